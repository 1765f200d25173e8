"""A broker: topics' partitions, each with one owner task, behind the framed protocol.

Rule: brokers never unpack a batch. They check it, stamp it, store it and hand out the same bytes.
"""
