"""Who was seen reaches the database, once: also of those who come faster than it can write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quiver.manager import database
from quiver.manager.classic import ClassicApi
from quiver.manager.observer import Observer
from quiver.manager.registry import Registry
from quiver.manager.standing import Standing
from quiver.metadata.manager_table import Manager
from quiver.metadata.store import sqlite_url
from quiver.testing.faulty_disk import FaultyDisk
from tests.broker.kit import SimulatedClock, settle
from tests.manager.kit import ONLY, QuorumBench, WatchedStore, until
from tests.metadata.kit import create, dump

TOPIC = "t"
MANY = 10
LAST_SEEN = ("consumer_metadata", "last_seen")


class Noted:
    """A manager's registry and observer over a real log and database, and what the observer writes."""

    def __init__(self, registry: Registry, observer: Observer, store: WatchedStore, url: str) -> None:
        self.registry, self.observer, self.store, self.url = registry, observer, store, url
        self.written: list[set[int]] = []
        record = store.record

        def note(reports: Mapping[tuple[str, str], Mapping[int, Any]]) -> None:
            self.written.append(set(reports[LAST_SEEN]))
            record(reports)

        store.record = note  # type: ignore[method-assign]

    async def register(self) -> set[int]:
        return {(await self.registry.register_consumer(TOPIC, None)).id for _ in range(MANY)}

    def in_database(self) -> dict[int, int | None]:
        return {row[0]: row[4] for row in dump(self.url)["consumer_metadata"]}


@contextlib.asynccontextmanager
async def noted(directory: Path) -> AsyncIterator[Noted]:
    url, clock = sqlite_url(directory / "metadata.db"), SimulatedClock()
    async with QuorumBench(FaultyDisk(1), url).opened() as (quorum, store, _):
        registry = Registry(quorum, clock)
        me = Manager(1, "127.0.0.1:1", "http://127.0.0.1:2", ONLY)
        standing = Standing(quorum, registry, None, clock, me, heartbeat_s=1.0, stale_s=5.0)
        classic = ClassicApi(quorum, registry, None, standing, clock, message_bytes_max=1)  # type: ignore[arg-type]
        await quorum.propose(create(TOPIC))
        await until(lambda: quorum.database.stored == quorum.state.applied)
        observer = Observer(quorum, registry, standing, classic, store, clock, heartbeat_s=1.0)
        await observer._record()
        yield Noted(registry, observer, store, url)


def test_who_comes_while_the_database_is_behind_is_not_written_again_and_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with noted(tmp_path) as at:
            for _ in range(16):
                at.store.gate.clear()
                await at.register()
                recording = asyncio.create_task(at.observer._record())
                await settle()
                at.store.gate.set()
                await recording
            assert max(map(len, at.written)) <= 4 * MANY, "what came in the last few heartbeats"
            quorum = at.registry._quorum
            await until(lambda: quorum.database.stored == quorum.state.applied)
            for _ in range(2):
                await at.observer._record()
            assert at.in_database() == at.registry.consumers_seen
            assert not at.written[-1], "nothing new, nothing to write"

    asyncio.run(scenario())


def test_what_was_seen_while_the_database_was_away_is_written_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_STORE_RETRY_S", 0.01)

    async def scenario() -> None:
        async with noted(tmp_path) as at:
            at.store.fails = True
            first = await at.register()
            await at.observer._record()
            second = await at.register()
            await at.observer._record()
            assert at.in_database() == {} and at.written[-1] == first | second
            at.store.fails = False
            await until(lambda: len(at.in_database()) == 2 * MANY)
            for _ in range(3):
                await at.observer._record()
            assert at.in_database() == at.registry.consumers_seen

    asyncio.run(scenario())
