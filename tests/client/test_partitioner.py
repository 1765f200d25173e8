"""Which partition a record goes to."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from quiver.client.partitioner import Partitioner
from quiver.errors import InvalidRequestError, UnknownPartitionError
from quiver.wire.records import batch_from_lists


def test_same_key_goes_to_the_same_partition_whoever_asks() -> None:
    first, second = Partitioner(), Partitioner()
    for number in range(100):
        key = b"key %d" % number
        chosen = first.choose("t", 7, None, key)
        second.choose("t", 7, None, None)
        assert chosen == first.choose("t", 7, None, key) == second.choose("t", 7, None, key)


def test_place_of_a_key_never_changes_between_versions() -> None:
    """Other clients and stored data rely on it."""
    chosen = [Partitioner().choose("t", 10, None, key) for key in (b"", b"a", b"hello", b"\x00\xff")]
    assert chosen == [0, 6, 0, 7]


def test_keys_spread_over_all_partitions() -> None:
    partitioner = Partitioner()
    counts = Counter(partitioner.choose("t", 8, None, b"user-%d" % number) for number in range(8000))
    assert set(counts) == set(range(8))
    assert min(counts.values()) > 800


def test_records_without_a_key_go_round_evenly_and_per_topic() -> None:
    partitioner = Partitioner()
    assert [partitioner.choose("a", 3, None, None) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert partitioner.choose("b", 3, None, None) == 0
    assert partitioner.choose("a", 3, None, None) == 1


def test_keyed_and_explicit_records_do_not_disturb_the_round() -> None:
    partitioner = Partitioner()
    assert partitioner.choose("t", 3, None, None) == 0
    partitioner.choose("t", 3, None, b"k")
    partitioner.choose("t", 3, 2, None)
    assert partitioner.choose("t", 3, None, None) == 1


def test_explicit_partition_wins_over_the_key() -> None:
    partitioner = Partitioner()
    assert [partitioner.choose("t", 5, number, b"same") for number in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("partition", [-1, 3, 2**40])
def test_partition_out_of_range_is_refused(partition: int) -> None:
    with pytest.raises(UnknownPartitionError, match="partitions 0 to 2"):
        Partitioner().choose("t", 3, partition, None)


@pytest.mark.parametrize("partition", ["0", 1.0, True, b"0", []])
def test_partition_of_the_wrong_type_is_refused(partition: object) -> None:
    with pytest.raises(InvalidRequestError):
        Partitioner().choose("t", 3, partition, None)  # type: ignore[arg-type]


def batch(keys: list[bytes | None]) -> pa.RecordBatch:
    return batch_from_lists([1], keys, [b"%d" % row for row in range(len(keys))], None)


def test_batch_without_keys_stays_whole_and_goes_round() -> None:
    partitioner = Partitioner()
    spread = [list(partitioner.spread("t", 3, None, batch([None, None]))) for _ in range(4)]
    assert [[number for number, _ in runs] for runs in spread] == [[0], [1], [2], [0]]
    assert all(piece.num_rows == 2 for runs in spread for _, piece in runs)


def test_batch_with_keys_is_spread_as_single_records_would_be_and_keeps_their_order() -> None:
    keys: list[bytes | None] = [b"k%d" % (row % 13) for row in range(200)]
    partitioner = Partitioner()
    rows: dict[int, list[bytes]] = {
        number: piece.column("value").to_pylist() for number, piece in partitioner.spread("t", 4, None, batch(keys))
    }
    expected: dict[int, list[bytes]] = {}
    for row, key in enumerate(keys):
        expected.setdefault(partitioner.choose("t", 4, None, key), []).append(b"%d" % row)
    assert rows == expected


def test_records_without_a_key_among_keyed_ones_stay_together() -> None:
    keys: list[bytes | None] = [b"a", None, b"b", None]
    runs = dict(Partitioner().spread("t", 50, None, batch(keys)))
    assert sorted(value for piece in runs.values() for value in piece.column("value").to_pylist()) == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert runs[0].column("value").to_pylist() == [b"1", b"3"]


def test_named_partition_takes_the_whole_batch() -> None:
    ((number, piece),) = Partitioner().spread("t", 4, 3, batch([b"a", b"b", b"c"]))
    assert (number, piece.num_rows) == (3, 3)
