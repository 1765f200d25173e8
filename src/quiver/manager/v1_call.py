"""One call of the v1 API: what was asked, parsed and checked, and the answers to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from quiver.errors import UnknownPartitionError
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.registry import Registry
from quiver.metadata.state import Topic

_encode = msgspec.json.Encoder().encode


class Call(NamedTuple):
    """`query` and `body` are what the route says; `body` is None where the route reads it by itself."""

    request: HttpRequest
    path: Mapping[str, str]
    query: Any
    body: Any

    async def place(self, registry: Registry) -> tuple[Topic, int]:
        """The topic and the partition in the path, known to exist."""
        text = self.path["partition"]
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        topic = await registry.topic(self.path["topic"], number)
        if number is not None and number < len(topic.partitions):
            return topic, number
        raise UnknownPartitionError(f"topic {topic.name} has no partition {text[:60]}", topic=topic.name)


def answer(body: msgspec.Struct, status: int = 200, *headers: tuple[str, str]) -> HttpAnswer:
    return HttpAnswer(status, _encode(body), headers)
