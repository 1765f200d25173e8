"""Asks one broker, whoever leads: what the SDK, which looks for the leader, would never do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from crc32c import crc32c

from quiver.errors import ConnectionLostError, NotLeaderError, RequestTimeoutError
from quiver.net.connection import Connection, open_connection
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import OFFSET_LATEST, Fetch, FetchReply, ListOffset, ListOffsetReply, Produce, ProduceReply
from quiver.wire.records import batch_from_lists, encode_batch
from tests.system.workload import Load

TIMEOUT_S: Final = 10.0


class Answers(NamedTuple):
    """Of a broker that no longer leads: errors, if all is well."""

    produced: object
    latest: object

    def check(self, acknowledged: int) -> None:
        """`acknowledged` is where the partition ended, as others said, before the broker was asked."""
        refusals = (NotLeaderError, ConnectionLostError, RequestTimeoutError)
        assert isinstance(self.produced, refusals), f"it acknowledged: {self.produced!r}"
        if isinstance(self.latest, ListOffsetReply):
            assert self.latest.offset >= acknowledged, "it served an old end"
        else:
            assert isinstance(self.latest, refusals), self.latest


class DirectLine:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def insist(self, load: Load) -> Answers:
        """Tells a broker to append to partition 0 and asks for its end, in one go."""
        value = b"to the old leader"
        load.history.producer("insisting").sent(value)  # an error says nothing of whether it is stored
        payload = encode_batch(batch_from_lists([0], None, [value], None))
        append = Produce(load.topic, 0, 1, 0, 0, crc32c(payload), SCHEMA_ID_V1)
        produced, latest = await asyncio.gather(
            self._connection.call(append, ProduceReply, [payload], timeout_s=TIMEOUT_S),
            self._connection.call(ListOffset(load.topic, 0, OFFSET_LATEST), ListOffsetReply, timeout_s=TIMEOUT_S),
            return_exceptions=True,
        )
        return Answers(produced, latest[0] if isinstance(latest, tuple) else latest)

    async def fetch(self, topic: str, partition: int, offset: int) -> tuple[FetchReply, memoryview]:
        request = Fetch(topic, partition, offset, 1_000_000)
        return await self._connection.call(request, FetchReply, timeout_s=TIMEOUT_S)


@contextlib.asynccontextmanager
async def direct_line(address: str) -> AsyncIterator[DirectLine]:
    connection = await open_connection(address, "direct", timeout_s=TIMEOUT_S)
    try:
        yield DirectLine(connection)
    finally:
        connection.close()
