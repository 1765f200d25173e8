from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quiver.config import (
    BATCH_BYTES_MAX,
    FRAME_BYTES_MAX,
    BrokerSettings,
    LogSettings,
    NetSettings,
    RaftSettings,
    check_listen_address,
    layered,
    read_toml,
)
from quiver.errors import InvalidRequestError


def settle(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, toml: dict[str, Any] | None = None
) -> BrokerSettings:
    return layered(BrokerSettings, flags or {}, environ or {}, toml or {})


def test_without_any_source_the_defaults_hold() -> None:
    assert settle() == BrokerSettings()


def test_flags_come_before_environment_before_file() -> None:
    sources: list[dict[str, Any]] = [{"port": 1}, {"QUIVER_PORT": "2"}, {"port": 3}]
    assert settle(*sources).port == 1
    assert settle({}, *sources[1:]).port == 2
    assert settle({}, {}, sources[2]).port == 3
    assert settle({"port": None}, {}, sources[2]).port == 3, "a flag that was not given does not count"


def test_flag_that_is_zero_or_false_counts() -> None:
    found = settle({"port": 0, "insecure": False}, {"QUIVER_PORT": "5", "QUIVER_INSECURE": "true"})
    assert (found.port, found.insecure) == (0, False)


def test_nested_settings_are_tables_and_joined_names() -> None:
    toml = {"log": {"segment_bytes_max": 1000, "retention_ms": 5}, "net": {"idle_timeout_s": 2}}
    found = settle({"log": {"retention_ms": 7}}, {"QUIVER_LOG_SEGMENT_BYTES_MAX": "2000"}, toml)
    assert found.log == LogSettings(segment_bytes_max=2000, retention_ms=7)
    assert found.net == NetSettings(idle_timeout_s=2.0)


def test_every_setting_can_be_given_by_environment() -> None:
    environ = {}
    nested = {"log": LogSettings, "net": NetSettings, "raft": RaftSettings}
    for prefix, cls in (("QUIVER", BrokerSettings), *((f"QUIVER_{n.upper()}", cls) for n, cls in nested.items())):
        for field in dataclasses.fields(cls):
            if field.name not in nested:
                environ[f"{prefix}_{field.name.upper()}"] = "1"
    found = settle({}, environ)
    values = [value for name in nested for value in dataclasses.astuple(getattr(found, name))]
    values += dataclasses.astuple(found)[: -len(nested)]
    assert all(value in (1, "1", True) for value in values)


@pytest.mark.parametrize("text", ["none", "None", ""])
def test_optional_setting_can_be_switched_off(text: str) -> None:
    assert settle({}, {"QUIVER_LOG_RETENTION_MS": text}).log.retention_ms is None


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("No", False)]
)
def test_booleans_have_the_usual_words(text: str, expected: bool) -> None:
    assert settle({}, {"QUIVER_INSECURE": text}).insecure is expected


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("QUIVER_PORT", "many"),
        ("QUIVER_PORT", ""),
        ("QUIVER_PORT", "1.5"),
        ("QUIVER_PORT", "none"),
        ("QUIVER_INSECURE", "maybe"),
        ("QUIVER_LOG_RETENTION_MS", "7d"),
        ("QUIVER_NET_IDLE_TIMEOUT_S", "soon"),
        ("QUIVER_NET_IDLE_TIMEOUT_S", "nan"),
    ],
)
def test_bad_variable_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{variable}: '{text}' is not a valid"):
        settle({}, {variable: text})


@pytest.mark.parametrize(
    "toml",
    [
        {"port": "many"},
        {"port": True},
        {"port": 1.5},
        {"port": float("inf")},
        {"port": float("nan")},
        {"port": [1]},
        {"insecure": "perhaps"},
        {"data_dir": 5},
        {"retention_check_s": True},
    ],
)
def test_bad_value_in_the_file_is_refused_by_name(toml: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"quiver.toml: {next(iter(toml))}"):
        settle({}, {}, toml)


def test_whole_number_written_as_a_float_is_a_whole_number() -> None:
    found = settle({}, {}, {"port": 5.0, "retention_check_s": 3})
    assert (found.port, type(found.port)) == (5, int)
    assert (found.retention_check_s, type(found.retention_check_s)) == (3.0, float)


def test_unknown_name_in_the_file_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown setting 'prot'; known: .*port"):
        settle({}, {}, {"prot": 1})
    with pytest.raises(InvalidRequestError, match="unknown setting 'segment_size'"):
        settle({}, {}, {"log": {"segment_size": 1}})
    with pytest.raises(InvalidRequestError, match=r"\[log\] must be a table"):
        settle({}, {}, {"log": 5})


def test_settings_file_is_read_and_a_missing_one_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quiver.toml"
    assert read_toml(path) == {}
    path.write_text('data_dir = "d"\n[log]\nretention_bytes = 10\n')
    found = settle({}, {}, read_toml(path))
    assert (found.data_dir, found.log.retention_bytes) == ("d", 10)


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"port = 1\nport = 2"])
def test_broken_settings_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "quiver.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"quiver\.toml is not valid TOML"):
        read_toml(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_permission(host: str) -> None:
    check_listen_address(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", "", "localhost.example.org"])
def test_other_addresses_must_be_asked_for_by_name(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="--insecure"):
        check_listen_address(host, insecure=False)
    check_listen_address(host, insecure=True)


def test_limits_fit_into_each_other() -> None:
    settings = BrokerSettings()
    assert settings.message_bytes_max < settings.batch_bytes_max == BATCH_BYTES_MAX
    assert FRAME_BYTES_MAX > BATCH_BYTES_MAX, "a full batch and its request fit one packet"
    assert settings.net.bytes_in_flight_max >= settings.net.frame_bytes_max
    assert settings.fetch_bytes_max < FRAME_BYTES_MAX
