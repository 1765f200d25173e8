"""A broker is brought up to date by what was known of it a moment ago: what it got since must stay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Struct

from quiver.clock import SystemClock
from quiver.errors import TopicExistsError, UnavailableError
from quiver.manager.brokers import Brokers
from quiver.metadata.state import Partition, Topic
from quiver.wire.messages import CreateTopic, DeleteTopic, Done

TOPIC = Topic("t", 3, 0, (Partition(1, "t", 0, "uid", (1, 2, 3), (1 << 32 | 7, 2 << 32 | 7, 3 << 32 | 7)),))


class Link:
    """A broker that knows a topic of that name; `uid` is its own."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.asked: list[Struct] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, tuple[()]]:
        self.asked.append(request)
        if isinstance(request, CreateTopic) and self.uid:
            raise TopicExistsError("topic t already exists", uid=self.uid)
        if isinstance(request, DeleteTopic):
            assert request.uid == self.uid
            self.uid = ""
        return Done(), ()


def attached(link: Link) -> Brokers:
    brokers = Brokers(SystemClock(), 5.0)
    brokers.attach(1, link)
    return brokers


def test_topic_made_since_the_broker_was_asked_is_not_deleted() -> None:
    link = Link("uid")
    # When it was asked what it has, it had nothing of it.
    assert asyncio.run(attached(link).make_current(1, "t", {}, TOPIC)) == ""
    assert [type(request) for request in link.asked] == [CreateTopic]


def test_name_that_means_another_topic_there_is_told_and_replaced_by_its_uid_alone() -> None:
    link = Link("old")
    brokers = attached(link)
    assert asyncio.run(brokers.make_current(1, "t", {}, TOPIC)) == "old"
    assert DeleteTopic not in map(type, link.asked)
    asyncio.run(brokers.replace(1, "old", TOPIC))
    assert [type(request) for request in link.asked[-2:]] == [DeleteTopic, CreateTopic]


def test_broker_that_was_removed_since_is_away_and_nothing_else() -> None:
    brokers = attached(Link(""))
    with pytest.raises(UnavailableError, match="broker 2 is not here now"):
        asyncio.run(brokers.status(2))
    with pytest.raises(UnavailableError):
        asyncio.run(brokers.make_current(2, "t", {}, TOPIC))
