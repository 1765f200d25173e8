"""One broker for each test module: tests use topics of their own, so they do not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.client.kit import LocalBroker, new_topic


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path_factory.mktemp("broker")) as made:
        yield made


@pytest.fixture(scope="module")
def servers(broker: LocalBroker) -> str:
    return broker.address


@pytest.fixture
def topic(servers: str) -> str:
    """A fresh topic of one partition."""
    return new_topic(servers)


@pytest.fixture
def make_topic(servers: str) -> Callable[[int], str]:
    return lambda partitions: new_topic(servers, partitions)
