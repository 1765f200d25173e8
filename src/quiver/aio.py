"""The SDK for asyncio: the same names as `quiver`, with `async with`, `await` and `async for`."""

from __future__ import annotations

from quiver.client.admin import AsyncAdmin as Admin
from quiver.client.async_consumer import AsyncConsumer as Consumer
from quiver.client.async_producer import AsyncProducer as Producer

__all__ = ["Admin", "Consumer", "Producer"]
