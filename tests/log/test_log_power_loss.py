"""Power cuts and killed processes: what was acknowledged stays, in order, and nothing is invented."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
from collections.abc import Iterator

import pytest

from quiver.config import LogSettings
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from tests.log.log_kit import ROOMY, SETTINGS, Driver, control, data, until_stopped

ONE_SEGMENT = dataclasses.replace(SETTINGS, segment_bytes_max=100_000)
ONE_ROOMY_SEGMENT = dataclasses.replace(ROOMY, segment_bytes_max=100_000)
ALL_SETTINGS = {
    "segments": SETTINGS,
    "one segment": ONE_SEGMENT,
    "roomy segments": ROOMY,
    "one roomy segment": ONE_ROOMY_SEGMENT,
}


def append_some(driver: Driver, number: int) -> None:
    chance = driver.disk.chance
    for _ in range(chance.randint(1, 4)):
        number += 1
        entry = control(number) if chance.random() < 0.25 else data(number, chance.choice((0, 7, 60, 300, 1500)))
        driver.append(entry, term=number // 20 + 1)


def act(driver: Driver, number: int) -> None:
    """One random step of an owner's life."""
    chance, log = driver.disk.chance, driver.live
    step = chance.random()
    if step < 0.55:
        append_some(driver, number * 10)
        if chance.random() < 0.7:
            driver.flush()
    elif step < 0.65:
        driver.flush()
    elif step < 0.75:
        if log.checkpoint.index < driver.acked - 1:
            driver.write_checkpoint(chance.randint(log.checkpoint.index + 1, driver.acked - 1))
    elif step < 0.85:
        if log.checkpoint.index + 1 < driver.acked:
            driver.truncate(chance.randint(log.checkpoint.index + 1, driver.acked - 1))
    else:
        driver.trim(chance.randint(1, log.checkpoint.index + 1))


def live(driver: Driver, generations: int, faults: bool) -> None:
    """Lives of a process: each works until it is stopped at some operation, and the next finds what it left."""
    chance = driver.disk.chance
    for generation in range(generations):
        driver.disk.stop_at(chance.randint(1, 80))
        if faults and chance.random() < 0.4:
            driver.disk.fail(
                chance.choice(("datasync", "pwrite", "allocate", "sync_directory")), errno.EIO, chance.randint(1, 9)
            )
        with until_stopped():
            driver.open()  # recovery may be stopped too
            for number in range(40):
                act(driver, generation * 40 + number)
        driver.disk.heal()
        driver.crash() if chance.random() < 0.5 else driver.kill()
    driver.open()
    driver.crash()
    driver.open()


@pytest.mark.parametrize("settings", ALL_SETTINGS.values(), ids=ALL_SETTINGS.keys())
@pytest.mark.parametrize("block", range(3))
def test_everything_acknowledged_survives_power_cuts_and_kills(settings: LogSettings, block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        with seed_named(seed):
            live(Driver(FaultyDisk(seed), settings), generations=6, faults=False)


@pytest.mark.parametrize("block", range(6))
def test_everything_acknowledged_survives_failing_syncs_and_writes_too(block: int) -> None:
    # What a failed sync left in the page cache is seen by the next process, and by its readers: it must stay.
    for seed in range(1000 + block * 10, 1000 + block * 10 + 10):
        with seed_named(seed):
            live(Driver(FaultyDisk(seed), ROOMY if seed % 2 else SETTINGS), generations=6, faults=True)


@contextlib.contextmanager
def seed_named(seed: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


# -- a scripted life, stopped at every single operation ----------------------------------------------------------------


def scripted(driver: Driver) -> None:
    """Every kind of operation: rolls, group commit over segments, check-point, truncation over segments, trim."""
    driver.open()
    for number in range(1, 6):
        driver.append(data(number, 150))
        driver.flush()
    for number in range(6, 14):
        driver.append(control(number) if number % 3 == 0 else data(number, 700 if number == 8 else 120), term=2)
    driver.flush()
    driver.write_checkpoint(6)
    driver.trim(6)
    driver.truncate(9)
    for number in range(20, 26):
        driver.append(data(number, 140), term=3)
    driver.flush()
    driver.truncate(13)
    driver.append(data(30, 20), term=4)
    driver.flush()
    driver.write_checkpoint(12)
    driver.append(data(31, 50), term=4)
    driver.trim(13)
    driver.flush()


@functools.cache
def operations_of_script() -> int:
    driver = Driver(FaultyDisk(0), ROOMY)
    scripted(driver)
    assert driver.live.first_index > 1
    return driver.disk.operations


@pytest.mark.parametrize("end", ["crash", "kill", "kill, then crash"])
@pytest.mark.parametrize("part", range(4))
def test_script_may_be_stopped_at_every_operation(end: str, part: int) -> None:
    for nth in range(1 + part, operations_of_script() + 1, 4):
        for seed in range(1 if end == "kill" else 4):
            driver = Driver(FaultyDisk(seed), ROOMY)
            driver.disk.stop_at(nth)
            with pytest.raises(SimulatedCrash):
                scripted(driver)
            driver.crash() if end == "crash" else driver.kill()
            driver.open()
            if end == "kill, then crash":
                # What the next process found and showed to readers is on the medium.
                driver.crash()
                driver.open()
            driver.append(data(99), term=9)
            driver.flush()
            driver.crash()
            driver.open()


def test_recovery_may_be_stopped_at_every_operation() -> None:
    for nth in range(1, operations_of_script(), 5):
        for stop in range(1, 9):
            driver = Driver(FaultyDisk(nth), ROOMY)
            driver.disk.stop_at(nth)
            with contextlib.suppress(SimulatedCrash):
                scripted(driver)
            driver.crash() if stop % 2 else driver.kill()
            driver.disk.stop_at(stop)
            with contextlib.suppress(SimulatedCrash):
                driver.open()
            driver.crash() if stop % 3 else driver.kill()
            driver.open()


def test_unacknowledged_entries_really_vanish_on_some_seeds() -> None:
    # Else the tests above would prove nothing.
    left = set()
    for seed in range(40):
        driver = Driver(FaultyDisk(seed))
        driver.open()
        driver.append(data(1))
        driver.flush()
        for number in range(2, 5):
            driver.append(data(number, 400))
        driver.disk.stop_at(2)
        with pytest.raises(SimulatedCrash):
            driver.flush()
        driver.crash()
        driver.open()
        left.add(driver.live.next_index)
    assert 2 in left and len(left) > 1
