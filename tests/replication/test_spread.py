"""A leader sends an entry that comes alone before it does anything else, if that is all the followers lack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.raft import Append
from quiver.raft.messages import HeartbeatReply
from quiver.wire.frame import Entry, Kind
from tests.replication.replica_kit import LEADER, ME, OTHER
from tests.replication.test_plain_replies import NOTHING, Led

ENTRY = Entry.control(Kind.DATA, b"value")


async def _led(path: Path) -> Led:
    led = Led(path)
    await led.begin()
    produce = await led.propose()
    for peer in (LEADER, OTHER):
        led.reply(peer, led.replica.raft.terms.last)
    await produce
    led.told.clear()
    return led


def test_the_followers_get_it_before_the_log_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        led = await _led(tmp_path)
        raft, log = led.replica.raft, led.partition._log
        ends: list[int] = []
        append = log.append_frame

        def appending(*args: object) -> None:
            ends.append(len(led.told))
            append(*args)  # type: ignore[arg-type]

        log.append_frame = appending  # type: ignore[method-assign]
        last, commit = raft.terms.last, raft.commit
        header = led.replica.spread(ENTRY)
        assert header is not None and header.index == last + 1 == raft.terms.last
        assert ends == [2], "sent first, then appended"
        assert led.told == [
            Append(ME, peer, raft.term, last, raft.term, last + 1, commit, ((last + 1, raft.term),))
            for peer in (LEADER, OTHER)
        ]
        # It is not sent again, and counts nowhere before it is on a disk.
        assert raft.leader is not None
        assert [progress.next for progress in raft.leader.progress.values()] == [last + 2] * 2
        assert raft.commit == commit and raft.synced_index == last
        log.append_frame = append  # type: ignore[method-assign]
        await led.partition.stop()

    asyncio.run(scenario())


def _has_a_message(led: Led) -> None:
    led.replica.receive(HeartbeatReply(OTHER, ME, led.replica.raft.term), NOTHING)


def _loses_a_link(led: Led) -> None:
    led.replica.link_changed(3, up=False)


def _hands_over(led: Led) -> None:
    led.replica.raft.transfer(LEADER)


def _reads(led: Led) -> None:
    led.replica.read()


def _a_follower_lacks_more(led: Led) -> None:
    leader = led.replica.raft.leader
    assert leader is not None
    leader.progress[OTHER].next -= 1


def _a_follower_is_asked_where_it_is(led: Led) -> None:
    leader = led.replica.raft.leader
    assert leader is not None
    leader.progress[OTHER].probe()


def _leads_no_more(led: Led) -> None:
    raft = led.replica.raft
    raft.step(HeartbeatReply(OTHER, ME, raft.term + 1), raft.now_ms)


@pytest.mark.parametrize(
    "busy",
    [
        _has_a_message,
        _loses_a_link,
        _hands_over,
        _reads,
        _a_follower_lacks_more,
        _a_follower_is_asked_where_it_is,
        _leads_no_more,
    ],
)
def test_where_they_lack_more_or_more_is_to_be_done_nothing_is_done(
    busy: Callable[[Led], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        led = await _led(tmp_path)
        busy(led)
        led.told.clear()
        raft, log = led.replica.raft, led.partition._log
        before = raft.terms.last, log.next_index
        assert led.replica.spread(ENTRY) is None
        assert (raft.terms.last, log.next_index) == before
        assert led.told == []

    asyncio.run(scenario())
