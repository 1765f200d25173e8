from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import CorruptLogError, InvalidRequestError
from quiver.types import Record
from quiver.wire.batch_check import SCHEMA_ID_V1, check_batch
from quiver.wire.records import (
    COMPRESSIONS,
    SCHEMA,
    batch_from_lists,
    batches_from_table,
    bytes_of,
    check_headers,
    decode_batch,
    encode_batch,
    encode_single,
    largest_record_bytes,
    split_batch,
    timestamp_range,
)
from quiver.wire.rows import to_records
from tests.wire.kit import dense, make_batch, make_payload

NOW_US = 1_700_000_000_000_000


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """(timestamp, key, value, headers) of all records."""
    records = [record for batch in batches for record in to_records("t", 0, dense(0, batch))]
    return [(record.timestamp, record.key, record.value, record.headers) for record in records]


# -- lists -----------------------------------------------------------------------------------------------------------

BLOBS = st.none() | st.binary(max_size=20)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3)
ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), BLOBS, BLOBS, HEADERS), min_size=1, max_size=30)


@given(rows=ROWS, compression=st.sampled_from(COMPRESSIONS))
@settings(deadline=None)
def test_records_survive_the_way_to_bytes_and_back(rows: list[Any], compression: str | None) -> None:
    timestamps, keys, values, headers = (list(column) for column in zip(*rows, strict=True))
    batch = batch_from_lists(timestamps, keys, values, headers)
    payload = encode_batch(batch, compression)
    check_batch(payload, len(rows), SCHEMA_ID_V1)
    found = to_records("logs", 3, dense(1000, decode_batch(payload)))
    assert found == [
        Record("logs", 3, 1000 + row, timestamp, key, value, tuple(pairs or ()))
        for row, (timestamp, key, value, pairs) in enumerate(rows)
    ]
    assert timestamp_range(batch) == (min(timestamps), max(timestamps))


@given(timestamp=st.integers(-(2**63), 2**63 - 1), value=st.binary(max_size=100))
@settings(deadline=None)
def test_lone_record_is_encoded_to_the_same_bytes_as_a_batch_of_one(timestamp: int, value: bytes) -> None:
    assert encode_single(timestamp, value) == encode_batch(batch_from_lists([timestamp], None, [value], None))


def test_lone_record_of_every_length_is_encoded_as_a_batch_of_one() -> None:
    for length in range(1100):
        value = bytes(number % 255 + 1 for number in range(length))
        assert encode_single(NOW_US, value) == encode_batch(batch_from_lists([NOW_US], None, [value], None))


def test_lone_records_share_no_memory() -> None:
    first, second = encode_single(1, b"aa"), encode_single(2, b"bb")
    assert [to_records("t", 0, dense(0, decode_batch(payload)))[0].value for payload in (first, second)] == [
        b"aa",
        b"bb",
    ]


def test_missing_keys_and_headers_and_one_timestamp_stand_for_all() -> None:
    batch = batch_from_lists([7], None, [b"a", b"b", None], None)
    assert rows_of([batch]) == [(7, None, b"a", ()), (7, None, b"b", ()), (7, None, None, ())]


def test_values_may_be_an_arrow_array() -> None:
    batch = batch_from_lists([7], None, pa.array([b"a", b"b"], pa.binary()), None)
    assert rows_of([batch]) == [(7, None, b"a", ()), (7, None, b"b", ())]


def test_absent_headers_cost_almost_nothing() -> None:
    without = len(make_payload(10_000, headers=False, nulls=False))
    bare = batch_from_lists([1], None, pa.nulls(10_000, pa.binary()), None)
    assert len(encode_batch(bare)) < without
    per_record = len(encode_batch(batch_from_lists([1], None, [b"x"] * 10_000, None))) / 10_000
    assert per_record < 8 + 4 + 4 + 4 + 1 + 1, "timestamp, three offsets, the value, bits"


# -- tables ----------------------------------------------------------------------------------------------------------


def test_table_with_only_values_is_stamped_now() -> None:
    batches = batches_from_table(pa.table({"value": [b"a", b"b"]}), NOW_US)
    assert rows_of(batches) == [(NOW_US, None, b"a", ()), (NOW_US, None, b"b", ())]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3)])
def test_text_and_large_columns_are_cast(kind: pa.DataType) -> None:
    raw: list[Any] = ["one", None, "two"] if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None
    column = pa.array(raw or [b"one", None, b"two"], kind)
    batches = batches_from_table(pa.table({"value": column, "key": column}), NOW_US)
    assert [batch.schema for batch in batches] == [SCHEMA]
    assert rows_of(batches) == [(NOW_US, blob, blob, ()) for blob in (b"one", None, b"two")]


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.timestamp("s", "Europe/Berlin")])
def test_timestamps_of_other_units_are_cast_and_missing_ones_are_now(kind: pa.DataType) -> None:
    moment = pa.array([datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC), None])
    table = pa.table({"timestamp": moment.cast(kind), "value": [b"a", b"b"]})
    stamp_us = int(datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    assert [row[0] for row in rows_of(batches_from_table(table, NOW_US))] == [stamp_us, NOW_US]


def test_chunked_table_gives_every_record_once() -> None:
    parts = [
        pa.table({"value": [b"%d" % n for n in range(start, start + size)]}) for start, size in ((0, 3), (3, 1), (4, 5))
    ]
    table = pa.concat_tables([parts[0], parts[1], parts[0].slice(0, 0), parts[2]])
    batches = batches_from_table(table, NOW_US)
    assert all(batch.num_rows for batch in batches)
    assert [row[2] for row in rows_of(batches)] == [b"%d" % n for n in range(9)]


@pytest.mark.parametrize(("start", "length"), [(0, 10), (7, 20), (99, 1), (3, 0)])
def test_sliced_table_gives_its_rows_only(start: int, length: int) -> None:
    whole = make_batch(100)
    assert rows_of(batches_from_table(pa.table(whole).slice(start, length), NOW_US)) == rows_of(
        [whole.slice(start, length)]
    )
    encoded = [decode_batch(encode_batch(b)) for b in batches_from_table(whole.slice(start, length), NOW_US)]
    assert rows_of(encoded) == rows_of([whole.slice(start, length)])


def test_column_order_does_not_matter() -> None:
    batch = make_batch(10)
    turned = pa.table(batch).select(["headers", "value", "timestamp", "key"])
    assert rows_of(batches_from_table(turned, NOW_US)) == rows_of([batch])


def test_table_without_values_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"needs a column 'value'; it has \['key'\]"):
        batches_from_table(pa.table({"key": [b"a"]}), NOW_US)


def test_unknown_column_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown columns \['offset', 'topic'\]"):
        batches_from_table(pa.table({"value": [b"a"], "topic": ["t"], "offset": [1]}), NOW_US)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("value", pa.array([1.5])),
        ("value", pa.array([[b"a"]])),
        ("key", pa.array([{"a": 1}])),
        ("timestamp", pa.array(["yesterday"])),
        ("timestamp", pa.array([2**62], pa.timestamp("s"))),
        ("headers", pa.array([b"a"])),
    ],
)
def test_column_that_does_not_convert_is_refused_by_name(name: str, column: pa.Array) -> None:
    columns = {"value": pa.array([b"a"]), name: column}
    with pytest.raises(InvalidRequestError, match=f"column '{name}' does not convert"):
        batches_from_table(pa.table(columns), NOW_US)


def test_empty_table_gives_no_batch() -> None:
    assert batches_from_table(pa.table({"value": pa.array([], pa.binary())}), NOW_US) == []


# -- sizes -----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=60), bytes_max=st.integers(200, 5000))
@settings(deadline=None)
def test_split_gives_every_record_once_and_pieces_about_the_limit(sizes: list[int], bytes_max: int) -> None:
    batch = batch_from_lists([1], None, [bytes([size % 251]) * size for size in sizes], None)
    pieces = list(split_batch(batch, bytes_max))
    assert rows_of([piece for piece, _ in pieces]) == rows_of([batch])
    for piece, size in pieces:
        assert size == piece.nbytes
        assert piece.num_rows == 1 or size <= bytes_max + bytes_max // 4


def test_split_leaves_a_small_batch_as_it_is_and_makes_few_pieces() -> None:
    batch = make_batch(1000)
    assert list(split_batch(batch, batch.nbytes)) == [(batch, batch.nbytes)]
    pieces = list(split_batch(batch, batch.nbytes // 4))
    assert 4 <= len(pieces) <= 8


def test_split_shares_the_memory() -> None:
    batch = batch_from_lists([1], None, [bytes(1000)] * 100, None)
    for piece, _ in split_batch(batch, 5000):
        assert piece.column("value").buffers()[2].address == batch.column("value").buffers()[2].address


def test_piece_of_a_split_is_encoded_without_the_rest() -> None:
    batch = batch_from_lists([1], None, [bytes(1000)] * 100, None)
    for compression in COMPRESSIONS:
        assert sum(len(encode_batch(piece, compression)) for piece, _ in split_batch(batch, 10_000)) < 130_000


@given(rows=st.lists(st.tuples(BLOBS, BLOBS), min_size=1, max_size=30))
@settings(deadline=None)
def test_largest_record_is_a_value_with_its_own_key(rows: list[tuple[bytes | None, bytes | None]]) -> None:
    keys, values = (list(column) for column in zip(*rows, strict=True))
    expected = max(len(key or b"") + len(value or b"") for key, value in rows)
    assert largest_record_bytes(batch_from_lists([1], keys, values, None)) == expected
    assert largest_record_bytes(batch_from_lists([1], None, values, None)) == max(len(value or b"") for value in values)


# -- decoding --------------------------------------------------------------------------------------------------------


def test_decoded_columns_lie_inside_the_payload() -> None:
    payload = memoryview(make_payload(100))
    start = pa.py_buffer(payload).address
    buffers = [buffer for column in decode_batch(payload).columns for buffer in column.buffers() if buffer]
    assert len(buffers) >= 10
    for buffer in buffers:
        assert start <= buffer.address and buffer.address + buffer.size <= start + len(payload)


def test_decoded_batch_outlives_the_names_that_held_the_payload() -> None:
    batch = decode_batch(memoryview(bytearray(make_payload(50))))
    assert rows_of([batch]) == rows_of([make_batch(50)])


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_damaged_payload_is_reported_as_corrupt(compression: str | None) -> None:
    payload = make_payload(50, compression)
    for bad in (b"", b"garbage", payload[:-1], payload[:100], SCHEMA.serialize().to_pybytes()):
        with pytest.raises(CorruptLogError, match="cannot be read"):
            decode_batch(memoryview(bad))


def test_header_names_that_are_no_text_are_reported_as_corrupt() -> None:
    payload = make_payload(2, nulls=False)
    with pytest.raises(CorruptLogError):
        decode_batch(memoryview(payload.replace(b"name", b"\xff\xfe\xfd\xfc")))


# -- values of the caller --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{"a": b"1", "b": b""}, [("a", b"1"), ("b", b"")], (("a", bytearray(b"1")), ["b", b""])]
)
def test_headers_are_a_mapping_or_pairs(headers: Any) -> None:
    assert check_headers(headers) == (("a", b"1"), ("b", b""))


@pytest.mark.parametrize(
    "headers", [5, "ab", [b"ab"], [("a",)], [("a", b"1", 2)], {"a": "text"}, {1: b"a"}, [("a", None)]]
)
def test_other_headers_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidRequestError):
        check_headers(headers)


def test_values_are_bytes_and_text_gets_a_hint() -> None:
    assert bytes_of(bytearray(b"a"), "a value") == bytes_of(memoryview(b"a"), "a value") == b"a"
    with pytest.raises(InvalidRequestError, match=r"a value is bytes, not str; encode it first"):
        bytes_of("a", "a value")
    with pytest.raises(InvalidRequestError, match="a key is bytes, not int"):
        bytes_of(5, "a key")
