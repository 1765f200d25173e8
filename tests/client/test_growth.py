"""Topics get more partitions while they are written and read: producers and consumers notice it by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from quiver import Admin, Consumer, Producer, aio
from quiver.errors import InvalidRequestError, UnknownTopicError
from tests.system.kit import Node, until

REFRESH_S = 0.05


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Node(tmp_path_factory.mktemp("node")) as node:
        yield node.address


def test_partitions_are_added_and_never_taken_away(servers: str) -> None:
    with Admin(servers) as admin:
        admin.create_topic("grow", 2)
        assert len(admin.add_partitions("grow", 5).partitions) == 5
        assert len(admin.add_partitions("grow", 5).partitions) == 5
        assert admin.offsets("grow") == dict.fromkeys(range(5), (0, 0))
        with pytest.raises(InvalidRequestError, match="Topic grow has 5 partitions; their number can only grow"):
            admin.add_partitions("grow", 4)
        with pytest.raises(UnknownTopicError):
            admin.add_partitions("nowhere", 4)
        for wrong in (0, 10_001, "3", True, 2.0):
            with pytest.raises(InvalidRequestError, match="partitions is an int"):
                admin.add_partitions("grow", wrong)  # type: ignore[arg-type]


def test_producer_uses_new_partitions_without_a_restart(servers: str) -> None:
    with Admin(servers) as admin, Producer(servers, metadata_refresh=REFRESH_S) as producer:
        admin.create_topic("written")
        assert producer.send("written", b"0").result(30).partition == 0
        admin.add_partitions("written", 3)
        met: set[int] = set()

        def has_met_all() -> bool:
            met.add(producer.send("written", b"x").result(30).partition)
            return met == {0, 1, 2}

        until(has_met_all)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_consumer_reads_new_partitions_from_their_first_record_on(servers: str, start: str) -> None:
    topic = f"read-{start}"
    with Admin(servers) as admin:
        admin.create_topic(topic)
        with Consumer(servers, [topic], group=topic, start=start, metadata_refresh=REFRESH_S) as consumer:
            until(lambda: consumer.poll(timeout=0.1) == [] and consumer.position(topic, 0) == 0)
            admin.add_partitions(topic, 3)
            with Producer(servers) as producer:
                for partition in range(3):
                    producer.send_many(topic, [b"%d" % number for number in range(100)], partition=partition)
            seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

            def has_all() -> bool:
                for record in consumer.poll(timeout=1):
                    seen[record.partition].append(record.offset)
                return sum(map(len, seen.values())) >= 300

            until(has_all)
            consumer.commit()
        assert seen == {partition: list(range(100)) for partition in range(3)}
        with Consumer(servers, [topic], group=topic, start="committed") as consumer:
            assert [consumer.position(topic, partition) for partition in range(3)] == [100, 100, 100]


def test_consumer_of_named_partitions_keeps_to_them(servers: str) -> None:
    with Admin(servers) as admin:
        admin.create_topic("named", 2)
        consumer = Consumer(servers, ["named"], partitions={"named": [1]}, metadata_refresh=REFRESH_S)
        with consumer, Producer(servers, metadata_refresh=REFRESH_S) as producer:
            assert consumer.poll(timeout=0.1) == []
            admin.add_partitions("named", 4)
            for partition in (0, 1):
                producer.send("named", b"x", partition=partition).result(30)
            assert [record.partition for record in consumer.poll(timeout=30)] == [1]
            assert consumer.position("named", 3) is None


def test_the_asyncio_face_notices_them_too(servers: str) -> None:
    async def main() -> None:
        async with aio.Admin(servers) as admin, aio.Producer(servers, metadata_refresh=REFRESH_S) as producer:
            await admin.create_topic("loop")
            async with aio.Consumer(servers, ["loop"], metadata_refresh=REFRESH_S) as consumer:
                await producer.send("loop", b"first")
                assert len(await consumer.poll(timeout=30)) == 1
                await admin.add_partitions("loop", 2)
                seen: set[int] = set()
                async with asyncio.timeout(30):
                    while 1 not in seen:
                        await producer.send("loop", b"x")
                        seen |= {record.partition for record in await consumer.poll(timeout=1)}

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), "1", True])
def test_how_often_to_look_is_a_time(servers: str, wrong: object) -> None:
    for make in (
        lambda: Producer(servers, metadata_refresh=wrong),
        lambda: Consumer(servers, ["x"], metadata_refresh=wrong),
    ):
        with pytest.raises(InvalidRequestError, match="metadata_refresh is a number of seconds above 0"):
            make()
