"""Who waits for an entry or a commit, and how it is told; also what it is told when this replica cannot do it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from quiver.errors import NotLeaderError, QuiverError
from quiver.raft import Raft
from quiver.replication.group import broker_of


class Asker(Protocol):
    """Who waits for one answer: a future, or what answers a request by itself."""

    def done(self) -> bool:
        """Answered, or gone."""
        ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: Any, /) -> None: ...


Waiter = tuple[Asker, Any]  # who waits, and the reply


def settle(future: Asker, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def refuse(waiters: Iterable[Waiter], error: Exception) -> None:
    for future, _ in waiters:
        if not future.done():
            future.set_exception(error)


def own_trouble(error: QuiverError, raft: Raft | None) -> QuiverError:
    """What is told of trouble that only this replica has: a full or failed disk, a damaged frame, a bug.

    Others of its group may be well. They may also have what this one refused, and commit it: nobody is told that
    nothing was stored. Where there are no others, the trouble itself is told."""
    if raft is None or _is_alone(raft):
        return type(error)(error.message, **error.facts)  # anew: a raised one holds its callers' frames and payloads
    leader = 0 if raft.leader is not None else broker_of(raft.leader_id)
    return NotLeaderError(f"broker {broker_of(raft.me)} does not lead this partition: {error.message}", leader=leader)


def _is_alone(raft: Raft) -> bool:
    # Before a change that is not committed, too: others may have what was sent before it, and the change may be undone.
    possible = raft.memberships[-1 if raft.memberships[-1][0] <= raft.commit else -2 :]
    return all(members.voters == (raft.me,) for _, members in possible)


class Signal:
    """Wakes everyone who waits for the next commit."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[bool], None] = {}  # woken in the order in which they came

    async def wait(self, timeout_s: float) -> bool:
        """False when it did not come in time."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, settle, waiter, False)
        self._waiting[waiter] = None
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiting.pop(waiter, None)

    def give(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            settle(waiter, True)

    def end(self, error: Exception) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
