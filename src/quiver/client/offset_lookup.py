"""From a time to an offset.

Rule: brokers know batches; the record inside a batch is found here.
"""

from __future__ import annotations

import pyarrow as pa

from quiver.client.cluster import Cluster
from quiver.errors import InvalidRequestError
from quiver.wire.frame import walk_frames
from quiver.wire.messages import Fetch, FetchReply, ListOffset, ListOffsetReply
from quiver.wire.rows import rows_of


async def offset_at(cluster: Cluster, topic: str, partition: int, timestamp: int) -> int:
    """The first record at or after that time, or the end of the log."""
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not 0 <= timestamp < 2**63:
        raise InvalidRequestError("a timestamp is an int of microseconds since 1970 UTC")
    found = await cluster.ask(topic, partition, ListOffset(topic, partition, timestamp), ListOffsetReply)

    async def fetch() -> memoryview:
        connection = await cluster.leader(topic, partition)
        request = Fetch(topic, partition, found.offset, 1)
        return (await connection.call(request, FetchReply, timeout_s=cluster.request_timeout_s))[1]

    for _, header, payload in walk_frames(await cluster.retrying(fetch)):
        if header.next_offset > found.offset and header.record_count:
            rows = rows_of(header, payload).since(found.offset)
            stamps = rows.batch.column("timestamp").view(pa.int64()).to_pylist()
            for offset, stamp in zip(rows.offsets, stamps, strict=True):
                if stamp >= timestamp:
                    return offset
    return found.offset
