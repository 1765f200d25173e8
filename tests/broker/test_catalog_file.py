"""The catalog on disk: what was stored is there after any crash, and a large one is not written again each time."""

from __future__ import annotations

import errno

import pytest

from quiver.broker.catalog_file import CatalogFile, CatalogTopic, Content
from quiver.errors import CorruptLogError
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash

DIRECTORY = "data/broker-1"
SMALL = 300  # bytes: nearly every catalog here is a large one


class Life:
    """A catalog and what it must hold."""

    def __init__(self, seed: int) -> None:
        self.disk = FaultyDisk(seed)
        self.disk.make_directory(DIRECTORY)
        self.stored = Content("cluster", {}, 7)
        self.file = CatalogFile(self.disk, DIRECTORY, SMALL)
        self.file.write(self.stored)
        self.number = 0

    def change(self, name: str) -> None:
        self.number += 1
        topic = None
        if name not in self.stored.topics or self.disk.chance.random() < 0.5:
            topic = CatalogTopic(name, [f"uid-{self.number}"] * self.disk.chance.randint(1, 4))
        self.wanted = Content("cluster", dict(self.stored.topics), 7)
        if topic is None:
            del self.wanted.topics[name]
        else:
            self.wanted.topics[name] = topic
        self.file.change(name, topic, self.wanted)
        self.stored = self.wanted

    def load(self) -> dict[str, CatalogTopic]:
        self.file = CatalogFile(self.disk, DIRECTORY, SMALL)
        return self.file.load().topics

    def journals(self) -> list[str]:
        return [name for name in self.disk.list(DIRECTORY) if name.endswith(".log")]


@pytest.mark.parametrize("seed", range(100))
def test_what_was_stored_is_there_after_power_cuts_and_full_disks(seed: int) -> None:
    life = Life(seed)
    chance = life.disk.chance
    for _ in range(12):
        life.disk.stop_at(chance.randint(5, 60))
        if chance.random() < 0.5:
            life.disk.fail(chance.choice(["pwrite", "datasync"]), errno.ENOSPC, chance.randint(1, 10))
        life.wanted = life.stored
        try:
            while True:
                try:
                    life.change(f"topic-{chance.randint(0, 9)}")
                except OSError:
                    break  # said to have failed: after a crash it may be there, and nothing else may be different
        except SimulatedCrash:
            pass
        life.disk.heal()
        (life.disk.crash if chance.random() < 0.5 else life.disk.kill)()
        found = life.load()
        assert found in (life.stored.topics, life.wanted.topics)
        life.stored = Content("cluster", found, 7)
        assert len(life.journals()) <= 1


def test_a_change_that_failed_is_not_there_for_the_next_process() -> None:
    life = Life(1)
    for number in range(20):
        life.change(f"topic-{number}")
    assert life.journals()
    life.disk.fail("datasync", errno.ENOSPC, path="catalog")
    with pytest.raises(OSError, match="space"):
        life.change("one-more")
    life.change("topic-3")
    life.disk.kill()
    assert life.load() == life.stored.topics


def test_a_large_catalog_is_not_written_again_for_each_topic() -> None:
    life = Life(2)
    for number in range(50):
        life.change(f"topic-{number}")
    image, operations = life.disk.open(life.file.path).size(), life.disk.operations
    life.change("another")
    assert life.disk.operations - operations == 2, "one write, one sync"
    assert life.disk.open(life.file.path).size() == image


def test_a_journal_is_replaced_by_an_image_before_it_is_much_longer_than_that() -> None:
    life = Life(3)
    for _ in range(400):
        life.change(f"topic-{life.disk.chance.randint(0, 9)}")
        journal = sum(life.disk.open(f"{DIRECTORY}/{name}").size() for name in life.journals())
        assert journal <= life.disk.open(life.file.path).size() + SMALL + 200
    assert life.load() == life.stored.topics


@pytest.mark.parametrize("back", range(1, 40))
def test_a_torn_last_line_is_cut(back: int) -> None:
    life = Life(4)
    for number in range(20):
        life.change(f"topic-{number}")
    before = dict(life.stored.topics)
    life.change("the-last")
    file = life.disk.open(f"{DIRECTORY}/{life.journals()[0]}")
    file.truncate(file.size() - back)
    assert life.load() == before
    life.stored = Content("cluster", before, 7)
    life.change("after-it")
    life.change("and-another")
    assert life.load() == life.stored.topics


def test_damage_before_the_last_line_is_named() -> None:
    life = Life(5)
    for number in range(20):
        life.change(f"topic-{number}")
    path = f"{DIRECTORY}/{life.journals()[0]}"
    file = life.disk.open(path)
    file.pwrite([b"X"], 20)
    with pytest.raises(CorruptLogError) as caught:
        life.load()
    assert caught.value.facts["path"] == path
    life.disk.remove(path)
    with pytest.raises(CorruptLogError, match="journal of the catalog is missing"):
        life.load()
