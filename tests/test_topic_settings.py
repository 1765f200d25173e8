"""What can be set for a topic, and in which words it is refused."""

from __future__ import annotations

import pytest

from quiver.config import LogSettings
from quiver.errors import InvalidRequestError
from quiver.topic_settings import NAMES, TopicRules, check_names, check_settings, parse_assignments, rules_of


def test_settings_come_as_values_or_as_their_text() -> None:
    typed = {"retention.ms": 5, "retention.bytes": -1, "cleanup": "consumed", "require.consumers": True}
    assert check_settings(typed) == typed
    texts = ["retention.ms=5", "retention.bytes = -1", "cleanup=consumed", "require.consumers=Yes"]
    assert parse_assignments(texts) == typed
    assert list(parse_assignments(["segment.bytes=2048", "max.message.bytes=9"])) == [
        "max.message.bytes",
        "segment.bytes",
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("retention.ms", 0, "retention.ms is a number from 1 to 9007199254740992, or -1 for no limit, not 0"),
        ("retention.ms", -2, "not -2"),
        ("retention.ms", True, "not True"),
        ("retention.ms", 1.5, "not 1.5"),
        ("retention.ms", "1e3", "not '1e3'"),
        ("retention.ms", "9" * 5000, "not '999"),
        ("retention.bytes", "", "not ''"),
        ("retention.bytes", 2**60, "retention.bytes is a number from 1"),
        ("cleanup", "compacted", "cleanup is delete, consumed or compact, not 'compacted'"),
        ("cleanup", 1, "cleanup is delete, consumed or compact, not 1"),
        ("tombstone.ms", -1, "tombstone.ms is a number from 0 to 9007199254740992, not -1"),
        ("tombstone.ms", None, "not None"),
        ("segment.bytes", 1023, "segment.bytes is a number from 1024 to 1073741824, not 1023"),
        ("segment.bytes", -1, "not -1"),
        ("require.consumers", "maybe", "require.consumers is true or false, not 'maybe'"),
        ("require.consumers", 1, "require.consumers is true or false, not 1"),
        ("max.message.bytes", 0, "max.message.bytes is a number from 1 to 8388608, not 0"),
        ("replication.factor", 101, "replication.factor is a number from 1 to 100, not 101"),
        ("replication.factor", None, "not None"),
        ("Retention.ms", 5, "there is no topic setting 'Retention.ms'; there are cleanup, max.message.bytes"),
        ("", 5, "there is no topic setting ''"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_settings({name: value})
    assert message in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["retention.ms"], "a setting is written name=value, not 'retention.ms'"),
        (["cleanup=delete", "cleanup=consumed"], "cleanup is set twice"),
    ],
)
def test_assignments_that_are_none(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_assignments(texts)


def test_names_to_unset() -> None:
    assert check_names(["retention.ms", "cleanup"]) == ["cleanup", "retention.ms"]
    with pytest.raises(InvalidRequestError, match="there is no topic setting 'x'"):
        check_names(["x"])
    with pytest.raises(InvalidRequestError, match="can be set to another number, not unset"):
        check_names(["replication.factor"])
    assert len(NAMES) == 8


def test_rules_are_the_brokers_own_where_nothing_was_set() -> None:
    log = LogSettings(retention_ms=7, retention_bytes=8, segment_bytes_max=9000)
    assert rules_of({}, log, 100) == TopicRules(log, 100)
    told = {"retention.ms": -1, "segment.bytes": 2048, "cleanup": "consumed", "require.consumers": True}
    rules = rules_of({**told, "max.message.bytes": 5}, log, 100)
    assert (rules.log.retention_ms, rules.log.retention_bytes, rules.log.segment_bytes_max) == (None, 8, 2048)
    assert (rules.message_bytes_max, rules.cleanup, rules.require_consumers) == (5, "consumed", True)
