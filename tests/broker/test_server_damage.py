"""A broker that starts on damaged files: it says what is wrong and keeps the rest running."""

from __future__ import annotations

import errno
import logging

import pytest

from quiver.errors import CorruptLogError, LogFailedError
from quiver.testing.faulty_disk import FaultyDisk
from tests.broker.server_kit import DIRECTORY, broker, run, running
from tests.wire.kit import make_payload

PARTITIONS = f"{DIRECTORY}/partitions"
CATALOG = f"{DIRECTORY}/catalog.json"


def overwrite(disk: FaultyDisk, path: str, content: bytes) -> None:
    file = disk.open(path)
    file.truncate(0)
    file.pwrite([content], 0)
    file.datasync()


def test_damaged_partition_is_reported_and_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        async with broker(disk) as client:
            await client.create("logs", 3)
            for partition in range(3):
                await client.produce(partition=partition)
            uids = [status.uid for status in await client.status()]
        path = f"{PARTITIONS}/{uids[1]}"
        (segment,) = [name for name in disk.list(path) if name.endswith(".seg")]
        disk.flip(f"{path}/{segment}", 120, 0)
        for name in disk.list(path):
            if name == "state" or name.endswith(".idx"):
                disk.remove(f"{path}/{name}")  # so that the start has to read the records
        async with broker(disk) as client:
            states = {status.partition: status for status in await client.status("logs")}
            assert [states[n].state for n in range(3)] == ["online", "corrupt", "online"]
            assert f"{path}/{segment}" in states[1].detail and states[1].uid == uids[1]
            for _ in range(3):
                with pytest.raises(CorruptLogError, match="wrong payload checksum"):
                    await client.fetch(partition=1)
                with pytest.raises(CorruptLogError):
                    await client.produce(partition=1)
            for partition in (0, 2):
                await client.produce(partition=partition)
                assert len(await client.fetch(partition=partition)) == 2
            await client.delete()
            assert disk.list(PARTITIONS) == [], "a damaged one can be deleted"

    with caplog.at_level(logging.ERROR, "quiver.broker"):
        run(main())
    assert [r.getMessage().split()[0] for r in caplog.records] == ["partition_corrupt"]


def test_partition_whose_disk_fails_at_the_start_does_not_stop_the_others() -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        async with broker(disk) as client:
            await client.create("logs", 2)
            await client.produce(partition=1)
            uids = [status.uid for status in await client.status()]
        disk.fail("pread", errno.EIO, path=uids[0])
        async with broker(disk) as client:
            assert [status.state for status in await client.status()] == ["failed", "online"]
            with pytest.raises(LogFailedError, match="logs-0 cannot be opened"):
                await client.produce(partition=0)
            assert await client.fetch(partition=1) == [make_payload(3)]

    run(main())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"cluster_id": 5}', b"[" * 100_000, b'{"a": "\xff"}']
)
def test_damaged_catalog_is_named_and_nothing_is_touched(content: bytes) -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        async with broker(disk) as client:
            await client.create()
            await client.produce()
        overwrite(disk, CATALOG, content)
        before = disk.list(PARTITIONS)
        with pytest.raises(CorruptLogError) as caught:
            async with running(disk):
                pass
        assert caught.value.facts["path"] == CATALOG
        assert disk.list(PARTITIONS) == before

    run(main())


def test_missing_catalog_does_not_make_left_overs_of_all_data() -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        async with broker(disk) as client:
            await client.create()
            await client.produce()
        disk.remove(CATALOG)
        before = disk.list(PARTITIONS)
        with pytest.raises(CorruptLogError, match="the catalog is missing"):
            async with running(disk):
                pass
        assert disk.list(PARTITIONS) == before != []

    run(main())
