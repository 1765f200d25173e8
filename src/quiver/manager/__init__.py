"""A manager: the metadata quorum, the HTTP gateway, health.

Rule: data goes to brokers by `BrokerLink` and never through metadata; metadata changes only by commands of the quorum.
"""
