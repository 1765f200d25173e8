from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from quiver.errors import InvalidRequestError, ProtocolError
from quiver.types import PARTITIONS_MAX
from quiver.wire.admin_messages import (
    AddManager,
    AddPartitions,
    AlterTopic,
    GetConsumers,
    GetManagers,
    GetMoves,
    Rebalance,
    RemoveBroker,
    RemoveManager,
    SetReplicas,
    TakeIn,
)
from quiver.wire.fields import CONSUMER_NAME_MAX
from quiver.wire.group_messages import (
    DeleteGroup,
    FenceGroup,
    GetGroups,
    GetPositions,
    GroupBeat,
    Held,
    JoinGroup,
    LeaveGroup,
)
from quiver.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_MAGIC,
    KIND_OF,
    OFFSET_EARLIEST,
    REPLY_TO,
    REQUESTS,
    CommitPosition,
    CommitPositions,
    CountClient,
    CreateTopic,
    DeleteTopic,
    Fetch,
    GetMetadata,
    GetPosition,
    GetStatus,
    Hello,
    HostTopic,
    JoinCluster,
    ListOffset,
    Ping,
    Position,
    Produce,
    decode_request,
    encode,
)
from quiver.wire.peer_messages import PeerHello, PeerMessages, PeerPing
from quiver.wire.quorum_messages import ForPrimary, GetQuorum, ManagerBeat, RelayHttp

EXAMPLES: list[Struct] = [
    Hello(HELLO_MAGIC, 1, 3, "a client"),
    Hello(HELLO_MAGIC, 1, 1),
    GetMetadata(),
    GetMetadata([]),
    GetMetadata(["a", "b"]),
    GetMetadata([], names=True),
    CreateTopic("logs"),
    CreateTopic("logs", PARTITIONS_MAX),
    CreateTopic("logs", 2, 3, ["0123456789abcdef" * 2, "f" * 32]),
    DeleteTopic("logs"),
    DeleteTopic("logs", "f" * 32),
    Ping(),
    Produce("logs", 0, 1, 0, 0, 0, 1),
    Produce("logs", 2**32 - 1, 2**31 - 1, -(2**63), 2**63 - 1, 2**32 - 1, 2**32 - 1, 2**63 - 1, 2**32 - 1, 2**63 - 1),
    Fetch("logs", 0, 0, 1),
    Fetch("logs", 1, 2**63 - 1, 2**31 - 1, 2**31 - 1, 3_600_000),
    ListOffset("logs", 0, OFFSET_EARLIEST),
    CommitPosition("logs", 0, Position("group", 17)),
    CommitPositions("logs", 0, [Position("#1", 17, expected=-1), Position("#2", 3)]),
    CommitPosition("logs", 0, Position("g" * CONSUMER_NAME_MAX, 2**63 - 1, True, -1)),
    GetPosition("logs", 7, "group"),
    GetStatus(),
    GetStatus("logs"),
    CountClient(2**63 - 1),
    CreateTopic("logs", 2, 3, ["0123456789abcdef" * 2, "f" * 32], [[1 << 32 | 7, 2 << 32 | 9], []]),
    JoinCluster(1, "127.0.0.1:9401", 2**32 - 1),
    JoinCluster(2**31 - 1, "h:1", 1, "c" * 64),
    PeerHello(3, "cluster"),
    PeerMessages([]),
    PeerMessages([("f" * 32, b"vote", 0), ("0" * 32, b"", 2**32 - 1)]),
    PeerPing(),
    HostTopic("logs", ["f" * 32], [[1 << 32, 2 << 32 | 9]], [2**32 - 1]),
    SetReplicas("logs", 2, "f" * 32, 0, [2**31 - 1, 1]),
    AddPartitions("logs", PARTITIONS_MAX),
    RemoveBroker(2**31 - 1),
    Rebalance(),
    GetMoves(),
    AlterTopic("logs", {"cleanup": "consumed", "retention.ms": 2**53, "require.consumers": True}, ["segment.bytes"]),
    GetConsumers("logs"),
    GetQuorum(),
    ForPrimary("c" * 64, 3, b"request"),
    ManagerBeat(1, "127.0.0.1:9400", "http://127.0.0.1:8002", 1 << 32 | 7, 0),
    ManagerBeat(2**31 - 1, "h:1", "http://h:2", 2**63 - 1, 2**63 - 1, 2**63 - 1, {1: 2}, {3: 4, 5: 6}),
    RelayHttp("POST", b"/topics"),
    RelayHttp("DELETE", b"/v1/topics/a?b=c", [(b"accept", b"*/*")]),
    CommitPosition("logs", 0, Position("group", 0, epoch=2**63 - 1, act="claim")),
    GetPositions(),
    GetPositions("group"),
    JoinGroup("group", "member", ["logs"]),
    JoinGroup("g" * CONSUMER_NAME_MAX, "m", ["a", "b"], 500, "range"),
    GroupBeat("group", "member", 0),
    GroupBeat("group", "member", 2**63 - 1, 5_000, [Held("logs", 0, 7)]),
    LeaveGroup("group", "member"),
    GetGroups(),
    GetGroups("group"),
    DeleteGroup("group"),
    FenceGroup("group"),
    AddManager(2**31 - 1, "h" * 300),
    RemoveManager(1),
    GetManagers(),
    TakeIn("c" * 64, ["h" * 300] * 5),
]


def decode(kind: int, header: bytes) -> Struct:
    return decode_request(kind, memoryview(header))


def pack(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


def test_examples_cover_every_request() -> None:
    assert {type(example) for example in EXAMPLES} == set(REQUESTS.values())


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda request: type(request).__name__)
def test_request_survives_a_round_trip(request_: Struct) -> None:
    kind = KIND_OF[type(request_)]
    assert REQUESTS[kind] is type(request_)
    assert decode(kind, encode(request_)) == request_


def test_every_request_has_a_reply_unless_it_is_one_way() -> None:
    assert set(REPLY_TO) == set(REQUESTS.values()) - {PeerMessages, PeerPing}


def test_kinds_are_one_byte_and_differ() -> None:
    assert len(KIND_OF) == len(REQUESTS)
    assert all(0 < kind < 256 for kind in REQUESTS)


def test_longest_hello_fits_the_limit_for_strangers() -> None:
    assert len(encode(Hello("x" * 16, 2**32 - 1, 2**32 - 1, "\U0001f3f9" * 255))) < HELLO_BYTES_MAX


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda request: type(request).__name__)
def test_newer_peer_with_more_fields_is_understood(request_: Struct) -> None:
    fields = msgspec.msgpack.decode(encode(request_))
    longer = pack(*fields, {"new": [1, 2, 3]}, "and another")
    assert decode(KIND_OF[type(request_)], longer) == request_


def test_older_peer_without_the_newest_fields_gets_the_defaults() -> None:
    assert decode(KIND_OF[Produce], pack("logs", 0, 1, 5, 6, 7, 1)) == Produce("logs", 0, 1, 5, 6, 7, 1, 0, 0, 0, 0)
    assert decode(KIND_OF[GetMetadata], pack()) == GetMetadata(None)


PRODUCE = ["logs", 0, 1, 0, 0, 0, 1, 0, 0, 0]
FETCH = ["logs", 0, 0, 1, 1, 0]

WRONG: list[tuple[type[Struct], list[Any], str]] = [
    (Produce, [5, *PRODUCE[1:]], "topic"),
    (Produce, ["x" * 1001, *PRODUCE[1:]], "topic"),
    (Produce, ["logs", -1, *PRODUCE[2:]], "partition"),
    (Produce, ["logs", 2**32, *PRODUCE[2:]], "partition"),
    (Produce, ["logs", "0", *PRODUCE[2:]], "partition"),
    (Produce, ["logs", 0.5, *PRODUCE[2:]], "partition"),
    (Produce, ["logs", True, *PRODUCE[2:]], "partition"),
    (Produce, ["logs", None, *PRODUCE[2:]], "partition"),
    (Produce, ["logs", 0, 0, *PRODUCE[3:]], "record_count"),
    (Produce, ["logs", 0, 2**31, *PRODUCE[3:]], "record_count"),
    (Produce, ["logs", 0, 1, 2**63, *PRODUCE[4:]], "timestamp_min"),
    (Produce, ["logs", 0, 1, 0, b"\0", *PRODUCE[5:]], "timestamp_max"),
    (Produce, [*PRODUCE[:5], 2**32, *PRODUCE[6:]], "payload_crc"),
    (Produce, [*PRODUCE[:6], -1, *PRODUCE[7:]], "schema_id"),
    (Produce, [*PRODUCE[:7], 2**64 - 1, 0, 0], "producer_id"),
    (Produce, [*PRODUCE[:8], [], 0], "producer_epoch"),
    (Produce, [*PRODUCE[:9], -5], "sequence"),
    (Fetch, ["logs", 0, -1, 1], "offset"),
    (Fetch, ["logs", 0, 0, 0], "bytes_max"),
    (Fetch, ["logs", 0, 0, 2**31], "bytes_max"),
    (Fetch, [*FETCH[:4], -1], "bytes_min"),
    (Fetch, [*FETCH[:5], 3_600_001], "wait_ms"),
    (CreateTopic, ["logs", 0], "partitions"),
    (CreateTopic, ["logs", PARTITIONS_MAX + 1], "partitions"),
    (CreateTopic, ["logs", 1, 0], "replication_factor"),
    (CreateTopic, ["logs", 1, 1, ["../" + "a" * 29]], "uids"),
    (CreateTopic, ["logs", 1, 1, ["A" * 32]], "uids"),
    (CreateTopic, ["logs", 1, 1, ["a" * 32 + "\n"]], "uids"),
    (Produce, [*PRODUCE, 8], "flags"),
    (DeleteTopic, [None], "name"),
    (GetMetadata, ["logs"], "topics"),
    (GetMetadata, [[1]], "topics"),
    (ListOffset, ["logs", 0, 2**63], "timestamp"),
    (GetPosition, ["logs", 0, ""], "consumer"),
    (GetPosition, ["logs", 0, "x" * (CONSUMER_NAME_MAX + 1)], "consumer"),
    (CommitPosition, ["logs", 0, ["group", -1]], "position"),
    (CommitPosition, ["logs", 0, ["", 1]], "position"),
    (CommitPosition, ["logs", 0, ["group", 1, False, -2]], "position"),
    (CommitPosition, ["logs", 0, None], "position"),
    (CommitPositions, ["logs", 0, [["group", 1], ["group", -1]]], "positions"),
    (CommitPositions, ["logs", 0, [["group", 1]] * 1001], "positions"),
    (CommitPositions, ["logs", 0, []], "positions"),
    (GetStatus, [b"logs"], "topic"),
    (Hello, ["x" * 17, 1, 1], "magic"),
    (Hello, [HELLO_MAGIC, -1, 1], "version_min"),
]


@pytest.mark.parametrize(("request_type", "fields", "name"), WRONG)
def test_wrong_field_is_the_senders_mistake_and_is_named(
    request_type: type[Struct], fields: list[Any], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{request_type.__name__}: .*\b{name}\b"):
        decode(KIND_OF[request_type], pack(*fields))


@pytest.mark.parametrize("fields", [[], ["logs"], PRODUCE[:6]])
def test_missing_field_is_the_senders_mistake(fields: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Produce"):
        decode(KIND_OF[Produce], pack(*fields))


@pytest.mark.parametrize("value", [{"topic": "logs"}, 5, None, "logs", b"logs"])
def test_something_else_than_an_array_is_the_senders_mistake(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Fetch"):
        decode(KIND_OF[Fetch], msgspec.msgpack.encode(value))


@pytest.mark.parametrize("kind", [0, 9, 249, 255])
def test_unknown_kind_is_the_senders_mistake(kind: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown request kind {kind}"):
        decode(kind, pack())


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda request: type(request).__name__)
def test_cut_request_is_not_our_protocol(request_: Struct) -> None:
    whole = encode(request_)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(KIND_OF[type(request_)], whole[:length])


@pytest.mark.parametrize("raw", [b"\xc1", b"\x91\xa2\xff\xfe", pack("logs") + b"\x00"])
def test_bytes_that_are_no_msgpack_are_not_our_protocol(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(KIND_OF[DeleteTopic], raw)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("kind", sorted(REQUESTS))
def test_deep_nesting_is_refused_without_harm(opening: bytes, kind: int) -> None:
    fields = msgspec.msgpack.decode(encode(next(e for e in EXAMPLES if KIND_OF[type(e)] == kind)))
    deep = opening * 200_000 + b"\xc0"
    extra = bytes([0x90 + len(fields) + 1]) + b"".join(map(msgspec.msgpack.encode, fields)) + deep
    for raw in (deep, extra):
        with pytest.raises((InvalidRequestError, ProtocolError)):
            decode(kind, raw)


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\x91\xdd\x7f\xff\xff\xff", b"\x91\xdb\xff\xff\xff\xff"])
def test_length_that_the_bytes_do_not_have_is_refused(head: bytes) -> None:
    with pytest.raises((InvalidRequestError, ProtocolError)):
        decode(KIND_OF[GetMetadata], head)


ANY_MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(kind=st.sampled_from(sorted(REQUESTS)), fields=st.lists(ANY_MSGPACK, max_size=11))
def test_any_msgpack_gives_a_request_or_names_the_mistake(kind: int, fields: list[Any]) -> None:
    try:
        request = decode(kind, pack(*fields))
    except InvalidRequestError:
        return
    assert type(request) is REQUESTS[kind]


@given(kind=st.integers(0, 255), raw=st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes_give_a_request_or_a_typed_error(kind: int, raw: bytes) -> None:
    try:
        request = decode(kind, raw)
    except (InvalidRequestError, ProtocolError):
        return
    assert type(request) is REQUESTS[kind]
