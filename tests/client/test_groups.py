"""Consumers of one group: they share partitions, hand them over, and cannot store anything over their successors."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer, aio
from quiver.client.consumer import ConsumerEngine
from quiver.client.loop_thread import shared_loop
from quiver.errors import InvalidRequestError, MemberFencedError
from quiver.types import MemberInfo, Record
from tests.client.group_kit import SHORT_SESSION_S, are_shared, kill, member, read, topic
from tests.client.kit import fill, new_topic, numbers, until

__all__ = ["member", "topic"]  # fixtures


def test_members_share_partitions_and_each_record_is_read_once(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 300)
    members = [member(commit_interval=0.1) for _ in range(3)]
    found: list[Record] = []
    read(members, found, lambda: are_shared(members) and len(found) >= 300)
    fill(servers, topic, 300, first=300)
    read(members, found, lambda: len(found) >= 600)
    assert sorted(numbers(found)) == list(range(600))


def test_a_member_keeps_what_it_keeps(servers: str, topic: str, member: Any) -> None:
    events: list[tuple[str, set[int]]] = []
    first = member(
        on_assigned=lambda pairs: events.append(("assigned", {pair[1] for pair in pairs})),
        on_revoked=lambda pairs: events.append(("revoked", {pair[1] for pair in pairs})),
    )
    first.poll(timeout=0)
    assert events == [("assigned", set(range(6)))]
    second = member()
    read([first, second], [], lambda: are_shared([first, second]))
    assert [name for name, _ in events] == ["assigned", "revoked"], "nothing that it keeps was taken and given again"
    assert len(events[1][1]) == 3
    second.close()
    read([first], [], lambda: are_shared([first]))
    assert events[2] == ("assigned", events[1][1])


def test_positions_are_stored_before_a_partition_is_handed_over(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    first = member(commit_interval=60)
    found: list[Record] = []
    read([first], found, lambda: len(found) == 60)
    second = member(commit_interval=60)
    read([first, second], found, lambda: are_shared([first, second]))
    assert [second.position(*pair) for pair in second.assignment()] == [10, 10, 10]
    assert len(found) == 60


def test_a_callback_can_commit_what_is_about_to_be_handed_over(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    first: Consumer = member(on_revoked=lambda pairs: first.commit())
    found: list[Record] = []
    read([first], found, lambda: len(found) == 60)
    second = member()
    read([first, second], found, lambda: are_shared([first, second]))
    assert len(found) == 60


def test_nothing_is_stored_unasked_without_an_interval(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    first, found = member(), []
    read([first], found, lambda: len(found) == 60)
    first.close()
    assert [member().committed(topic, number) for number in range(6)] == [None] * 6


def test_what_was_being_dealt_with_in_an_error_comes_again(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    with (
        pytest.raises(ZeroDivisionError),
        Consumer(servers, [topic], group=topic, commit_interval=60) as consumer,
    ):
        done = consumer.poll(20, timeout=10)
        in_hand = consumer.poll(20, timeout=10)
        raise ZeroDivisionError
    found: list[Record] = []
    second = member(commit_interval=60)
    read([second], found, lambda: len(found) == 60 - len(done))
    assert {(one.partition, one.offset) for one in in_hand} <= {(one.partition, one.offset) for one in found}
    second.close()
    assert member().poll(timeout=0.2) == [], "and at a clean end everything is stored"


def test_what_a_silent_member_had_goes_to_the_others(servers: str, topic: str, member: Any) -> None:
    first, second = member(), member(session_timeout=SHORT_SESSION_S)
    read([first, second], [], lambda: are_shared([first, second]))
    kill(second)
    read([first], [], lambda: are_shared([first]))


def test_who_was_away_cannot_commit_over_its_successor(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    lost: list[Any] = []
    away = member(on_lost=lost.extend, session_timeout=SHORT_SESSION_S)
    found: list[Record] = []
    read([away], found, lambda: len(found) >= 60)
    kill(away)
    successor = member()
    read([successor], [], lambda: are_shared([successor]))
    with pytest.raises(MemberFencedError, match="another member of group"):
        away.commit()
    assert [successor.committed(topic, number) for number in range(6)] == [None] * 6
    read([successor], again := [], lambda: len(again) >= 60 or successor.position(topic, 0) == 10)


def test_a_member_that_was_held_to_be_gone_comes_back(servers: str, topic: str, member: Any) -> None:
    lost: list[Any] = []
    one = member(on_lost=lost.extend)
    read([one], [], lambda: are_shared([one]))
    with Admin(servers) as admin:
        name = one._engine._member.id
        shared_loop().call(leave(admin, topic, name))
    read([one], [], lambda: bool(lost) and are_shared([one]))
    assert sorted(lost) == [(topic, number) for number in range(6)]


async def leave(admin: Admin, group: str, name: str) -> None:
    from quiver.wire.group_messages import LeaveGroup
    from quiver.wire.messages import Done

    await admin._admin._cluster.ask_any(LeaveGroup(group, name), Done)


def test_new_partitions_are_shared_and_read_from_their_beginning(servers: str, topic: str, member: Any) -> None:
    members = [member(start="latest"), member(start="latest")]
    read(members, [], lambda: are_shared(members))
    with Admin(servers) as admin, Producer(servers) as producer:
        admin.add_partitions(topic, 9)
        for number in (6, 7, 8):
            producer.send(topic, b"%d" % number, partition=number).result()
    found: list[Record] = []
    read(members, found, lambda: are_shared(members, 9) and len(found) == 3)
    assert sorted(numbers(found)) == [6, 7, 8]


def test_the_first_member_fixes_where_latest_is(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    first = member(start="latest", session_timeout=SHORT_SESSION_S)
    first.poll(timeout=0)
    kill(first)
    fill(servers, topic, 60, first=60)
    second, found = member(start="latest"), []
    read([second], found, lambda: len(found) == 60)
    assert sorted(numbers(found)) == list(range(60, 120)), "what came after the group began is not skipped"


async def until_wanted(engine: ConsumerEngine, count: int, changed: asyncio.Event) -> None:
    """Until the group wants it to have so many partitions."""
    assert engine._member is not None
    while len(engine._member.wanted) != count:
        changed.clear()
        await changed.wait()


def test_what_is_asked_back_before_it_was_read_is_let_go_of(servers: str, topic: str) -> None:
    async def main() -> None:
        changed = asyncio.Event()
        settings: Any = {"group": topic, "session_timeout": 60.0}
        first, second = (ConsumerEngine(servers, [topic], changed.set, **settings) for _ in range(2))
        try:
            await first.start()  # it has everything, and reads nothing yet
            await second.start()
            assert second.is_waiting
            await until_wanted(first, 3, changed)
            await first.finish_revoke(await first.begin_revoke())
            assert len(await first.adopt()) == 3
            await until_wanted(second, 3, changed)
            assert not second.is_waiting
        finally:
            await asyncio.gather(first.close(), second.close())

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_was_wanted_back_and_is_left_here_after_all_is_read_on(servers: str, topic: str) -> None:
    """Letting go of it fails, as when the broker does not answer; meanwhile who was to have it is gone."""
    fill(servers, topic, 60)

    async def main() -> None:
        changed, found = asyncio.Event(), list[Record]()
        settings: Any = {"group": topic, "session_timeout": 60.0}
        first, second = (ConsumerEngine(servers, [topic], changed.set, **settings) for _ in range(2))
        try:
            await first.start()
            await first.finish_revoke(await first.begin_revoke())
            assert len(await first.adopt()) == 6
            await second.start()
            await until_wanted(first, 3, changed)
            taken = await first.begin_revoke()
            assert len(taken.revoked) == 3
            await second.close()
            await until_wanted(first, 6, changed)
            again = await first.begin_revoke()
            assert not again.revoked and not again.lost
            await first.finish_revoke(again)
            assert sorted(await first.adopt()) == sorted(taken.revoked)
            while len(found) < 60:
                changed.clear()
                if not (records := first.backlog.take(100)):
                    await changed.wait()
                found += records
            assert sorted(numbers(found)) == list(range(60))
        finally:
            await asyncio.gather(first.close(), second.close())

    asyncio.run(asyncio.wait_for(main(), 60))


def test_iteration_lets_go_between_two_records(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 120, batch=60)  # two batches: most records are in the middle of one
    first, found = member(commit_interval=60), []
    iterator = iter(first)
    found.append(next(iterator))
    second = member(commit_interval=60)
    second.poll(timeout=0)
    until(lambda: first._engine.is_unsettled)
    found.append(next(iterator))
    assert len(first.assignment()) == 3
    read([first, second], found, lambda: len(found) == 120)
    assert sorted(numbers(found)) == list(range(120))


def test_members_of_other_topics_share_only_what_they_want(servers: str, topic: str, member: Any) -> None:
    other = new_topic(servers, 2)
    both = member()
    with Consumer(servers, [topic, other], group=topic) as wide:
        read([both, wide], [], lambda: are_shared([both, wide], 8))
        assert {pair[0] for pair in both.assignment()} == {topic}


def test_run_shares_with_other_members(servers: str, topic: str, member: Any) -> None:
    seen: dict[int, list[Record]] = defaultdict(list)
    runners = [member(), member()]
    threads = [
        threading.Thread(target=one.run, args=(seen[number].append,), kwargs={"poll_time": 0.05}, daemon=True)
        for number, one in enumerate(runners)
    ]
    for thread in threads:
        thread.start()
    with Admin(servers) as admin:
        until(lambda: [len(one.partitions) for one in members_of(admin, topic)] == [3, 3])
    fill(servers, topic, 200)
    until(lambda: sum(map(len, seen.values())) >= 200)
    for one in runners:
        one.stop()
    for thread in threads:
        thread.join(60)
    assert sorted(numbers(seen[0] + seen[1])) == list(range(200))
    assert not {one.partition for one in seen[0]} & {one.partition for one in seen[1]}


def members_of(admin: Admin, group: str) -> tuple[MemberInfo, ...]:
    """Of a group that may not be there yet."""
    known = {one.name for one in admin.list_groups()}
    return admin.describe_group(group)[0].members if group in known else ()


@pytest.mark.parametrize("way", ["run", "iterate"])
def test_waiting_for_a_share_is_no_silence(servers: str, topic: str, member: Any, way: str) -> None:
    first = member()
    first.poll(timeout=0)  # it has everything, and does not come back
    second, seen = member(idle_timeout=0.2), list[Record]()
    work = {
        "run": lambda: second.run(seen.append, timeout=0.2, poll_time=0.05),
        "iterate": lambda: seen.extend(second),
    }
    thread = threading.Thread(target=work[way], daemon=True)
    thread.start()
    with Admin(servers) as admin:
        until(lambda: len(members_of(admin, topic)) == 2)
    thread.join(1.0)  # five times as long as it would listen to silence
    assert thread.is_alive()
    read([first], [], lambda: len(first.assignment()) == 3)
    thread.join(60)
    assert not thread.is_alive(), "then it hears silence"


def test_who_has_no_share_to_wait_for_hears_silence(servers: str) -> None:
    topic = new_topic(servers, 1)
    with Consumer(servers, [topic], group=topic) as only, Consumer(servers, [topic], group=topic) as spare:
        only.poll(timeout=0)
        assert spare.run(print, timeout=0.3, poll_time=0.05) == 0


def test_a_handler_that_raises_is_skipped_when_asked(servers: str, topic: str, member: Any) -> None:
    fill(servers, topic, 60)
    seen: list[int] = []

    def handle(record: Record) -> None:
        seen.append(int(record.value or b"-1"))
        if len(seen) == 60:
            one.stop()
        if seen[-1] % 10 == 0:
            raise ZeroDivisionError

    one: Consumer = member()
    assert one.run(handle, poll_time=0.05, on_error="skip") == 54
    assert sorted(seen) == list(range(60))
    assert member().poll(timeout=0.2) == []
    with pytest.raises(InvalidRequestError, match="on_error"):
        member().run(handle, on_error="ignore")


def test_asyncio_members_share_and_run(servers: str, topic: str) -> None:
    fill(servers, topic, 120)

    async def main() -> None:
        told: list[str] = []

        async def assigned(pairs: Any) -> None:
            told.append("assigned")

        settings: Any = {"group": topic, "commit_interval": 0.1, "session_timeout": 60.0}
        async with (
            aio.Consumer(servers, [topic], on_assigned=assigned, **settings) as first,
            aio.Consumer(servers, [topic], **settings) as second,
        ):
            found: list[Record] = []
            while not len(found) >= 120 or len(await second.assignment()) != 3:
                found += await first.poll(timeout=0.02) + await second.poll(timeout=0.02)
            assert sorted(numbers(found)) == list(range(120))
            assert told == ["assigned"]
        fill(servers, topic, 60)
        seen: list[Record] = []

        async def keep(record: Record) -> None:
            seen.append(record)
            if len(seen) == 60:
                third.stop()

        async with aio.Consumer(servers, [topic], **settings) as third:
            assert await third.run(keep, poll_time=0.05) == 60
            assert await third.poll(timeout=0.1) == []
        assert len(seen) == 60

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"session_timeout": 0.1}, "session_timeout"),
        ({"session_timeout": True}, "session_timeout"),
        ({"session_timeout": 10**9}, "session_timeout"),
        ({"commit_interval": 0}, "commit_interval"),
        ({"commit_interval": -1.0}, "commit_interval"),
        ({"commit_interval": "5"}, "commit_interval"),
        ({"commit_interval": 1, "group": None}, "needs a group"),
        ({"assignment": "fair"}, "sticky"),
        ({"group": "#1"}, "registered consumer"),
    ],
)
def test_wrong_settings_are_refused(servers: str, topic: str, settings: Any, why: str) -> None:
    with (
        pytest.raises(InvalidRequestError, match=why),
        Consumer(servers, [topic], **{"group": "wrong"} | settings) as consumer,
    ):
        consumer.poll(timeout=0)


def test_a_group_has_one_way_of_sharing(servers: str, topic: str, member: Any) -> None:
    member(assignment="range").poll(timeout=0)
    with pytest.raises(InvalidRequestError, match="shares partitions by range"):
        member(assignment="sticky").poll(timeout=0)
