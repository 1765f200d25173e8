"""Groups as an administrator sees them: listed, described, set to another place and deleted, also while others join."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quiver import Admin, Consumer, aio
from quiver.client.group_admin import GroupAdmin
from quiver.errors import (
    GroupActiveError,
    InvalidRequestError,
    InvalidTopicError,
    MemberFencedError,
    OffsetOutOfRangeError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.types import Record
from tests.client.group_kit import SHORT_SESSION_S, are_shared, kill, member, read, topic
from tests.client.kit import fill, poll_numbers, until

__all__ = ["member", "topic"]  # fixtures


def test_a_group_is_listed_and_described_with_its_lag(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    reader = member(client_id="reader")
    found: list[Record] = []
    read([reader], found, lambda: len(found) == 60)
    reader.commit()
    fill(servers, topic, 60)
    with Admin(servers) as admin:
        listed = {group.name: group for group in admin.list_groups()}
        assert listed[topic].member_count == 1
        info, positions = admin.describe_group(topic)
        assert [one.id.rpartition("-")[0] for one in info.members] == ["reader"]
        assert info.members[0].partitions == tuple((topic, number) for number in range(6))
        assert [(one.offset, one.latest, one.lag, one.owner) for one in positions] == [
            (10, 20, 10, info.members[0].id)
        ] * 6


def test_a_group_of_positions_alone_is_a_group(servers: str, topic: str) -> None:
    fill(servers, topic, 60)
    with Consumer(servers, [topic], group=topic, partitions={topic: [2]}) as consumer:
        assert len(consumer.poll(5, timeout=10)) == 5
        consumer.commit()
    with Admin(servers) as admin:
        assert topic in [group.name for group in admin.list_groups()]
        assert [one.offset for one in admin.describe_group(topic)[1]] == [None, None, 5, None, None, None]
        admin.delete_group(topic)
        with pytest.raises(UnknownGroupError):
            admin.describe_group(topic)


def test_a_group_at_rest_is_set_to_any_place(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    reader, found = member(), []
    read([reader], found, lambda: len(found) == 60)
    reader.commit()
    with Admin(servers) as admin:
        with pytest.raises(GroupActiveError, match="1 active members; stop them first"):
            admin.reset_group(topic, to="earliest")
        with pytest.raises(GroupActiveError):
            admin.delete_group(topic)
        reader.close()
        planned = admin.reset_group(topic, to="earliest", dry_run=True)
        assert [(one.before, one.after) for one in planned] == [(10, 0)] * 6
        assert [one.offset for one in admin.describe_group(topic)[1]] == [10] * 6, "a dry run changes nothing"
        assert admin.reset_group(topic, to="earliest") == planned
        assert [one.offset for one in admin.describe_group(topic)[1]] == [0] * 6
        admin.reset_group(topic, to="latest", topic=topic, partition=3)
        admin.reset_group(topic, offset=7, topic=topic, partition=4)
        third = min(record.timestamp for record in found if (record.partition, record.offset) == (5, 3))
        admin.reset_group(topic, timestamp=third, topic=topic, partition=5)
        offsets = [one.offset for one in admin.describe_group(topic)[1]]
        assert offsets[:5] == [0, 0, 0, 10, 7]
        assert 0 <= (offsets[5] or 0) <= 3
    again, new = member(), []
    read([again], new, lambda: len(new) == 60 - sum(offset or 0 for offset in offsets))


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ({}, InvalidRequestError),
        ({"to": "middle"}, InvalidRequestError),
        ({"to": "latest", "offset": 1}, InvalidRequestError),
        ({"offset": -1}, InvalidRequestError),
        ({"offset": True}, InvalidRequestError),
        ({"offset": 11}, OffsetOutOfRangeError),
        ({"timestamp": -5}, InvalidRequestError),
        ({"to": "latest", "partition": 1}, InvalidRequestError),
        ({"to": "latest", "topic": "nowhere"}, UnknownTopicError),
        ({"to": "latest", "topic": "bad/name"}, InvalidTopicError),
    ],
)
def test_a_place_that_is_none_is_refused_and_moves_nothing(
    servers: str, topic: str, place: dict[str, Any], error: type[Exception]
) -> None:
    fill(servers, topic, 60)
    with Consumer(servers, [topic], group=topic, partitions={topic: list(range(6))}) as consumer:
        assert len(poll_numbers(consumer, 60)) == 60
        consumer.commit()
    with Admin(servers) as admin:
        with pytest.raises(error):
            admin.reset_group(topic, **place)
        with pytest.raises(UnknownPartitionError):
            admin.reset_group(topic, to="latest", topic=topic, partition=6)
        assert [one.offset for one in admin.describe_group(topic)[1]] == [10] * 6


@pytest.mark.parametrize("name", ["nobody", "#1", "", "x" * 256, 5])
def test_an_unknown_group_is_said_to_be(servers: str, name: Any) -> None:
    with Admin(servers) as admin:
        for ask in (admin.describe_group, admin.delete_group, lambda one: admin.reset_group(one, to="latest")):
            with pytest.raises((UnknownGroupError, InvalidRequestError)):
                ask(name)


@pytest.mark.parametrize("claimed_by_then", [False, True])
def test_who_joins_while_a_group_is_set_back_reads_on_undisturbed(
    servers: str, topic: str, member: Any, monkeypatch: pytest.MonkeyPatch, claimed_by_then: bool
) -> None:
    """Between the check that nobody is there, the claims, and the moves."""
    fill(servers, topic, 60)
    reader, found = member(), []
    read([reader], found, lambda: len(found) == 60)
    reader.commit()
    reader.close()
    commit = GroupAdmin._commit
    newcomer: list[Consumer] = []

    async def late(self: GroupAdmin, name: str, asked: Any, otherwise: str) -> None:
        if all(one.act == "move" for one in asked.values()) is claimed_by_then and not newcomer:
            newcomer.append(member())
            await asyncio.to_thread(read, newcomer, [], lambda: are_shared(newcomer))
        await commit(self, name, asked, otherwise)

    monkeypatch.setattr(GroupAdmin, "_commit", late)

    async def reset() -> None:
        async with aio.Admin(servers) as admin:
            await admin.groups.reset(topic, to="earliest")

    why = "by now were not changed" if claimed_by_then else "nothing was changed"
    with pytest.raises(GroupActiveError, match=f"a member joined group {topic} meanwhile; .*{why}"):
        asyncio.run(reset())
    assert [newcomer[0].committed(topic, number) for number in range(6)] == [10] * 6
    fill(servers, topic, 60)
    read(newcomer, new := [], lambda: len(new) == 60)
    newcomer[0].commit()
    assert [newcomer[0].committed(topic, number) for number in range(6)] == [20] * 6


def test_who_was_away_while_its_group_was_set_back_cannot_move_it(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    away, found = member(session_timeout=SHORT_SESSION_S), []
    read([away], found, lambda: len(found) >= 60)
    kill(away)
    with Admin(servers) as admin:
        until(lambda: admin.describe_group(topic)[0].member_count == 0)
        admin.reset_group(topic, offset=3, topic=topic)
        with pytest.raises(MemberFencedError):
            away.commit()
        assert [one.offset for one in admin.describe_group(topic)[1]] == [3] * 6
        admin.delete_group(topic)
        with pytest.raises(MemberFencedError, match="was deleted since"):
            away.commit()
        with pytest.raises(UnknownGroupError):
            admin.describe_group(topic)
