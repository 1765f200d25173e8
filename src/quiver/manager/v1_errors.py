"""Errors of the v1 API: which status, which code, which body.

Rule: one form for all of them, {"error": {"code", "message", "retriable", ...facts}}. A code is the error's class in
small letters, or one of HTTP's own, and never changes its meaning; the message is for people.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from quiver.errors import (
    ConflictError,
    MessageTooLargeError,
    NoConsumersError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    QuiverError,
    TopicExistsError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.manager.http_server import HttpAnswer

_RETRY_LATER: Final = ("retry-after", "1")
_STATUS: Final[dict[type[QuiverError], int]] = {
    UnknownTopicError: 404,
    UnknownPartitionError: 404,
    UnknownGroupError: 404,
    TopicExistsError: 409,
    ConflictError: 409,
    OutOfOrderSequenceError: 409,
    ProducerFencedError: 409,
    NoConsumersError: 409,
    MessageTooLargeError: 413,
    OffsetOutOfRangeError: 416,
}
# Refusals that HTTP itself has a word for.
_CODES: Final = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    431: "head_too_large",
    500: "internal",
    503: "unavailable",
}
_encode = msgspec.json.Encoder(enc_hook=str).encode


class HttpRefusal(Exception):
    """A request that the door turns away before anything is asked of the API."""

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.answer = refusal(status, message, *headers)


def refusal(status: int, message: str, *headers: tuple[str, str]) -> HttpAnswer:
    return _answer(status, _CODES[status], message, status == 503, {}, headers)


def answer_of(error: QuiverError) -> HttpAnswer:
    status = next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), error.http_status)
    return _answer(status, code_of(type(error)), error.message, error.retriable, error.facts, ())


def code_of(cls: type[QuiverError]) -> str:
    """UnknownTopicError -> unknown_topic"""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()


def _answer(
    status: int,
    code: str,
    message: str,
    retriable: bool,
    facts: dict[str, Any],
    headers: tuple[tuple[str, str], ...],
) -> HttpAnswer:
    if status == 503:
        headers = (*headers, _RETRY_LATER)
    body = {**facts, "code": code, "message": message, "retriable": retriable}
    return HttpAnswer(status, _encode({"error": body}), headers)
