"""Asyncio shells around the packets: a listening server, a client connection.

Rule: bytes and limits only. What a request means is decided by the handler that the server is given.
"""
