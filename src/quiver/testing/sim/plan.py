"""What a seed means: the size of the cluster, its settings, and how much of each fault there is.

Rule: the same mix for every run, planted bug or not; only the seed decides.
"""

from __future__ import annotations

import dataclasses
import random

from quiver.config import MIB, BrokerSettings, LogSettings, RaftSettings

_NEVER_MS = 10**9

FAULTS = (
    "kill",
    "power cut",
    "restart all",
    "stop",
    "pause",
    "split",
    "cut one way",
    "slow disk",
    "fsync error",
    "full disk",
    "lost disk",
    "lost partition",
    "bit flip",
    "transfer",
    "move",
)
# Managers have no partitions to move; a flipped bit in their log shows only when it is read.
MANAGER_FAULTS = (*(fault for fault in FAULTS if fault not in ("move", "bit flip")), "lost database", "database away")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    brokers: int
    replicas: int
    partitions: int
    producers: int
    duration_s: float
    fault_interval_s: float
    weights: dict[str, float]
    notices: bool
    ordered: bool
    inline_flushes: bool
    loss: float
    doubling: float
    straggler: float
    delay_s: float
    clock_spread: float
    log: LogSettings
    raft: RaftSettings
    retention_check_s: float
    kept: int  # transactions that managers keep beyond their check-point

    @property
    def compacts(self) -> bool:
        """The topic is compacted by key."""
        return self.log.retention_bytes is None and self.doubling < 0.1

    def settings(self, node_id: int) -> BrokerSettings:
        return BrokerSettings(
            data_dir="sim",
            node_id=node_id,
            log=self.log,
            raft=self.raft,
            retention_check_s=self.retention_check_s,
        )


def plan_run(chance: random.Random) -> Plan:
    notices = chance.random() < 0.7
    pick = chance.choice
    # A run with a few kinds of fault finds more than one with a little of everything.
    liked = chance.sample(FAULTS, pick((2, 3, 4, 6)))
    log = LogSettings(
        segment_bytes_max=pick((1500, 3000, 10_000)),
        room_bytes_max=pick((0, 300, 8 * MIB, 8 * MIB)),
        index_interval_bytes=pick((200, 1000, 5000)),
        checkpoint_bytes=pick((700, 3000, 20_000)),
        retention_ms=None,
        retention_bytes=pick((None, 3000, 10_000)),
    )
    raft = RaftSettings(
        heartbeat_ms=pick((30, 50, 100)),
        election_ms=pick((200, 300, 600)),
        append_bytes_max=pick((800, 4000, 1_000_000)),
        appends_in_flight_max=pick((1, 4, 64)),
        quiesce_ms=pick((200, 1000, _NEVER_MS)) if notices else _NEVER_MS,
    )
    brokers, replicas = pick(((3, 3), (3, 3), (4, 3), (5, 3), (5, 5)))
    if "move" in liked:
        brokers = max(brokers, replicas + 1)  # else there is nowhere to go
    # On one connection everything waits behind a message that takes long: a few of them stop a cluster for good.
    ordered = chance.random() < 0.6
    straggler = pick((0.0, 0.0, 0.0005, 0.002)) if ordered else pick((0.0, 0.0, 0.01, 0.05))
    return Plan(
        brokers=brokers,
        replicas=replicas,
        partitions=pick((1, 1, 2)),
        producers=pick((1, 2, 3)),
        duration_s=pick((6.0, 10.0, 15.0)),
        fault_interval_s=pick((0.2, 0.5, 1.0)),
        weights={fault: (10.0 if fault in liked else 0.3) for fault in FAULTS},
        notices=notices,
        ordered=ordered,
        inline_flushes=chance.random() < 0.5,
        loss=pick((0.0, 0.0, 0.01, 0.1)),
        doubling=pick((0.0, 0.0, 0.05, 0.2)),
        straggler=straggler,
        delay_s=pick((0.0005, 0.002, 0.01)),
        clock_spread=pick((0.0, 0.02, 0.2)),
        log=log,
        raft=raft,
        retention_check_s=pick((0.3, 1.0, 3.0)),
        kept=pick((3, 20, 10_000)),
    )


def plan_managers(chance: random.Random) -> Plan:
    """The same for a quorum of managers."""
    plan = plan_run(chance)
    count = chance.choice((3, 3, 3, 5))
    liked = chance.sample(MANAGER_FAULTS, chance.choice((2, 3, 4, 6)))
    return dataclasses.replace(
        plan,
        brokers=count,
        replicas=count,
        partitions=1,
        duration_s=chance.choice((5.0, 8.0)),
        weights={fault: (10.0 if fault in liked else 0.3) for fault in MANAGER_FAULTS},
        raft=dataclasses.replace(plan.raft, quiesce_ms=_NEVER_MS),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPlan:
    """A consumer group on top of that."""

    partitions: int
    members_max: int
    session_s: float
    release_s: float
    commit_interval_s: float | None
    strategy: str
    start: str
    resets: bool
    event_interval_s: float  # between two things that happen to members, partitions or their broker
    weights: dict[str, float]


GROUP_EVENTS = ("join", "leave", "kill", "pause", "all leave", "more partitions", "kill broker", "cut power of broker")


def plan_groups(chance: random.Random) -> tuple[Plan, GroupPlan]:
    """Managers and one broker, with members that come and go."""
    pick, plan = chance.choice, plan_managers(chance)
    liked = chance.sample(GROUP_EVENTS, pick((2, 3, 4)))
    resets = chance.random() < 0.4
    weights = {event: (5.0 if event in liked else 1.0) for event in GROUP_EVENTS} | {"join": 8.0}
    if resets:  # who resets is let only while nobody is there
        weights |= {"all leave": 8.0, "pause": 5.0}
    log = dataclasses.replace(plan.log, retention_bytes=None, checkpoint_bytes=pick((3000, 20_000)))
    managers = dataclasses.replace(
        plan,
        log=log,
        duration_s=pick((5.0, 8.0)),
        fault_interval_s=pick((0.5, 1.5, 5.0)),
        loss=pick((0.0, 0.0, 0.0, 0.01)),
    )
    return managers, GroupPlan(
        partitions=pick((1, 2, 4)),
        members_max=pick((2, 3, 4)),
        session_s=pick((0.5, 1.0, 2.0)),
        release_s=pick((0.5, 1.5)),
        commit_interval_s=pick((None, 0.05, 0.3)),
        strategy=pick(("sticky", "sticky", "range", "round-robin")),
        start=pick(("earliest", "earliest", "latest")),
        resets=resets,
        event_interval_s=pick((0.15, 0.4)),
        weights=weights,
    )
