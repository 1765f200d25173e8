"""A node that is killed, stopped and started again keeps what it acknowledged."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer
from tests.system.crash_rounds import run_rounds
from tests.system.kit import SMALL_FILES, Node, create_topic, read_all, values_of

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_rounds_of_kills_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    """All 200 rounds: python -m tests.system.crash_rounds --rounds 200"""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown by pytest when the test fails
    result = run_rounds(tmp_path, 5, seed)
    assert result.violations == []
    assert result.acknowledged > 200
    assert result.seen >= result.acknowledged


def test_message_received_is_the_message_sent(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        create_topic(node.address, "DS")
        with Producer(node.address) as producer, Consumer(node.address, ["DS"]) as consumer:
            sent = producer.send("DS", b"hello")
            (received,) = consumer.poll(timeout=10)
        assert received.value == b"hello"
        where = sent.result(10)
        assert (received.topic, received.partition, received.offset) == (where.topic, where.partition, where.offset)


def test_terminated_node_ends_with_code_zero_and_nothing_torn(tmp_path: Path) -> None:
    with Node(tmp_path, SMALL_FILES) as node:
        create_topic(node.address, "t", 3)
        stop = threading.Event()
        acknowledged: list[bytes] = []
        with Producer(node.address) as producer:

            def send_on() -> None:
                number = 0
                while not stop.is_set():
                    values = [b"%d" % (number + row) for row in range(20)]
                    number += 20
                    producer.send_many("t", values).result(60)
                    acknowledged.extend(values)

            sending = threading.Thread(target=send_on)
            sending.start()
            for _ in range(3):
                time.sleep(0.4)
                assert node.terminate() == 0
                node.start()
            stop.set()
            sending.join()
        assert "torn_tail_cut" not in node.log
        assert "Traceback" not in node.log
        assert sorted(int(value or b"") for value in values_of(read_all(node.address, "t"))) == list(
            range(len(acknowledged))
        )


def test_node_told_twice_to_stop_still_stops_cleanly(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        create_topic(node.address, "t")
        with Producer(node.address) as producer, Consumer(node.address, ["t"]) as consumer:
            producer.send("t", b"v").result(10)
            assert len(consumer.poll(timeout=10)) == 1
            node.signal(signal.SIGTERM)
            assert node.terminate() == 0


def test_node_without_its_parent_stops(tmp_path: Path) -> None:
    """Its standard input is a pipe from who started it; the end of that is the end of the node."""
    with Node(tmp_path) as node:
        create_topic(node.address, "t")
        process = node._process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_restart_with_twenty_partitions_keeps_all(tmp_path: Path, kill: bool) -> None:
    with Node(tmp_path, SMALL_FILES) as node:
        create_topic(node.address, "wide", 20)
        values = [b"%06d" % number for number in range(20_000)]
        with Producer(node.address, batch_bytes=5000) as producer:
            producer.send_many("wide", values).result(30)
        with Consumer(node.address, ["wide"], group="g") as consumer:
            count = 0
            while count < 5000:
                count += len(consumer.poll(5000 - count, timeout=10))
            consumer.commit()
        with Admin(node.address) as admin:
            before = admin.offsets("wide")
        if kill:
            node.kill()
        else:
            assert node.terminate() == 0
        node.start()
        with Admin(node.address) as admin:
            assert admin.offsets("wide") == before
            assert {status.state for status in admin.partition_status("wide")} == {"online"}
        assert len(before) == 20
        assert min(latest for _, latest in before.values()) > 0
        assert sorted(value or b"" for value in values_of(read_all(node.address, "wide"))) == values
        with Consumer(node.address, ["wide"], group="g", start="committed") as consumer:
            left = sum(latest for _, latest in before.values()) - sum(
                consumer.committed("wide", partition) or 0 for partition in range(20)
            )
            assert left == 15_000


def test_stopped_process_is_waited_for_and_loses_nothing(tmp_path: Path) -> None:
    """SIGSTOP: the node is there and says nothing; connections stay open."""
    with Node(tmp_path) as node:
        create_topic(node.address, "t")
        with Producer(node.address, request_timeout=0.3) as producer:
            producer.send("t", b"before").result(10)
            node.signal(signal.SIGSTOP)
            futures = [producer.send_many("t", [b"%d" % number]) for number in range(10)]
            time.sleep(1.0)
            assert not any(future.done() for future in futures)
            node.signal(signal.SIGCONT)
            for future in futures:
                future.result(20)
        assert values_of(read_all(node.address, "t")) == [b"before", *(b"%d" % number for number in range(10))]
