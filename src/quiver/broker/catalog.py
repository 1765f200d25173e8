"""Which topics this node has and which directory holds which partition.

Rule: a topic exists from the moment the file that names it is on disk, and not a moment longer than that. Directories
that no topic names are left-overs of a crash and are removed.
"""

from __future__ import annotations

import logging
import secrets
import uuid

import msgspec

from quiver.broker.catalog_file import CatalogFile, CatalogTopic, Content
from quiver.errors import CorruptLogError, InvalidRequestError, TopicExistsError, UnknownTopicError
from quiver.log.disk import Disk
from quiver.replication.group import broker_of, replica_id
from quiver.wire.messages import CreateTopic, HostTopic

logger = logging.getLogger("quiver.broker")


def _new_disk_id() -> int:
    return secrets.randbelow(2**32 - 1) + 1


class Catalog:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._file = CatalogFile(disk, directory)
        self._partitions = f"{directory}/partitions"
        disk.make_directory(self._partitions)
        if self._file.exists:
            self._content = self._file.load()
        elif disk.list(self._partitions):
            # The catalog is written before the first of them. Without it they would all be taken for left-overs.
            raise CorruptLogError.at(self._file.path, 0, "the catalog is missing, but there are partitions")
        else:
            self._content = Content(uuid.uuid4().hex, {}, _new_disk_id())
            self._file.write(self._content)
        self._used = {uid for topic in self.topics.values() for uid in topic.partitions}

    @property
    def cluster_id(self) -> str:
        return self._content.cluster_id

    @property
    def disk_id(self) -> int:
        """Drawn when this directory was made: whoever has another has lost what this one had."""
        return self._content.disk_id

    def adopt_cluster(self, cluster_id: str) -> None:
        """From now on this broker belongs to that cluster."""
        if cluster_id != self._content.cluster_id:
            content = msgspec.structs.replace(self._content, cluster_id=cluster_id)
            self._file.write(content)
            self._content = content

    @property
    def topics(self) -> dict[str, CatalogTopic]:
        return self._content.topics

    def new_topic(self, asked: CreateTopic | HostTopic, broker: int) -> CatalogTopic:
        """A topic with the given directories' names, or fresh ones; it does not exist before `add`."""
        name, voters = asked.name, asked.voters
        if name in self.topics:
            raise TopicExistsError(f"topic {name} already exists", uid=self.topics[name].partitions[0])
        self._check_unused(name, asked.uids)
        if isinstance(asked, HostTopic):
            uids, epochs, revision = asked.uids, asked.epochs, asked.revision
        else:
            uids, epochs, revision = asked.uids or [uuid.uuid4().hex for _ in range(asked.partitions)], [], 0
        replicas = self._new_replicas(broker, uids, voters)
        return CatalogTopic(name, uids, voters, replicas, {}, epochs, asked.settings, revision)

    def _check_unused(self, name: str, uids: list[str]) -> None:
        if len(set(uids)) < len(uids) or not self._used.isdisjoint(uids):
            # Two owners would destroy each other's log.
            raise InvalidRequestError(f"topic {name} cannot use the directories of other partitions")

    def changed_topic(self, topic: CatalogTopic, asked: HostTopic, broker: int) -> CatalogTopic:
        """The topic as it is now asked for. Partitions may be added; what is older than what is known is left out."""
        count = len(topic.partitions)
        if bool(topic.voters) != bool(asked.voters) or asked.uids[:count] != topic.partitions:
            raise InvalidRequestError(
                f"topic {topic.name} is another one here: its partitions have other names", uid=topic.partitions[0]
            )
        added = asked.uids[count:]
        self._check_unused(topic.name, added)
        voters, epochs = [*topic.voters, *asked.voters[count:]], [*topic.epochs] or [0] * count
        epochs += asked.epochs[count:]
        replicas = topic.replicas | self._new_replicas(broker, added, asked.voters[count:])
        founders = dict(topic.founders)
        for number, uid in enumerate(topic.partitions):
            if not voters or asked.epochs[number] <= epochs[number]:
                continue
            told = asked.voters[number]
            if broker not in map(broker_of, told):
                replicas.pop(uid, None)
                founders.pop(uid, None)
            elif uid in replicas:
                founders.setdefault(uid, voters[number])
            else:
                replicas |= self._new_replicas(broker, [uid], [told])
            voters[number], epochs[number] = told, asked.epochs[number]
        newer = asked if asked.revision > topic.revision else topic
        return CatalogTopic(topic.name, asked.uids, voters, replicas, founders, epochs, newer.settings, newer.revision)

    def _new_replicas(self, broker: int, uids: list[str], voters: list[list[int]]) -> dict[str, int]:
        """Of the partitions that name this broker: its founder, or a newcomer under a new id, because this disk may
        have had a replica of that partition before, and has forgotten what that one promised."""
        me = replica_id(broker, self.disk_id)
        return {
            uid: me if me in found else replica_id(broker, _new_disk_id())
            for uid, found in zip(uids, voters, strict=False)
            if broker in map(broker_of, found)
        }

    def renew_replica(self, topic: CatalogTopic, uid: str, broker: int) -> CatalogTopic:
        """The directory of that partition is lost: what comes in its place is another replica."""
        renewed = msgspec.structs.replace(topic, replicas={**topic.replicas, uid: replica_id(broker, _new_disk_id())})
        self._save(topic.name, renewed)
        return renewed

    def add(self, topic: CatalogTopic) -> None:
        """Its directories are there already."""
        self._disk.sync_directory(self._partitions)
        self._save(topic.name, topic)

    def remove(self, name: str, uid: str = "") -> None:
        """Its directories are left-overs from now on. `uid` says which topic of that name is meant."""
        if name not in self.topics:
            raise UnknownTopicError(f"topic {name} does not exist")
        if uid and uid not in self.topics[name].partitions:
            raise UnknownTopicError(f"topic {name} was made again: the one to delete is not here any more")
        self._save(name, None)

    def directory_of(self, uid: str) -> str:
        return f"{self._partitions}/{uid}"

    def remove_leftovers(self) -> None:
        """Blocking. A directory that cannot be removed now is tried again at the next deletion and the next start."""
        known = {topic.partitions[number] for topic in self.topics.values() for number in topic.hosted()}
        for uid in self._disk.list(self._partitions):
            if uid not in known:
                try:
                    self._disk.remove_tree(self.directory_of(uid))
                except OSError as error:
                    logger.warning("leftover_not_removed uid=%s error=%r", uid, str(error))
                else:
                    logger.info("leftover_removed uid=%s", uid)

    def _save(self, name: str, topic: CatalogTopic | None) -> None:
        """Whoever goes over the topics meanwhile goes over those that were there."""
        topics = dict(self.topics)
        old = topics.get(name)
        if topic is None:
            del topics[name]
        else:
            topics[name] = topic
        content = msgspec.structs.replace(self._content, topics=topics)
        self._file.change(name, topic, content)
        self._content = content
        self._used.difference_update(old.partitions if old is not None else ())
        self._used.update(topic.partitions if topic is not None else ())
