"""Requests by chance to the HTTP port of real processes: no 500, and no change by what was refused.

    python -m tests.manager.http_fuzz                              10,000 requests of each kind
    python -m tests.manager.http_fuzz --only forwarded --cases 500 --seed 7

classic, v1: from dice, to a node. openapi: by schemathesis from /openapi.json, to a node. forwarded: as classic, to a
manager that does not lead, one of three.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.manager.classic_fuzz import LIMITS, fuzz_classic
from tests.manager.kit import HttpNode
from tests.manager.openapi_fuzz import fuzz_openapi
from tests.manager.v1_fuzz import fuzz_v1
from tests.system.managed_kit import MANAGERS, PATIENT, ManagedCluster

Run = Callable[[Path, int, int], None]
OPERATIONS = 66  # right and wrong requests of each that /openapi.json has, about


def _on_a_node(fuzz: Callable[[str, int, int], object], settings: dict[str, str]) -> Run:
    def run(directory: Path, cases: int, seed: int) -> None:
        with HttpNode(directory, settings) as node:
            fuzz(node.http, cases, seed)
            assert "http_failed" not in node.log
            assert "Traceback" not in node.log

    return run


def _forwarded(directory: Path, cases: int, seed: int) -> None:
    with ManagedCluster(directory, LIMITS | PATIENT) as cluster:
        primary = cluster.primary()
        secondary = next(manager for manager in MANAGERS if manager != primary)
        fuzz_classic(cluster.http_of(secondary), cases, seed, cluster.http_of(primary))
        rows = cluster.until_equal()
        assert rows[0] == rows[1] == rows[2]
        assert cluster.trouble() == []


def _openapi(http: str, cases: int, seed: int) -> None:
    fuzz_openapi(http, max(1, cases // OPERATIONS), seed)


RUNS: dict[str, Run] = {
    "classic": _on_a_node(fuzz_classic, LIMITS),
    "v1": _on_a_node(fuzz_v1, {}),
    "openapi": _on_a_node(_openapi, {}),
    "forwarded": _forwarded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", choices=RUNS)
    given = parser.parse_args()
    for name in [given.only] if given.only else RUNS:
        began_s = time.monotonic()
        print(f"{name}: {given.cases} requests, seed {given.seed}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            RUNS[name](Path(directory), given.cases, given.seed)
        print(f"{name}: no harm done, {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
