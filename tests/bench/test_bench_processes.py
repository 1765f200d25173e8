from __future__ import annotations

import os
import signal

import pytest
from servers import uninterrupted
from spark_section import why_no_spark

from quiver.testing.processes import session_members


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


def test_spark_is_skipped_with_a_reason_when_java_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_no_spark() == "Java is missing: it is not on PATH"
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert why_no_spark() == "Java is missing: there is none in JAVA_HOME=/nowhere"
