"""What the manager's tests share: a metadata quorum on any disk and database, a real node with its HTTP port, and a
client that holds every answer against the general rules of the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import sqlalchemy as sa

from quiver.config import LogSettings
from quiver.log.disk import Disk
from quiver.manager.quorum import LOG_SETTINGS, METADATA_UID, MetadataQuorum
from quiver.metadata.state import Counters, Put, Remove
from quiver.metadata.store import Store
from quiver.replication.group import replica_id
from quiver.replication.seat import Seat
from quiver.wire.frame import FrameHeader, Kind
from tests.broker.kit import InlineExecutor, SimulatedClock
from tests.system.kit import WAIT_S, Node

LOG = "data/manager-1/log"
ONLY = replica_id(1, 7)  # the replica of a quorum of one

# -- metadata ----------------------------------------------------------------------------------------------------


class WatchedStore(Store):
    """Notes what it is given, and fails or waits when told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.applied: list[int] = []
        self.changes: list[Put | Remove] = []
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()

    def apply(self, applied: int, counters: Counters, changes: Any) -> None:
        assert self.gate.wait(WAIT_S)
        if self.fails:
            raise sa.exc.OperationalError("INSERT", {}, Exception("the database is away"))
        super().apply(applied, counters, changes)
        self.applied.append(applied)
        self.changes += changes


class Applies:
    """Counts the commands that a state machine was asked to apply."""

    def __init__(self, quorum: MetadataQuorum) -> None:
        self.indexes: list[int] = []
        real = quorum._apply

        def apply(header: FrameHeader, payload: bytes) -> Any:
            if header.kind == Kind.COMMAND:
                self.indexes.append(header.index)
            return real(header, payload)

        quorum._apply = apply  # type: ignore[method-assign]


@dataclasses.dataclass
class QuorumBench:
    """One metadata log and one database, opened and opened again."""

    disk: Disk
    url: str
    directory: str = LOG
    writers: Executor = dataclasses.field(default_factory=InlineExecutor)
    cluster_id: str = "c"
    settings: LogSettings = dataclasses.replace(LOG_SETTINGS, room_bytes_max=0)  # noqa: RUF009

    def make(self) -> tuple[MetadataQuorum, WatchedStore, Applies]:
        """Not started yet."""
        store = WatchedStore(self.url)
        seat = Seat(METADATA_UID, ONLY, (ONLY,))
        quorum = MetadataQuorum(
            self.disk, self.directory, store, SimulatedClock(), self.writers, seat, log_settings=self.settings
        )
        return quorum, store, Applies(quorum)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[MetadataQuorum, WatchedStore, Applies]]:
        quorum, store, applies = self.make()
        try:
            await quorum.start(self.cluster_id)
            await quorum.until_led()
            yield quorum, store, applies
        finally:
            store.gate.set()
            await quorum.stop()


async def abandon(quorum: MetadataQuorum) -> None:
    """As if the process died: nothing more is written, neither to the log nor to the database."""
    for task in (quorum._owner, quorum.database._task):
        if task is not None:
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
    quorum.database._thread.shutdown()
    quorum.database._store.close()


async def until(condition: Callable[[], Any]) -> None:
    """Returns when it holds."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


# -- a real node and its HTTP port -------------------------------------------------------------------------------


class HttpNode(Node):
    """A node process on ports that the system chooses, others after each start."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        super().__init__(directory, settings, port=0)

    def start(self) -> None:
        self.port = self.http_port = 0
        with os.fdopen(self.launch(), "rb") as pipe:
            line = json.loads(pipe.readline() or b"{}")
        if "http" not in line:
            self.kill()
            raise AssertionError(f"the node did not start: {line} {self.log[-2000:]}")
        self.port, self.http_port = (int(line[name].rsplit(":", 1)[1]) for name in ("address", "http"))

    @property
    def database(self) -> Path:
        return self.directory / "data" / "manager-1" / "metadata.db"


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def message(self) -> Any:
        return self.body["message"]


def checked(status: int, headers: dict[str, str], raw: bytes) -> Answer:
    """The general rules: every answer is a JSON object with a status that agrees with HTTP's; never a 500."""
    assert headers["content-type"] == "application/json", (status, headers, raw[:200])
    body = json.loads(raw)
    assert isinstance(body, dict)
    if status == 200:
        assert body["status"] == "success"
    else:
        assert status in (400, 404, 405, 503), (status, body)
        assert body.keys() == {"status", "message"}
        assert body["status"] == "failure"
        assert isinstance(body["message"], str)
        assert body["message"]
        assert ("retry-after" in headers) == (status == 503)
        assert ("allow" in headers) == (status == 405)
    return Answer(status, body, headers)


class Api:
    """A classic client on one connection. Not for two threads at once."""

    def __init__(self, address: str, timeout_s: float = WAIT_S) -> None:
        where = urlsplit(address)
        assert where.hostname is not None
        self._connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        target = f"{path}?{urlencode(query)}" if query else path
        return checked(*self.raw(method, target, body, headers))

    def raw(
        self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body, whatever they are."""
        try:
            self._connection.request(method, target, body, headers or {})
            response = self._connection.getresponse()
            content = response.read()
        except BaseException:
            self._connection.close()  # half an exchange: the next request needs a new connection
            raise
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content

    def call(self, method: str, path: str, **fields: Any) -> Answer:
        """As the contract has it: POST takes a JSON object, GET takes query parameters."""
        if method == "GET":
            return self.request(method, path, query=fields)
        return self.request(method, path, body=json.dumps(fields).encode())

    def get(self, path: str, **fields: Any) -> dict[str, Any]:
        return self._succeed(self.call("GET", path, **fields))

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        return self._succeed(self.call("POST", path, **fields))

    @staticmethod
    def _succeed(answer: Answer) -> dict[str, Any]:
        assert answer.status == 200, answer
        return {name: value for name, value in answer.body.items() if name != "status"}

    def refusal(self, method: str, path: str, **fields: Any) -> str:
        """The sentence of a failure that is the client's."""
        answer = self.call(method, path, **fields)
        assert answer.status == 400, answer
        return str(answer.message)

    # -- the calls that most tests need --

    def create(self, topic: str, partitions: int = 1) -> str:
        self.post("/topics", topic_name=topic, partitions=partitions)
        return topic

    def producer(self, topic: str, **fields: Any) -> int:
        return int(self.post("/producer/register", topic=topic, **fields)["producer_id"])

    def consumer(self, topic: str, **fields: Any) -> int:
        return int(self.post("/consumer/register", topic=topic, **fields)["consumer_id"])

    def produce(self, topic: str, producer_id: int, message: str, **fields: Any) -> tuple[int, int]:
        found = self.post("/producer/produce", topic=topic, producer_id=producer_id, message=message, **fields)
        return found["partition_id"], found["offset"]

    def consume(self, topic: str, consumer_id: int, **fields: Any) -> str | None:
        """The next message; None when there is no new one."""
        answer = self.call("GET", "/consumer/consume", topic=topic, consumer_id=consumer_id, **fields)
        if answer.status == 400:
            assert answer.message == f"No new message is published to {topic}"
            return None
        assert answer.status == 200, answer
        return str(answer.message)

    def consume_all(self, topic: str, consumer_id: int, **fields: Any) -> list[str]:
        found: list[str] = []
        while (message := self.consume(topic, consumer_id, **fields)) is not None:
            found.append(message)
        return found

    def size(self, topic: str, consumer_id: int) -> int:
        return int(self.get("/size", topic=topic, consumer_id=consumer_id)["size"])

    def client_size(self, client: str) -> int:
        return int(self.get("/producer/client_size", prod_client=client)["count"])

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def api_of(node: HttpNode) -> Iterator[Api]:
    with Api(node.http) as made:
        yield made


def state_of(api: Api, clients: Sequence[str] = ()) -> dict[str, Any]:
    """Everything a client can see that a failed call must not change. Heartbeats are not among it: a call is a call."""
    health = api.get("/health")
    topics = api.get("/topics")["topics"]
    consumers = [(row["consumer_id"], row["topic"]) for row in health["consumers"]]
    return {
        "transaction": health["transaction"],
        "topics": {topic: api.get("/topics/partitions", topic_name=topic)["partitions"] for topic in topics},
        "producers": [(row["producer_id"], row["topic"]) for row in health["producers"]],
        "consumers": consumers,
        "brokers": [(row["broker_id"], row["endpoint"]) for row in health["brokers"]],
        "sizes": {consumer_id: api.size(topic, consumer_id) for consumer_id, topic in consumers},
        "clients": {client: api.client_size(client) for client in clients},
    }


_numbers = itertools.count(1)


def fresh(name: str = "t") -> str:
    """A name nobody used before in this process."""
    return f"{name}-{next(_numbers)}"
