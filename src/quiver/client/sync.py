"""The synchronous faces: the same engines, run on the process's background loop.

Rule: a Producer and an Admin may be used from several threads at once; a Consumer by one thread at a time, and says so
when it is not. None of them may be carried over a fork: make a new one in the child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from quiver.client.admin import AsyncAdmin
from quiver.client.delivery import BatchesFuture, Delivery, RecordFuture
from quiver.client.loop_thread import shared_loop
from quiver.client.producer import ProducerEngine
from quiver.errors import ForkedError
from quiver.types import (
    GroupInfo,
    GroupPosition,
    GroupReset,
    ManagerInfo,
    NodeInfo,
    PartitionMove,
    PartitionStatus,
    TopicInfo,
)


class _Closing:
    """`with` for all three."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Producer(_Closing):
    """Sends records. Idempotent: a retry after a lost reply stores nothing twice. Safe to share between threads.

    with Producer("127.0.0.1:9400") as producer:
        producer.send("logs", b"hello", key=b"k").result()   # -> RecordMetadata(topic, partition, offset)
        producer.send_many("logs", [b"a", b"b"])
        producer.flush()

    Settings: linger_ms=5, batch_bytes=262144, buffer_bytes=67108864, compression=None|'lz4'|'zstd', idempotent=True,
    delivery_timeout=120, request_timeout=30, block_timeout=60, metadata_refresh=30 (seconds),
    message_bytes_max=1048576, client_id.
    """

    def __init__(self, servers: str, **settings: Any) -> None:
        self._io = shared_loop()

        async def make() -> ProducerEngine:
            return ProducerEngine(servers, **settings)

        self._engine = self._io.call(make())

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Any = None,
    ) -> RecordFuture:
        """Hands one record over and returns its future. Waits only while the buffer is full.

        Without `partition` and `key` records go round-robin; with a key, by its hash. `timestamp` is microseconds.
        """
        engine = self._engine
        engine.check_usable()
        info = engine.known_topic(topic) or self._io.call(engine.topic(topic))
        if not engine.has_room():
            engine.wait_for_room()
        return engine.add(info, value, key, partition, timestamp, headers)

    def send_many(self, topic: str, records: Any, *, keys: Any = None, partition: int | None = None) -> BatchesFuture:
        """Hands over a list of bytes or an Arrow table (column `value`, optional `key`, `timestamp`, `headers`).

        Records without keys go to the partitions in runs, one batch after the other; order within a run is kept.
        """
        engine = self._engine
        engine.check_usable()
        info = engine.known_topic(topic) or self._io.call(engine.topic(topic))
        deliveries: list[Delivery] = []
        counts: list[int] = []
        for planned in engine.plan_many(info, records, keys, partition):
            if not engine.has_room():
                engine.wait_for_room(sum(counts))
            deliveries.append(engine.add_batch(info, planned))
            counts.append(planned.records.num_rows)
            engine.pace(info, planned.partition)
        return BatchesFuture(deliveries, counts)

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every record sent so far is acknowledged or has failed; its future tells which."""
        self._engine.check_usable()
        self._io.call(self._engine.flush(timeout))

    def close(self, timeout: float | None = 30.0) -> None:
        """Flushes, then closes. A second call does nothing."""
        if self._io.pid == os.getpid():
            self._io.call(self._engine.close(timeout))


class Admin(_Closing):
    """Creates, lists, describes and deletes topics. Safe to share between threads."""

    def __init__(self, servers: str, **settings: Any) -> None:
        self._io = shared_loop()
        self._admin = AsyncAdmin(servers, **settings)

    def _call(self, coroutine: Any) -> Any:
        if self._io.pid != os.getpid():
            coroutine.close()
            raise ForkedError("this Admin was made before a fork; make a new one in the child process")
        return self._io.call(coroutine)

    def create_topic(self, name: str, partitions: int = 1, settings: Mapping[str, object] | None = None) -> TopicInfo:
        """`settings` by name (docs/settings.md), as {"retention.ms": 86_400_000}."""
        info: TopicInfo = self._call(self._admin.create_topic(name, partitions, settings))
        return info

    def alter_topic(
        self, name: str, settings: Mapping[str, object] | None = None, unset: Sequence[str] = ()
    ) -> TopicInfo:
        """Sets settings, and lets those of `unset` be as if they had never been set. Brokers follow at once."""
        info: TopicInfo = self._call(self._admin.alter_topic(name, settings, unset))
        return info

    def add_partitions(self, name: str, partitions: int) -> TopicInfo:
        """The topic has so many partitions from now on; it can only get more."""
        info: TopicInfo = self._call(self._admin.add_partitions(name, partitions))
        return info

    def delete_topic(self, name: str) -> None:
        self._call(self._admin.delete_topic(name))

    def list_topics(self) -> list[str]:
        names: list[str] = self._call(self._admin.list_topics())
        return names

    def describe_topic(self, name: str) -> TopicInfo:
        info: TopicInfo = self._call(self._admin.describe_topic(name))
        return info

    def describe_topics(self, names: Sequence[str] | None = None) -> dict[str, TopicInfo]:
        """Those of `names` that exist, or all, by name; asked at once."""
        found: dict[str, TopicInfo] = self._call(self._admin.describe_topics(names))
        return found

    def offsets(self, name: str) -> dict[int, tuple[int, int]]:
        """(earliest, latest) offset by partition; latest is the next one to be given."""
        found: dict[int, tuple[int, int]] = self._call(self._admin.offsets(name))
        return found

    def offset_at(self, name: str, partition: int, timestamp: int) -> int:
        offset: int = self._call(self._admin.offset_at(name, partition, timestamp))
        return offset

    def partition_status(self, topic: str | None = None) -> list[PartitionStatus]:
        found: list[PartitionStatus] = self._call(self._admin.partition_status(topic))
        return found

    def replica_status(self, topic: str | None = None) -> dict[int, list[PartitionStatus]]:
        found: dict[int, list[PartitionStatus]] = self._call(self._admin.replica_status(topic))
        return found

    def nodes(self) -> list[NodeInfo]:
        nodes: list[NodeInfo] = self._call(self._admin.nodes())
        return nodes

    def managers(self) -> list[ManagerInfo]:
        """All managers; the primary first, when one is known."""
        managers: list[ManagerInfo] = self._call(self._admin.managers())
        return managers

    def remove_broker(self, broker: int) -> None:
        """Begins to move everything a broker has to others; then it is forgotten. `moves` tells how far that is."""
        self._call(self._admin.remove_broker(broker))

    def rebalance(self) -> list[PartitionMove]:
        """Begins to give every broker its share of replicas and leaders; tells what moves."""
        moves: list[PartitionMove] = self._call(self._admin.rebalance())
        return moves

    def moves(self) -> tuple[list[PartitionMove], list[int]]:
        """The partitions on their way to other brokers, and the brokers that are being removed."""
        found: tuple[list[PartitionMove], list[int]] = self._call(self._admin.moves())
        return found

    def add_manager(self, manager: int, address: str) -> list[ManagerInfo]:
        """Lets a manager that is not there yet join the quorum; then it is started with that id, at that address."""
        managers: list[ManagerInfo] = self._call(self._admin.add_manager(manager, address))
        return managers

    def remove_manager(self, manager: int) -> list[ManagerInfo]:
        """Begins to take a manager out of the quorum, which is done when `quorum` does not show it any more."""
        managers: list[ManagerInfo] = self._call(self._admin.remove_manager(manager))
        return managers

    def quorum(self) -> list[ManagerInfo]:
        """All managers with their state, those that are awaited and those that are about to leave, too."""
        managers: list[ManagerInfo] = self._call(self._admin.quorum())
        return managers

    def list_groups(self) -> list[GroupInfo]:
        """All groups: those with members, now or before, and those that only have positions."""
        groups: list[GroupInfo] = self._call(self._admin.groups.all())
        return groups

    def describe_group(self, name: str) -> tuple[GroupInfo, list[GroupPosition]]:
        """Its members, and how far it is in each partition of its topics. Raises UnknownGroupError."""
        found: tuple[GroupInfo, list[GroupPosition]] = self._call(self._admin.groups.describe(name))
        return found

    def reset_group(self, name: str, **place: Any) -> list[GroupReset]:
        """Sets a group to another place: to='earliest' or 'latest', offset=, or timestamp= (microseconds); topic= and
        partition= for one of them. With dry_run=True it only tells. Raises GroupActiveError while it has members."""
        moved: list[GroupReset] = self._call(self._admin.groups.reset(name, **place))
        return moved

    def delete_group(self, name: str) -> None:
        """Forgets a group and its positions. Raises UnknownGroupError, GroupActiveError."""
        self._call(self._admin.groups.delete(name))

    def close(self) -> None:
        if self._io.pid == os.getpid():
            self._io.call(self._admin.close())
