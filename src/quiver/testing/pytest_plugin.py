"""The fixture `quiver_cluster` for the tests of those who use Quiver; pytest finds it when the package is installed.

Rule: pytest loads this in every project of the environment: nothing is imported before the fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quiver.testing.cluster import Clusters


@pytest.fixture(scope="session")
def quiver_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """`quiver_cluster(brokers=1)` is a running cluster, the same for all tests of the session; docs/testing.md."""
    from quiver.testing.cluster import clusters

    with clusters(tmp_path_factory.mktemp("quiver")) as made:
        yield made
