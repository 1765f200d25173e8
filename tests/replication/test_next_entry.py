"""A follower stores the next entry and acknowledges it without a turn; whatever else comes waits for one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quiver.broker.partition import Partition
from quiver.clock import SystemClock
from quiver.log import flusher
from quiver.log.flusher import FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.raft import Append
from quiver.raft.messages import AppendReply, Heartbeat, Vote
from quiver.testing.sim.disk import durable_term
from quiver.wire.frame import Entry, Kind, encode_frame, stamp
from tests.broker.kit import settle
from tests.manager.kit import until
from tests.replication.replica_kit import DIRECTORY, LEADER, LOG, ME, OTHER, Follower, Held, Turns

NEXT = 4  # what a test sends


def frame(index: int, term: int = 1, kind: Kind = Kind.DATA) -> bytes:
    return encode_frame(stamp(Entry.control(kind, b"value"), index, term, 0), b"value")


class Following:
    """A replica with entries 1 to 3 of the leader, and room behind them."""

    def __init__(self, path: Path) -> None:
        self.kit = Follower("partition", path, Held(None), FlushPolicy(SystemClock()))
        assert isinstance(self.kit.owner, Partition)
        self.partition: Partition = self.kit.owner
        self.replica = self.kit.replica
        self.raft = self.replica.raft
        self.log: PartitionLog = self.partition._log
        self.log._checkpoint_due_bytes = -(2**40)  # none gets due: it would end with a turn
        self.turns = Turns(self.partition)

    async def begin(self) -> None:
        self.partition.start()
        self.kit.leader.append(self.replica, 1)
        for index in range(2, NEXT):
            await until(lambda index=index: self.kit.leader.was_told(index - 1))  # type: ignore[misc]
            self.send(index)
        await until(lambda: self.kit.leader.was_told(NEXT - 1))
        await settle()
        self.kit.leader.told.clear()

    def send(self, index: int = NEXT, frames: bytes | None = None, **change: Any) -> bool:
        term = change.pop("term", 1)
        fields = {"prev_index": index - 1, "prev_term": 1, "last": index, "commit": index - 1}
        fields |= {"terms": ((index, term),)} | change
        message = Append(fields.pop("sender", LEADER), fields.pop("to", ME), term, **fields)
        return self.replica.receive(message, memoryview(frames or frame(index, term)), self.partition.settle)


def run(path: Path, scenario: Callable[[Following], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        following = Following(path)
        await following.begin()
        await scenario(following)

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ALONE_S_MIN", 0.0)


def test_it_is_on_disk_when_the_leader_is_told_and_takes_no_turn(tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        turns = following.turns.count
        for index in range(NEXT, NEXT + 5):
            assert not following.send(index)
            assert following.kit.leader.told == [AppendReply(ME, LEADER, 1, index)]
            assert durable_term(following.kit.disk, DIRECTORY, index) == 1
            assert following.partition.state.applied_index == following.raft.commit == index - 1
            assert following.log.synced_index == index + 1 == following.log.next_index
            following.kit.leader.told.clear()
        await settle()
        assert following.turns.count == turns
        # The same as entries that took a turn: to a reader, to who asks for them, and after a power cut.
        assert [header.index for _, header, _ in following.log.scan(1)] == list(range(1, NEXT + 5))
        following.kit.disk.crash()
        again = PartitionLog(following.kit.disk, DIRECTORY, LOG)
        assert again.next_index == NEXT + 5
        assert [bytes(payload) for _, _, payload in again.scan(NEXT)] == [b"value"] * 5

    run(tmp_path, scenario)


def test_after_it_come_those_that_take_turns_and_again_those_that_do_not(tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        assert not following.send()
        both = frame(NEXT + 1) + frame(NEXT + 2)
        assert following.send(NEXT + 1, both, last=NEXT + 2)
        await until(lambda: following.kit.leader.was_told(NEXT + 2))
        await settle()
        assert not following.send(NEXT + 3, commit=NEXT + 3)
        assert following.partition.state.applied_index == NEXT + 3
        await following.partition.stop()

    run(tmp_path, scenario)


def _damaged(raw: bytes) -> bytes:
    return raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param({"sender": OTHER}, id="of another sender"),
        pytest.param({"term": 2}, id="of a new term"),
        pytest.param({"prev_term": 2}, id="after another entry"),
        pytest.param({"index": NEXT - 1}, id="once more"),
        pytest.param({"index": NEXT + 1}, id="with a gap"),
        pytest.param({"to": OTHER}, id="to another replica"),
        pytest.param({"last": NEXT + 1, "frames": frame(NEXT) + frame(NEXT + 1)}, id="two entries"),
        pytest.param({"frames": frame(NEXT) + frame(NEXT + 1)}, id="more than it says"),
        pytest.param({"frames": frame(NEXT)[:-8]}, id="less than it says"),
        pytest.param({"frames": frame(NEXT + 1)}, id="another than it says"),
        pytest.param({"frames": frame(NEXT, 2)}, id="of another term than it says"),
        pytest.param({"frames": frame(NEXT, kind=Kind.NOOP)}, id="of another kind"),
        pytest.param({"frames": frame(NEXT, kind=Kind.MEMBERSHIP)}, id="a membership"),
        pytest.param({"frames": _damaged(frame(NEXT))}, id="damaged"),
    ],
)
def test_what_is_not_just_the_next_entry_is_not_taken_at_once(sent: dict[str, Any], tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        before = following.kit.disk.operations
        following.send(**sent)
        assert following.kit.disk.operations == before, "something was written"
        assert following.kit.leader.told == []
        assert following.raft.terms.last == NEXT - 1

    run(tmp_path, scenario)


def _hears_of_a_link(following: Following) -> None:
    following.replica.link_changed(3, up=False)


def _has_another_message(following: Following) -> None:
    following.replica.receive(Heartbeat(LEADER, ME, 1, 0), memoryview(b""))


def _was_full(following: Following) -> None:
    following.raft.may_lead = False


def _votes(following: Following) -> None:
    following.raft.step(Vote(OTHER, ME, 2, 100, 1, transfer=True), 10**9)


def _has_entries_in_memory(following: Following) -> None:
    header, parts = following.log.stamp_entry(1, Entry.control(Kind.DATA, b"value"))
    following.log.append_frame(header, parts, 0.0)


def _another_flush_runs(following: Following) -> None:
    policy = following.replica._flusher._policy
    assert policy is not None
    policy.in_threads += 1


def _has_no_room(following: Following) -> None:
    following.log._segments[-1].zeros_end = 0


@pytest.mark.parametrize(
    "busy",
    [
        _hears_of_a_link,
        _has_another_message,
        _was_full,
        _votes,
        _has_entries_in_memory,
        _another_flush_runs,
        _has_no_room,
    ],
)
def test_where_more_is_to_be_done_it_waits_for_a_turn(busy: Callable[[Following], None], tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        busy(following)
        before = following.kit.disk.operations
        assert following.send(), "it is to have a turn"
        assert following.kit.disk.operations == before, "something was written"
        assert not following.kit.leader.was_told(NEXT)

    run(tmp_path, scenario)


@pytest.mark.parametrize("operation", ["pwrite", "datasync"])
def test_a_disk_that_fails_stops_the_log_and_nothing_is_acknowledged(operation: str, tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        following.kit.disk.fail(operation, errno.EIO, path=".seg")
        assert following.send()
        await until(lambda: following.raft.failed)
        assert following.log.failure is not None
        assert not following.kit.leader.was_told(NEXT)
        assert not following.send(NEXT + 1)
        assert not following.kit.leader.was_told(NEXT + 1)

    run(tmp_path, scenario)


def test_a_disk_that_is_full_for_a_moment_costs_a_turn(tmp_path: Path) -> None:
    async def scenario(following: Following) -> None:
        following.kit.disk.fail("pwrite", errno.ENOSPC, path=".seg")
        assert following.send()
        assert not following.kit.leader.was_told(NEXT)
        await until(lambda: following.kit.leader.was_told(NEXT))
        assert durable_term(following.kit.disk, DIRECTORY, NEXT) == 1
        await following.partition.stop()

    run(tmp_path, scenario)
