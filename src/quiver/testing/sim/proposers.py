"""Clients of the simulated managers: they change metadata, ask how far it is, and hold the answers against the ledger.

Rule: a command is proposed once. Who does not know what came of it makes another.
"""

from __future__ import annotations

from typing import Any

from quiver.errors import DiskFullError, NotLeaderError, QuiverError, RequestError
from quiver.metadata.commands import (
    AddPartitions,
    Command,
    CreateTopic,
    DeleteTopic,
    RegisterBroker,
    RegisterConsumer,
    RegisterProducer,
    encode_command,
)
from quiver.metadata.state import Consumer, Producer
from quiver.testing.sim.clients import Clients, leader_after
from quiver.testing.sim.manager_node import Confirm, Propose
from quiver.testing.sim.metadata_ledger import MetadataLedger
from quiver.testing.sim.world import Violation


class Answers:
    """What all clients were told."""

    def __init__(self, ledger: MetadataLedger) -> None:
        self.ledger = ledger
        self.acknowledged = 0
        self.last = 0  # the highest transaction that was acknowledged
        self._undone: list[tuple[Command, str]] = []  # said to have changed nothing
        self._ids: dict[tuple[str, int], Command] = {}

    def done(self, command: Command, result: Any) -> None:
        index = self.ledger.places.get(encode_command(command))
        if index is None:
            raise Violation("2 committed stays", f"{command} is acknowledged and not committed")
        self.ledger.check_result("a client", index, result)
        self.acknowledged += 1
        self.last = max(self.last, index)
        if isinstance(result, (Producer, Consumer)):
            known = self._ids.setdefault((type(result).__name__, result.id), command)
            if known is not command:
                raise Violation("ids once", f"{command} and {known} got the number {result.id}")

    def undone(self, command: Command, error: QuiverError) -> None:
        self._undone.append((command, error.message))

    def check_undone(self) -> None:
        for command, said in self._undone:
            if (index := self.ledger.places.get(encode_command(command))) is not None:
                raise Violation("once", f"{command} is transaction {index}, its client was told: {said}")


class Proposer:
    def __init__(self, clients: Clients, answers: Answers, number: int) -> None:
        self._clients = clients
        self._answers = answers
        self._number = number
        self._count = 0
        self._topics: list[str] = []  # that may be there
        self._primary = clients.any_node()
        self.is_done = False

    async def run(self) -> None:
        clients = self._clients
        while not clients.stopping:
            if clients.chance.random() < 0.2:
                await self._confirm()
            else:
                await self._propose(self._command())
            await clients.pause(0.03)
        self.is_done = True

    def _command(self) -> Command:
        """One that is like no other: it has a time, a name or a uid of its own."""
        self._count += 1
        chance, stamp = self._clients.chance, self._number * 1_000_000 + self._count
        topic = chance.choice(self._topics) if self._topics else "none"
        match chance.choice(("create", "create", "delete", "producer", "producer", "consumer", "broker", "add")):
            case "create":
                self._topics.append(f"t{stamp}")
                return self._creation(f"t{stamp}", stamp)
            case "delete" if self._topics:
                self._topics.remove(topic)
                return DeleteTopic(topic)
            case "consumer":
                return RegisterConsumer(topic, chance.choice((None, 0, 5)), stamp)
            case "broker":
                return RegisterBroker(chance.randint(1, 4), f"h:{stamp}", stamp, chance.randint(1, 3))
            case "add":
                return AddPartitions(topic, chance.randint(1, 3), [f"a{stamp}"])
        create = self._creation(f"p{stamp}", stamp)
        return RegisterProducer(create.name if chance.random() < 0.3 else topic, None, create, stamp)

    def _creation(self, name: str, stamp: int) -> CreateTopic:
        return CreateTopic(name, [f"u{stamp}-{n}" for n in range(self._clients.chance.randint(1, 3))], 3, stamp)

    async def _propose(self, command: Command) -> None:
        asked = self._primary
        try:
            result, _ = await self._clients.call(asked, Propose(command))
        except (NotLeaderError, DiskFullError) as error:
            self._answers.undone(command, error)
            self._primary = leader_after(self._clients, error, asked)
        except RequestError as refusal:
            self._answers.done(command, refusal)
        except QuiverError as error:  # nobody knows whether it was done
            self._primary = leader_after(self._clients, error, asked)
        else:
            self._answers.done(command, result)

    async def _confirm(self) -> None:
        asked, known = self._primary, self._answers.last
        try:
            index, _ = await self._clients.call(asked, Confirm())
        except QuiverError as error:
            self._primary = leader_after(self._clients, error, asked)
            return
        if index < known:
            raise Violation("stale", f"the metadata is said to end at {index}, {known} was acknowledged before")
