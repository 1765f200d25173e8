"""What the classic clients share: the managers they ask, topics, and when to look for more partitions.

Rule: a client keeps no thread of its own. What may have changed meanwhile is looked at in the calls of its user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Final, Self

from quiver.client.http import HttpLink, Reply
from quiver.errors import QuiverError

URL_DEFAULT: Final = "http://127.0.0.1:8002"
TIMEOUT_S_DEFAULT: Final = 30.0
# A topic can get more partitions at any time. So often at most a client asks how many there are: what is in a new one
# is found within this time, and an idle poll costs hardly a request more.
PARTITIONS_REFRESH_S: Final = 2.0


class ClassicClient:
    _error: ClassVar[type[QuiverError]]

    def __init__(self, url: str | Sequence[str], timeout: float) -> None:
        self._link = HttpLink(url, timeout)
        self._lock = threading.Lock()

    def ListTopics(self) -> list[str]:
        """The names of all topics."""
        topics: list[str] = self._checked(self._link.get("/topics", {})).body["topics"]
        return topics

    def _partitions(self, topic: str) -> list[int]:
        reply = self._checked(self._link.get("/topics/partitions", {"topic_name": topic}))
        partitions: list[int] = reply.body["partitions"]
        return partitions

    def _checked(self, reply: Reply) -> Reply:
        if not reply.is_success:
            raise self._error(reply.message, status=reply.status)
        return reply

    def _check_partition(self, partition: object) -> None:
        if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
            raise self._error(f"partition must be an integer, not {type(partition).__name__}", status=400)

    def close(self) -> None:
        """Closes the connections. The client may still be used; it opens new ones."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_link"):  # not so when the arguments were wrong
            self._link.close()


class PartitionLook:
    """When a topic was last asked for its partitions. Of several threads one asks, the others need not wait for it."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PARTITIONS_REFRESH_S

    def is_due(self) -> bool:
        """True once: the caller asks now. Called with the client's lock held."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + PARTITIONS_REFRESH_S
        return True
