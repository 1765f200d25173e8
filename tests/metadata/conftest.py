from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.metadata.store import sqlite_url
from tests.metadata.kit import postgres_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """One server for each process of the test run."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of either kind."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "metadata.db")
    else:
        with postgres_database(request.getfixturevalue("postgres")) as made:
            yield made


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    """An empty database of a real PostgreSQL."""
    with postgres_database(postgres) as made:
        yield made
