"""Which form a body has and which form an answer takes: Content-Type and Accept.

Rule: what cannot be read is a 415, what cannot be given is a 406, and both say what could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from quiver.manager.v1_errors import HttpRefusal

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
RECORD_MEDIA: Final = (JSON, NDJSON, ARROW)

_ALIASES: Final = {
    "application/ndjson": NDJSON,
    "application/jsonl": NDJSON,
    "application/jsonlines": NDJSON,
    "application/x-jsonlines": NDJSON,
}


def content_type(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> str:
    """The form of the body. A client must say it: a page in a browser can send a body of no type to any address, but
    one of these types only where it is allowed to."""
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if coding not in ("", "identity"):
        raise HttpRefusal(415, f"content-encoding {coding[:60]!r} is not supported; send the body as it is")
    raw = headers.get(b"content-type", b"").decode("latin-1")
    name, *parameters = [part.strip().lower() for part in raw.split(";")]
    media = _ALIASES.get(name, name)
    if media not in allowed:
        problem = f"content-type {name[:60]!r} is not supported here" if name else "the content-type is missing"
        raise HttpRefusal(415, f"{problem}; use {' or '.join(allowed)}")
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise HttpRefusal(415, f"charset {value[:60]!r} is not supported; use utf-8")
    return media


def accepted(headers: Mapping[bytes, bytes], offered: Sequence[str]) -> str:
    """The offer that the client likes best; the first when it does not say or does not mind."""
    raw = headers.get(b"accept", b"*/*").decode("latin-1").strip().lower() or "*/*"
    ranges = [_range(part) for part in raw.split(",") if part.strip()]
    best, best_weight = None, 0.0
    for media in offered:
        # The range that names it most closely decides, as HTTP has it.
        matches = [(closeness, weight) for name, weight in ranges if (closeness := _closeness(name, media))]
        weight = max(matches)[1] if matches else 0.0
        if weight > best_weight:
            best, best_weight = media, weight
    if best is None:
        raise HttpRefusal(406, f"none of what the client accepts can be given; {' or '.join(offered)} can")
    return best


def _range(part: str) -> tuple[str, float]:
    name, *parameters = [piece.strip() for piece in part.split(";")]
    weight = 1.0
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                weight = min(max(float(value), 0.0), 1.0)
            except ValueError:
                weight = 0.0
    return _ALIASES.get(name, name), weight if weight == weight else 0.0


def _closeness(name: str, media: str) -> int:
    if name == media:
        return 3
    if name == media.partition("/")[0] + "/*":
        return 2
    return 1 if name == "*/*" else 0
