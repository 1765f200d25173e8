"""Rounds of sudden death: a node is killed at random moments under load and started again on its data.

    python -m tests.system.crash_rounds --rounds 200
    python -m tests.system.crash_rounds --rounds 20 --seed 7

Producers send one by one and in lists, consumers follow and commit. Most rounds end with SIGKILL, some with SIGTERM,
some with a second SIGKILL while the node still recovers. At the end all that was acknowledged must be there exactly
once, in order, at dense offsets, the same for every reader, and no committed position may have moved back. The seed
decides what is sent and when the node dies; what the machine makes of that differs from run to run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quiver import Admin
from quiver.testing.history import Violation
from tests.system.kit import SMALL_FILES, Node, end_by_signal
from tests.system.workload import PARTITIONS, Load, read_everything

TOPIC = "rounds"
PROGRESS_PER_ROUND = 30  # acknowledgements that a restarted node must give before it is killed again


class Result(NamedTuple):
    rounds: int
    kills: int
    acknowledged: int
    seen: int
    recovery_s_max: float
    violations: list[Violation]


def end_node(node: Node, dice: random.Random) -> int:
    """One of the ways to die; returns how often the node was killed."""
    way = dice.random()
    if way < 0.15:
        assert node.terminate() == 0
        return 0
    node.kill()
    if way < 0.8:
        return 1
    # Once more, while it starts: recovery must survive its own death.
    ready = node.launch()
    time.sleep(dice.uniform(0.0, 0.3))
    node.kill()
    os.close(ready)
    return 2


def run_rounds(directory: Path, rounds: int, seed: int, report: Callable[[str], object] = print) -> Result:
    dice = random.Random(seed)
    kills, recovery_s_max = 0, 0.0
    with Node(directory, SMALL_FILES) as node:
        with Admin(node.address) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        load = Load(node.address, TOPIC, seed)
        try:
            for number in range(1, rounds + 1):
                load.until_acknowledged(PROGRESS_PER_ROUND)
                time.sleep(dice.uniform(0.0, 0.6))
                kills += end_node(node, dice)
                node.start()
                recovery_s_max = max(recovery_s_max, node.start_s)
                if number % 10 == 0 or number == rounds:
                    report(f"round {number}/{rounds}: {kills} kills, {load.acknowledged} acknowledged")
            load.finish()
        except BaseException:
            node.kill()
            load.abandon()
            raise
        node.kill()
        node.start()
        seen = read_everything(node.address, TOPIC, load.history.reader("last"))
        assert node.terminate() == 0
        for word in ("Traceback", "partition_corrupt", "owner_failed", "append_failed"):
            assert word not in node.log, f"{word} in {node.log_path}"
    return Result(rounds, kills, load.history.acknowledged_count, seen, recovery_s_max, load.judge())


def main() -> int:
    end_by_signal()
    parser = argparse.ArgumentParser(prog="python -m tests.system.crash_rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="a random one when not given; it is printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = run_rounds(Path(directory), arguments.rounds, seed, lambda line: print(line, flush=True))
    for violation in result.violations:
        print(violation)
    outcome = f"{len(result.violations)} violations" if result.violations else "all there, once, in order"
    print(
        f"seed {seed}: {result.rounds} rounds, {result.kills} kills, {result.acknowledged} acknowledged, "
        f"{result.seen} stored, slowest start {result.recovery_s_max:.2f} s, "
        f"{time.monotonic() - began_s:.0f} s: {outcome}"
    )
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
