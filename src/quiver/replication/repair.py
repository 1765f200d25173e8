"""Brings back a replica whose log is damaged inside what it had acknowledged: each bad frame comes from a peer.

Frames are the same bytes on every replica that has compacted as far, so the peer's frame of that index fits exactly
where ours was. While this goes on the replica is silent: it does not vote, lead or count, and its log is not cut.

Rule: only a committed entry is taken, and only if it fills the damaged place to the byte. Damage that cannot be mended
so (another file, a place that does not fit) makes the replica begin anew, under another id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, NamedTuple

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk
from quiver.log.segment import SUFFIX, scan_frames
from quiver.raft import AnyMessage
from quiver.raft.messages import Repair, RepairReply
from quiver.replication.append_sender import Transport
from quiver.replication.group import broker_of
from quiver.wire.frame import HEADER_BYTES, FrameError, decode_frame, decode_header

logger = logging.getLogger("quiver.replication")

_ASK_S: Final = 0.5
# A reply that fits: what follows it in the file is a frame again, or the end.
_PROBE_BYTES: Final = HEADER_BYTES


class UnrepairableError(Exception):
    """This place cannot be filled with a peer's frame."""


class Place(NamedTuple):
    path: str
    position: int
    index: int  # type: ignore[assignment]  # our word; tuple.index is never called


def is_gone(disk: Disk, error: CorruptLogError) -> bool:
    """The damaged file is no longer there: it was trimmed since somebody read it."""
    path = str(error.facts.get("path", ""))
    return path.endswith(SUFFIX) and not disk.exists(path)


def locate(disk: Disk, error: CorruptLogError) -> Place:
    """Which entry is damaged; blocking."""
    path, position = str(error.facts.get("path", "")), int(error.facts.get("position", 0))
    name = path.rpartition("/")[2]
    if not name.endswith(SUFFIX) or not disk.exists(path):
        raise UnrepairableError(error.message)
    file = disk.open(path)
    index = int(name.removesuffix(SUFFIX))
    if position >= file.size():
        raise UnrepairableError(error.message)
    try:
        for at, header, _ in scan_frames(file, path, 0, file.size()):
            if at >= position:
                break  # whole: somebody else mended it
            index = header.index + 1
    except CorruptLogError as found:
        position = int(found.facts.get("position", 0))
    return Place(path, position, index)


class Answer(NamedTuple):
    """`is_alike`: the peer has compacted as far as we have; else its frame may be shorter than ours was."""

    frame: bytes | memoryview
    is_alike: bool = True


def mend(disk: Disk, place: Place, answer: Answer) -> None:
    """Writes the frame where the damaged one was; blocking. Raises UnrepairableError where it does not fit."""
    frame = answer.frame
    try:
        header, _ = decode_frame(memoryview(frame))
    except FrameError as error:
        raise UnrepairableError(f"the peer's frame is damaged too: {error}") from error
    file = disk.open(place.path)
    end = place.position + header.frame_length
    if header.index != place.index or header.frame_length != len(frame) or end > file.size():
        raise UnrepairableError(f"entry {header.index} does not fill the place of entry {place.index}")
    following = file.pread(_PROBE_BYTES, end)
    if following:
        try:
            fits = decode_header(following).index == place.index + 1
        except FrameError:
            fits = answer.is_alike  # a torn tail comes next; or it is damaged as well, and the next round's
        if not fits:
            raise UnrepairableError(f"another entry than {place.index + 1} follows in {place.path}")
    file.pwrite([frame], place.position)
    file.datasync()


class Repairer:
    """Mends one replica. Messages for it come to `receive` as long as it runs."""

    def __init__(
        self,
        uid: str,
        me: int,
        voters: list[int],
        disk: Disk,
        threads: Executor,
        transport: Transport,
        compacted: int = 0,
    ) -> None:
        """`compacted`: see `Repair`."""
        self._uid = uid
        self._me = me
        self._voters = voters
        self._compacted = compacted
        self._disk = disk
        self._threads = threads
        self._transport = transport
        self._wanted = 0
        self._answer: asyncio.Future[Answer] | None = None

    def receive(self, message: AnyMessage, frames: memoryview) -> None:
        answer = self._answer
        if not isinstance(message, RepairReply) or message.index != self._wanted or answer is None or answer.done():
            return
        if message.trimmed:
            answer.set_exception(UnrepairableError(f"entry {message.index} is trimmed at replica {message.sender}"))
        elif frames:
            answer.set_result(Answer(frames, message.compacted == self._compacted))

    async def run(self, error: CorruptLogError, open_again: Callable[[], CorruptLogError | None]) -> None:
        """Mends place after place, until the log opens. Raises UnrepairableError or OSError."""
        loop = asyncio.get_running_loop()
        damage: CorruptLogError | None = error
        if await loop.run_in_executor(self._threads, is_gone, self._disk, error):
            damage = await loop.run_in_executor(self._threads, open_again)
        while damage is not None:
            place = await loop.run_in_executor(self._threads, locate, self._disk, damage)
            answer = await self._ask(place.index)
            await loop.run_in_executor(self._threads, mend, self._disk, place, answer)
            logger.info("frame_repaired uid=%s index=%d path=%s", self._uid, place.index, place.path)
            damage = await loop.run_in_executor(self._threads, open_again)

    async def _ask(self, index: int) -> Answer:
        self._wanted = index
        self._answer = asyncio.get_running_loop().create_future()
        while not self._answer.done():
            for voter in self._voters:
                if broker_of(voter) != broker_of(self._me):
                    request = Repair(self._me, voter, 0, index, self._compacted)
                    self._transport.send(broker_of(voter), self._uid, request)
            await asyncio.wait([self._answer], timeout=_ASK_S)
        return self._answer.result()
