"""Who was seen at one manager is told to each of the others, once."""

from __future__ import annotations

from quiver.manager.sightings import Seen, Sightings

NOBODY = Seen({}, {})


def test_a_sighting_is_told_to_the_others_once_however_old_it_is() -> None:
    sightings = Sightings()
    assert sightings.for_manager(2, 0, 100, NOBODY) == NOBODY
    assert sightings.for_manager(3, 0, 101, NOBODY) == NOBODY
    sightings.note(2, Seen({7: 50}, {}))  # seen before manager 3 was last told, and heard of after that
    assert sightings.for_manager(3, 101, 110, NOBODY) == Seen({7: 50}, {})
    assert sightings.for_manager(3, 110, 120, NOBODY) == NOBODY
    assert sightings.for_manager(2, 100, 130, NOBODY) == NOBODY, "it said so itself"


def test_what_was_told_in_vain_is_told_again() -> None:
    sightings = Sightings()
    sightings.for_manager(2, 0, 100, NOBODY)
    sightings.note(1, Seen({}, {4: 90}))
    assert sightings.for_manager(2, 100, 110, NOBODY) == Seen({}, {4: 90})
    assert sightings.for_manager(2, 100, 120, NOBODY) == Seen({}, {4: 90}), "it never got the one of 110"
    assert sightings.for_manager(2, 120, 130, NOBODY) == NOBODY


def test_a_manager_that_is_new_is_told_everything_and_the_latest_time_counts() -> None:
    sightings = Sightings()
    assert sightings.for_manager(2, 0, 100, Seen({1: 5}, {})) == Seen({1: 5}, {})
    sightings.note(1, Seen({1: 9}, {}))
    sightings.note(3, Seen({1: 7}, {}))
    assert sightings.for_manager(2, 100, 110, NOBODY) == Seen({1: 9}, {})
    sightings.clear()
    assert sightings.for_manager(2, 110, 120, Seen({1: 9}, {2: 3})) == Seen({1: 9}, {2: 3})
