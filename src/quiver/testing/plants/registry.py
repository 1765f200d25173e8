"""What a planted bug is, and how it is turned on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

Patch = tuple[Any, str, Any]  # a class or module, the name in it, what it is replaced by
Patches = Callable[[], list[Patch]]


class Plant(NamedTuple):
    what: str
    patches: Patches


PLANTS: dict[str, Plant] = {}


def plant(name: str, what: str) -> Callable[[Patches], Patches]:
    def keep(patches: Patches) -> Patches:
        PLANTS[name] = Plant(what, patches)
        return patches

    return keep


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Turns that bug on; an empty name is none. Raises KeyError for a name that is none of `PLANTS`."""
    with contextlib.ExitStack() as stack:
        for target, attribute, replacement in PLANTS[name].patches() if name else ():
            stack.enter_context(mock.patch.object(target, attribute, replacement))
        yield
