"""What nginx is told, out of what managers say; mistakes; the reload."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiver.cli.main import app
from quiver.cli.nginx import decide, reload_nginx, write
from quiver.client.managers import Roles
from quiver.errors import UsageError
from quiver.manager.nginx import Balanced
from tests.system.kit import free_port

A, B, C = "http://a:1", "http://b:2", "http://c:3"
ROLES = Roles(A, (B, C))


def test_what_all_say_is_taken() -> None:
    assert decide({A: ROLES, B: ROLES, C: ROLES}, {}) == Balanced("a:1", ("b:2", "c:3"))


def test_the_order_in_which_they_name_each_other_changes_nothing() -> None:
    assert decide({C: Roles(A, (C, B)), B: ROLES}, {}) == decide({B: ROLES, C: ROLES}, {})


def test_the_many_know_better_than_the_one_that_was_left_behind() -> None:
    new = Roles(B, (A, C))
    assert decide({A: ROLES, B: new, C: new}, {}) == Balanced("b:2", ("a:1", "c:3"))


def test_of_two_that_are_named_the_one_that_answers_leads() -> None:
    assert decide({A: None, B: Roles(B, (A, C)), C: ROLES}, {}) == Balanced("b:2", ("a:1", "c:3"))


def test_one_silence_is_not_being_away() -> None:
    answers = {A: ROLES, B: None, C: ROLES}
    assert decide(answers, {A: 0, B: 1, C: 0}) == Balanced("a:1", ("b:2", "c:3"))
    assert decide(answers, {A: 0, B: 2, C: 0}) == Balanced("a:1", ("b:2", "c:3"), frozenset({"b:2"}))


def test_when_nobody_knows_nothing_is_decided() -> None:
    assert decide({A: None, B: None}, {A: 5, B: 5}) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch"], "--watch needs --output"),
        (["--reload", "true"], "--reload needs --watch"),
        (["--http", "ftp://x"], "is not an address"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["nginx-config", *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_cluster_that_is_not_there_is_told() -> None:
    result = CliRunner().invoke(app, ["nginx-config", "--http", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "says who leads" in result.stderr


def test_nginx_is_reloaded_by_signal_or_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "nginx.pid"
    assert "does not run" in reload_nginx(None, pid_file)
    hung_up = threading.Event()
    before = signal.signal(signal.SIGHUP, lambda *_: hung_up.set())
    try:
        pid_file.write_text(f"{os.getpid()}\n")
        assert reload_nginx(None, pid_file) == "nginx reloaded"
        assert hung_up.wait(5)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert reload_nginx("true", pid_file) == "nginx reloaded"
    assert "no such config" in reload_nginx("sh -c 'echo no such config >&2; exit 1'", pid_file)
    assert "cannot be run" in reload_nginx("/nonexistent/nginx", pid_file)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "nginx.conf"
    write(path, "one")
    with path.open() as reader:
        write(path, "two")
        assert reader.read() == "one"
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot write"):
        write(tmp_path / "not there" / "nginx.conf", "three")
