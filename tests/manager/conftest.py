from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.manager.kit import Api, HttpNode
from tests.manager.v1_kit import V1
from tests.metadata.kit import postgres_database, postgres_server
from tests.system.kit import until


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """One server for each process of the test run."""
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    with postgres_database(postgres) as made:
        yield made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    """A real node for all tests of a module; each takes topics of its own."""
    with HttpNode(tmp_path_factory.mktemp("node")) as made:
        with V1(made.http) as client:  # what it has to say of itself is in its log: nothing comes by itself any more
            until(lambda: (found := client.request("GET", "/v1/health").body)["managers"] and found["brokers"])
        yield made


@pytest.fixture
def api(node: HttpNode) -> Iterator[Api]:
    with Api(node.http) as made:
        yield made
