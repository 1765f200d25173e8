from __future__ import annotations

import errno

import pytest

from quiver.log.disk import File, write_atomically
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.testing.medium import SECTOR_BYTES

SEEDS = range(60)


def new_disk(seed: int = 0) -> FaultyDisk:
    disk = FaultyDisk(seed)
    disk.make_directory("d")
    return disk


def write(disk: FaultyDisk, path: str, raw: bytes, position: int = 0) -> File:
    file = disk.open(path, create=True)
    file.pwrite([raw], position)
    return file


def read(disk: FaultyDisk, path: str) -> bytes | None:
    if not disk.exists(path):
        return None
    file = disk.open(path)
    return file.pread(file.size(), 0)


def write_durably(disk: FaultyDisk, path: str, raw: bytes) -> File:
    file = write(disk, path, raw)
    file.datasync()
    disk.sync_directory("d")
    return file


def test_what_is_written_is_read_at_once() -> None:
    disk = new_disk()
    file = disk.open("d/f", create=True)
    assert file.pwrite([b"abc", bytearray(b"def"), memoryview(b"gh")], 2) == 8
    assert file.size() == 10
    assert file.pread(100, 0) == b"\0\0abcdefgh"
    assert file.pread(3, 2) == b"abc"
    file.truncate(4)
    assert disk.open("d/f").pread(100, 0) == b"\0\0ab"
    assert disk.list("d") == ["f"]


def test_synced_bytes_survive_every_crash() -> None:
    for seed in SEEDS:
        disk = new_disk(seed)
        write_durably(disk, "d/f", b"x" * 2000)
        disk.crash()
        disk.crash()
        assert read(disk, "d/f") == b"x" * 2000


def test_unsynced_bytes_survive_vanish_or_are_torn_at_sectors() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = write_durably(disk, "d/f", b"a" * (4 * SECTOR_BYTES))
        file.pwrite([b"b" * (3 * SECTOR_BYTES)], SECTOR_BYTES // 2)
        disk.crash()
        raw = read(disk, "d/f")
        assert raw is not None and len(raw) == 4 * SECTOR_BYTES
        for start in range(0, len(raw), SECTOR_BYTES // 2):
            assert len(set(raw[start : start + SECTOR_BYTES // 2])) == 1
        ends.add(raw)
    assert b"a" * (4 * SECTOR_BYTES) in ends
    assert b"a" * 256 + b"b" * 1536 + b"a" * 256 in ends
    assert len(ends) > 4


def test_unsynced_growth_may_leave_zeros_or_the_old_length() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = write_durably(disk, "d/f", b"a" * 10)
        file.pwrite([b"b" * 10], 10)
        disk.crash()
        ends.add(read(disk, "d/f"))
    assert ends == {b"a" * 10, b"a" * 10 + b"b" * 10, b"a" * 10 + bytes(10)}


def test_unsynced_truncation_may_come_back() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        write_durably(disk, "d/f", b"a" * 10).truncate(3)
        disk.crash()
        ends.add(read(disk, "d/f"))
    assert ends == {b"aaa", b"a" * 10}


def test_room_that_was_cut_off_may_come_back_and_data_may_not() -> None:
    """A sync of data promises nothing of an end that only gives zeros away."""
    left: set[bytes | None] = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = write_durably(disk, "d/f", b"x" * 10)
        file.allocate(30)
        file.datasync()
        file.truncate(10)
        file.datasync()
        disk.crash()
        left.add(read(disk, "d/f"))
        file = write_durably(disk, "d/g", b"x" * 20)
        file.truncate(10)
        file.datasync()
        disk.crash()
        assert read(disk, "d/g") == b"x" * 10
    assert left == {b"x" * 10, b"x" * 10 + bytes(20)}


def test_directory_operations_happen_in_order_or_not_at_all() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        write_durably(disk, "d/1", b"one")
        write(disk, "d/2", b"two").datasync()
        disk.rename("d/1", "d/3")
        disk.remove("d/2")
        disk.crash()
        ends.add(tuple(disk.list("d")))
        assert b"one" in (read(disk, "d/1"), read(disk, "d/3"))
    assert ends == {("1",), ("1", "2"), ("2", "3"), ("3",)}


def test_synced_directory_operations_survive_every_crash() -> None:
    for seed in SEEDS:
        disk = new_disk(seed)
        write_durably(disk, "d/1", b"one")
        write_durably(disk, "d/2", b"two")
        disk.rename("d/1", "d/3")
        disk.remove("d/2")
        disk.sync_directory("d")
        disk.crash()
        assert disk.list("d") == ["3"]
        assert read(disk, "d/3") == b"one"


def test_removed_tree_is_gone_after_its_parent_is_synced() -> None:
    for seed in SEEDS:
        disk = FaultyDisk(seed)
        disk.make_directory("d/inner")
        write(disk, "d/inner/f", b"x").datasync()
        disk.sync_directory("d/inner")
        disk.remove_tree("d/inner")
        assert disk.list("d") == []
        disk.sync_directory("d")
        disk.crash()
        assert disk.list("d") == []


def test_directory_is_renamed_with_what_is_in_it() -> None:
    disk = FaultyDisk(0)
    disk.make_directory("d/old")
    disk.open("d/old/f", create=True).pwrite([b"x"], 0)
    disk.rename("d/old", "d/new")
    assert not disk.exists("d/old") and disk.open("d/new/f").pread(9, 0) == b"x"
    with pytest.raises(FileNotFoundError):
        disk.rename("d/old", "d/new")


def test_atomic_write_leaves_the_old_or_the_new_file() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        write_atomically(disk, "d/f", b"old")
        disk.stop_at(seed % 7 + 1)
        stopped = False
        try:
            write_atomically(disk, "d/f", b"new" * 500)
        except SimulatedCrash:
            stopped = True
        disk.crash()
        raw = read(disk, "d/f")
        assert raw == b"new" * 500 or (stopped and raw == b"old")
        ends.add((stopped, raw))
    assert len(ends) == 3


def test_same_seed_and_calls_give_the_same_disk() -> None:
    def run(seed: int) -> list[bytes | None]:
        disk = new_disk(seed)
        seen = []
        for number in range(20):
            write(disk, f"d/{number % 3}", bytes([number]) * 3000, number * 100)
            if number % 4 == 0:
                disk.open(f"d/{number % 3}", create=True).datasync()
            if number % 5 == 0:
                disk.sync_directory("d")
            if number % 6 == 0:
                disk.crash()
            seen += [read(disk, f"d/{name}") for name in range(3)]
        return seen

    assert all(run(seed) == run(seed) for seed in range(10))
    assert run(1) != run(2)


@pytest.mark.parametrize("end", ["crash", "kill"])
def test_old_handles_are_dead(end: str) -> None:
    disk = new_disk()
    file = write_durably(disk, "d/f", b"x")
    getattr(disk, end)()
    for call in (lambda: file.pread(1, 0), lambda: file.pwrite([b"y"], 0), file.size, file.datasync):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF
    assert read(disk, "d/f") == b"x"


def test_kill_keeps_the_page_cache_and_a_later_crash_may_take_it() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        write_durably(disk, "d/f", b"old").pwrite([b"new"], 0)
        write(disk, "d/g", b"")
        disk.kill()
        assert read(disk, "d/f") == b"new"
        assert disk.exists("d/g")
        disk.crash()
        ends.add((read(disk, "d/f"), disk.exists("d/g")))
    assert len(ends) == 4


def test_operation_fails_on_order_and_once() -> None:
    disk = new_disk()
    file = write(disk, "d/f", b"x")
    disk.fail("datasync", errno.EIO, nth=2)
    file.datasync()
    with pytest.raises(OSError) as caught:
        file.datasync()
    assert caught.value.errno == errno.EIO
    file.datasync()
    disk.fail("pwrite", errno.ENOSPC, path="d/g")
    file.pwrite([b"y"], 0)
    with pytest.raises(OSError) as caught:
        write(disk, "d/g", b"z")
    assert caught.value.errno == errno.ENOSPC
    disk.fail("sync_directory", errno.EIO)
    with pytest.raises(OSError):
        disk.sync_directory("d")
    disk.sync_directory("d")


def test_failed_datasync_is_not_made_good_by_the_next() -> None:
    ends = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = write_durably(disk, "d/f", b"old")
        file.pwrite([b"new"], 0)
        disk.fail("datasync", errno.EIO)
        with pytest.raises(OSError):
            file.datasync()
        file.datasync()
        assert read(disk, "d/f") == b"new"
        disk.crash()
        ends.add(read(disk, "d/f"))
    assert ends == {b"old", b"new"}


def test_full_disk_writes_what_fits_and_goes_on_when_space_returns() -> None:
    disk = FaultyDisk(0, capacity_bytes=10)
    disk.make_directory("d")
    write(disk, "d/f", b"x" * 6)
    with pytest.raises(OSError) as caught:
        write(disk, "d/g", b"y" * 6)
    assert caught.value.errno == errno.ENOSPC
    assert read(disk, "d/g") == b"y" * 4
    write(disk, "d/f", b"z" * 6)  # overwriting needs no space
    with pytest.raises(OSError):
        write(disk, "d/f", b"z" * 7)
    disk.remove("d/f")
    write(disk, "d/g", b"y" * 10)
    disk.capacity_bytes = 20
    write(disk, "d/f", b"x" * 10)


def test_stopped_machine_does_nothing_until_it_starts_again() -> None:
    disk = new_disk()
    file = write_durably(disk, "d/f", b"x")
    disk.stop_at(2)
    file.pwrite([b"y"], 0)
    with pytest.raises(SimulatedCrash):
        file.truncate(0)
    for call in (file.datasync, file.size, lambda: disk.open("d/f"), lambda: disk.remove("d/f")):
        with pytest.raises(SimulatedCrash):
            call()
    disk.kill()
    assert read(disk, "d/f") == b"y"


def test_flipped_bit_stays_flipped_after_a_crash() -> None:
    disk = new_disk()
    write_durably(disk, "d/f", b"\0\0\0")
    disk.flip("d/f", 1, 6)
    assert read(disk, "d/f") == b"\0\x40\0"
    disk.crash()
    assert read(disk, "d/f") == b"\0\x40\0"


def test_allocated_bytes_are_zeros_and_take_space() -> None:
    disk = FaultyDisk(0, capacity_bytes=1000)
    disk.make_directory("d")
    file = disk.open("d/f", create=True)
    file.pwrite([b"abc"], 0)
    file.allocate(600)
    assert file.pread(1000, 0) == b"abc" + bytes(597)
    file.allocate(10)
    assert file.size() == 600
    with pytest.raises(OSError) as full:
        file.allocate(1001)
    assert full.value.errno == errno.ENOSPC
    file.pwrite([b"x" * 300], 300)
    assert file.size() == 600
