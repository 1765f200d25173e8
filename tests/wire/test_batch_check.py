from __future__ import annotations

import contextlib
import random
import struct

import pyarrow as pa
import pytest

from quiver.errors import CorruptLogError, InvalidBatchError
from quiver.wire.batch_check import SCHEMA_ID_V1, check_batch, plain_bytes
from quiver.wire.records import COMPRESSIONS, SCHEMA, batch_from_lists, decode_batch, encode_batch
from quiver.wire.rows import to_records
from tests.wire.kit import dense, make_batch, make_payload, metadata_end


def check(payload: bytes | memoryview, count: int, schema_id: int = SCHEMA_ID_V1) -> None:
    check_batch(memoryview(payload), count, schema_id)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000, 10_000])
@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("nulls", [False, True])
def test_what_the_codec_makes_is_accepted(compression: str | None, rows: int, headers: bool, nulls: bool) -> None:
    check(make_payload(rows, compression, nulls=nulls, headers=headers), rows)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "batch",
    [
        batch_from_lists([1], None, [b""], None),
        batch_from_lists([1], [b""], [None], [[]]),
        batch_from_lists([1], None, [None] * 50, None),
        batch_from_lists([1], [b""] * 3, [b""] * 3, [[("", b"")]] * 3),
        batch_from_lists([1], None, [bytes(1_000_000)], None),
        make_batch(100).slice(13, 50),
        make_batch(100).slice(99),
        pa.Table.from_batches([make_batch(5), make_batch(6)]).combine_chunks().to_batches()[0],
    ],
    ids=["empty value", "null value", "all null", "empty strings", "large", "slice", "last row", "combined"],
)
def test_unusual_batches_are_accepted(batch: pa.RecordBatch, compression: str | None) -> None:
    check(encode_batch(batch, compression), batch.num_rows)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("count", [1, 9, 11, 2**31 - 1])
def test_wrong_count_is_refused(compression: str | None, count: int) -> None:
    with pytest.raises(InvalidBatchError, match=f"holds 10 records, the request says {count}"):
        check(make_payload(10, compression), count)


def test_unknown_schema_id_is_refused() -> None:
    with pytest.raises(InvalidBatchError, match="unknown schema id 2"):
        check(make_payload(1), 1, 2)


OTHER_SCHEMAS = [
    pa.schema([("value", pa.binary())]),
    pa.schema([field for field in SCHEMA if field.name != "headers"]),
    pa.schema([*SCHEMA, pa.field("more", pa.int64())]),
    pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.int64()), ("d", pa.int64())]),
]


@pytest.mark.parametrize("schema", OTHER_SCHEMAS, ids=lambda schema: " ".join(schema.names))
def test_other_columns_are_refused(schema: pa.Schema) -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(4, field.type) for field in schema], schema=schema)
    with pytest.raises(InvalidBatchError, match="does not have the columns of a message"):
        check(batch.serialize(), 4)


def test_schema_message_is_refused() -> None:
    with pytest.raises(InvalidBatchError):
        check(SCHEMA.serialize(), 1)


def test_whole_stream_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(make_batch(3))
    with pytest.raises(InvalidBatchError):
        check(sink.getvalue(), 3)


def test_two_batches_in_one_payload_are_refused() -> None:
    with pytest.raises(InvalidBatchError, match="not as long as it says"):
        check(make_payload(3) * 2, 3)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_batch_cut_anywhere_is_refused(compression: str | None) -> None:
    payload = make_payload(20, compression)
    for length in range(len(payload)):
        with pytest.raises(InvalidBatchError):
            check(payload[:length], 20)


def test_longer_payload_than_the_batch_is_refused() -> None:
    with pytest.raises(InvalidBatchError, match="not as long as it says"):
        check(make_payload(3) + b"\0", 3)


def claim_rows(payload: bytes, rows: int, claimed: int) -> bytes:
    """The batch with every length in its metadata that says `rows` saying something else."""
    end = metadata_end(payload)
    return payload[:end].replace(struct.pack("<q", rows), struct.pack("<q", claimed)) + payload[end:]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("claimed", [78, 1000, 2**31 - 1])
def test_more_rows_than_the_columns_have_room_for_are_refused(compression: str | None, claimed: int) -> None:
    payload = claim_rows(make_payload(77, compression, nulls=False, headers=False), 77, claimed)
    with pytest.raises(InvalidBatchError):
        check(payload, claimed)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 16, 100, 1000])
def test_random_bytes_are_refused(size: int) -> None:
    chance = random.Random(size)
    for _ in range(200):
        with pytest.raises(InvalidBatchError):
            check(chance.randbytes(size), 1)
        with pytest.raises(InvalidBatchError):
            check(b"\xff\xff\xff\xff" + struct.pack("<I", max(0, size - 8)) + chance.randbytes(size), 1)


def mutate(payload: bytes, chance: random.Random) -> bytes:
    mutant = bytearray(payload)
    # Mostly the metadata, which the check reads; the columns are Arrow's to check.
    end = metadata_end(payload) if chance.random() < 0.9 else len(payload)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(min(end, len(mutant)))
        way = chance.random()
        if way < 0.5:
            mutant[at] ^= 1 << chance.randrange(8)
        elif way < 0.7:
            mutant[at] = chance.choice((0, 1, 127, 128, 255))
        elif way < 0.9:
            number = chance.choice((2**63 - 1, -(2**63), -1, 0, 2**31, 2**32, chance.getrandbits(62)))
            mutant[at : at + 8] = struct.pack("<q", number)
        else:
            del mutant[at : at + chance.choice((1, 8, 64))]
    return bytes(mutant)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_mutant_is_refused_or_read_or_reported_as_corrupt_and_nothing_else(compression: str | None) -> None:
    chance = random.Random(f"mutants {compression}")
    originals = [(make_payload(rows, compression, headers=rows != 2), rows) for rows in (1, 2, 9, 100)]
    outcomes = {"refused": 0, "corrupt": 0, "read": 0}
    for _ in range(6000):
        payload, rows = chance.choice(originals)
        mutant = mutate(payload, chance)
        try:
            check(mutant, rows)
        except InvalidBatchError:
            outcomes["refused"] += 1
            continue
        try:
            records = to_records("logs", 0, dense(0, decode_batch(memoryview(mutant))))
        except CorruptLogError:
            outcomes["corrupt"] += 1
        else:
            assert len(records) == rows, "readers count the records as the broker did"
            outcomes["read"] += 1
    assert all(outcomes.values()), f"the mutants are too tame or too wild: {outcomes}"


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_room_a_message_takes_is_known_before_it_is_read(compression: str | None) -> None:
    table = pa.record_batch({"value": [b"\x00" * 1000] * 100, "n": list(range(100))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(table)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    message = reader.read_next_message()
    metadata, body = memoryview(message.metadata), memoryview(message.body)
    assert table.nbytes <= plain_bytes(metadata, body) <= table.nbytes + 100
    if compression:
        assert len(body) < table.nbytes / 10
    for length in range(0, len(metadata), 5):
        with contextlib.suppress(InvalidBatchError):
            plain_bytes(metadata[:length], body)
