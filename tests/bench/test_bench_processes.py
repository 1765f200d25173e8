from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plan import QUICK, Bench
from replicated_section import Load, kill_and_wait
from report import SIMULATOR
from servers import uninterrupted
from sim_section import simulator
from spark_section import why_no_spark

from quiver.testing.processes import session_members
from tests.system.kit import until


@pytest.fixture
def _interruptible():
    """Who is started in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_takes_effect_after_the_clean_up():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("clean-up")
    assert done == ["clean-up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_clean_up_is_not_hidden():
    with pytest.raises(ValueError), uninterrupted():
        raise ValueError


def test_the_members_of_a_session_are_found():
    assert os.getpid() in session_members(os.getsid(0))


class Sent:
    """A future of one record that is settled by hand."""

    def __init__(self) -> None:
        self._settled = threading.Event()

    def settle(self) -> None:
        self._settled.set()

    def done(self) -> bool:
        return self._settled.is_set()

    def result(self, timeout_s: float) -> None:
        if not self._settled.wait(timeout_s):
            raise TimeoutError


def test_load_keeps_many_in_flight_and_ends_when_all_are_acknowledged():
    sent: list[Sent] = []

    class Stalled:
        def send(self, topic: str, value: bytes) -> Sent:
            sent.append(Sent())
            return sent[-1]

    with Load(Stalled(), "t") as load:
        until(lambda: len(sent) == 256)
        assert load.unacknowledged in (255, 256)  # one is waited for
        for one in sent[:10]:
            one.settle()
        until(lambda: len(sent) == 266)
        threading.Timer(0.1, lambda: [one.settle() for one in sent]).start()
    assert all(one.done() for one in sent)


def test_load_says_when_a_record_was_not_acknowledged():
    class Failing:
        def send(self, topic: str, value: bytes) -> Sent:
            raise ValueError

    with pytest.raises(RuntimeError, match="not acknowledged"), Load(Failing(), "t"):
        pass


def test_who_is_killed_is_dead_when_that_returns():
    child = subprocess.Popen(["sleep", "60"])
    kill_and_wait(child.pid)
    assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert child.wait() == -signal.SIGKILL


def test_the_simulator_is_measured_in_a_process_of_its_own(tmp_path: Path):
    steps: Any = Mock()
    bench = Bench(replace(QUICK, sim_seeds=1), tmp_path, steps, "", "", 0, None, "")
    (row,) = simulator(bench)
    assert row.name == SIMULATOR and row.figures["events_per_s"] > 0


def test_spark_is_skipped_with_a_reason_when_java_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_no_spark() == "Java is missing: it is not on PATH"
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert why_no_spark() == "Java is missing: there is none in JAVA_HOME=/nowhere"
