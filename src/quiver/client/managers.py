"""Decides which manager a call goes to: changes to the primary, reads to the secondaries in turn.

Rule: pure; time is an argument. A manager that failed comes last for a while, and is never given up: when the others
fail too it is tried again. Addresses that were given and are not the managers' own (nginx, a tunnel) are kept to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

AVOID_S: Final = 2.0  # how long a manager that failed comes last
REFRESH_S: Final = 30.0  # who is who is asked again after so long, whatever happens
REFRESH_S_MIN: Final = 0.25  # and after a failure, but not more often than this


class Roles(NamedTuple):
    """Addresses as URLs. `secondaries` is empty when the primary is alone."""

    primary: str
    secondaries: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (self.primary, *self.secondaries)


def read_roles(body: Mapping[str, Any]) -> Roles | None:
    """What `GET /replicas` said; None when that is no such answer."""
    primary, others = _url(body.get("primary")), body.get("replicas")
    if primary is None or not isinstance(others, list):
        return None
    urls = [_url(other) for other in others]
    return Roles(primary, tuple(url for url in urls if url not in (None, primary)))


def _url(place: object) -> str | None:
    if not isinstance(place, dict):
        return None
    ip, port = place.get("ip"), place.get("port")
    if not isinstance(ip, str) or not isinstance(port, int):
        return None
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


class Managers:
    """What one client knows of the managers. Not safe to share between threads."""

    def __init__(self, given: Sequence[str]) -> None:
        self._given = tuple(dict.fromkeys(given))
        self._roles: Roles | None = None
        self._turn = 0
        self._avoid_until: dict[str, float] = {}
        self._ask_at = 0.0

    def order(self, is_read: bool, now: float) -> list[str]:
        """All addresses, the best for this call first."""
        roles = self._roles
        if roles is None:
            order = list(self._given)
        else:
            others = roles.secondaries
            start = self._turn % len(others) if others else 0
            turned = [*others[start:], *others[:start]]
            order = [*turned, roles.primary] if is_read else [roles.primary, *turned]
            self._turn += is_read
        return sorted(order, key=lambda url: self._avoid_until.get(url, 0.0) > now)

    def failed(self, url: str, now: float) -> None:
        self._avoid_until[url] = now + AVOID_S
        self._ask_at = min(self._ask_at, now)

    def answered(self, url: str) -> None:
        self._avoid_until.pop(url, None)

    def should_ask(self, now: float) -> bool:
        """Whether it is time to ask who is who. True once: the caller asks now, and others need not."""
        if now < self._ask_at:
            return False
        self._ask_at = now + REFRESH_S_MIN
        return True

    def learn(self, roles: Roles, now: float) -> None:
        self._roles = roles
        self._ask_at = now + REFRESH_S

    def keep_to_given(self, now: float) -> None:
        """The answer came through something that is not a manager: whoever gave that address wants it used."""
        self._roles = None
        self._ask_at = now + REFRESH_S
