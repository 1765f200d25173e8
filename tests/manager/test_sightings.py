"""Who was seen at one manager is told to each of the others, once."""

from __future__ import annotations

from quiver.manager.sightings import Seen, SeenTimes, Sightings

NOBODY = Seen({}, {})


def nobody() -> Seen:
    return NOBODY


def test_news_are_what_was_noted_since_whatever_time_it_was_seen_at() -> None:
    times = SeenTimes({1: 500, 2: 600})
    assert times.since(0) == {}, "what was there before is no news"
    times.note(1, 700)
    version = times.version
    times.note(3, 800)
    times.merge({1: 650, 2: 610, 3: 900})
    assert times.since(version) == {2: 610, 3: 900}, "an older time of 1 is none"
    assert times.since(0) == {1: 700, 2: 610, 3: 900}
    assert times.since(times.version) == {}


def test_who_is_forgotten_is_no_news_either() -> None:
    times = SeenTimes({1: 5})
    times.note(2, 6)
    times.note(3, 7)
    times.keep({1, 3})
    assert times == {1: 5, 3: 7}
    assert times.since(0) == {3: 7}


def test_a_sighting_is_told_to_the_others_once_however_old_it_is() -> None:
    sightings = Sightings()
    assert sightings.for_manager(2, 0, 100, nobody) == NOBODY
    assert sightings.for_manager(3, 0, 101, nobody) == NOBODY
    sightings.note(2, Seen({7: 50}, {}))  # seen before manager 3 was last told, and heard of after that
    assert sightings.for_manager(3, 101, 110, nobody) == Seen({7: 50}, {})
    assert sightings.for_manager(3, 110, 120, nobody) == NOBODY
    assert sightings.for_manager(2, 100, 130, nobody) == NOBODY, "it said so itself"


def test_what_was_told_in_vain_is_told_again() -> None:
    sightings = Sightings()
    sightings.for_manager(2, 0, 100, nobody)
    sightings.note(1, Seen({}, {4: 90}))
    assert sightings.for_manager(2, 100, 110, nobody) == Seen({}, {4: 90})
    assert sightings.for_manager(2, 100, 120, nobody) == Seen({}, {4: 90}), "it never got the one of 110"
    assert sightings.for_manager(2, 120, 130, nobody) == NOBODY


def test_a_manager_that_is_new_is_told_everything_and_the_latest_time_counts() -> None:
    sightings = Sightings()
    assert sightings.for_manager(2, 0, 100, lambda: Seen({1: 5}, {})) == Seen({1: 5}, {})
    sightings.note(1, Seen({1: 9}, {}))
    sightings.note(3, Seen({1: 7}, {}))
    assert sightings.for_manager(2, 100, 110, nobody) == Seen({1: 9}, {})
    sightings.clear()
    assert sightings.for_manager(2, 110, 120, lambda: Seen({1: 9}, {2: 3})) == Seen({1: 9}, {2: 3})
