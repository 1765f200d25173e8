"""Holds managers to the rules of consensus, and to what they promise beyond: every command once, everywhere the same.

It applies each committed command to a state of its own, once and without ever stopping, and compares: what managers
have after that entry, what they answer, what is in their databases.
"""

from __future__ import annotations

from typing import Any

from quiver.errors import RequestError
from quiver.manager.quorum import METADATA_UID, MetadataQuorum
from quiver.metadata.commands import Command, decode_command
from quiver.metadata.state import State
from quiver.testing.sim.database import state_image
from quiver.testing.sim.ledger import Group, Ledger
from quiver.testing.sim.node import Node
from quiver.testing.sim.world import Violation
from quiver.wire.frame import FrameHeader, Kind


class MetadataLedger(Ledger):
    def __init__(self, managers: int) -> None:
        super().__init__([METADATA_UID], managers)
        self._model = State()
        self._images: dict[int, int] = {0: state_image(self._model)}  # transaction -> what rows there are after it
        self.places: dict[bytes, int] = {}  # command -> its transaction
        self.results: dict[int, Any] = {}  # transaction -> what came of it

    def _enter(self, group: Group, header: FrameHeader, payload: Any) -> None:
        super()._enter(group, header, payload)
        if header.kind == Kind.COMMAND:
            self._enter_command(header.index, bytes(payload))
        self._images[header.index] = state_image(self._model)

    def _enter_command(self, index: int, payload: bytes) -> None:
        command = decode_command(payload)
        self._check_once(command, payload, index)
        try:
            self.results[index] = self._model.apply(command).result
        except RequestError as refusal:
            self.results[index] = refusal

    def _check_once(self, command: Command, payload: bytes, index: int) -> None:
        if (before := self.places.setdefault(payload, index)) != index:
            raise Violation("once", f"{command} is in the log at {before} and at {index}")

    def applied_command(
        self, node: Node, quorum: MetadataQuorum, header: FrameHeader, payload: bytes, result: Any
    ) -> None:
        try:
            raft = quorum.replica.raft
            self._check_entry(node, self.group(METADATA_UID), raft, header, payload)
            self.check_image(node, header.index, state_image(quorum.state), "state")
            if header.kind == Kind.COMMAND:
                self.check_result(node.name, header.index, result)
        except Violation as violation:
            self.found.append(violation)  # the product would take it for a mistake of its own
            raise

    def check_result(self, who: str, index: int, result: Any) -> None:
        expected = self.results[index]
        same = str(result) == str(expected) if isinstance(expected, RequestError) else result == expected
        if not same:
            raise Violation("2 one state", f"{who} gets {result!r} of transaction {index}, not {expected!r}")

    def check_image(self, node: Node, index: int, image: int, what: str) -> None:
        if index not in self._images:
            raise Violation("2 committed stays", f"{node.name} has a {what} of {index}, which is not committed")
        if self._images[index] != image:
            raise Violation("2 one state", f"{node.name} has another {what} after transaction {index}")

    def stored(self, node: Node, applied: int, image: int) -> None:
        """A transaction was written to a database."""
        try:
            self.check_image(node, applied, image, "database")
        except Violation as violation:
            self.found.append(violation)
            raise
