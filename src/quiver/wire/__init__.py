"""Bytes and their meaning: the stored frame, the request envelope, the request types, the Arrow record codec.

Rule: no sockets, no files, no clock. Bytes in, values out, and back.
"""
