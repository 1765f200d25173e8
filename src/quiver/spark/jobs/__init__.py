"""Bulk jobs on Spark: ingest, archive, replay, verify. `quiver.spark` has their functions, `quiver spark` the commands.

Rule: rows stay in Spark. What comes to the driver is counts, names and a handful of examples.
"""
