"""Records out of one partition, at once or when they come, in the form the client accepts.

Rule: nobody is waited for who is no longer there. A wait is made of short requests, so that the end of the client, of
this server or of the partition's leader is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from quiver.errors import InvalidRequestError
from quiver.manager.http_server import HttpAnswer
from quiver.manager.registry import Registry
from quiver.manager.v1_call import Call, answer
from quiver.manager.v1_media import ARROW, NDJSON, RECORD_MEDIA, accepted
from quiver.manager.v1_shapes import FETCH_RECORDS_DEFAULT, RECORDS_MAX, Fetched, FetchQuery
from quiver.metadata.state import Topic
from quiver.wire.messages import OFFSET_EARLIEST, OFFSET_LATEST, Fetch, FetchReply, ListOffset, ListOffsetReply

NEXT_HEADER: Final = "Quiver-Next-Offset"
START_HEADER: Final = "Quiver-Start-Offset"
WATERMARK_HEADER: Final = "Quiver-High-Watermark"
_WAIT_STEP_MS: Final = 1_000
_NAMED_OFFSETS: Final = {"earliest": OFFSET_EARLIEST, "latest": OFFSET_LATEST}
_lines_encoder = msgspec.json.Encoder()


class Fetching:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def fetch(self, call: Call) -> HttpAnswer:
        query: FetchQuery = call.query
        media = accepted(call.request.headers, RECORD_MEDIA)
        topic, partition = await call.place(self._registry)
        offset = await self._offset(topic, partition, query.offset)
        reply, payload = await self._wait(call, topic, partition, offset)
        # Arrow is loaded with the first request: a node that serves none stays small.
        from quiver.manager.v1_records import arrow_stream, pieces_of, records_out

        records_max = query.max_records or (RECORDS_MAX if media == ARROW else FETCH_RECORDS_DEFAULT)
        pieces, following = pieces_of(payload, offset, records_max)
        while following > offset and not any(piece.offsets for piece in pieces):
            # Compaction left nothing there, and an empty answer would look like the end.
            offset = following
            reply, payload = await self._wait(call, topic, partition, offset)
            pieces, following = pieces_of(payload, offset, records_max)
        headers = (
            (NEXT_HEADER, str(following)),
            (START_HEADER, str(reply.start_offset)),
            (WATERMARK_HEADER, str(reply.high_watermark)),
            ("cache-control", "no-store"),
            ("vary", "accept"),
        )
        if media == ARROW:
            return HttpAnswer(200, arrow_stream(partition, pieces), headers, ARROW)
        records = await records_out(partition, pieces, all_base64=query.encoding == "base64")
        if media == NDJSON:
            return HttpAnswer(200, _lines_encoder.encode_lines(records), headers, NDJSON)
        bounds = (reply.start_offset, reply.high_watermark, following)
        return answer(Fetched(topic.name, partition, *bounds, records), 200, *headers)

    async def _offset(self, topic: Topic, partition: int, asked: str) -> int:
        named = _NAMED_OFFSETS.get(asked)
        if named is None:
            try:
                return int(asked)
            except ValueError as error:
                raise InvalidRequestError("offset is a number, or earliest, or latest") from error
        request = ListOffset(topic.name, partition, named)
        reply, _ = await self._registry.link_of(topic.name, partition).call(request)
        assert isinstance(reply, ListOffsetReply)
        return reply.offset

    async def _wait(self, call: Call, topic: Topic, partition: int, offset: int) -> tuple[FetchReply, Sequence[Any]]:
        """The first records that are there, or the end of the wait."""
        query: FetchQuery = call.query
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + query.wait_ms / 1000
        while True:
            left_ms = max(int((deadline_s - loop.time()) * 1000), 0)
            step_ms = min(left_ms, _WAIT_STEP_MS)
            request = Fetch(topic.name, partition, offset, query.max_bytes, 1, step_ms)
            reply, payload = await self._registry.link_of(topic.name, partition).call(request)
            assert isinstance(reply, FetchReply)
            if payload or left_ms <= step_ms or call.request.is_leaving():
                return reply, payload
