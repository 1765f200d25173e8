"""A command is the same after the log gave it back."""

from __future__ import annotations

import random

import msgspec
import pytest

from quiver.metadata.commands import (
    Command,
    CreateTopic,
    RegisterBroker,
    RegisterProducer,
    decode_command,
    encode_command,
)
from tests.metadata.kit import broker, consume, create, produce, random_command


def test_every_kind_of_command_survives_the_log() -> None:
    dice = random.Random(1)
    commands = [random_command(dice) for _ in range(300)]
    kinds = {type(command) for command in commands}
    assert kinds == set(Command.__args__)  # type: ignore[attr-defined]
    for command in commands:
        assert decode_command(encode_command(command)) == command
        assert decode_command(memoryview(encode_command(command))) == command


@pytest.mark.parametrize(
    "command",
    [
        create("x" * 249, 10_000, 100),
        produce("t", 2**31, partitions=1),
        produce("t", None),
        consume("t", None),
        broker(2**62, "[fe80::1]:65535"),
        CreateTopic("", [], 0, 0),
        RegisterProducer("ü \x00", 0, None, 2**62),
    ],
    ids=lambda command: type(command).__name__,
)
def test_extreme_values_survive_the_log(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


def test_logs_of_earlier_versions_are_understood() -> None:
    old = {"type": "register_broker", "broker_id": 1, "endpoint": "h:1", "now_us": 5}
    assert decode_command(msgspec.msgpack.encode(old)) == RegisterBroker(1, "h:1", 5, 0)
    old = {"type": "create_topic", "name": "t", "uids": ["u"], "replication_factor": 3, "now_us": 5}
    assert decode_command(msgspec.msgpack.encode(old)) == CreateTopic("t", ["u"], 3, 5, [])


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", encode_command(create("t"))[:-1], msgspec.msgpack.encode({"type": "?"})]
)
def test_bytes_that_are_no_command_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(payload)
