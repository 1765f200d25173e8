"""Tools for tests and simulators, shipped to users.

Rule: nothing outside tests and simulators imports this room.
"""
