"""Compaction by key, on one log: what stays, what readers find, and what a crash may leave."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import LogFailedError
from quiver.log import compaction
from quiver.log.compaction import Order
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED
from quiver.wire.frame import Kind, walk_frames
from tests.log.compaction_kit import Said, carry_out, expected_after, keyed, put_order, records_in, table_of
from tests.log.log_kit import SETTINGS, Checkpoint, contents, control, disk_with, image, open_log

SMALL = dataclasses.replace(SETTINGS, segment_bytes_max=2000)
KEYS = [b"a", b"b", b"c", b"d"]

SAID = st.builds(
    Said,
    st.sampled_from([*KEYS, None]),
    st.none() | st.binary(max_size=12),
    st.integers(0, 100),
)
STEPS = st.lists(
    st.tuples(st.just("data"), st.lists(SAID, min_size=1, max_size=5), st.sampled_from([None, "lz4", "zstd"]))
    | st.tuples(st.just("order"), st.integers(0, 100), st.booleans())
    | st.tuples(st.just("control"), st.integers(0, 9), st.booleans())
    | st.tuples(st.just("open"), st.booleans(), st.booleans()),
    max_size=25,
)


@given(steps=STEPS)
@settings(deadline=None, max_examples=60)
def test_a_compacted_log_has_the_last_record_of_each_key(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    model = []
    before, before_offset = Order(), 0  # the order before, and the offset it was at
    for step, what, how in steps:
        if step == "data":
            log.append(1, keyed(what, how), 0.0)
            log.flush()
            model += records_in(log)[len(records_in(log)) - len(what) :]
        elif step == "control":
            log.append(1, control(what), 0.0)
            log.flush()
        elif step == "open":
            log = open_log(disk, SMALL)
        else:
            # As the leader orders: up to the order before, and never less than that said.
            drop_end, drop_offset = (before.index, before_offset) if how else (before.drop_end, 0)
            order = put_order(log, drop_end, max(what if how else 0, before.drop_before_us))
            before_offset = log.next_offset
            if not how:
                drop_offset = sum(header.record_count for _, header, _ in log.scan(1) if header.index < drop_end)
            assert carry_out(log, disk, order) is not None
            model = expected_after(model, order, log.next_offset, drop_offset)
            before = order
        assert records_in(log) == model
        assert records_in(log, 300) == model
    check_places(log)


def check_places(log: PartitionLog) -> None:
    """Every entry is found by its index, every offset leads to its frame, and nothing is missing in between."""
    entries = contents(log)
    assert [entry.index for entry in entries] == list(range(log.first_index, log.next_index))
    for before, after in itertools.pairwise(entries):
        assert after.base_offset == before.base_offset + before.record_count
    for entry in entries:
        _, header, _ = next(iter(log.scan(entry.index)))
        assert header.index == entry.index
        for offset in range(entry.base_offset, entry.base_offset + entry.record_count):
            _, header, _ = next(walk_frames(log.read(offset, 1)))
            assert header.base_offset <= offset < header.next_offset


def fill_keys(log: PartitionLog, rounds: int) -> None:
    for number in range(rounds):
        log.append(1, keyed([Said(key, b"%d" % number, number) for key in KEYS]), 0.0)
        if number % 3 == 2:
            log.append(1, keyed([Said(KEYS[number % 4], None, number)]), 0.0)
        log.flush()


def test_order_is_about_whole_files_and_leaves_what_follows_alone() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    fill_keys(log, 2)
    assert log.segment_count == 1
    order = put_order(log)
    assert log.segment_count == 2 and log.segments_before(order.index)[0].next_index == order.index
    fill_keys(log, 1)
    later = records_in(log)[-4:]
    carry_out(log, disk, order)
    assert [record.offset for record in records_in(log)] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert records_in(log)[-4:] == later


def test_small_files_become_one_and_space_comes_back() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    for _ in range(4):
        fill_keys(log, 9)
        before = log.size_bytes
        carry_out(log, disk, put_order(log))
        assert log.size_bytes < before / 2
    before = log.segment_count
    carry_out(log, disk, put_order(log))
    assert log.segment_count <= before / 2
    found = [header for _, header, _ in log.scan(1) if header.kind == Kind.DATA]
    assert {header.schema_id for header in found[:-4]} == {SCHEMA_ID_COMPACTED}
    assert {name for name in disk.list(log.directory) if name.endswith(".seg")} == {
        segment.path.rpartition("/")[2] for segment in (*log.segments_before(log.next_index), log._active)
    }
    check_places(open_log(disk, SMALL))


def test_a_time_is_found_behind_batches_of_which_nothing_is_left() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    for number in range(6):
        log.append(1, keyed([Said(b"a", b"", 10 + number), Said(b"%d" % number, b"", 5)]), 0.0)
    log.append(1, keyed([Said(b"b", b"", 100)]), 0.0)
    log.append(1, keyed([Said(b"b", b"", 90)]), 0.0)
    carry_out(log, disk, put_order(log))
    found = log.find_timestamp(12, log.next_index)
    assert found is not None and found.base_offset == 10, "the last record of a, not the first batch that had one"
    found = log.find_timestamp(80, log.next_index)
    assert found is not None and found.base_offset == 13


def test_records_that_nobody_can_read_stay_as_they_are() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    broken = keyed([Said(b"a", b"1")])
    payload = bytes(broken.payload).replace(b"\xff\xff\xff\xff", b"\0\0\0\0")
    log.append(1, broken._replace(payload=payload, payload_crc=compaction.crc32c(payload)), 0.0)
    log.append(1, keyed([Said(b"a", b"2")]), 0.0)
    log.append(1, keyed([Said(b"a", b"3")]), 0.0)
    log.flush()
    carry_out(log, disk, put_order(log))
    assert [len(entry.payload) > 0 for entry in contents(log)[:3]] == [True, False, True]
    assert contents(log)[0].payload == payload


def test_more_keys_than_are_looked_at_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "KEYS_MAX", 10)
    disk = FaultyDisk(0)
    log = open_log(disk, SMALL)
    for number in range(40):
        log.append(1, keyed([Said(b"%d" % (number * 7 % 30), b"%d" % number), Said(b"x", b"%d" % number)]), 0.0)
    log.flush()
    table = table_of(records_in(log))
    found = carry_out(log, disk, put_order(log))
    assert found is not None and found.turns >= 4
    assert table_of(records_in(log)) == table
    assert len(records_in(log)) == 31


# -- trouble -----------------------------------------------------------------------------------------------------------


def made(disk: FaultyDisk) -> tuple[PartitionLog, Order]:
    """A log with an order that joins files, empties batches and drops what says 'deleted'."""
    log = open_log(disk, SMALL)
    fill_keys(log, 3)
    log.append(1, keyed([Said(b"gone", b"value", 1)]), 0.0)
    log.append(1, keyed([Said(b"gone", None, 1)]), 0.0)
    fill_keys(log, 3)
    first = put_order(log)
    carry_out(log, disk, first)
    fill_keys(log, 4)
    return log, put_order(log, first.index, 50)


def test_order_may_be_cut_short_at_every_operation() -> None:
    """By a power cut or a kill: a reader finds the same table, and when it is done again, all is as it should be."""
    disk = FaultyDisk(0)
    log, order = made(disk)
    files, table, start = image(disk), table_of(records_in(log)), disk.operations
    carry_out(log, disk, order)
    done, count = records_in(log), disk.operations - start
    assert count > 20 and b"gone" not in {record.key for record in done}
    for nth in range(1, count + 1):
        for seed, power_cut in ((1, True), (2, True), (0, False)):
            disk = disk_with(files, seed)
            log = open_log(disk, SMALL)
            disk.stop_at(nth)
            with pytest.raises(SimulatedCrash):
                carry_out(log, disk, order)
            disk.crash() if power_cut else disk.kill()
            log = open_log(disk, SMALL)
            assert table_of(records_in(log)) == table, f"stopped at {nth}, seed {seed}"
            check_places(log)
            carry_out(log, disk, order)
            disk.crash()
            assert records_in(open_log(disk, SMALL)) == done


def test_what_is_deleted_stays_deleted_when_files_are_replaced_one_by_one() -> None:
    """The order in which files are replaced matters: the record before the one that deletes it, always."""
    disk = FaultyDisk(0)
    log = open_log(disk, dataclasses.replace(SMALL, segment_bytes_max=600))
    for key, value in ((b"k", b"1"), (b"x", b"1"), (b"k", None), (b"x", b"2"), (b"y", b"1")):
        log.append(1, keyed([Said(key, value)]), 0.0)
        log.flush()
    seen = []
    order = put_order(log, log.next_index, 1)
    carry_out(log, disk, order, lambda: seen.append(table_of(records_in(log))))
    assert len(seen) > 4 and all(table == {b"x": b"2", b"y": b"1"} for table in seen)
    assert {record.key for record in records_in(log)} == {b"x", b"y"}


@pytest.mark.parametrize("operation", ["pwrite", "datasync", "truncate", "rename"])
def test_a_disk_that_fails_before_a_file_is_replaced_leaves_the_log_as_it_was(operation: str) -> None:
    disk = FaultyDisk(0)
    log, order = made(disk)
    before = records_in(log)
    disk.fail(operation, errno.EIO, 1)
    with pytest.raises(OSError):
        carry_out(log, disk, order)
    assert log.failure is None and records_in(log) == before
    carry_out(log, disk, order)
    assert len(records_in(log)) < len(before)


def test_a_disk_that_fails_after_a_file_is_replaced_stops_the_log() -> None:
    disk = FaultyDisk(0)
    log, order = made(disk)
    disk.fail("sync_directory", errno.EIO, 2)  # the first is before the new name
    with pytest.raises(LogFailedError):
        carry_out(log, disk, order)
    assert log.failure is not None
    disk.crash()
    log = open_log(disk, SMALL)
    carry_out(log, disk, order)
    check_places(log)


def test_a_log_that_is_trimmed_meanwhile_is_left_alone() -> None:
    for nth in range(12):
        disk = FaultyDisk(0)
        log, order = made(disk)
        job = log.begin_checkpoint(Checkpoint(order.index - 1, 1, log.next_offset))
        job.run()
        log.finish_checkpoint(job)
        jobs = itertools.count()
        with contextlib.suppress(FileNotFoundError):
            carry_out(log, disk, order, lambda: next(jobs) == nth and log.trim_prefix(order.index))  # noqa: B023
        log.trim_prefix(order.index)
        assert log.first_index == order.index
        check_places(open_log(disk, SMALL))
