"""Planted bugs of the metadata: acknowledgement, ids, the database."""

from __future__ import annotations

from typing import Any

from quiver.errors import RequestError
from quiver.manager import quorum
from quiver.manager.database import Database
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata.commands import decode_command
from quiver.metadata.image import copy_of, decode_state
from quiver.metadata.state import Counters
from quiver.replication.waiting import settle
from quiver.testing.plants.registry import Patch, plant
from quiver.wire.frame import Kind


@plant("command-acknowledged-early", "a change of metadata is answered when it is appended")
def _command_acknowledged_early() -> list[Patch]:
    take = MetadataQuorum._take_inbox

    def hasty(self: Any) -> None:
        take(self)
        state = copy_of(self.state)
        for waiting in self._tail:
            if waiting.header.kind != Kind.COMMAND:
                continue
            try:
                result = state.apply(decode_command(waiting.payload)).result
            except RequestError:
                continue
            if waiting.asker is not None:
                settle(waiting.asker, result)

    return [(MetadataQuorum, "_take_inbox", hasty)]


@plant("unknown-told-as-not-done", "who asked a primary that lost its place is told that nothing was done")
def _unknown_told_as_not_done() -> list[Patch]:
    return [(MetadataQuorum, "_unknown", lambda self: self._not_leader())]


@plant("ids-counted-anew", "the next id after a restart is one more than the highest that is still in use")
def _ids_counted_anew() -> list[Patch]:
    def recounting(raw: bytes) -> Any:
        state = decode_state(raw)
        partitions = [part.id for topic in state.topics.values() for part in topic.partitions]
        used = (partitions, state.producers, state.consumers)
        state.counters = Counters(*(max(ids, default=0) + 1 for ids in used))
        return state

    return [(quorum, "decode_state", recounting)]


@plant("database-gap", "after a restart the database is taken to have what the log has")
def _database_gap() -> list[Patch]:
    opened = Database.open

    async def trusting(self: Any, cluster_id: str, state: Any, last_index: int) -> None:
        await opened(self, cluster_id, state, last_index)
        if not self._anew:
            self.stored = self._has = last_index
            self._follow(state)

    return [(Database, "open", trusting)]
