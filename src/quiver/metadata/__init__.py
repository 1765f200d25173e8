"""What the cluster knows of itself: topics, partitions, brokers, producers, consumers.

Rule: a pure state machine. Commands come in log order; each gives a result and the rows that change. `store.py` alone
touches a database.
"""
