"""Which topics this node has and which directory holds which partition.

Rule: a topic exists from the moment the file that names it is on disk, and not a moment longer than that. Directories
that no topic names are left-overs of a crash and are removed.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from quiver.errors import CorruptLogError, TopicExistsError, UnknownTopicError
from quiver.log.disk import Disk, write_atomically

_FILE: Final = "catalog.json"


class CatalogTopic(msgspec.Struct, frozen=True):
    name: str
    partitions: list[str]  # the uid of each partition, by number


class _Content(msgspec.Struct):
    cluster_id: str
    topics: dict[str, CatalogTopic]


class Catalog:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{_FILE}"
        if disk.exists(self._path):
            file = disk.open(self._path)
            try:
                self._content = msgspec.json.decode(file.pread(file.size(), 0), type=_Content)
            except msgspec.DecodeError as error:
                raise CorruptLogError.at(self._path, 0, f"the catalog cannot be read: {error}") from error
        else:
            self._content = _Content(uuid.uuid4().hex, {})
            self._save(self._content.topics)

    @property
    def cluster_id(self) -> str:
        return self._content.cluster_id

    @property
    def topics(self) -> dict[str, CatalogTopic]:
        return self._content.topics

    def new_topic(self, name: str, partitions: int) -> CatalogTopic:
        """A topic with fresh directories' names; it does not exist before `add`."""
        if name in self.topics:
            raise TopicExistsError(f"topic {name} already exists")
        return CatalogTopic(name, [uuid.uuid4().hex for _ in range(partitions)])

    def add(self, topic: CatalogTopic) -> None:
        self._save({**self.topics, topic.name: topic})

    def remove(self, name: str) -> CatalogTopic:
        topic = self.topics.get(name)
        if topic is None:
            raise UnknownTopicError(f"topic {name} does not exist")
        self._save({other: kept for other, kept in self.topics.items() if other != name})
        return topic

    def _save(self, topics: dict[str, CatalogTopic]) -> None:
        content = _Content(self._content.cluster_id, topics)
        write_atomically(self._disk, self._path, msgspec.json.format(msgspec.json.encode(content), indent=1))
        self._content = content
