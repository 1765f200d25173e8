from __future__ import annotations

import pickle
from collections.abc import Iterator

import msgspec
import pytest

from quiver import errors
from quiver.errors import (
    CorruptLogError,
    DeliveryError,
    DiskFullError,
    OffsetOutOfRangeError,
    ProtocolError,
    QuiverError,
    RequestError,
    UnavailableError,
    UsageError,
    error_from_wire,
)
from quiver.wire.messages import ErrorReply


def tree(cls: type[QuiverError]) -> Iterator[type[QuiverError]]:
    """Without the errors of the classic clients: these never cross the wire, and live where they are raised."""
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


ALL = list(tree(QuiverError))


def test_docstring_draws_the_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip(" │├└─").split(" ")[0]
        if name.endswith("Error"):
            drawn.append(((len(line) - len(line.lstrip(" │├└─"))) // 4 - 1, name))
    depth = [(len(cls.__mro__) - len(QuiverError.__mro__), cls.__name__) for cls in ALL]
    assert drawn == depth


@pytest.mark.parametrize("cls", ALL)
def test_error_crosses_the_wire_as_code_message_and_facts(cls: type[QuiverError]) -> None:
    error = cls("what happened", offset=5, topic="logs")
    raw = msgspec.msgpack.encode(ErrorReply(error.code, error.message, error.facts))
    reply = msgspec.msgpack.decode(raw, type=ErrorReply)
    found = error_from_wire(reply.code, reply.message, reply.facts)
    assert type(found) is cls
    assert (found.message, found.facts, str(found)) == (
        "what happened",
        {"offset": 5, "topic": "logs"},
        "what happened",
    )


@pytest.mark.parametrize("code", ["SomethingNewError", "", "Exception", "SystemExit", "ErrorReply"])
def test_unknown_code_of_a_newer_server_is_still_our_error(code: str) -> None:
    found = error_from_wire(code, "new trouble", {"self": 1, "message": 2})
    assert type(found) is QuiverError
    assert (found.message, found.facts, found.retriable) == ("new trouble", {"self": 1, "message": 2}, False)


@pytest.mark.parametrize("cls", ALL)
def test_class_says_whose_fault_it_is_and_what_to_do(cls: type[QuiverError]) -> None:
    branches = [b for b in (RequestError, UnavailableError, DeliveryError, UsageError) if issubclass(cls, b)]
    assert len(branches) <= 1
    assert cls.retriable == issubclass(cls, UnavailableError)
    expected = 400 if issubclass(cls, RequestError) else 503 if issubclass(cls, UnavailableError) else 500
    assert cls.http_status == expected


@pytest.mark.parametrize("cls", ALL)
def test_error_can_be_sent_to_another_process(cls: type[QuiverError]) -> None:
    found = pickle.loads(pickle.dumps(cls("what happened", offset=5)))
    assert (type(found), found.message, found.facts) == (cls, "what happened", {"offset": 5})


def test_out_of_range_says_the_valid_range() -> None:
    error = OffsetOutOfRangeError.of("logs", 2, 5, 10, 20)
    assert error.message == "offset 5 is out of range for logs-2: valid offsets are 10 to 20"
    assert error.facts == {"topic": "logs", "partition": 2, "offset": 5, "earliest": 10, "latest": 20}


def test_damage_names_file_and_position() -> None:
    error = CorruptLogError.at("a/b.seg", 96, "wrong payload checksum")
    assert error.message == "corrupt log: wrong payload checksum in a/b.seg at byte 96"
    assert error.facts == {"path": "a/b.seg", "position": 96, "reason": "wrong payload checksum"}


def test_what_only_looks_temporary_is_not_retried() -> None:
    assert DiskFullError.retriable
    assert not CorruptLogError.retriable and not ProtocolError.retriable
