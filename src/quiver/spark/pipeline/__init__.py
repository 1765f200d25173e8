"""Pipelines: a project of Spark Declarative Pipelines with topics as sources and sinks, and a runner for it.

Rule: a project is Spark's own kind of project; nothing in it needs this package but the format `quiver`.
"""
