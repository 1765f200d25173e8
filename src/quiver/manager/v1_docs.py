"""/docs: a page that shows /openapi.json and sends calls, from this manager alone.

Rule: nothing comes from elsewhere, and the browser is told so. What can be called stands in the page itself; the script
only makes forms of it.
"""

from __future__ import annotations

import functools
from html import escape
from pathlib import Path
from typing import Final

from quiver.manager.http_server import HttpAnswer
from quiver.manager.v1_openapi import build

_PAGE: Final = "docs.html"
_PLACE: Final = "<!-- calls -->"
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)


@functools.cache
def page() -> HttpAnswer:
    template = Path(__file__).with_name(_PAGE).read_text()
    headers = (("content-security-policy", _POLICY),)
    return HttpAnswer(200, template.replace(_PLACE, _calls()).encode(), headers, "text/html; charset=utf-8")


def _calls() -> str:
    document = build()
    parts: list[str] = []
    for tag in document["tags"]:
        rows = [
            f'<li><span class="method">{method.upper()}</span> <code>{escape(path)}</code> {escape(found["summary"])}'
            for path, methods in document["paths"].items()
            for method, found in methods.items()
            if tag["name"] in found["tags"]
        ]
        parts += [f"<h2>{tag['name']}</h2>", "<ul>", *rows, "</ul>"]
    return "\n".join(parts)
