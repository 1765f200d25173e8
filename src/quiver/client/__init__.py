"""The SDK: batches out, batches in, and the faces a user sees.

Rule: one asyncio engine each for producing, consuming and administration; the synchronous classes run the same engines
on one background loop. The pure parts (batcher, delivery) know neither loops nor sockets.
"""
