"""Clients and fork: what was made before is refused in the child, what is made there works, the parent goes on."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer
from quiver.client import delivery, loop_thread
from quiver.errors import ForkedError
from tests.client.kit import fill, poll_numbers, stored

# Python 3.12 warns of every fork of a process with threads; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child; fails with what it raised there."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            threading.Timer(20, os._exit, (3,)).start()  # a child that hangs must not stay
            try:
                answer = (True, function())
                code = 0
            except BaseException:
                answer = (False, traceback.format_exc())
            with os.fdopen(write_end, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert said, f"the child ended with {os.waitstatus_to_exitcode(status)} without a word"
    worked, answer = pickle.loads(said)
    assert worked, answer
    return answer


def raises(use: Callable[[], Any]) -> str:
    try:
        use()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_producer_of_the_parent_is_refused_in_the_child(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"before").result(10)

        def child() -> list[str]:
            uses = (
                lambda: producer.send(topic, b"child"),
                lambda: producer.send_many(topic, [b"child"]),
                producer.flush,
            )
            found = [raises(use) for use in uses]
            producer.close()  # harmless: it is not ours
            return found

        assert in_child(child) == [ForkedError.__name__] * 3
        producer.send(topic, b"after").result(10)
    assert stored(servers, topic) == [b"before", b"after"]


def test_consumer_of_the_parent_is_refused_in_the_child(servers: str, topic: str) -> None:
    fill(servers, topic, 20)
    with Consumer(servers, [topic], group="g") as consumer:
        poll_numbers(consumer, 5)

        def child() -> list[str]:
            uses = (
                consumer.poll,
                consumer.poll_arrow,
                consumer.commit,
                lambda: next(iter(consumer)),
                lambda: consumer.seek(topic, 0, 0),
                lambda: consumer.position(topic, 0),
                lambda: consumer.committed(topic, 0),
            )
            found = [raises(use) for use in uses]
            consumer.close()
            return found

        assert in_child(child) == [ForkedError.__name__] * 7
        assert poll_numbers(consumer, 15) == list(range(5, 20))


def test_admin_of_the_parent_is_refused_in_the_child(servers: str, topic: str) -> None:
    with Admin(servers) as admin:
        admin.list_topics()

        def child() -> list[str]:
            found = [raises(admin.list_topics), raises(lambda: admin.create_topic("x")), raises(admin.nodes)]
            admin.close()
            return found

        assert in_child(child) == [ForkedError.__name__] * 3
        assert topic in admin.list_topics()


def test_clients_made_in_the_child_work(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"0").result(10)

        def child() -> list[int]:
            with Producer(servers) as own, Consumer(servers, [topic], group="g") as consumer, Admin(servers) as admin:
                own.send(topic, b"1").result(10)
                found = poll_numbers(consumer, 2)
                consumer.commit()
                return [*found, admin.offsets(topic)[0][1]]

        assert in_child(child) == [0, 1, 2]
        producer.send(topic, b"2").result(10)
    assert stored(servers, topic) == [b"0", b"1", b"2"]


def test_child_works_whatever_lock_was_held_at_the_moment_of_the_fork(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"0").result(10)

    def child() -> int:
        with Producer(servers) as own:
            return own.send(topic, b"1").result(10).offset

    with delivery._lock, loop_thread._lock:
        assert in_child(child) == 1


def test_forks_while_many_records_are_under_way_disturb_nobody(servers: str, topic: str) -> None:
    done = threading.Event()
    sent = []
    with Producer(servers) as producer:

        def send_on() -> None:
            while not done.is_set():
                sent.append(producer.send(topic, b"%d" % len(sent)))
                time.sleep(0.0001)

        thread = threading.Thread(target=send_on)
        thread.start()
        try:
            for _ in range(5):

                def child() -> int:
                    with Producer(servers) as own:
                        return own.send(topic, b"child").result(10).partition

                assert in_child(child) == 0
        finally:
            done.set()
            thread.join()
    values = stored(servers, topic)
    assert [value for value in values if value != b"child"] == [b"%d" % number for number in range(len(sent))]
    assert values.count(b"child") == 5
