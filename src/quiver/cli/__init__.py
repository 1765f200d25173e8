"""The `quiver` command, the supervisor behind `quiver up`, and the process of one node.

Rule: node and supervisor start in a fraction of a second, so they import neither typer nor rich nor the SDK; the
client commands import the SDK inside the command.
"""
