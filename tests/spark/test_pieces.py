"""How a task's rows are cut, without Spark."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from quiver.config import BATCH_BYTES_MAX
from quiver.spark.pieces import HEADER_BYTES, PIECE_BYTES_MAX, ROW_BYTES, cut, row_bytes

KINDS = {
    "binary": {"value": pa.binary(), "key": pa.binary(), "headers": pa.map_(pa.string(), pa.binary())},
    "string": {"value": pa.string(), "key": pa.string(), "headers": pa.map_(pa.string(), pa.string())},
    "large": {"value": pa.large_binary(), "key": pa.large_string(), "headers": pa.map_(pa.string(), pa.large_binary())},
}

text = st.text("aé", max_size=20)
headers = st.none() | st.lists(st.tuples(text, text), max_size=3)
rows = st.lists(st.tuples(st.none() | text, st.none() | text, headers), max_size=40)

Row = tuple[str | None, str | None, list[tuple[str, str]] | None]


def batch_of(given: list[Row], kind: str, names: tuple[str, ...] = ("value", "key", "headers")) -> pa.RecordBatch:
    columns = dict(zip(("value", "key", "headers"), zip(*given, strict=True), strict=True)) if given else {}
    types = {name: KINDS[kind][name] for name in names}
    return pa.record_batch([pa.array(list(columns.get(name, ())), types[name]) for name in names], names=list(names))


def expected_bytes(row: Row, names: tuple[str, ...]) -> int:
    value, key, pairs = row
    size = ROW_BYTES + len((value or "").encode())
    if "key" in names:
        size += len((key or "").encode())
    if "headers" in names:
        size += sum(len(name.encode()) + len(item.encode()) + HEADER_BYTES for name, item in pairs or ())
    return size


column_sets = st.sampled_from([("value",), ("value", "key"), ("headers", "value"), ("value", "key", "headers")])


@given(rows, st.sampled_from(list(KINDS)), column_sets, st.data())
def test_row_counts_for_its_bytes_wherever_it_lies(
    given: list[Row], kind: str, names: tuple[str, ...], data: st.DataObject
) -> None:
    batch = batch_of(given, kind, names)
    start = data.draw(st.integers(0, len(given)))
    stop = data.draw(st.integers(start, len(given)))
    found = row_bytes(batch.slice(start, stop - start)).to_pylist()
    assert found == [expected_bytes(row, names) for row in given[start:stop]]


@given(rows, st.integers(1, 500), st.data())
def test_pieces_do_not_depend_on_how_rows_are_handed_over(
    given: list[Row], bytes_max: int, data: st.DataObject
) -> None:
    batch = batch_of(given, "binary")
    whole = [piece.to_pylist() for piece in cut([batch], bytes_max)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(given)), max_size=6)))
    parts = [batch.slice(start, stop - start) for start, stop in pairwise([0, *cuts, len(given)])]
    assert [piece.to_pylist() for piece in cut(parts, bytes_max)] == whole
    assert [row for piece in whole for row in piece] == batch.to_pylist()


@given(rows, st.integers(1, 500))
def test_piece_is_full_and_not_over(given: list[Row], bytes_max: int) -> None:
    sizes = [expected_bytes(row, ("value", "key", "headers")) for row in given]
    at = 0
    for piece in cut([batch_of(given, "binary")], bytes_max):
        stop = at + piece.num_rows
        assert all(column.num_chunks == 1 for column in piece.columns)
        assert sum(sizes[at:stop]) <= bytes_max or piece.num_rows == 1
        assert stop == len(given) or sum(sizes[at : stop + 1]) > bytes_max
        at = stop
    assert at == len(given)


@given(rows)
def test_row_takes_no_more_than_it_counts_for(given: list[Row]) -> None:
    """So a piece is never cut again on its way to the broker."""
    batch = batch_of(given, "binary").append_column("timestamp", pa.repeat(pa.scalar(0), len(given)))
    slack = 256  # the last offset and the padding of each column
    assert batch.nbytes <= sum(row_bytes(batch).to_pylist()) + slack


def test_piece_fits_a_batch_with_room() -> None:
    assert 2 * PIECE_BYTES_MAX < BATCH_BYTES_MAX


def test_no_rows_make_no_piece() -> None:
    assert list(cut([])) == []
    assert list(cut([batch_of([], "binary"), batch_of([], "binary")])) == []
