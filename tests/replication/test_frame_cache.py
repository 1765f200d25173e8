"""The newest frames in memory, against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quiver.replication import frame_cache
from quiver.replication.frame_cache import FrameCache


def frame(index: int, size: int = 10) -> list[bytes | bytearray | memoryview]:
    return [b"%d." % index, bytes(size)]


def cache_of(first: int, last: int) -> FrameCache:
    cache = FrameCache(first)
    for index in range(first, last + 1):
        cache.add(frame(index))
    return cache


def test_frames_come_back_in_parts_and_in_order() -> None:
    cache = cache_of(5, 9)
    assert cache.get(6, 7) == [*frame(6), *frame(7)]
    assert cache.get(4, 6) is None
    assert cache.get(8, 10) is None


def test_fit_counts_bytes_and_gives_one_frame_at_least() -> None:
    cache = cache_of(1, 9)
    assert cache.fit(1, 1) == 1
    assert cache.fit(1, 24) == 2
    assert cache.fit(3, 10_000) == 9
    assert cache.fit(10, 100) is None
    assert cache.fit(0, 100) is None


def test_what_is_not_on_disk_stays_however_much_it_is() -> None:
    cache = cache_of(1, 9)
    cache.drop_below(needed=10, synced_end=4)
    assert cache.first == 4 and cache.get(4, 9) is not None


def test_what_is_needed_goes_when_there_is_too_much_of_it() -> None:
    cache = FrameCache(1)
    for index in range(1, 6):
        cache.add(frame(index, frame_cache.BYTES_MAX // 4))
    cache.drop_below(needed=1, synced_end=6)
    assert cache.first == 3


@given(st.lists(st.tuples(st.sampled_from(["add", "cut", "drop"]), st.integers(0, 30)), max_size=40))
def test_cache_is_a_window_of_the_log(steps: list[tuple[str, int]]) -> None:
    cache, log = FrameCache(1), [0]
    versions = 0
    for step, number in steps:
        if step == "add":
            versions += 1
            log.append(versions)
            cache.add(frame(versions))
        elif step == "cut" and len(log) > 1:
            index = 1 + number % (len(log) - 1) if len(log) > 1 else 1
            del log[index:]
            cache.drop_from(index)
        elif step == "drop":
            cache.drop_below(number, len(log))
        for index in range(1, len(log)):
            got = cache.get(index, index)
            assert got in (None, frame(log[index]))
            assert (got is None) == (index < cache.first)
        assert cache.get(len(log), len(log)) is None
