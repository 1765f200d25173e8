from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quiver.errors import ProtocolError
from quiver.wire.packet import FLAG_REPLY, PREFIX_BYTES, Packet, PacketReader, encode_prefix

LIMIT = 1024 * 1024
SMALL_BUFFER = len(PacketReader(LIMIT).get_buffer())

Plain = tuple[int, int, int, bytes, bytes]


def plain(packet: Packet) -> Plain:
    return packet.kind, packet.flags, packet.correlation, bytes(packet.header), bytes(packet.payload)


def encode(packet: Plain) -> bytes:
    kind, flags, correlation, header, payload = packet
    return encode_prefix(kind, flags, correlation, header, len(payload)) + payload


def feed(reader: PacketReader, stream: bytes, cuts: list[int]) -> list[Plain]:
    """Receives the stream in pieces that end at the cuts, each piece in as many reads as the buffer asks for."""
    found: list[Plain] = []
    ends = sorted({cut for cut in cuts if cut < len(stream)} | {len(stream)})
    position = 0
    for end in ends:
        while position < end:
            buffer = reader.get_buffer()
            assert len(buffer) > 0
            count = min(len(buffer), end - position)
            buffer[:count] = stream[position : position + count]
            position += count
            found += [plain(packet) for packet in reader.received(count)]
    return found


PACKETS = st.tuples(
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40),
    st.one_of(
        st.just(b""),
        st.binary(max_size=200),
        st.integers(SMALL_BUFFER - 200, SMALL_BUFFER + 200).map(lambda size: random.Random(size).randbytes(size)),
        st.just(bytes(3 * SMALL_BUFFER)),
    ),
)


@given(packets=st.lists(PACKETS, max_size=6), cuts=st.lists(st.integers(0, 6 * SMALL_BUFFER), max_size=12))
@settings(deadline=None)
def test_any_split_of_the_stream_gives_the_same_packets(packets: list[Plain], cuts: list[int]) -> None:
    stream = b"".join(map(encode, packets))
    assert feed(PacketReader(LIMIT), stream, cuts) == packets


@given(packets=st.lists(PACKETS, min_size=1, max_size=3), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_cuts_around_every_packet_edge_change_nothing(packets: list[Plain], seed: int) -> None:
    stream = b"".join(map(encode, packets))
    edges, position = [], 0
    for packet in packets:
        for edge in (position, position + PREFIX_BYTES, position + PREFIX_BYTES + len(packet[3])):
            edges += [edge - 1, edge, edge + 1]
        position += len(encode(packet))
    cuts = [edge for edge in edges if edge > 0 and random.Random(seed + edge).random() < 0.7]
    assert feed(PacketReader(LIMIT), stream, cuts) == packets


def test_one_byte_at_a_time_gives_the_packets() -> None:
    packets = [(1, 0, 5, b"head", b"payload"), (2, FLAG_REPLY, 6, b"", b""), (3, 0, 7, b"x", b"")]
    stream = b"".join(map(encode, packets))
    assert feed(PacketReader(LIMIT), stream, list(range(len(stream)))) == packets


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_packet_of_about_the_buffers_size_is_whole(extra: int) -> None:
    payload = random.Random(1).randbytes(SMALL_BUFFER - PREFIX_BYTES + extra)
    packet = (9, 0, 1, b"", payload)
    reader = PacketReader(LIMIT)
    assert feed(reader, encode(packet) * 3, [100]) == [packet] * 3


def test_small_packets_after_a_large_one_are_found() -> None:
    large = (1, 0, 1, b"h", random.Random(2).randbytes(5 * SMALL_BUFFER))
    small = (2, 0, 2, b"h", b"small")
    stream = encode(small) + encode(large) + encode(small) * 4
    assert feed(PacketReader(LIMIT), stream, []) == [small, large, small, small, small, small]


def test_packets_stay_valid_while_the_buffer_is_used_again() -> None:
    reader = PacketReader(LIMIT)
    stream = encode((1, 0, 1, b"first", b"payload one"))
    reader.get_buffer()[: len(stream)] = stream
    (first,) = reader.received(len(stream))
    feed(reader, encode((2, 0, 2, b"other", b"X" * 60_000)), [])
    assert plain(first) == (1, 0, 1, b"first", b"payload one")


def test_large_payload_is_received_into_its_own_memory_without_a_copy() -> None:
    reader = PacketReader(LIMIT)
    stream = encode((1, 0, 1, b"", bytes(8 * SMALL_BUFFER)))
    buffer = reader.get_buffer()
    buffer[: PREFIX_BYTES + 10] = stream[: PREFIX_BYTES + 10]
    assert reader.received(PREFIX_BYTES + 10) == []
    rest = reader.get_buffer()
    assert len(rest) == len(stream) - PREFIX_BYTES - 10
    rest[:] = b"\x07" * len(rest)
    (packet,) = reader.received(len(rest))
    rest[0] = 8
    assert packet.payload[10] == 8, "the payload is the memory that was received into"


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_length_over_the_limit_is_refused_at_the_prefix_before_anything_is_allocated(length: int) -> None:
    reader = PacketReader(LIMIT)
    prefix = struct.pack("<IIQBBH4x", length, 0, 1, 1, 0, 0)
    reader.get_buffer()[:PREFIX_BYTES] = prefix
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"{length} bytes is over the limit of {LIMIT}"):
            reader.received(PREFIX_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_length_at_the_limit_is_accepted() -> None:
    packet = (1, 0, 1, b"", bytes(5000))
    assert feed(PacketReader(5000), encode(packet), []) == [packet]
    with pytest.raises(ProtocolError):
        feed(PacketReader(4999), encode(packet), [])


def test_header_longer_than_the_packet_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a packet"):
        feed(PacketReader(LIMIT), struct.pack("<IIQBBH4x", 10, 11, 1, 1, 0, 0), [])


@given(garbage=st.binary(min_size=PREFIX_BYTES, max_size=500))
@example(garbage=b"GET / HTTP/1.1\r\nHost: localhost:9400\r\n\r\n")
@example(garbage=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(32)))
@example(garbage=b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 40)
@example(garbage=b"\x00" * PREFIX_BYTES)
def test_garbage_is_refused_or_waits_and_nothing_else_happens(garbage: bytes) -> None:
    reader = PacketReader(4096)
    try:
        packets = feed(reader, garbage, [])
    except ProtocolError:
        return
    assert sum(PREFIX_BYTES + len(packet[3]) + len(packet[4]) for packet in packets) <= len(garbage)
    assert len(reader.get_buffer()) > 0


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 4]
)
def test_http_and_tls_are_refused_at_their_first_bytes(greeting: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(PacketReader(4096), greeting, [])
