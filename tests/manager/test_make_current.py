"""A broker is brought up to date by what was known of it a moment ago: what it got since must stay."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from quiver.clock import SystemClock
from quiver.errors import TopicExistsError
from quiver.manager.brokers import Brokers
from quiver.metadata.state import Partition, Topic
from quiver.types import PartitionStatus
from quiver.wire.messages import CreateTopic, DeleteTopic, Done, GetStatus, StatusReply

TOPIC = Topic("t", 3, 0, (Partition(1, "t", 0, "uid", (1, 2, 3), (1 << 32 | 7, 2 << 32 | 7, 3 << 32 | 7)),))


class Link:
    """A broker that knows the topic."""

    def __init__(self, partitions: list[PartitionStatus]) -> None:
        self.partitions = partitions
        self.asked: list[type[Struct]] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, tuple[()]]:
        self.asked.append(type(request))
        if isinstance(request, GetStatus):
            return StatusReply(self.partitions), ()
        if isinstance(request, CreateTopic) and DeleteTopic not in self.asked:
            raise TopicExistsError("topic t already exists")
        return Done(), ()


def bring_up_to_date(link: Link) -> None:
    brokers = Brokers(SystemClock(), 5.0)
    brokers.attach(1, link)
    asyncio.run(brokers.make_current(1, "t", {}, TOPIC))  # when it was asked what it has, it had nothing of it


def test_topic_made_since_the_broker_was_asked_is_not_deleted() -> None:
    link = Link([PartitionStatus("t", 0, "online", 0, 5, 500, 1, "", "uid")])
    bring_up_to_date(link)
    assert DeleteTopic not in link.asked


def test_name_of_which_the_broker_has_nothing_is_said_anew() -> None:
    link = Link([])
    bring_up_to_date(link)
    assert link.asked[-2:] == [DeleteTopic, CreateTopic]
