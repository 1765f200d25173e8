"""A member of a group whose connections break at any step of any exchange: every record is read once all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from quiver import Consumer, Producer, Record
from quiver.wire.group_messages import GroupBeat, JoinGroup, LeaveGroup
from quiver.wire.messages import CommitPosition, Fetch
from tests.system.kit import Node, create_topic, until
from tests.system.proxy import Proxy, Step

pytestmark = pytest.mark.system

PARTITIONS = 4
ROUND = 40

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


class Play:
    """Records are produced in rounds; what was read is told by their values."""

    def __init__(self, servers: str) -> None:
        self.topic = create_topic(servers, f"cut-group-{next(_numbers)}", PARTITIONS)
        self._servers = servers
        self._produced = 0
        self.read: list[int] = []

    def produce(self) -> None:
        with Producer(self._servers) as producer:
            for number in range(self._produced, self._produced + ROUND):
                producer.send(self.topic, b"%d" % number, partition=number % PARTITIONS)
            producer.flush()
        self._produced += ROUND

    def let_read(self, members: list[Consumer], enough: Callable[[], bool]) -> None:
        def look() -> bool:
            for member in members:
                records: list[Record] = member.poll(7, timeout=0.02)
                self.read += [int(record.value or b"-1") for record in records]
            return enough()

        until(look)

    def all_read(self) -> bool:
        return len(self.read) >= self._produced

    def check(self) -> None:
        assert sorted(self.read) == list(range(self._produced)), "each record once"


def shares(members: list[Consumer]) -> list[int]:
    return [len(member.assignment()) for member in members]


@pytest.mark.parametrize("by_hand", [False, True], ids=["in the background", "by hand"])
@pytest.mark.parametrize("step", Step)
def test_each_record_is_read_once_whatever_is_cut(node: Node, step: Step, by_hand: bool) -> None:
    play = Play(node.address)
    play.produce()
    settings = {"group": play.topic, "session_timeout": 15.0, "commit_interval": None if by_hand else 60.0}
    with Proxy(node.address) as proxy:
        # Joining and claiming, then the first beats, letting go and storing, reading, and the goodbye.
        for request, skip in ((JoinGroup, 0), (CommitPosition, 1), (GroupBeat, 0), (GroupBeat, 1), (Fetch, 2)):
            proxy.cut(step, request, skip)
        cut = Consumer(proxy.address, [play.topic], on_revoked=lambda _: cut.commit(), **settings)
        with cut, Consumer(node.address, [play.topic], **settings) as whole:
            play.let_read([cut], play.all_read)
            proxy.cut(step, GroupBeat)
            proxy.cut(step, CommitPosition)
            play.let_read([cut, whole], lambda: shares([cut, whole]) == [2, 2])
            play.produce()
            proxy.cut(step, Fetch)
            play.let_read([cut, whole], lambda: play.all_read() and not proxy.cuts_left)
            proxy.cut(step, LeaveGroup)
            if by_hand:
                cut.commit()
            cut.close()
            assert not proxy.is_cut_left(LeaveGroup)
            play.let_read([whole], lambda: shares([whole]) == [4])
            play.produce()
            play.let_read([whole], play.all_read)
            play.let_read([whole], lambda: True)
    play.check()
