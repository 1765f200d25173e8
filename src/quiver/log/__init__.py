"""The partition log on disk: disk → slots → index → segment → partition_log.

Rule: no asyncio and no clock here. The owner calls; what blocks is a job that the owner may run in a thread.
"""
