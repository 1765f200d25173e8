from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from quiver.errors import CorruptLogError
from quiver.log.slots import HardStateFile, SyncMark, TwoSlots
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.types import HardState

PATH = "d/hardstate"


def new_disk(seed: int = 0) -> FaultyDisk:
    disk = FaultyDisk(seed)
    disk.make_directory("d")
    return disk


def raw_of(disk: FaultyDisk, path: str = PATH) -> bytes:
    file = disk.open(path)
    return file.pread(file.size(), 0)


def test_new_hard_state_is_term_zero_without_a_vote() -> None:
    disk = new_disk()
    assert HardStateFile(disk, "d").value == HardState(0, 0)
    assert HardStateFile(disk, "d").value == HardState(0, 0)


def test_written_hard_state_is_read_back() -> None:
    disk = new_disk()
    for term in range(1, 8):
        HardStateFile(disk, "d").write(HardState(term, term * 10))
        assert HardStateFile(disk, "d").value == HardState(term, term * 10)


def test_torn_slot_keeps_the_older_value() -> None:
    for term in range(1, 5):
        disk = new_disk()
        slots = TwoSlots(disk, "d/mark")
        for number in range(1, term + 1):
            slots.write(number, 0, sync=False)
        before = raw_of(disk, "d/mark")
        slots.write(99, 0, sync=False)
        after = raw_of(disk, "d/mark").ljust(1024, b"\0")
        changed = [at for at in range(1024) if after[at : at + 1] != before.ljust(1024, b"\0")[at : at + 1]]
        # Any mixture of old and new bytes.
        for cut in range(changed[0], changed[-1] + 1):
            torn = new_disk()
            torn.open("d/mark", create=True).pwrite([after[:cut] + before.ljust(1024, b"\0")[cut:]], 0)
            found = TwoSlots(torn, "d/mark").values
            assert found == (term, 0) or (found == (99, 0) and cut == changed[-1] + 1)


def test_write_after_a_failed_one_never_falls_on_the_only_good_slot() -> None:
    for writes in range(1, 5):
        disk = new_disk()
        slots = TwoSlots(disk, "d/mark")
        for value in range(1, writes + 1):
            slots.write(value, 0, sync=False)
        newest = slice(writes % 2 * 512, writes % 2 * 512 + 28)
        good = raw_of(disk, "d/mark")[newest]
        disk.fail("pwrite", errno.ENOSPC)
        with pytest.raises(OSError):
            slots.write(98, 0, sync=False)
        assert slots.values == (writes, 0)
        slots.write(99, 0, sync=False)
        assert raw_of(disk, "d/mark")[newest] == good
        assert TwoSlots(disk, "d/mark").values == (99, 0)


def test_every_flipped_bit_of_the_hard_state_gives_the_same_vote_or_an_error() -> None:
    # The newest slot alone would fall back to an older vote without a word, and vote twice in one term.
    for writes in (0, 1, 4):
        disk = new_disk()
        file = HardStateFile(disk, "d")
        for term in range(1, writes + 1):
            file.write(HardState(term, 7))
        expected, raw = file.value, raw_of(disk)
        for bit in range(len(raw) * 8):
            damaged = new_disk()
            damaged.open(PATH, create=True).pwrite([raw], 0)
            damaged.flip(PATH, bit // 8, bit % 8)
            assert HardStateFile(damaged, "d").value == expected


def test_hard_state_with_both_slots_damaged_is_reported_never_guessed() -> None:
    disk = new_disk()
    file = HardStateFile(disk, "d")
    file.write(HardState(3, 1))
    file.write(HardState(4, 2))
    for start in (0, 512):
        disk.flip(PATH, start + 9, 3)
    with pytest.raises(CorruptLogError) as caught:
        HardStateFile(disk, "d")
    assert caught.value.facts["path"] == PATH


def test_hard_state_survives_a_crash_at_any_point() -> None:
    for seed in range(150):
        disk = new_disk(seed)
        known = HardState()
        for _ in range(4):
            tried = known
            disk.stop_at(disk.chance.randint(1, 12))
            with contextlib.suppress(SimulatedCrash):
                file = HardStateFile(disk, "d")
                for step in range(4):
                    tried = HardState(known.term + 1, step)
                    file.write(tried)
                    known = tried
            disk.crash() if disk.chance.random() < 0.6 else disk.kill()
            found = HardStateFile(disk, "d").value
            assert found in (known, tried)
            known = found


def test_hard_state_once_read_is_never_forgotten() -> None:
    # A killed process may leave a vote in the page cache only; who reads it acts on it, so it must be on disk by then.
    for seed in range(40):
        for operation in range(1, 9):
            disk = new_disk(seed)
            disk.stop_at(operation)
            with contextlib.suppress(SimulatedCrash):
                HardStateFile(disk, "d").write(HardState(5, 2))
            disk.kill()
            found = HardStateFile(disk, "d").value
            disk.crash()
            assert HardStateFile(disk, "d").value == found


def test_failed_sync_of_the_hard_state_is_an_error_and_changes_nothing() -> None:
    disk = new_disk()
    file = HardStateFile(disk, "d")
    file.write(HardState(1, 1))
    disk.fail("datasync", errno.EIO)
    with pytest.raises(OSError):
        file.write(HardState(2, 2))
    assert file.value == HardState(1, 1)
    disk.crash()
    assert HardStateFile(disk, "d").value in (HardState(1, 1), HardState(2, 2))


def test_late_mark_is_written_when_it_is_asked_for_and_overtaken_by_any_other() -> None:
    disk = FaultyDisk(0)
    disk.make_directory("d")
    mark = SyncMark(disk, "d/synced")
    errors: list[OSError] = []
    mark.raise_to(5)
    mark.raise_later(9)
    assert SyncMark(disk, "d/synced").values == (5, 0)
    mark.catch_up(errors.append)
    assert SyncMark(disk, "d/synced").values == (9, 0)
    mark.raise_later(12)
    mark.write(7, 0, sync=True)  # the log was cut meanwhile
    mark.catch_up(errors.append)
    assert SyncMark(disk, "d/synced").values == (7, 0) and not errors


def test_late_mark_without_space_stays_lower_and_any_other_error_is_raised() -> None:
    disk = FaultyDisk(0)
    disk.make_directory("d")
    mark = SyncMark(disk, "d/synced")
    errors: list[OSError] = []
    mark.raise_later(9)
    disk.fail("pwrite", errno.ENOSPC)
    mark.catch_up(errors.append)
    assert SyncMark(disk, "d/synced").values == (0, 0) and not errors
    mark.raise_later(9)
    disk.fail("pwrite", errno.EIO)
    mark.catch_up(errors.append)
    assert [error.errno for error in errors] == [errno.EIO]


class SlowFirstWrite:
    """A file whose first write takes until the test lets it go on."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._first = True
        self.begun, self.go_on = threading.Event(), threading.Event()

    def pwrite(self, buffers: Sequence[Any], position: int) -> None:
        if self._first:
            self._first = False
            self.begun.set()
            assert self.go_on.wait(10)
        self._file.pwrite(buffers, position)


@pytest.mark.parametrize("late_first", [True, False])
def test_late_mark_never_takes_the_place_of_a_higher_one_that_a_thread_writes_meanwhile(late_first: bool) -> None:
    """The next flush may run in a thread while the mark of the one before is still to be written."""
    disk = new_disk()
    mark = SyncMark(disk, "d/synced")
    mark.raise_to(5)
    mark.raise_later(9)
    mark._file = slow = SlowFirstWrite(mark._file)  # type: ignore[assignment]
    writes = [threading.Thread(target=mark.catch_up, args=(None,)), threading.Thread(target=mark.raise_to, args=(12,))]
    first, second = writes if late_first else reversed(writes)
    first.start()
    assert slow.begun.wait(10)
    second.start()
    second.join(0.2)  # it ends, or waits for the first
    slow.go_on.set()
    for write in writes:
        write.join(10)
    assert mark.values == SyncMark(disk, "d/synced").values == (12, 0)
