"""What can be set for one topic: names, ranges, and what a broker makes of them.

Rule: only what was set is kept and sent; everything else is the broker's own setting, and follows it when it changes. A
name that is not known, or a value that cannot be, is refused before anything changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, MIB, LogSettings
from quiver.errors import InvalidRequestError

Value = bool | int | str
Settings = Mapping[str, Value]

UNLIMITED: Final = -1
RETENTION_MS: Final = "retention.ms"
RETENTION_BYTES: Final = "retention.bytes"
CLEANUP: Final = "cleanup"
SEGMENT_BYTES: Final = "segment.bytes"
REQUIRE_CONSUMERS: Final = "require.consumers"
MESSAGE_BYTES: Final = "max.message.bytes"
REPLICATION_FACTOR: Final = "replication.factor"
TOMBSTONE_MS: Final = "tombstone.ms"

DELETE: Final = "delete"  # by time and size
CONSUMED: Final = "consumed"  # once everybody has read it, and not before
COMPACT: Final = "compact"  # all but the last record of each key
CLEANUPS: Final = (DELETE, CONSUMED, COMPACT)
TOMBSTONE_MS_DEFAULT: Final = 24 * 3600 * 1000

REPLICATION_FACTOR_MAX: Final = 100
_NUMBER_MAX: Final = 2**53  # what JSON programs can count to
_SEGMENT_BYTES_MIN: Final = 1024
_SEGMENT_BYTES_MAX: Final = 1024 * MIB
_TRUTH: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True, slots=True)
class TopicRules:
    """What holds for the partitions of a topic on one broker."""

    log: LogSettings
    message_bytes_max: int = MESSAGE_BYTES_MAX
    cleanup: str = DELETE
    require_consumers: bool = False
    tombstone_ms: int = TOMBSTONE_MS_DEFAULT


def rules_of(settings: Settings, log: LogSettings, message_bytes_max: int) -> TopicRules:
    """What was set for the topic, over what the broker does without."""
    changed: dict[str, int | None] = {}
    for name, field in ((RETENTION_MS, "retention_ms"), (RETENTION_BYTES, "retention_bytes")):
        if name in settings:
            changed[field] = None if settings[name] == UNLIMITED else int(settings[name])
    if SEGMENT_BYTES in settings:
        changed["segment_bytes_max"] = int(settings[SEGMENT_BYTES])
    return TopicRules(
        dataclasses.replace(log, **changed),  # type: ignore[arg-type]  # the fields above
        message_bytes_of(settings, message_bytes_max),
        str(settings.get(CLEANUP, DELETE)),
        bool(settings.get(REQUIRE_CONSUMERS, False)),
        int(settings.get(TOMBSTONE_MS, TOMBSTONE_MS_DEFAULT)),
    )


def message_bytes_of(settings: Settings, default: int) -> int:
    """The longest message that the topic takes."""
    return int(settings.get(MESSAGE_BYTES, default))


def check_key(topic: str, settings: Settings, has_key: bool) -> None:
    """Raises InvalidRequestError where a record must have a key and has none."""
    if not has_key and settings.get(CLEANUP) == COMPACT:
        raise InvalidRequestError(missing_key(topic))


def missing_key(topic: str) -> str:
    return f"a record of topic {topic} needs a key: the topic is compacted by key"


def check_settings(given: Mapping[str, object]) -> dict[str, Value]:
    """The settings as they are kept, from numbers, words or their text. Raises InvalidRequestError."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"settings are values by name, not {_shown(given)}")
    for name in given:
        _check_name(name)
    return {name: _READ[name](name, given[name]) for name in sorted(given)}


def check_names(names: Iterable[object]) -> list[str]:
    """The names of settings that are to be as if they had never been set."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise InvalidRequestError(f"what is to be unset is a list of names, not {_shown(names)}")
    found = [_check_name(name) for name in names]
    if REPLICATION_FACTOR in found:
        raise InvalidRequestError(f"{REPLICATION_FACTOR} can be set to another number, not unset")
    return sorted(found)


def parse_assignments(texts: Iterable[str]) -> dict[str, Value]:
    """Settings from the form that people type: name=value."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequestError(f"a setting is written name=value, not {text[:60]!r}")
        if name.strip() in given:
            raise InvalidRequestError(f"{name.strip()} is set twice")
        given[name.strip()] = value.strip()
    return check_settings(given)


def _check_name(name: object) -> str:
    if not isinstance(name, str) or name not in _READ:
        raise InvalidRequestError(f"there is no topic setting {str(name)[:60]!r}; there are {', '.join(sorted(_READ))}")
    return name


def _number(low: int, high: int, *, or_unlimited: bool = False) -> Callable[[str, object], int]:
    def read(name: str, raw: object) -> int:
        number: object = raw
        if isinstance(raw, str) and raw.isascii() and raw.removeprefix("-").isdigit() and len(raw) < 20:
            number = int(raw)
        if not isinstance(number, bool) and isinstance(number, int):
            within = low <= number <= high or (or_unlimited and number == UNLIMITED)
            if within:
                return number
        also = ", or -1 for no limit" if or_unlimited else ""
        raise InvalidRequestError(f"{name} is a number from {low} to {high}{also}, not {_shown(raw)}")

    return read


def _truth(name: str, raw: object) -> bool:
    found = _TRUTH.get(raw.lower()) if isinstance(raw, str) else raw
    if not isinstance(found, bool):
        raise InvalidRequestError(f"{name} is true or false, not {_shown(raw)}")
    return found


def _word(*words: str) -> Callable[[str, object], str]:
    def read(name: str, raw: object) -> str:
        if not isinstance(raw, str) or raw not in words:
            raise InvalidRequestError(f"{name} is {', '.join(words[:-1])} or {words[-1]}, not {_shown(raw)}")
        return raw

    return read


def _shown(raw: object) -> str:
    return repr(raw) if len(repr(raw)) <= 60 else repr(raw)[:57] + "..."


_READ: Final[Mapping[str, Callable[[str, object], Value]]] = {
    RETENTION_MS: _number(1, _NUMBER_MAX, or_unlimited=True),
    RETENTION_BYTES: _number(1, _NUMBER_MAX, or_unlimited=True),
    CLEANUP: _word(*CLEANUPS),
    SEGMENT_BYTES: _number(_SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX),
    REQUIRE_CONSUMERS: _truth,
    MESSAGE_BYTES: _number(1, BATCH_BYTES_MAX // 2),
    REPLICATION_FACTOR: _number(1, REPLICATION_FACTOR_MAX),
    TOMBSTONE_MS: _number(0, _NUMBER_MAX),
}
NAMES: Final = tuple(sorted(_READ))
