"""How `quiver consume` writes a record: its bare value, or all of it as one line of JSON."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Iterable
from typing import Any

import msgspec

from quiver.types import Record

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def as_text(records: Iterable[Record]) -> bytes:
    """Values, each with a newline; a record without a value is an empty line."""
    return b"".join([(record.value or b"") + b"\n" for record in records])


def as_json(records: Iterable[Record]) -> bytes:
    return b"".join([msgspec.json.encode(_fields(record)) + b"\n" for record in records])


def _fields(record: Record) -> dict[str, Any]:
    moment = _EPOCH + datetime.timedelta(microseconds=record.timestamp)
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "key": _text_or_base64(record.key),
        "value": _text_or_base64(record.value),
        "headers": [[name, _text_or_base64(value)] for name, value in record.headers],
    }


def _text_or_base64(raw: bytes | None) -> str | dict[str, str] | None:
    """JSON has no bytes: what is not UTF-8 becomes {"base64": ...}, so nothing is lost and both can be told apart."""
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}
