"""The core is cheap: a broker holds thousands of groups."""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil

import pytest

import quiver.raft


def classes() -> list[type]:
    """All that are defined in the core. Members of an enum are made once, whatever they weigh."""
    modules = [
        importlib.import_module(f"quiver.raft.{found.name}") for found in pkgutil.iter_modules(quiver.raft.__path__)
    ]
    return [
        found
        for module in modules
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and not issubclass(found, enum.Enum)
    ]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_what_the_core_makes_has_slots_and_no_dict(kind: type) -> None:
    assert kind.__dictoffset__ == 0


def test_the_classes_with_most_attributes_are_among_those_looked_at() -> None:
    assert {"Raft", "Knowledge", "Leader", "Progress", "TermRuns", "Ready", "Append"} <= {
        kind.__name__ for kind in classes()
    }
