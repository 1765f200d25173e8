"""A group that is never at rest: members join, leave and are killed all the time while records are produced and read.

    python -m tests.system.group_rounds --records 1000000 --seconds 120
    python -m tests.system.group_rounds --records 50000 --seconds 10 --seed 7

Members are processes that commit by hand and tell what they have read and what is stored. At the end every record was
read; a record was read again only when the member that had read it was killed before its commit, and never more of
them than it had left unstored. The seed decides who joins, leaves and dies when; what the machine makes of that differs
from run to run.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from quiver import Admin, Producer
from tests.system.group_kit import Members, Verdict, judge
from tests.system.kit import create_topic, end_by_signal, until
from tests.system.managed_kit import ManagedCluster

TOPIC: Final = "rounds"
PARTITIONS: Final = 12
MEMBERS: Final = 4
MEMBERS_MAX: Final = 8
START_S_MAX: Final = 60.0
SESSION_S: Final = 3.0
COMMIT_S: Final = 0.3
STEPS_PER_S: Final = 20  # of the producer
EVENT_S: Final = 1.2  # between two things that happen to members
DRAIN_S_MAX: Final = 120.0


class Result(NamedTuple):
    records: int
    joined: int
    stopped: int
    killed: int
    lost: int  # how often a member was held to be gone that was not killed
    verdict: Verdict
    lags: list[int]
    trouble: list[str]


def produce(servers: str, records: int, seconds: float, count: list[int], failed: list[BaseException]) -> None:
    """So many, evenly over the time and over the partitions; `count` has how many each partition has got."""
    steps, began_s = max(1, int(seconds * STEPS_PER_S)), time.monotonic()
    try:
        with Producer(servers) as producer:
            for step in range(steps):
                partition = step % PARTITIONS
                size = records * (step + 1) // steps - records * step // steps
                first = count[partition]
                values = [b"%d-%d" % (partition, first + number) for number in range(size)]
                producer.send_many(TOPIC, values, partition=partition)
                count[partition] += size
                time.sleep(max(0.0, began_s + (step + 1) / STEPS_PER_S - time.monotonic()))
            producer.flush()
    except BaseException as error:
        failed.append(error)
        raise


def disturb(members: Members, dice: random.Random, told: collections.Counter[str]) -> None:
    """One of three things, so that there are about as many members as before."""
    count, alive = len(members.alive()), [member for member in members.alive() if member.is_reading]
    wish = dice.choice(("kill", "kill", "stop", "join"))
    if count > MEMBERS_MAX or not alive:
        return  # those who come are slow to start: more of them would not help
    if wish == "join" or count < MEMBERS - 1:
        members.start()
        told["joined"] += 1
    elif wish == "kill":
        dice.choice(alive).kill()
        told["killed"] += 1
    else:
        dice.choice(alive).ask_to_stop()
        told["stopped"] += 1


def run_rounds(
    directory: Path, records: int, seconds: float, seed: int, report: Callable[[str], object] = print
) -> Result:
    dice, told = random.Random(seed), collections.Counter[str]()
    count, failed = [0] * PARTITIONS, list[BaseException]()
    with (
        ManagedCluster(directory) as cluster,
        Members(cluster.servers, TOPIC, SESSION_S, COMMIT_S, by_hand=True) as members,
    ):
        create_topic(cluster.servers, TOPIC, PARTITIONS)
        for _ in range(MEMBERS):
            members.start()
        until(lambda: all(member.is_reading for member in members.all), START_S_MAX)
        producing = threading.Thread(target=produce, args=(cluster.servers, records, seconds, count, failed))
        producing.start()
        while producing.is_alive() or not (told["killed"] and told["joined"]):
            time.sleep(dice.expovariate(1 / EVENT_S))
            disturb(members, dice, told)
            report(f"{sum(count):,} of {records:,} produced, {len(members.alive())} members, {dict(told)}")
        producing.join()
        if failed:
            raise failed[0]
        if not members.alive():
            members.start()
        with Admin(cluster.servers) as admin:

            def lags() -> list[int]:
                found = admin.describe_group("g")[1]
                return [one.lag for one in found]

            until(lambda: not sum(lags()), DRAIN_S_MAX)
            for member in members.all:
                if not member.was_killed:
                    member.stop()
            final = lags()
        verdict = judge(members.pieces, dict(enumerate(count)))
        lost = sum(member.lost for member in members.all)
        return Result(
            records, len(members.all), told["stopped"], told["killed"], lost, verdict, final, cluster.trouble()
        )


def main() -> int:
    end_by_signal()
    parser = argparse.ArgumentParser(prog="python -m tests.system.group_rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=None, help="a random one when not given; it is printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        result = run_rounds(
            Path(directory), arguments.records, arguments.seconds, seed, lambda line: print(line, flush=True)
        )
    print(result)
    return 0 if result.verdict.is_good and not result.trouble and not sum(result.lags) else 1


if __name__ == "__main__":
    sys.exit(main())
