from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from quiver.wire.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Entry,
    FrameError,
    FrameHeader,
    FrameTruncatedError,
    Kind,
    decode_frame,
    decode_header,
    encode_frame,
    encode_header,
    stamp,
    walk_frames,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)


def make_frame(payload: bytes = b"thirteen byte", **fields: int) -> tuple[FrameHeader, bytes]:
    header = stamp(Entry(Kind.DATA, payload, crc32c(payload), 3, 10, 20, 7, 2, 99, 5), 41, 6, 1000)
    header = header._replace(**fields)
    return header, encode_frame(header, payload)


@given(payload=st.binary(max_size=200), kind=st.sampled_from(Kind), data=st.data())
def test_frame_survives_a_round_trip(payload: bytes, kind: Kind, data: st.DataObject) -> None:
    u32s, u64s, i64s = (data.draw(st.tuples(*[part] * count)) for part, count in ((U32, 3), (U64, 6), (I64, 2)))
    header = FrameHeader(
        kind=kind,
        flags=data.draw(st.integers(0, 2**16 - 1)),
        payload_length=len(payload),
        payload_crc=crc32c(payload),
        record_count=u32s[0],
        index=u64s[0],
        term=u64s[1],
        base_offset=u64s[2],
        timestamp_min=i64s[0],
        timestamp_max=i64s[1],
        schema_id=u32s[1],
        producer_epoch=u32s[2],
        producer_id=u64s[3],
        sequence=u64s[4],
        transaction_id=u64s[5],
    )
    raw = encode_frame(header, payload)
    assert len(raw) == header.frame_length == HEADER_BYTES + len(payload) + -len(payload) % ALIGNMENT
    assert len(raw) % ALIGNMENT == 0
    found, found_payload = decode_frame(memoryview(raw))
    assert found == header
    assert found_payload == payload


def test_frame_at_any_position_of_a_buffer_is_found() -> None:
    header, raw = make_frame()
    buffer = memoryview(b"x" * 13 + raw)
    assert decode_frame(buffer, 13)[0] == header
    assert decode_header(b"x" * 13 + raw, 13) == header


def test_payload_is_a_view_of_the_buffer() -> None:
    _, raw = make_frame()
    buffer = bytearray(raw)
    _, payload = decode_frame(memoryview(buffer))
    buffer[HEADER_BYTES] ^= 0xFF
    assert payload[0] == buffer[HEADER_BYTES]


def test_every_flipped_bit_of_header_and_payload_is_detected() -> None:
    header, raw = make_frame()
    for bit in range((HEADER_BYTES + header.payload_length) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decode_frame(memoryview(damaged))


def test_every_flipped_bit_of_a_header_is_detected_without_its_payload() -> None:
    _, raw = make_frame()
    for bit in range(HEADER_BYTES * 8):
        damaged = bytearray(raw[:HEADER_BYTES])
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decode_header(damaged)


def test_padding_carries_nothing() -> None:
    header, raw = make_frame()
    damaged = bytearray(raw)
    damaged[-1] ^= 0xFF
    assert decode_frame(memoryview(damaged)) == (header, raw[HEADER_BYTES : HEADER_BYTES + header.payload_length])


def test_frame_cut_at_every_byte_says_how_much_it_wants() -> None:
    header, raw = make_frame()
    for length in range(len(raw)):
        with pytest.raises(FrameTruncatedError) as caught:
            decode_frame(memoryview(raw[:length]))
        assert caught.value.position == 0
        assert length < caught.value.wanted <= header.frame_length
        assert caught.value.wanted == (HEADER_BYTES if length < HEADER_BYTES else len(raw))


def test_garbage_is_never_a_frame() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        raw = bytearray(chance.randbytes(chance.randint(0, 300)))
        if chance.random() < 0.5:
            raw[:4] = b"QV\x01\x01"
        with pytest.raises(FrameError):
            decode_frame(memoryview(raw))


def test_zeros_are_not_a_frame() -> None:
    with pytest.raises(FrameError):
        decode_frame(memoryview(bytes(4096)))


@pytest.mark.parametrize("length", [PAYLOAD_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_impossible_length_is_refused_even_with_a_right_checksum(length: int) -> None:
    raw = encode_header(make_frame(payload_length=length)[0])
    with pytest.raises(FrameError, match="impossible"):
        decode_frame(memoryview(raw))


def test_longest_allowed_payload_is_asked_for_not_refused() -> None:
    raw = encode_header(make_frame(payload_length=PAYLOAD_BYTES_MAX)[0])
    with pytest.raises(FrameTruncatedError) as caught:
        decode_frame(memoryview(raw))
    assert caught.value.wanted == HEADER_BYTES + PAYLOAD_BYTES_MAX


def resealed(raw: bytes, position: int, value: bytes) -> bytes:
    """The header with some bytes replaced and its checksum made right again."""
    changed = bytearray(raw)
    changed[position : position + len(value)] = value
    struct.pack_into("<I", changed, 12, crc32c(changed[16:HEADER_BYTES], crc32c(changed[:12])))
    return bytes(changed)


def test_unknown_version_kind_or_header_length_is_refused() -> None:
    _, raw = make_frame()
    assert decode_header(resealed(raw, 3, bytes([Kind.NOOP]))).kind == Kind.NOOP
    with pytest.raises(FrameError, match="version 2"):
        decode_header(resealed(raw, 2, b"\x02"))
    with pytest.raises(FrameError, match="version"):
        decode_header(resealed(raw, 6, b"\x68\x00"))
    for kind in (0, max(Kind) + 1, 255):
        with pytest.raises(FrameError, match="impossible"):
            decode_header(resealed(raw, 3, bytes([kind])))


def test_walk_gives_every_frame_and_names_the_position_of_a_bad_one() -> None:
    frames = [make_frame(bytes([size]) * size, index=size) for size in range(1, 20)]
    raw = b"".join(frame for _, frame in frames)
    found = list(walk_frames(memoryview(raw)))
    assert [header for _, header, _ in found] == [header for header, _ in frames]
    assert [bytes(payload) for _, _, payload in found] == [bytes([size]) * size for size in range(1, 20)]
    damaged = bytearray(raw)
    position = found[7][0]
    damaged[position + HEADER_BYTES] ^= 1
    with pytest.raises(FrameError) as caught:
        list(walk_frames(memoryview(damaged)))
    assert caught.value.position == position
