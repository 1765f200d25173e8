"""Classic clients and several managers: who is asked what, and what happens when one of them is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from quiver.classic import MyConsumer, MyConsumerError, MyProducer
from quiver.errors import InvalidRequestError
from tests.system.kit import free_port
from tests.system.nginx_kit import StrawManager


class StrawQuorum:
    """Managers that give every call what it wants to hear."""

    def __init__(self) -> None:
        self.managers = [StrawManager(name) for name in ("1", "2", "3")]
        self.lead(0)

    def lead(self, primary: int) -> None:
        places = [{"ip": "127.0.0.1", "port": int(manager.place.rpartition(":")[2])} for manager in self.managers]
        others = [place for at, place in enumerate(places) if at != primary]
        said = {"status": "success", "topics": [], "partitions": [0], "producer_id": 1, "consumer_id": 1, "offset": 0}
        said |= {"partition_id": 0, "message": "m", "primary": places[primary], "replicas": others}
        for manager in self.managers:
            manager.body = json.dumps(said).encode()

    def url(self, at: int) -> str:
        return f"http://{self.managers[at].place}"

    def asked(self, path: str) -> list[int]:
        return [sum(path in call for call in manager.calls) for manager in self.managers]


@pytest.fixture
def quorum() -> Iterator[StrawQuorum]:
    made = StrawQuorum()
    yield made
    for manager in made.managers:
        manager.close()


@pytest.mark.parametrize("given", [0, 1])
def test_changes_go_to_the_primary_and_reads_to_the_secondaries(quorum: StrawQuorum, given: int) -> None:
    with MyProducer(quorum.url(given)) as producer, MyConsumer(quorum.url(given)) as consumer:
        producer.RegisterProducer("t")
        consumer.RegisterConsumer("t")
        for _ in range(10):
            producer.Enqueue("t", "m")
            consumer.Dequeue("t")
    assert quorum.asked("POST") == [12, 0, 0]
    assert quorum.asked("/consumer/consume") == [0, 5, 5]


def test_a_name_of_the_host_is_as_good_as_its_address(quorum: StrawQuorum) -> None:
    with MyConsumer(quorum.url(0).replace("127.0.0.1", "localhost")) as consumer:
        for _ in range(10):
            consumer.ListTopics()
    assert quorum.asked("/topics") == [0, 5, 5]


def test_a_manager_that_is_gone_costs_a_retry(quorum: StrawQuorum) -> None:
    with MyProducer(quorum.url(0), timeout=5) as producer:
        producer.RegisterProducer("t")
        producer.Enqueue("t", "m")
        quorum.managers[0].close()
        quorum.managers[0].cut_all()
        quorum.lead(1)
        for _ in range(5):
            producer.Enqueue("t", "m")
    # The first found the old primary away and asked the next in the list; then it was told who leads.
    assert quorum.asked("/producer/produce")[1] >= 4
    assert sum(quorum.asked("/producer/produce")) == 6


def test_one_of_the_given_ones_is_enough(quorum: StrawQuorum) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for given in ([nobody, quorum.url(2)], f"{nobody},{quorum.url(2)}"):
        with MyConsumer(given, timeout=5) as consumer:
            assert consumer.ListTopics() == []
    with MyConsumer([nobody], timeout=0.2) as consumer, pytest.raises(MyConsumerError, match="does not answer"):
        consumer.ListTopics()


def test_what_stands_before_the_managers_is_kept_to(quorum: StrawQuorum) -> None:
    """nginx says what a manager says, and is none."""
    door = StrawManager("door")
    try:
        door.body = quorum.managers[0].body
        with MyProducer(f"http://{door.place}") as producer:
            producer.RegisterProducer("t")
            producer.Enqueue("t", "m")
        assert [manager.calls for manager in quorum.managers] == [[], [], []]
        assert len(door.calls) == 4
    finally:
        door.close()


@pytest.mark.parametrize("given", [[], "", "http://127.0.0.1:1,", ["http://127.0.0.1:1", "x"], None, 3])
def test_addresses_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError):
        MyConsumer(given)  # type: ignore[arg-type]
