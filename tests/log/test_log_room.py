"""Files that are made longer ahead of their content: the room is never taken for content, nor content for room."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from quiver.errors import CorruptLogError, DiskFullError, LogFailedError
from quiver.log.disk import Buffer, SystemDisk
from quiver.testing.faulty_disk import FaultyDisk, FaultyFile
from tests.log.log_kit import (
    DIRECTORY,
    ROOMY,
    append,
    check_contents,
    contents,
    data,
    disk_with,
    fill,
    image,
    last_segment,
    open_log,
)


def test_active_file_is_longer_than_its_content_and_sealed_ones_are_not() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 13)
    files = {name: raw for name, raw in image(disk).items() if name.endswith(".seg")}
    assert sum(map(len, files.values())) > log.size_bytes
    last = files.pop(last_segment(files))
    assert last.endswith(bytes(100))
    assert sum(map(len, files.values())) + len(last.rstrip(b"\0")) <= log.size_bytes
    check_contents(open_log(disk, ROOMY), stored)


def test_first_bytes_of_a_log_get_no_room() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    fill(log, 1)
    assert len(image(disk)[last_segment(image(disk))]) == log.size_bytes


def test_room_is_made_seldom() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    fill(log, 1)
    disk.fail("allocate", errno.EIO, 2)
    for number in range(3):  # 96 bytes each: the first makes room for more
        append(log, data(number, 0))
        log.flush()
    assert disk.met == []


@pytest.mark.parametrize(("length", "zeros"), [(0, [64 * 1024]), (20_000, [])])
def test_room_is_written_seldom_and_only_behind_small_writes(
    length: int, zeros: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = FaultyFile.pwrite

    def note(self: FaultyFile, buffers: Sequence[Buffer], position: int) -> int:
        if not any(map(any, buffers)):
            written.append(sum(map(len, buffers)))
        return write(self, buffers, position)

    monkeypatch.setattr(FaultyFile, "pwrite", note)
    disk = FaultyDisk(0)
    log = open_log(disk, dataclasses.replace(ROOMY, room_bytes_max=2**20, segment_bytes_max=2**20))
    fill(log, 1)
    for number in range(3):
        append(log, data(number, length))
        log.flush()
    assert written == zeros


def test_room_that_cannot_be_written_is_no_error() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 1)
    disk.fail("pwrite", errno.ENOSPC, 2, ".seg")
    stored += fill(log, 1)
    assert disk.met and contents(log) == stored
    disk.fail("pwrite", errno.EIO, 2, ".seg")
    with pytest.raises(LogFailedError):
        fill(log, 6)


def test_room_is_not_reported_as_a_torn_tail() -> None:
    disk = FaultyDisk(0)
    fill(open_log(disk, ROOMY), 9)
    disk.kill()
    assert open_log(disk, ROOMY).cut_bytes == 0


def test_torn_frame_before_room_is_cut_and_counted() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 9)
    name = last_segment(image(disk))
    position = log._segments[-1].size_bytes
    disk.kill()
    disk.open(f"{DIRECTORY}/{name}").pwrite([b"QV\x01torn"], position)
    again = open_log(disk, ROOMY)
    assert again.cut_bytes == 7
    check_contents(again, stored)
    # What was cut does not come back behind what is appended now.
    stored += fill(again, 2)
    check_contents(open_log(disk, ROOMY), stored)


def test_sealed_segment_may_get_its_room_back_by_a_power_cut() -> None:
    disk = FaultyDisk(0)
    stored = fill(open_log(disk, ROOMY), 12)
    files = image(disk)
    sealed = min(name for name in files if name.endswith(".seg"))
    longer = {**files, sealed: files[sealed] + bytes(300)}
    for found in (longer, {name: raw for name, raw in longer.items() if not name.endswith(".idx")}):
        again = disk_with(found)
        check_contents(open_log(again, ROOMY), stored)
        assert image(again)[sealed] == files[sealed]
    longer[sealed] += b"x"
    with pytest.raises(CorruptLogError):
        open_log(disk_with(longer), ROOMY)


def test_zeros_instead_of_acknowledged_frames_are_damage() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    fill(log, 9)
    # A sealed segment is read at the start only when its index is gone.
    files = {name: raw for name, raw in image(disk).items() if not name.endswith(".idx")}
    for name in (name for name in files if name.endswith(".seg")):
        for kept in (0, 96):
            emptied = {**files, name: files[name][:kept].ljust(len(files[name]), b"\0")}
            with pytest.raises(CorruptLogError):
                open_log(disk_with(emptied), ROOMY)


def test_disk_without_space_for_room_takes_the_entries() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 2)
    for error in (errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP):
        disk.fail("allocate", error)
        stored += fill(log, 1)
    assert contents(log) == stored


def test_full_disk_gives_room_back_and_goes_on_later() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 4)
    disk.capacity_bytes = sum(map(len, image(disk).values()))
    append(log, data(5, 500))
    with pytest.raises(DiskFullError):
        log.flush()
    disk.capacity_bytes = None
    stored += fill(log, 3)
    check_contents(open_log(disk, ROOMY), stored)


def test_truncation_takes_the_room_with_it() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, ROOMY)
    stored = fill(log, 9)
    log.truncate_suffix(9)
    assert sum(len(raw) for name, raw in image(disk).items() if name.endswith(".seg")) == log.size_bytes
    stored = [*stored[:8], *fill(log, 3, term=2)]
    check_contents(open_log(disk, ROOMY), stored)


def test_real_file_is_longer_and_comes_back(tmp_path: Path) -> None:
    disk, directory = SystemDisk(), f"{tmp_path}/log"
    log = open_log(disk, ROOMY, directory)
    stored = fill(log, 10)
    files = image(disk, directory)
    assert len(files[last_segment(files)]) > log._segments[-1].size_bytes
    check_contents(open_log(disk, ROOMY, directory), stored)
