"""The catalog on disk: a whole image, and in a journal beside it the changes since, one line each.

A small catalog is written whole every time: one file that can be read. A large one would cost as much for its last
topic as for all before it; its changes go to the journal, until that is as long as the image.

Rule: an image names the only journal that belongs to it. A last line that is not whole was never acknowledged and is
cut; any other one is damage.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk, File, write_atomically

logger = logging.getLogger("quiver.broker")

_FILE: Final = "catalog.json"
_IMAGE_BYTES_SMALL: Final = 64 * 1024
_CHECK_BYTES: Final = 9  # of a line: its checksum in hex, and a space


class CatalogTopic(msgspec.Struct, frozen=True):
    """`voters` are the replicas of each partition as a manager last said; `replicas` says which replica of it is ours.

    Both are empty on a node that is a cluster of its own: it has every partition, and nobody else has. `founders` are
    the voters that a replica of ours began with, where others were told since: its log begins with them.
    """

    name: str
    partitions: list[str]  # the uid of each partition, by number
    voters: list[list[int]] = []
    replicas: dict[str, int] = {}
    founders: dict[str, list[int]] = {}
    epochs: list[int] = []  # of what was last said of each partition
    settings: dict[str, bool | int | str] = {}  # what was set for the topic ...
    revision: int = 0  # ... and which time that was

    def hosted(self) -> list[int]:
        """The partitions that this broker has."""
        return [n for n, uid in enumerate(self.partitions) if not self.voters or uid in self.replicas]

    def founders_of(self, number: int) -> list[int]:
        return self.founders.get(self.partitions[number], self.voters[number])


class Content(msgspec.Struct):
    cluster_id: str
    topics: dict[str, CatalogTopic]
    disk_id: int = 0
    journal: int = 0  # the number of the journal with the changes since; 0: there is none


class _Change(msgspec.Struct):
    """A topic as it is now; None: it is gone."""

    name: str
    topic: CatalogTopic | None


class CatalogFile:
    def __init__(self, disk: Disk, directory: str, small_bytes: int = _IMAGE_BYTES_SMALL) -> None:
        self.path = f"{directory}/{_FILE}"
        self._disk = disk
        self._directory = directory
        self._small_bytes = small_bytes
        self._number = 0
        self._image_bytes = 0
        self._journal: File | None = None  # None: the next change writes an image
        self._end = 0

    @property
    def exists(self) -> bool:
        return self._disk.exists(self.path)

    def load(self) -> Content:
        """Raises CorruptLogError."""
        # Whoever wrote it may have been killed before this: what counts from now on must outlive a power cut.
        self._disk.sync_directory(self._directory)
        file = self._disk.open(self.path)
        raw = file.pread(file.size(), 0)
        try:
            content = msgspec.json.decode(raw, type=Content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptLogError.at(self.path, 0, f"the catalog cannot be read: {error}") from error
        self._number, self._image_bytes = content.journal, len(raw)
        if content.journal and self._load_journal(content):
            # What can be read may not be on the medium, when a sync failed in an earlier life: it counts from now on.
            try:
                self.write(content)
                return content
            except OSError as error:  # a full disk: the next change tries again
                logger.warning("catalog_not_written error=%r", str(error))
        self._remove_old(content.journal)
        return content

    def _load_journal(self, content: Content) -> int:
        """Takes the changes in; returns how many there are."""
        path = self._journal_path(content.journal)
        if not self._disk.exists(path):
            raise CorruptLogError.at(path, 0, "the journal of the catalog is missing")
        file = self._disk.open(path)
        file.datasync()  # of a line that failed and was taken back, perhaps only for this process
        lines = file.pread(file.size(), 0).split(b"\n")
        changes = [_decode(line) for line in lines[:-1]]
        whole = next((at for at, change in enumerate(changes) if change is None), len(changes))
        if any(changes[whole:]):
            end = sum(len(line) + 1 for line in lines[:whole])
            raise CorruptLogError.at(path, end, "a line of the catalog's journal cannot be read")
        for change in changes[:whole]:
            if change is not None and change.topic is not None:
                content.topics[change.name] = change.topic
            elif change is not None:
                content.topics.pop(change.name, None)
        return whole

    def write(self, content: Content) -> None:
        """All of it. When this fails, the file is as before."""
        content = msgspec.structs.replace(content, journal=0)
        raw = msgspec.json.format(msgspec.json.encode(content), indent=1)
        journal: File | None = None
        number = self._number
        if len(raw) > self._small_bytes:
            content.journal = number = number + 1
            raw = msgspec.json.format(msgspec.json.encode(content), indent=1)
            # Made before the image that needs it; both names are synced with it.
            journal = self._disk.open(self._journal_path(number), create=True)
            journal.truncate(0)
            journal.datasync()  # one of that number may have been removed, and come back with a power cut
        write_atomically(self._disk, self.path, raw)
        self._number, self._image_bytes, self._journal, self._end = number, len(raw), journal, 0
        self._remove_old(content.journal)

    def change(self, name: str, topic: CatalogTopic | None, content: Content) -> None:
        """Stores what became of one topic; `content` has it already."""
        journal = self._journal
        if journal is None or self._end > max(self._small_bytes, self._image_bytes):
            self.write(content)
            return
        body = msgspec.json.encode(_Change(name, topic))
        line = b"%08x %b\n" % (crc32c(body), body)
        try:
            journal.pwrite([line], self._end)
            journal.datasync()
        except OSError:
            # It may be on the disk or not. The next change is an image, which this line is no part of.
            self._journal = None
            journal.truncate(self._end)
            journal.datasync()
            raise
        self._end += len(line)

    def _journal_path(self, number: int) -> str:
        return f"{self._directory}/catalog-{number}.log"

    def _remove_old(self, number: int) -> None:
        """Journals of earlier images, or of one that never came to be."""
        mine = f"catalog-{number}.log"
        for name in self._disk.list(self._directory):
            if name.startswith("catalog-") and name.endswith(".log") and name != mine:
                try:
                    self._disk.remove(f"{self._directory}/{name}")
                except OSError as error:
                    logger.warning("journal_not_removed name=%s error=%r", name, str(error))


def _decode(line: bytes) -> _Change | None:
    """None: it is not whole."""
    try:
        if int(line[: _CHECK_BYTES - 1], 16) != crc32c(line[_CHECK_BYTES:]):
            return None
        return msgspec.json.decode(line[_CHECK_BYTES:], type=_Change)
    except (ValueError, msgspec.DecodeError):
        return None
