"""Rounds of sudden death in a cluster: brokers and the manager are killed at random moments under load.

    python -m tests.system.cluster_rounds --rounds 100
    python -m tests.system.cluster_rounds --rounds 10 --seed 7

Each round kills the leader of a partition, a follower, all brokers, the manager, or everything, with SIGKILL; some
victims are killed again while they recover. In some rounds a leader is only paused, for longer than it may be silent.
The supervisor starts the dead again, after longer and longer pauses. Nobody waits for that: the next round begins when
messages flow again. At the end all that was acknowledged must be there exactly once, in order, at dense offsets, the
same for every reader, no committed position may have moved back, and no end that was told may have been too old. The
seed decides what is sent and who dies when; what the machine makes of that differs from run to run.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from quiver import Admin
from quiver.testing.history import Violation
from tests.system.kit import end_by_signal
from tests.system.replicated_kit import BROKERS, MANAGER, ReplicatedCluster, paused
from tests.system.workload import PARTITIONS, Load, read_everything

TOPIC: Final = "rounds"
PACE: Final = 4.0  # a hundred rounds take ten minutes or more, and all that was sent is kept in mind
PROGRESS_PER_ROUND: Final = 30  # acknowledgements before something is killed again
AGAIN_SHARE: Final = 0.2  # of the rounds; the victim is killed again while it recovers
VICTIMS: Final = {"leader": 5, "follower": 4, "brokers": 2, "manager": 2, "everything": 1, "paused": 2}  # how often
PAUSE_S_MAX: Final = 3.0
ALL: Final = tuple(range(1, BROKERS + 1))


class Result(NamedTuple):
    rounds: int
    kills: int
    acknowledged: int
    seen: int
    violations: list[Violation]
    trouble: list[str]  # what no log should say


def choose(cluster: ReplicatedCluster, dice: random.Random, victim: str) -> list[int]:
    """Who is to die, of those that live."""
    if victim == "manager":
        wanted = [MANAGER]
    elif victim == "brokers":
        wanted = list(ALL)
    elif victim == "everything":
        wanted = [MANAGER, *ALL]
    else:
        leader = cluster.leader(TOPIC, dice.randrange(PARTITIONS))
        wanted = [leader] if victim != "follower" else dice.sample([broker for broker in ALL if broker != leader], 1)
    return [number for number in wanted if cluster.is_alive(cluster.pid(number))]


def run_round(cluster: ReplicatedCluster, dice: random.Random, victim: str) -> int:
    """Returns how often something was killed."""
    chosen = choose(cluster, dice, victim)
    if victim == "paused":
        with paused(cluster, *chosen):
            time.sleep(dice.uniform(0.0, PAUSE_S_MAX))
        return 0
    cluster.kill(*chosen)
    if not chosen or dice.random() >= AGAIN_SHARE:
        return len(chosen)
    again = dice.choice(chosen)
    cluster.kill_while_it_starts(again, dice.uniform(0.0, 0.3))
    return len(chosen) + 1


def run_rounds(directory: Path, rounds: int, seed: int, report: Callable[[str], object] = print) -> Result:
    dice = random.Random(seed)
    kills, told = 0, collections.Counter[str]()
    with ReplicatedCluster(directory) as cluster:
        with Admin(cluster.servers) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        load = Load(cluster.servers, TOPIC, seed, PACE)
        try:
            for number in range(1, rounds + 1):
                load.until_acknowledged(PROGRESS_PER_ROUND)
                time.sleep(dice.uniform(0.0, 0.6))
                victim = dice.choices(list(VICTIMS), list(VICTIMS.values()))[0]
                kills += run_round(cluster, dice, victim)
                told[victim] += 1
                if number % 5 == 0 or number == rounds:
                    shares = ", ".join(f"{name} {count}" for name, count in sorted(told.items()))
                    report(f"round {number}/{rounds}: {kills} kills ({shares}), {load.acknowledged} acknowledged")
            load.until_acknowledged(PROGRESS_PER_ROUND)
            load.finish()
        except BaseException:
            load.abandon()
            raise
        cluster.until_whole(TOPIC)
        cluster.until_back(cluster.kill(*ALL))
        seen = read_everything(cluster.servers, TOPIC, load.history.reader("last"))
        trouble = cluster.trouble()
    return Result(rounds, kills, load.history.acknowledged_count, seen, load.judge(), trouble)


def main() -> int:
    end_by_signal()
    parser = argparse.ArgumentParser(prog="python -m tests.system.cluster_rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="a random one when not given; it is printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = run_rounds(Path(directory), arguments.rounds, seed, lambda line: print(line, flush=True))
    wrong = [*map(str, result.violations), *result.trouble]
    for line in wrong:
        print(line)
    outcome = f"{len(wrong)} violations" if wrong else "all there, once, in order"
    print(
        f"seed {seed}: {result.rounds} rounds, {result.kills} kills, {result.acknowledged} acknowledged, "
        f"{result.seen} stored, {time.monotonic() - began_s:.0f} s: {outcome}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
