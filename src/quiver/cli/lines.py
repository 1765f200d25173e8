"""Cuts a byte stream into lines, and a line into key and value, for `quiver produce`.

Rule: memory is bounded by one read and one message, however long the input or a line of it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from quiver.errors import InvalidRequestError, MessageTooLargeError

READ_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive lines without their newlines; `first` is the number of the first, from 1."""

    first: int
    lines: list[bytes]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.lines)) + len(self.lines)


def read_lines(read: Callable[[int], bytes], line_bytes_max: int) -> Iterator[Lines]:
    """One item for each read that completes a line, at once, so that typed lines do not wait for more.

    The last line counts also without a newline. A line over the limit is an error, after all lines before it.
    """
    rest = b""
    first = 1
    while piece := read(READ_BYTES):
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        too_long = next((at for at, line in enumerate(lines) if len(line) > line_bytes_max), None)
        if too_long is None and len(rest) > line_bytes_max:
            too_long = len(lines)
        if too_long is not None:
            if too_long:
                yield Lines(first, lines[:too_long])
            number = first + too_long
            raise MessageTooLargeError(f"line {number} is longer than a message may be ({line_bytes_max:,} bytes)")
        if lines:
            yield Lines(first, lines)
            first += len(lines)
    if rest:
        yield Lines(first, [rest])


def split_key(line: bytes, separator: bytes, number: int) -> tuple[bytes, bytes]:
    """Key and value around the first separator."""
    key, found, value = line.partition(separator)
    if not found:
        raise InvalidRequestError(f"line {number} has no key: {separator.decode(errors='replace')!r} is not in it")
    return key, value
