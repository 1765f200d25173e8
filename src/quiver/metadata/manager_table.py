"""The managers there are, those that are awaited, and those that were removed.

Rule: pure. A manager that was removed is none until it is added again: its number alone lets nobody in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from quiver.errors import InvalidRequestError, ManagerRemovedError
from quiver.metadata.commands import AddManager, RegisterManager, RemoveManager

EXPECTED: Final = "expected"  # it was added and has not been here yet
GONE: Final = "removed"


class Manager(msgspec.Struct, frozen=True):
    id: int
    address: str
    http: str
    replica_id: int
    phase: str = ""


class ManagerTable(dict[int, Manager]):
    """Those that have said where they are, by id. `others` are awaited or were removed."""

    __slots__ = ("others",)

    def __init__(self, rows: Iterable[Manager] = ()) -> None:
        super().__init__()
        self.others: dict[int, Manager] = {}
        for row in rows:
            self.put(row)

    @property
    def rows(self) -> dict[int, Manager]:
        return self | self.others

    @property
    def removed(self) -> set[int]:
        return {row.id for row in self.others.values() if row.phase == GONE}

    @property
    def addresses(self) -> dict[int, str]:
        """Of all that are or will be managers."""
        return {row.id: row.address for row in self.rows.values() if row.phase != GONE}

    def put(self, row: Manager) -> Manager:
        self.pop(row.id, None)
        self.others.pop(row.id, None)
        (self.others if row.phase else self)[row.id] = row
        return row

    def change(self, command: RegisterManager | AddManager | RemoveManager) -> Manager:
        """The row after it. Raises InvalidRequestError when that may not be."""
        number = command.manager_id
        match command:
            case RegisterManager():
                self.check_may_come(number)
                return self.put(Manager(number, command.address, command.http, command.replica_id))
            case AddManager():
                if number in self:
                    raise InvalidRequestError(f"Manager {number} is part of the quorum already")
                return self.put(Manager(number, command.address, "", 0, EXPECTED))
            case RemoveManager():
                self.check_may_come(number)
                known = self.rows.get(number) or Manager(number, "", "", 0)
                return self.put(msgspec.structs.replace(known, phase=GONE))

    def check_may_come(self, number: int) -> None:
        if number in self.removed:
            raise self.removal_of(number)

    @staticmethod
    def removal_of(number: int) -> ManagerRemovedError:
        return ManagerRemovedError(
            f"Manager {number} was removed from this cluster; it may come back with an empty data directory "
            f"after 'quiver manager add {number} HOST:PORT'"
        )
