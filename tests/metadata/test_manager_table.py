"""Who is a manager, who is awaited, and who was removed and stays so."""

from __future__ import annotations

import pytest

from quiver.errors import InvalidRequestError, ManagerRemovedError
from quiver.metadata.commands import AddManager, RemoveManager
from quiver.metadata.manager_table import EXPECTED, GONE, ManagerTable
from tests.metadata.kit import manager


def table(*managers: int) -> ManagerTable:
    made = ManagerTable()
    for number in managers:
        made.change(manager(number))
    return made


def test_one_that_was_added_is_awaited_and_one_as_soon_as_it_says_where_it_is() -> None:
    managers = table(1, 2, 3)
    assert managers.change(AddManager(4, "h:1")).phase == EXPECTED
    assert 4 not in managers and managers.addresses[4] == "h:1"
    assert managers.change(manager(4)).phase == ""
    assert managers[4].address == "127.0.0.1:9404" and not managers.others
    with pytest.raises(InvalidRequestError, match="Manager 4 is part of the quorum already"):
        managers.change(AddManager(4, "h:2"))


def test_one_that_was_removed_comes_back_only_when_it_is_added_again() -> None:
    managers = table(1, 2, 3)
    assert managers.change(RemoveManager(3)).phase == GONE
    assert managers.keys() == {1, 2} == managers.addresses.keys() and managers.removed == {3}
    for disk_id in (7, 8):  # an empty disk is not enough
        with pytest.raises(ManagerRemovedError, match="'quiver manager add 3 HOST:PORT'"):
            managers.change(manager(3, disk_id))
    with pytest.raises(ManagerRemovedError):
        managers.change(RemoveManager(3))
    managers.change(AddManager(3, "h:1"))
    managers.change(manager(3, 8))
    assert managers.keys() == {1, 2, 3} and not managers.removed


def test_one_that_never_came_or_never_said_anything_can_be_removed() -> None:
    managers = table(1, 2)
    managers.change(AddManager(4, "h:1"))
    managers.change(RemoveManager(4))
    managers.change(RemoveManager(3))
    assert managers.removed == {3, 4} and managers.addresses.keys() == {1, 2}
