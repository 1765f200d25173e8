"""One flipped bit anywhere in a log's files: its entries come back exactly, or an error names file and position."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk, SystemDisk
from quiver.log.recovery import MARK_FILE
from quiver.log.slots import HardStateFile
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import HardState
from tests.log.log_kit import (
    DIRECTORY,
    ROOMY,
    SETTINGS,
    Driver,
    Stored,
    check_contents,
    contents,
    contents_by_offset,
    disk_with,
    fill,
    image,
    open_log,
    write_files,
)

Files = dict[str, bytes]


def make(
    *, checkpoint: int = 0, trimmed: bool = False, truncated: bool = False, roomy: bool = False
) -> tuple[Files, list[Stored]]:
    driver = Driver(FaultyDisk(0), ROOMY if roomy else SETTINGS)
    driver.open()
    HardStateFile(driver.disk, DIRECTORY).write(HardState(3, 2))
    driver.entries = fill(driver.live, 13)
    driver.acked = 14
    if truncated:
        driver.truncate(10)
        driver.entries += fill(driver.live, 3, term=2)
        driver.acked = driver.live.synced_index
    if checkpoint:
        driver.write_checkpoint(checkpoint)
    if trimmed:
        driver.trim(checkpoint)
        assert driver.live.first_index > 1
    return image(driver.disk), driver.entries[driver.live.first_index - 1 :]


STATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "check-pointed": {"checkpoint": 12},
    "trimmed": {"checkpoint": 11, "trimmed": True},
    "truncated": {"truncated": True},
    "roomy": {"roomy": True, "checkpoint": 12},
}


def judge(disk: Disk, stored: list[Stored], directory: str = DIRECTORY) -> bool:
    """True when all came back, False when the damage was reported; anything else fails."""
    try:
        assert HardStateFile(disk, directory).value == HardState(3, 2)
        log = open_log(disk, directory=directory)
        found = contents(log)
        by_offset = contents_by_offset(log)
    except CorruptLogError as error:
        assert str(error.facts["path"]).startswith(directory)
        assert error.facts["position"] >= 0
        return False
    assert found == stored
    assert by_offset == [entry for entry in stored if entry.record_count]
    assert log.next_index == stored[-1].index + 1
    assert log.next_offset == stored[-1].base_offset + stored[-1].record_count
    return True


@pytest.mark.parametrize("state", STATES)
def test_flipped_bit_anywhere_is_harmless_or_reported(state: str) -> None:
    files, stored = make(**STATES[state])
    assert judge(disk_with(files), stored)
    chance = random.Random(state)
    reported = set()
    for name, raw in files.items():
        for byte in range(chance.randrange(3), len(raw), 3):
            disk = disk_with(files)
            disk.flip(f"{DIRECTORY}/{name}", byte, chance.randrange(8))
            if not judge(disk, stored):
                reported.add(name.rpartition(".")[2])
    # Frames have no second copy, nor has the check-point of a trimmed log; the rest is rebuilt or kept twice.
    assert reported == ({"seg", "state"} if state == "trimmed" else {"seg"})


def test_damage_is_reported_again_at_every_opening() -> None:
    # Nothing that recovery does on its way to the error may hide it from the next one.
    files, stored = make(**STATES["check-pointed"])
    chance = random.Random(5)
    for name in (name for name in files if name.endswith(".seg")):
        for _ in range(40):
            disk = disk_with(files)
            disk.flip(f"{DIRECTORY}/{name}", chance.randrange(len(files[name])), chance.randrange(8))
            first = judge(disk, stored)
            disk.crash()
            assert judge(disk, stored) == first


def test_flipped_bit_on_the_real_disk_is_harmless_or_reported(tmp_path: Path) -> None:
    files, stored = make(**STATES["check-pointed"])
    chance = random.Random(6)
    disk = SystemDisk()
    judged = set()
    for number in range(60):
        directory = f"{tmp_path}/{number}"
        name = chance.choice(sorted(files))
        damaged = bytearray(files[name])
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        write_files(disk, {**files, name: bytes(damaged)}, directory)
        judged.add(judge(disk, stored, directory))
        disk.remove_tree(directory)
    assert judged == {True, False}


def test_damaged_frame_is_not_served_and_the_others_are() -> None:
    files, stored = make(**STATES["plain"])
    name = sorted(name for name in files if name.endswith(".seg"))[0]
    disk = disk_with(files)
    log = open_log(disk)
    bad = next(entry for entry in stored[1:] if entry.record_count)
    disk.flip(f"{DIRECTORY}/{name}", sum(96 + -len(e.payload) // 8 * -8 for e in stored[: bad.index - 1]) + 100, 2)
    with pytest.raises(CorruptLogError, match="payload checksum"):
        log.read(bad.base_offset, 1000)
    with pytest.raises(CorruptLogError, match="payload checksum"):
        contents(log)
    after = next(entry for entry in stored[bad.index :] if entry.record_count)
    assert bytes(log.read(after.base_offset, 1))
    assert bytes(log.read(0, 1))


def test_lost_mark_alone_loses_nothing() -> None:
    files, stored = make(**STATES["plain"])
    for harm in (None, b"", bytes(1024), b"\xff" * 1024, files[MARK_FILE][:30]):
        damaged = {name: raw for name, raw in files.items() if name != MARK_FILE}
        if harm is not None:
            damaged[MARK_FILE] = harm
        check_contents(open_log(disk_with(damaged)), stored)
