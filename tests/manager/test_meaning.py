"""The classic HTTP API's rules of meaning, one by one, on a real node."""

from __future__ import annotations

import pytest

from quiver.wire.partitioning import partition_of_key
from tests.manager.kit import Api, fresh, state_of

pytestmark = pytest.mark.system


@pytest.fixture
def topic(api: Api) -> str:
    """Three partitions."""
    return api.create(fresh(), 3)


@pytest.fixture
def single(api: Api) -> str:
    return api.create(fresh())


# -- who may do what ---------------------------------------------------------------------------------------------


def test_a_producer_of_a_topic_may_write_to_any_partition(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    assert [api.produce(topic, producer, "m", partition_id=number)[0] for number in (2, 0, 1)] == [2, 0, 1]


def test_a_producer_of_a_partition_may_write_only_to_that_one(api: Api, topic: str) -> None:
    producer, watcher = api.producer(topic, partition_id=1), api.consumer(topic)
    assert api.produce(topic, producer, "m") == (1, 0)
    assert api.produce(topic, producer, "m", partition_id=1) == (1, 1)
    # Neither a key nor a client's name leads elsewhere.
    assert api.produce(topic, producer, "m", key="k")[0] == 1
    assert api.produce(topic, producer, "m", prod_client=fresh("c"), sequence=0)[0] == 1
    fields = {"topic": topic, "producer_id": producer, "message": "m"}
    message = f"Producer {producer} is registered to partition 1 only"
    assert api.refusal("POST", "/producer/produce", **fields, partition_id=0) == message
    assert api.size(topic, watcher) == 4


def test_a_consumer_of_a_partition_reads_only_that_one(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic, partition_id=2)
    for number in range(6):
        api.produce(topic, producer, f"m{number}", partition_id=number % 3)
    assert api.size(topic, consumer) == 2
    message = f"Consumer {consumer} is registered to partition 2 only"
    assert api.refusal("GET", "/consumer/consume", topic=topic, consumer_id=consumer, partition_id=0) == message
    assert api.refusal("POST", "/consumer/set_offset", consumer_id=consumer, offset=-1, partition_id=0) == message
    assert api.consume_all(topic, consumer) == ["m2", "m5"]
    assert api.size(topic, consumer) == 0


def test_ids_that_are_not_of_the_topic_are_refused_and_store_nothing(api: Api, topic: str, single: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    stranger, reader = api.producer(single), api.consumer(single)
    api.produce(topic, producer, "m")
    before = state_of(api)
    for wrong in (stranger, 10**9, 0, -1, consumer + 10**6):
        fields = {"topic": topic, "producer_id": wrong, "message": "x"}
        message = f"Producer {wrong} is not registered to topic {topic}"
        assert api.refusal("POST", "/producer/produce", **fields) == message
    for wrong in (reader, 10**9, 0, -1):
        fields = {"topic": topic, "consumer_id": wrong}
        message = f"Consumer {wrong} is not registered to topic {topic}"
        assert api.refusal("GET", "/consumer/consume", **fields) == message
        assert api.refusal("GET", "/size", **fields) == message
        assert api.refusal("POST", "/consumer/set_offset", **fields, offset=0) == message
    assert api.refusal("POST", "/consumer/set_offset", consumer_id=10**9, offset=0).startswith("Consumer 1000000000 ")
    assert state_of(api) == before


def test_ids_are_unique_over_all_topics(api: Api) -> None:
    topics = [api.create(fresh()) for _ in range(4)]
    producers = [api.producer(topic) for topic in topics * 3]
    consumers = [api.consumer(topic) for topic in topics * 3]
    assert producers == list(range(producers[0], producers[0] + 12))
    assert consumers == list(range(consumers[0], consumers[0] + 12))


@pytest.mark.parametrize("partition", [3, -1, 10**6])
def test_a_partition_that_does_not_exist_is_refused(api: Api, topic: str, partition: int) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    message = f"Partition {partition} does not exist in topic {topic}"
    before = state_of(api)
    for method, path, fields in (
        ("POST", "/producer/register", {"topic": topic}),
        ("POST", "/consumer/register", {"topic": topic}),
        ("POST", "/producer/produce", {"topic": topic, "producer_id": producer, "message": "m"}),
        ("GET", "/consumer/consume", {"topic": topic, "consumer_id": consumer}),
        ("POST", "/consumer/set_offset", {"consumer_id": consumer, "offset": -1}),
    ):
        assert api.refusal(method, path, **fields, partition_id=partition) == message, path
    missing = fresh()
    refused = api.refusal("POST", "/producer/register", topic=missing, partition_id=3)
    assert refused == f"Partition 3 does not exist in topic {missing}"
    assert state_of(api) == before, "and the missing topic was not made on the way"


# -- which partition ---------------------------------------------------------------------------------------------


def test_messages_without_a_partition_go_round(api: Api, topic: str) -> None:
    first, second = api.producer(topic), api.producer(topic)
    places = [api.produce(topic, producer, "m") for producer in (first, second, first, first, second, first)]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_a_client_name_without_sequence_is_only_a_label(api: Api, topic: str) -> None:
    producer, client = api.producer(topic), fresh("client")
    places = [api.produce(topic, producer, "same", prod_client=client) for _ in range(6)]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], "stored each time, round the partitions"
    assert api.client_size(client) == 6


def test_a_key_chooses_its_partition(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    places = {key: api.produce(topic, producer, "m", key=key)[0] for key in map(str, range(30))}
    assert set(places.values()) == {0, 1, 2}
    for key, partition in places.items():
        assert api.produce(topic, producer, "m", key=key)[0] == partition
        assert partition == partition_of_key(key.encode(), 3), "the one rule that the SDK has too"


def test_the_rule_for_keys_never_changes() -> None:
    """A changed rule would send a key's next message elsewhere than its last one."""
    found = [partition_of_key(key, 7) for key in (b"", b"a", b"key", b"quiver", "ü".encode(), bytes(100))]
    assert found == [0, 1, 3, 1, 5, 0]


def test_a_named_partition_goes_before_a_key(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    elsewhere = (partition_of_key(b"k", 3) + 1) % 3
    assert api.produce(topic, producer, "m", key="k", partition_id=elsewhere)[0] == elsewhere


def test_numbered_messages_of_a_client_go_to_the_partition_of_its_name(api: Api, topic: str) -> None:
    producer, other = api.producer(topic), api.producer(topic)

    def client_of(partition: int) -> str:
        names = iter(lambda: fresh("client"), "")
        return next(name for name in names if partition_of_key(name.encode(), 3) == partition)

    for partition in (0, 1, 2, 0):
        client = client_of(partition)
        places = [
            api.produce(topic, sender, f"{client} {sequence}", prod_client=client, sequence=sequence)
            for sequence, sender in enumerate((producer, other, producer, producer))
        ]
        assert {found for found, _ in places} == {partition}


# -- sequence ----------------------------------------------------------------------------------------------------


def test_the_same_number_again_is_acknowledged_and_stored_once(api: Api, topic: str) -> None:
    producer, consumer, client = api.producer(topic), api.consumer(topic), fresh("client")
    first = [api.produce(topic, producer, f"m{number}", prod_client=client, sequence=number) for number in range(3)]
    again = [api.produce(topic, producer, f"m{number}", prod_client=client, sequence=number) for number in (2, 0, 1, 2)]
    assert again == [first[2], first[0], first[1], first[2]]
    assert api.client_size(client) == 3
    assert api.consume_all(topic, consumer) == ["m0", "m1", "m2"]


def test_an_old_number_is_still_answered_with_its_first_offset(api: Api, topic: str) -> None:
    """However long ago: the broker remembers only the last few by heart."""
    producer, client, other = api.producer(topic), fresh("client"), fresh("client")
    first = {}
    for number in range(40):
        first[number] = api.produce(topic, producer, f"m{number}", prod_client=client, sequence=number, partition_id=0)
        api.produce(topic, producer, "noise", partition_id=0)
        api.produce(topic, producer, "noise", prod_client=other, sequence=number, partition_id=0)
        api.produce(topic, producer, "label", prod_client=client, partition_id=0)
    for number in (0, 1, 20, 30, 31, 32, 39):
        again = api.produce(topic, producer, f"m{number}", prod_client=client, sequence=number, partition_id=0)
        assert again == first[number], number
    assert api.client_size(client) == 80


@pytest.mark.parametrize("number", [1, 2, 100, 2**61])
def test_a_gap_names_the_expected_number(api: Api, topic: str, number: int) -> None:
    producer, watcher, client = api.producer(topic), api.consumer(topic), fresh("client")
    fields = {"topic": topic, "producer_id": producer, "message": "m", "prod_client": client}
    message = api.refusal("POST", "/producer/produce", **fields, sequence=number)
    assert message == f"Sequence {number} is out of order: the expected sequence is 0"
    api.produce(topic, producer, "m", prod_client=client, sequence=0)
    message = api.refusal("POST", "/producer/produce", **fields, sequence=number + 1)
    assert message == f"Sequence {number + 1} is out of order: the expected sequence is 1"
    assert api.size(topic, watcher) == 1
    assert api.client_size(client) == 1


def test_numbers_are_counted_for_each_client_and_partition(api: Api, topic: str) -> None:
    producer, one, two = api.producer(topic), fresh("client"), fresh("client")
    assert api.produce(topic, producer, "m", prod_client=one, sequence=0, partition_id=0) == (0, 0)
    assert api.produce(topic, producer, "m", prod_client=two, sequence=0, partition_id=0) == (0, 1)
    assert api.produce(topic, producer, "m", prod_client=one, sequence=0, partition_id=1) == (1, 0)
    assert api.produce(topic, producer, "m", prod_client=one, sequence=1, partition_id=0) == (0, 2)
    assert api.client_size(one) == 3
    assert api.client_size(two) == 1


def test_a_sequence_needs_a_client(api: Api, topic: str) -> None:
    producer, watcher = api.producer(topic), api.consumer(topic)
    fields = {"topic": topic, "producer_id": producer, "message": "m", "sequence": 0}
    assert "prod_client" in api.refusal("POST", "/producer/produce", **fields)
    assert "sequence" in api.refusal("POST", "/producer/produce", **fields | {"sequence": -1}, prod_client="c")
    assert api.size(topic, watcher) == 0


def test_a_client_name_must_be_one(api: Api, topic: str) -> None:
    producer, watcher = api.producer(topic), api.consumer(topic)
    fields = {"topic": topic, "producer_id": producer, "message": "m"}
    for client in ("", "x" * 256):
        message = api.refusal("POST", "/producer/produce", **fields, prod_client=client)
        assert message == "prod_client must have 1 to 255 characters"
    assert api.size(topic, watcher) == 0
    api.produce(topic, producer, "m", prod_client="ü" * 255)


def test_a_label_between_numbered_messages_changes_no_number(api: Api, single: str) -> None:
    producer, client = api.producer(single), fresh("client")
    assert api.produce(single, producer, "a", prod_client=client, sequence=0) == (0, 0)
    assert api.produce(single, producer, "b", prod_client=client) == (0, 1)
    assert api.produce(single, producer, "c", prod_client=client, sequence=1) == (0, 2)
    assert api.client_size(client) == 3


def test_clients_are_counted_over_all_topics(api: Api, topic: str, single: str) -> None:
    client = fresh("client")
    for name in (topic, single):
        producer = api.producer(name)
        api.produce(name, producer, "m", prod_client=client)
        api.produce(name, producer, "m", prod_client=client, sequence=0)
    assert api.client_size(client) == 4


# -- after -------------------------------------------------------------------------------------------------------


def test_a_lost_reply_is_delivered_again(api: Api, single: str) -> None:
    producer, consumer = api.producer(single), api.consumer(single)
    for number in range(4):
        api.produce(single, producer, f"m{number}")
    assert api.consume(single, consumer) == "m0"
    assert api.consume(single, consumer) == "m1"
    # It never saw m1: the last it saw is offset 0.
    for _ in range(3):
        found = api.get("/consumer/consume", topic=single, consumer_id=consumer, after=0)
        assert found == {"message": "m1", "offset": 1, "partition_id": 0}
    assert api.get("/consumer/consume", topic=single, consumer_id=consumer, after=1)["offset"] == 2
    assert api.size(single, consumer) == 1, "what was delivered again is not read twice"
    # The very first reply was lost: it has seen nothing yet.
    assert api.consume(single, consumer, after=-1) == "m0"
    assert api.consume(single, consumer, after=2) == "m3"
    assert api.consume(single, consumer, after=3) is None
    assert api.consume(single, consumer, after=2) == "m3", "also the last one of all"


def test_after_says_nothing_new_when_no_reply_was_lost(api: Api, single: str) -> None:
    producer, consumer = api.producer(single), api.consumer(single)
    for number in range(5):
        api.produce(single, producer, f"m{number}")
    seen = []
    after = -1
    while (
        answer := api.call("GET", "/consumer/consume", topic=single, consumer_id=consumer, after=after)
    ).status == 200:
        seen.append(answer.message)
        after = answer.body["offset"]
    assert seen == ["m0", "m1", "m2", "m3", "m4"]


def test_after_cannot_skip_messages(api: Api, single: str) -> None:
    producer, consumer = api.producer(single), api.consumer(single)
    for number in range(3):
        api.produce(single, producer, f"m{number}")
    assert api.consume(single, consumer, after=1) == "m0"
    assert api.consume(single, consumer, after=10**15) == "m1"


def test_after_belongs_to_one_partition(api: Api, topic: str) -> None:
    """With several of them nobody can tell whose offset it is; a guess would repeat what was read."""
    producer, consumer = api.producer(topic), api.consumer(topic)
    for number in range(6):
        api.produce(topic, producer, f"m{number}")
    for _ in range(4):
        api.consume(topic, consumer)
    before = state_of(api)
    fields = {"topic": topic, "consumer_id": consumer, "after": 0}
    assert "partition_id" in api.refusal("GET", "/consumer/consume", **fields)
    assert state_of(api) == before
    found = api.get("/consumer/consume", **fields, partition_id=0)
    assert found == {"message": "m3", "offset": 1, "partition_id": 0}


@pytest.mark.parametrize("after", [-2, 2**62, 2**63])
def test_after_must_be_an_offset(api: Api, single: str, after: int) -> None:
    consumer = api.consumer(single)
    assert "after" in api.refusal("GET", "/consumer/consume", topic=single, consumer_id=consumer, after=after)


# -- set_offset --------------------------------------------------------------------------------------------------


def test_minus_one_is_the_start_and_each_offset_is_followed_by_the_next(api: Api, single: str) -> None:
    producer, consumer = api.producer(single), api.consumer(single)
    messages = [f"m{number}" for number in range(5)]
    for message in messages:
        api.produce(single, producer, message)
    for offset in (-1, 0, 3, 1, 4, -1):
        api.post("/consumer/set_offset", consumer_id=consumer, offset=offset, topic=single)
        assert api.size(single, consumer) == 4 - offset
        assert api.consume_all(single, consumer) == messages[offset + 1 :]


@pytest.mark.parametrize("offset", [-2, 5, 6, 10**12, 2**62, -(2**62)])
def test_an_offset_out_of_range_is_refused(api: Api, single: str, offset: int) -> None:
    producer, consumer = api.producer(single), api.consumer(single)
    for number in range(5):
        api.produce(single, producer, f"m{number}")
    api.consume(single, consumer)
    message = api.refusal("POST", "/consumer/set_offset", consumer_id=consumer, offset=offset)
    assert message == (f"Offset {offset} is out of range for partition 0 of topic {single}: it may be -1 to 4")
    assert api.size(single, consumer) == 4


def test_an_empty_partition_has_only_a_start(api: Api, single: str) -> None:
    consumer = api.consumer(single)
    api.post("/consumer/set_offset", consumer_id=consumer, offset=-1)
    message = api.refusal("POST", "/consumer/set_offset", consumer_id=consumer, offset=0)
    assert message == f"Offset 0 is out of range for partition 0 of topic {single}: it may be -1 to -1"


def test_an_offset_that_one_partition_lacks_moves_none(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    for partition, count in ((0, 3), (1, 1)):  # and partition 2 is empty
        for number in range(count):
            api.produce(topic, producer, f"{partition}:{number}", partition_id=partition)
    for offset, lacking in ((0, 2), (1, 1), (2, 1)):
        message = api.refusal("POST", "/consumer/set_offset", consumer_id=consumer, offset=offset)
        assert f"partition {lacking} of" in message
        assert api.size(topic, consumer) == 4, "a failure changes nothing"
    api.post("/consumer/set_offset", consumer_id=consumer, offset=1, partition_id=0)
    assert api.size(topic, consumer) == 2
    assert sorted(api.consume_all(topic, consumer)) == ["0:2", "1:0"]
    api.post("/consumer/set_offset", consumer_id=consumer, offset=-1)
    assert api.size(topic, consumer) == 4


def test_setting_an_offset_moves_nobody_else(api: Api, single: str) -> None:
    producer, one, two = api.producer(single), api.consumer(single), api.consumer(single)
    for number in range(3):
        api.produce(single, producer, f"m{number}")
    assert api.consume_all(single, one) == api.consume_all(single, two) == ["m0", "m1", "m2"]
    api.post("/consumer/set_offset", consumer_id=one, offset=-1)
    assert (api.size(single, one), api.size(single, two)) == (3, 0)


# -- consume -----------------------------------------------------------------------------------------------------


def test_a_new_consumer_starts_at_the_oldest_message(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    for number in range(6):
        api.produce(topic, producer, f"m{number}")
    consumer = api.consumer(topic)
    assert api.size(topic, consumer) == 6
    assert api.consume_all(topic, consumer) == ["m0", "m1", "m2", "m3", "m4", "m5"]


def test_consumers_read_independently(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    consumers = [api.consumer(topic) for _ in range(3)]
    for number in range(9):
        api.produce(topic, producer, f"m{number}")
    reads = [[api.consume(topic, consumer) for _ in range(3 * turn)] for turn, consumer in enumerate(consumers)]
    assert reads == [[], ["m0", "m1", "m2"], ["m0", "m1", "m2", "m3", "m4", "m5"]]
    assert [api.size(topic, consumer) for consumer in consumers] == [9, 6, 3]
    rest = [read + api.consume_all(topic, consumer) for read, consumer in zip(reads, consumers, strict=True)]
    assert rest == [[f"m{number}" for number in range(9)]] * 3


def test_consuming_goes_round_and_skips_empty_partitions(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    for number in range(3):
        api.produce(topic, producer, f"0:{number}", partition_id=0)
    for number in range(2):
        api.produce(topic, producer, f"2:{number}", partition_id=2)
    assert api.consume_all(topic, consumer) == ["0:0", "2:0", "0:1", "2:1", "0:2"]
    api.produce(topic, producer, "1:0", partition_id=1)
    assert api.consume(topic, consumer) == "1:0"
    assert api.consume(topic, consumer) is None


def test_no_new_message_only_when_all_partitions_are_empty(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    assert api.consume(topic, consumer) is None
    for partition in (2, 1, 0, 1, 1):
        api.produce(topic, producer, f"in {partition}", partition_id=partition)
        assert api.consume(topic, consumer) == f"in {partition}"
        assert api.consume(topic, consumer) is None


def test_a_named_partition_is_read_alone(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    for number in range(6):
        api.produce(topic, producer, f"m{number}")
    assert api.consume_all(topic, consumer, partition_id=1) == ["m1", "m4"]
    assert api.size(topic, consumer) == 4
    assert api.get("/size", topic=topic, consumer_id=consumer, partition_id=1) == {"size": 0}
    assert sorted(api.consume_all(topic, consumer)) == ["m0", "m2", "m3", "m5"]


def test_all_consumers_see_one_order_of_a_partition(api: Api, single: str) -> None:
    producers = [api.producer(single) for _ in range(3)]
    sent = [f"m{number}" for number in range(30)]
    for number, message in enumerate(sent):
        api.produce(single, producers[number % 3], message)
    assert [api.consume_all(single, api.consumer(single)) for _ in range(3)] == [sent] * 3
