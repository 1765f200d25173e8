"""Records with their offsets: dense as they were produced, with gaps where compaction was."""

from __future__ import annotations

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import CorruptLogError
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED, SCHEMA_ID_V1
from quiver.wire.frame import Entry, FrameHeader, Kind, stamp
from quiver.wire.records import COMPRESSIONS, encode_batch
from quiver.wire.rows import COMPACTED_SCHEMA, TABLE_SCHEMA, Rows, encode_rows, rows_of, to_records, to_table
from tests.wire.kit import dense, make_batch, make_payload


def header_of(payload: bytes | memoryview, count: int, schema_id: int, base_offset: int = 500) -> FrameHeader:
    return stamp(Entry(Kind.DATA, payload, crc32c(payload), count, schema_id=schema_id), 1, 1, base_offset)


@pytest.mark.parametrize("skip", [0, 1, 7, 9, 10])
def test_table_begins_at_the_wanted_offset(skip: int) -> None:
    payload = make_payload(10)
    rows = rows_of(header_of(payload, 10, SCHEMA_ID_V1), memoryview(payload)).since(500 + skip)
    table = to_table("logs", 3, rows)
    assert table.schema == TABLE_SCHEMA
    assert table.num_rows == 10 - skip
    table.validate(full=True)
    found = [(row["topic"], row["partition"], row["offset"], row["value"]) for row in table.to_pylist()]
    records = to_records("logs", 3, dense(500, make_batch(10)))[skip:]
    assert found == [(record.topic, record.partition, record.offset, record.value) for record in records]


def test_slices_keep_records_and_offsets_together() -> None:
    rows = dense(40, make_batch(10))
    assert rows.slice(0) is rows
    for part, offsets in ((rows.slice(4), range(44, 50)), (rows.slice(2, 3), range(42, 45)), (rows.slice(9, 9), [49])):
        assert [record.offset for record in to_records("logs", 1, part)] == list(offsets)
        assert to_records("logs", 1, part) == to_records("logs", 1, rows)[offsets[0] - 40 :][: len(offsets)]


@given(left=st.sets(st.integers(0, 19)), wanted=st.integers(490, 530), compression=st.sampled_from(COMPRESSIONS))
def test_what_compaction_left_keeps_its_offsets(left: set[int], wanted: int, compression: str | None) -> None:
    all_rows = dense(500, make_batch(20))
    kept = sorted(left)
    rows = Rows([500 + place for place in kept], all_rows.batch.take(pa.array(kept, pa.int32())))
    payload = encode_rows(header_of(b"", 20, SCHEMA_ID_V1), rows, compression)
    found = rows_of(header_of(payload, 20, SCHEMA_ID_COMPACTED), payload)
    expected = [record for record in to_records("logs", 0, all_rows) if record.offset - 500 in left]
    assert to_records("logs", 0, found) == expected
    behind = found.since(wanted)
    assert to_records("logs", 0, behind) == [record for record in expected if record.offset >= wanted]
    table = to_table("logs", 0, behind)
    table.validate(full=True)
    assert table.column("offset").to_pylist() == list(behind.offsets)
    assert bool(payload) == bool(left), "a batch of which nothing is left takes no room"


@pytest.mark.parametrize("places", [[3, 2], [1, 1], [-1], [20]])
def test_records_where_none_can_be_are_reported_as_corrupt(places: list[int]) -> None:
    batch = make_batch(len(places))
    columns = [*batch.columns, pa.array(places, pa.int32())]
    payload = encode_batch(pa.RecordBatch.from_arrays(columns, schema=COMPACTED_SCHEMA))
    with pytest.raises(CorruptLogError, match="cannot be read"):
        rows_of(header_of(payload, 20, SCHEMA_ID_COMPACTED), payload)
