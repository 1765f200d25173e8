"""Drives the Raft core for a log on disk: persists, sends, applies, takes newcomers in, repairs damage.

Rule: it knows nothing of what the entries mean. Who owns the log, a partition of a broker or the metadata of a manager,
is told of them (`seat.Owner`).
"""
