"""Who holds the partitions: the links to brokers, what each of them hosts, who was seen when, who leads.

A topic is made in the quorum first; then every broker is told, also those that hold nothing of it, so that they know
that it exists. It counts as hosted when a majority of each group has it. Who was away is brought up to date when it is
back (`joining.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct

from quiver.clock import Clock
from quiver.errors import (
    InvalidRequestError,
    QuiverError,
    RequestTimeoutError,
    TopicExistsError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.manager.links import BrokerLink
from quiver.metadata.state import Partition, Topic
from quiver.types import PartitionStatus
from quiver.wire.messages import CreateTopic, DeleteTopic, GetStatus, HostTopic, StatusReply

logger = logging.getLogger("quiver.manager")

# When a majority has a new topic, the others get so long before the creation is acknowledged without them.
_STRAGGLER_S: Final = 1.0
# Who has not answered by then what all are asked has perhaps stopped; others will tell what it would have told.
_ANSWER_S: Final = 2.0
# Who has not said by then that it did as it was told is told again with its next heartbeat.
_TELL_S: Final = 5.0


T = TypeVar("T")


class Brokers:
    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self.silence_s = silence_s
        self._links: dict[int, BrokerLink] = {}
        self._hosted: set[str] = set()  # topics that their brokers have, by the uid of their first partition
        self._leaders: dict[str, tuple[int, int]] = {}  # by partition uid: term and broker
        self._heard_s: dict[int, float] = {}  # by the clock that never jumps: what follows from silence goes by it
        self.seen: dict[int, int] = {}  # as it is shown, also by who managed before
        self.outdated: set[int] = set()  # brokers that have not heard of some change

    # -- links ---------------------------------------------------------------------------------------------------

    def attach(self, broker_id: int, link: BrokerLink) -> None:
        self._links[broker_id] = link

    def detach(self, broker_id: int) -> None:
        self._links.pop(broker_id, None)
        self.seen.pop(broker_id, None)
        self._heard_s.pop(broker_id, None)
        self.outdated.discard(broker_id)

    def heard(self, broker_id: int) -> None:
        self.seen[broker_id] = self._clock.now_us()
        self._heard_s[broker_id] = self._clock.monotonic_s()

    def link(self, broker_id: int) -> BrokerLink | None:
        return self._links.get(broker_id)

    def _here(self, broker_id: int) -> BrokerLink:
        """Raises for one that was removed since."""
        if (link := self._links.get(broker_id)) is None:
            raise UnavailableError(f"broker {broker_id} is not here now")
        return link

    @property
    def attached(self) -> list[int]:
        return list(self._links)

    def is_active(self, broker_id: int) -> bool:
        """Heard of within the time after which a silent broker counts as inactive."""
        return broker_id in self._heard_s and self.silent_s(broker_id) <= self.silence_s

    def silent_s(self, broker_id: int) -> float:
        """How long nothing was heard of it; for ever, as long as this manager has not heard of it."""
        heard_s = self._heard_s.get(broker_id)
        return math.inf if heard_s is None else self._clock.monotonic_s() - heard_s

    @property
    def active(self) -> list[int]:
        return [broker_id for broker_id in self._links if self.is_active(broker_id)]

    async def status(self, broker_id: int) -> list[PartitionStatus]:
        """What a broker has. Notes that it is here, and who leads as far as it knows."""
        reply, _ = await self._here(broker_id).call(GetStatus())
        assert isinstance(reply, StatusReply)
        self.heard(broker_id)
        for status in reply.partitions:
            if status.leader and status.term >= self._leaders.get(status.uid, (0, 0))[0]:
                self._leaders[status.uid] = (status.term, status.leader)
        return reply.partitions

    async def ask_all(self, request: Struct, reply: type[T]) -> list[T]:
        """What those say who answer soon."""
        asked = [asyncio.ensure_future(link.call(request)) for link in self._links.values()]
        if asked:
            await asyncio.wait(asked, timeout=_ANSWER_S)
        answers = [task.result()[0] for task in asked if _end(task) is None]
        return [answer for answer in answers if isinstance(answer, reply)]

    # -- leaders -------------------------------------------------------------------------------------------------

    def leader_of(self, partition: Partition) -> int:
        """The broker that leads, as far as is known; else the one that should."""
        found = self._leaders.get(partition.uid)
        return found[1] if found else partition.replicas[0] if partition.replicas else 0

    def learn_leader(self, partition: Partition, broker_id: int) -> None:
        """What a broker said that does not lead: 0 when it does not know who does."""
        term = self._leaders.get(partition.uid, (0, 0))[0]
        if broker_id:
            self._leaders[partition.uid] = (term, broker_id)

    def to_ask(self, partition: Partition, not_this: int) -> tuple[int, BrokerLink] | None:
        """The leader, or another broker of the group when it was asked in vain."""
        leader = self.leader_of(partition)
        order = [leader, *(replica for replica in partition.holders if replica != leader)]
        if not_this in order:
            at = order.index(not_this) + 1
            order = order[at:] + order[:at]
        return next(((broker_id, self._links[broker_id]) for broker_id in order if broker_id in self._links), None)

    # -- topics --------------------------------------------------------------------------------------------------

    def is_hosted(self, topic: Topic) -> bool:
        return topic.partitions[0].uid in self._hosted

    def note_hosted(self, topic: Topic) -> None:
        self._hosted.add(topic.partitions[0].uid)

    async def host(self, topic: Topic) -> None:
        """Tells all brokers of a topic. Raises when too few of them have it now; those that are late are noted."""
        if self.is_hosted(topic):
            return
        telling = {
            broker_id: asyncio.ensure_future(self._make(broker_id, topic)) for broker_id in self.concerned(topic)
        }
        await _until_enough(topic, telling)
        failed = {broker_id: error for broker_id, task in telling.items() if (error := _end(task)) is not None}
        self.outdated.update(failed)
        if not _has_majorities(topic, telling.keys() - failed.keys()):
            late = UnavailableError(f"no broker that holds partitions of topic {topic.name} is here now, or too few")
            raise next(iter(failed.values()), late)
        self.note_hosted(topic)

    async def host_again(self, topic: Topic) -> None:
        """The same for a topic that got more partitions."""
        self._hosted.discard(topic.partitions[0].uid)
        await self.host(topic)

    async def tell(self, topics: Sequence[Topic]) -> None:
        """Tells all brokers that partitions of these topics are elsewhere; those that are late are noted."""
        telling = {
            broker_id: asyncio.ensure_future(self._make_all(broker_id, topics)) for broker_id in self._links if topics
        }
        if telling:
            await asyncio.wait(telling.values(), timeout=_TELL_S)
        self.outdated.update(broker_id for broker_id, task in telling.items() if _end(task) is not None)

    async def _make_all(self, broker_id: int, topics: Sequence[Topic]) -> None:
        for topic in topics:
            await self._make(broker_id, topic)

    async def _make(self, broker_id: int, topic: Topic) -> None:
        with contextlib.suppress(TopicExistsError):  # said twice: the broker has it
            await self._here(broker_id).call(creation_of(topic))

    async def unhost(self, topic: Topic) -> None:
        """Tells all brokers that a topic is deleted. Raises when no one could do it; those that are late are noted."""
        self._hosted.discard(topic.partitions[0].uid)
        for partition in topic.partitions:
            self._leaders.pop(partition.uid, None)
        concerned = self.concerned(topic)
        telling = [asyncio.ensure_future(self._drop(broker_id, topic)) for broker_id in concerned]
        if telling:
            await asyncio.wait(telling)
        failed = {broker: error for broker, task in zip(concerned, telling, strict=True) if (error := _end(task))}
        self.outdated.update(failed)
        if failed and len(failed) == len(concerned):
            raise next(iter(failed.values()))

    async def _drop(self, broker_id: int, topic: Topic) -> None:
        with contextlib.suppress(UnknownTopicError):
            await self._here(broker_id).call(DeleteTopic(topic.name, topic.partitions[0].uid))

    async def make_current(self, broker_id: int, name: str, has: dict[int, str], topic: Topic | None) -> str:
        """Makes what a broker has of a name, by partition, what it should have. `topic` None: it was deleted.

        Returns the uid of another topic that has the name there, and of which `has` has nothing."""
        link = self._here(broker_id)
        uids = {} if topic is None else {partition.number: partition.uid for partition in topic.partitions}
        if any(uids.get(number) != uid for number, uid in has.items()):
            # It was deleted while this broker was away, and its name may have been given to another one since.
            logger.info("topic_dropped broker=%d topic=%s", broker_id, name)
            with contextlib.suppress(UnknownTopicError):
                await link.call(DeleteTopic(name, next(iter(has.values()))))
            has = {}
        if topic is None or broker_id not in self.concerned(topic):
            return ""
        holds = {partition.number for partition in topic.partitions if broker_id in partition.holders}
        as_made = not topic.revision and not any(partition.epoch for partition in topic.partitions)
        if holds and holds == has.keys() and as_made:
            return ""
        try:
            await link.call(creation_of(topic))
        except (TopicExistsError, InvalidRequestError) as error:
            there = str(error.facts.get("uid", ""))
            return "" if there in uids.values() else there
        return ""

    async def replace(self, broker_id: int, uid: str, topic: Topic) -> None:
        """The topic that has this uid was deleted; its name means another one now."""
        logger.info("topic_replaced broker=%d topic=%s", broker_id, topic.name)
        link = self._here(broker_id)
        with contextlib.suppress(UnknownTopicError):
            await link.call(DeleteTopic(topic.name, uid))
        await link.call(creation_of(topic))

    def concerned(self, topic: Topic) -> list[int]:
        """Whom to tell of a topic: all. Without groups only who has it: each would make a group of its own."""
        groups = [partition.holders for partition in topic.partitions]
        to_all = not any(groups) or any(partition.voters for partition in topic.partitions)
        return [broker_id for broker_id in self._links if to_all or any(broker_id in group for group in groups)]


def creation_of(topic: Topic) -> CreateTopic | HostTopic:
    uids = [partition.uid for partition in topic.partitions]
    voters = [list(partition.voters) for partition in topic.partitions]
    voters = voters if any(voters) else []
    epochs = [partition.epoch for partition in topic.partitions]
    if any(epochs) or topic.revision:
        return HostTopic(topic.name, uids, voters, epochs, topic.settings, topic.revision)
    return CreateTopic(topic.name, len(uids), topic.replication_factor, uids, voters, topic.settings)


def _has_majorities(topic: Topic, brokers: set[int]) -> bool:
    """Of each partition that is anywhere at all."""
    groups = [part.replicas if part.voters else part.replicas[:1] for part in topic.partitions]
    return all(not group or sum(replica in brokers for replica in group) * 2 > len(group) for group in groups)


async def _until_enough(topic: Topic, telling: Mapping[int, asyncio.Future[None]]) -> None:
    """Returns when all are told, or a majority of each group is and the others had a moment more."""
    waiting = set(telling.values())
    while waiting:
        done = {broker_id for broker_id, task in telling.items() if task.done() and task.exception() is None}
        if _has_majorities(topic, done):
            await asyncio.wait(waiting, timeout=_STRAGGLER_S)
            return
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def _end(task: asyncio.Future[Any]) -> QuiverError | None:
    """What kept a broker from doing as it was told; who has not answered is no longer waited for."""
    if not task.done():
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # which nobody waits for any more
        task.cancel()
        return RequestTimeoutError("the broker has not answered yet")
    error = task.exception()
    if error is not None and not isinstance(error, QuiverError):
        raise error
    return error
