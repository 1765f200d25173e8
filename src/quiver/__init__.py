"""Quiver: a durable, partitioned message queue that is Arrow from producer to consumer.

The synchronous SDK; `quiver.aio` has the same names for asyncio, `quiver.errors` every error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quiver import errors
from quiver.types import BatchMetadata, Record, RecordMetadata

if TYPE_CHECKING:
    from quiver.client.sync import Admin, Producer
    from quiver.client.sync_consumer import Consumer

__all__ = ["Admin", "BatchMetadata", "Consumer", "Producer", "Record", "RecordMetadata", "__version__", "errors"]

_LAZY = ("Admin", "Consumer", "Producer")


def __getattr__(name: str) -> Any:
    # A node and the command line's help import this package too; they must not pay for Arrow.
    if name in _LAZY:
        from quiver.client import sync, sync_consumer

        return getattr(sync_consumer if name == "Consumer" else sync, name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("quiver")
    raise AttributeError(f"module 'quiver' has no attribute {name!r}")
