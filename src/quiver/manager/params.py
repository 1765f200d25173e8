"""Parameters of a classic call: a JSON object and query parameters as one, typed when taken.

Rule: unknown names are ignored, numbers may be strings, and what is missing or wrong is said by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quiver.errors import InvalidRequestError

_INTEGER_DIGITS_MAX = 19


class Params:
    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def _get(self, names: tuple[str, ...]) -> Any:
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return value
        return None

    def optional_text(self, *names: str) -> str | None:
        value = self._get(names)
        if value is None or isinstance(value, str):
            return value
        raise InvalidRequestError(f"{names[0]} must be a string")

    def text(self, *names: str) -> str:
        value = self.optional_text(*names)
        if value is None:
            raise InvalidRequestError(f"{names[0]} is missing")
        return value

    def optional_integer(self, *names: str) -> int | None:
        value = self._get(names)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return value
        if isinstance(value, str):
            digits = value.strip().removeprefix("-")
            if digits.isascii() and digits.isdigit() and len(digits) < _INTEGER_DIGITS_MAX:
                return int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        raise InvalidRequestError(f"{names[0]} must be an integer")

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.optional_integer(*names)
        if value is None:
            value = default
        if value is None:
            raise InvalidRequestError(f"{names[0]} is missing")
        return value
