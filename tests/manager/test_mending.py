"""A bit that flips in the log of a manager that runs is mended from a peer, without a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from quiver.config import NetSettings, RaftSettings
from quiver.log.disk import SystemDisk
from quiver.log.segment import scan_frames
from quiver.raft import AnyMessage
from quiver.raft.messages import RepairReply
from quiver.wire.frame import HEADER_BYTES
from tests.manager.kit import until
from tests.manager.quorum_kit import Managers, managers
from tests.metadata.kit import create, image

# A primary that stays, whatever else the machine does: it is its own log that is to be read.
PATIENT = {"raft": RaftSettings(heartbeat_ms=20, election_ms=1000), "net": NetSettings(peer_silence_s=5)}


def flip(directory: Path, *indexes: int) -> Path:
    """A bit in each of these entries."""
    (path,) = directory.glob("*.seg")
    file = SystemDisk().open(str(path))
    at: dict[int, int] = {}
    for position, header, _ in scan_frames(file, str(path), 0, file.size()):
        at[header.index] = position + HEADER_BYTES  # where its payload begins
        if header.index == max(indexes):
            break
    with path.open("r+b") as raw:
        for index in indexes:
            raw.seek(at[index])
            (old,) = raw.read(1)
            raw.seek(at[index])
            raw.write(bytes([old ^ 1]))
    return path


def drop_repairs(message: AnyMessage, frames: memoryview) -> bool:
    """What peers send to mend it is lost."""
    return isinstance(message, RepairReply)


async def trouble(cluster: Managers, number: int) -> Any:
    return msgspec.json.decode((await cluster.http(number, "GET", "/health"))[1])["trouble"]


async def damaged(cluster: Managers, path: Path) -> tuple[int, int, Path]:
    """The primary, whose log has two bad entries that one of the others, which is away, does not have; that other."""
    primary = await cluster.until_led()
    behind = cluster.secondaries[0]
    await cluster.stop(behind)
    await until(lambda: cluster.quorum(primary).replica.raft.down)  # nothing is kept in memory for it
    first = cluster.quorum(primary).last_transaction + 1
    for number in range(30):
        await cluster.quorum(primary).propose(create(f"t{number}"))
    await cluster.until_equal()
    return primary, behind, flip(path / "data" / f"manager-{primary}" / "log", first + 5, first + 20)


def test_a_primary_whose_log_is_damaged_says_so_and_is_mended_by_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, **PATIENT) as cluster:
            primary, behind, segment = await damaged(cluster, tmp_path)
            (other,) = cluster.secondaries
            quorum = cluster.quorum(primary)
            real, quorum.mending.receive = quorum.mending.receive, drop_repairs  # type: ignore[method-assign]
            starting = asyncio.create_task(cluster.start(behind))  # what it lacks is read, and found
            await until(lambda: quorum.mending.damage)
            assert str(segment) in await trouble(cluster, primary)
            assert not quorum.replica.raft.may_vote
            quorum.mending.receive = real  # type: ignore[method-assign]
            await starting
            await until(lambda: quorum.mending.damage is None)
            assert quorum.replica.raft.may_vote and await trouble(cluster, primary) is None
            await cluster.until_led()
            await cluster.until_equal()
            assert image(cluster.quorum(behind).state) == image(cluster.quorum(other).state)
            whole = (tmp_path / "data" / f"manager-{other}" / "log" / segment.name).read_bytes()
            assert segment.read_bytes()[: len(whole.rstrip(b"\0"))] == whole.rstrip(b"\0")
        async with managers(tmp_path) as cluster:  # it is whole: nobody begins anew
            await cluster.until_led()
            assert len(cluster.quorum(primary).state.topics) == 30

    asyncio.run(main())
    assert not list(tmp_path.glob("data/manager-*/log.damaged"))


def test_a_manager_that_is_being_mended_goes_on_and_takes_changes(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, **PATIENT) as cluster:
            primary, behind, _ = await damaged(cluster, tmp_path)
            quorum = cluster.quorum(primary)
            real, quorum.mending.receive = quorum.mending.receive, drop_repairs  # type: ignore[method-assign]
            starting = asyncio.create_task(cluster.start(behind))
            await until(lambda: quorum.mending.damage)
            await quorum.propose(create("meanwhile"))
            quorum.mending.receive = real  # type: ignore[method-assign]
            await starting
            await until(lambda: "meanwhile" in cluster.quorum(behind).state.topics)

    asyncio.run(main())
