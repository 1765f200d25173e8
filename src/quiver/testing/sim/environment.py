"""What the product takes from its surroundings, taken from the simulation instead, for as long as a run lasts.

Rule: names of modules are patched here and nowhere else (but for planted bugs); the product has no hook for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from quiver.broker import catalog, hosting, server
from quiver.broker.partition_state import PartitionState
from quiver.log import flusher
from quiver.log.checkpoint import Checkpoint
from quiver.log.partition_log import PartitionLog
from quiver.manager import database, identity, quorum
from quiver.manager.quorum import MetadataQuorum
from quiver.replication import raft_replica
from quiver.testing.sim.ledger import Ledger
from quiver.testing.sim.metadata_ledger import MetadataLedger
from quiver.testing.sim.node import Node
from quiver.testing.sim.plan import Plan
from quiver.testing.sim.trace import LogHandler, Trace


def _running_node() -> Node | None:
    loop = asyncio._get_running_loop()
    owner = None if loop is None else getattr(loop, "owner", None)
    return owner if isinstance(owner, Node) else None


def _running_name() -> str:
    node = _running_node()
    return "-" if node is None else node.name


def _watches(ledger: Ledger) -> list[tuple[type, str, Any]]:
    """The methods whose calls the ledger is told of, and what takes their place."""
    apply: Callable[[PartitionState, Any, Any], list[int]] = PartitionState.apply

    def watched_apply(state: PartitionState, header: Any, payload: Any) -> list[int]:
        refused = apply(state, header, payload)
        node = _running_node()
        if node is not None:
            ledger.applied(node, state, header, payload, refused)
        return refused

    truncate: Callable[[PartitionLog, int], None] = PartitionLog.truncate_suffix

    def watched_truncate(log: PartitionLog, index: int) -> None:
        node = _running_node()
        if node is not None:
            ledger.truncating(node, log.directory, index)
        truncate(log, index)

    install: Callable[[PartitionLog, Checkpoint], None] = PartitionLog.install

    def watched_install(log: PartitionLog, checkpoint: Checkpoint) -> None:
        node = _running_node()
        if node is not None:
            ledger.installing(node, log.directory, checkpoint.start.index)
        install(log, checkpoint)

    apply_command: Callable[[MetadataQuorum, Any, Any], Any] = MetadataQuorum._apply

    def watched_command(manager: MetadataQuorum, header: Any, payload: Any) -> Any:
        result = apply_command(manager, header, payload)
        node = _running_node()
        if node is not None and isinstance(ledger, MetadataLedger):
            ledger.applied_command(node, manager, header, payload, result)
        return result

    return [
        (PartitionState, "apply", watched_apply),
        (PartitionLog, "truncate_suffix", watched_truncate),
        (PartitionLog, "install", watched_install),
        (MetadataQuorum, "_apply", watched_command),
    ]


@contextlib.contextmanager
def simulated(ledger: Ledger, trace: Trace, chance: random.Random, plan: Plan) -> Iterator[LogHandler]:
    disk_ids = itertools.count(1)

    def new_executor(*_: Any) -> Any:
        node = _running_node()
        assert node is not None
        return node.new_executor()

    def found_damage(text: str) -> None:
        node = _running_node()
        if node is not None:
            ledger.damaged(node, text)

    handler = LogHandler(trace, _running_name, found_damage)
    logger = logging.getLogger("quiver")
    before = logger.level, logger.propagate
    with contextlib.ExitStack() as stack:
        for target, name, watched in _watches(ledger):
            stack.enter_context(mock.patch.object(target, name, watched))
        stack.enter_context(mock.patch.object(server, "ThreadPoolExecutor", new_executor))
        stack.enter_context(mock.patch.object(raft_replica, "random", chance))
        stack.enter_context(mock.patch.object(catalog, "_new_disk_id", lambda: next(disk_ids)))
        stack.enter_context(mock.patch.object(database, "ThreadPoolExecutor", new_executor))
        stack.enter_context(mock.patch.object(identity, "secrets", SimpleNamespace(randbits=lambda _: next(disk_ids))))
        stack.enter_context(mock.patch.object(quorum, "_KEPT_MIN", plan.kept))
        if not plan.inline_flushes:
            stack.enter_context(mock.patch.object(hosting, "FlushPolicy", lambda clock: None))
        else:  # also while others flush: what is done at once is worth finding fault with more often than it is quicker
            stack.enter_context(mock.patch.object(flusher, "ALONE_S_MIN", 0.0))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield handler
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before
