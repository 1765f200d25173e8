"""The commands as typer sees them: help, mistakes that need no cluster, and what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiver.cli.main import app

COMMANDS: list[tuple[str, ...]] = [
    (),
    ("up",),
    ("down",),
    ("status",),
    ("topic",),
    ("broker",),
    ("broker", "list"),
    ("topic", "create"),
    ("topic", "list"),
    ("topic", "describe"),
    ("topic", "delete"),
    ("group",),
    ("group", "list"),
    ("group", "describe"),
    ("group", "reset"),
    ("group", "delete"),
    ("produce",),
    ("consume",),
    ("nginx-config",),
    ("spark",),
    ("spark", "ingest"),
    ("spark", "archive"),
    ("spark", "replay"),
    ("spark", "verify"),
    ("pipeline",),
    ("pipeline", "init"),
    ("pipeline", "run"),
]
WITH_TOPIC = [("topic", "create"), ("topic", "describe"), ("topic", "delete"), ("produce",), ("consume",)]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    _, examples = result.stdout.split("Examples:")
    assert " ".join(("quiver", *command)) in examples


def test_version_is_shown() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("quiver ")


@pytest.mark.parametrize("name", ["a b", ".", "..", "a/b", "ä", "", "x" * 250])
@pytest.mark.parametrize("command", WITH_TOPIC, ids=" ".join)
def test_bad_topic_names_are_refused_before_anything_is_asked(command: tuple[str, ...], name: str) -> None:
    result = CliRunner().invoke(app, [*command, name])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: topic name ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broker"], "a broker needs --id N"),
        (["broker", "--id", "1", "--manager", "no port:x"], "is not an address like 127.0.0.1:9400"),
        (["broker", "--id", "0", "--manager", "h:1"], "greater than or equal to 1"),
        (["up", "--managers", "2"], "1, 3 or 5 managers make a quorum"),
        (["up", "--managers", "0"], "greater than or equal to 1"),
        (["up", "--port", "70000"], "less than or equal to 65535"),
        (["up", "--config", "none.toml"], "the settings file none.toml does not exist"),
        (["produce", "t", "--key-separator", ""], "--key-separator must not be empty"),
        (["produce", "t", "--file", "missing"], "cannot read missing: No such file or directory"),
        (["consume", "t", "--from", "noon"], "is not a place to start"),
        (["consume", "t", "--from", "2026-01-31", "--group", "g"], "a group has its own position"),
        (["consume", "t", "--max", "0"], "greater than or equal to 1"),
    ],
)
def test_a_users_mistake_ends_with_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("quiver.cli.node", {"typer", "rich", "pyarrow"}), ("quiver.cli.main", {"rich", "pyarrow"})],
)
def test_what_must_start_fast_imports_nothing_heavy(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert unwanted.isdisjoint(run.stdout.decode().split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [("quiver to", "topic"), ("quiver topic des", "describe"), ("quiver topic create --par", "--partitions")],
)
def test_shell_completes_commands_and_options(words: str, expected: str) -> None:
    """What the script of --install-completion asks for."""
    environ = {"_QUIVER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = CliRunner().invoke(app, [], prog_name="quiver", env=environ)
    assert expected in result.output.split()


def test_completion_can_be_installed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in result.output and "--show-completion" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topic", "create", "x", "--set", "cleanup=never"], "cleanup is delete, consumed or compact, not 'never'"),
        (["topic", "create", "x", "--set", "retention.ms=soon"], "or -1 for no limit, not 'soon'"),
        (["topic", "create", "x", "--set", "retention.ms=-7"], "or -1 for no limit, not '-7'"),
        (["topic", "create", "x", "--set", "segment.bytes=1e9"], "is a number from 1024 to 1073741824, not '1e9'"),
        (["topic", "create", "x", "--set", "tombstone.ms="], "tombstone.ms is a number from 0 to"),
        (["topic", "alter", "x", "--set", "require.consumers=2"], "require.consumers is true or false, not '2'"),
        (["topic", "alter", "x", "--set", "retention.ms=1", "--set", "retention.ms=2"], "retention.ms is set twice"),
        (["topic", "create", "x", "--set", "cleanup"], "a setting is written name=value, not 'cleanup'"),
        (["topic", "alter", "x", "--set", "nope=1"], "there is no topic setting 'nope'"),
        (["topic", "alter", "x", "--unset", "nope"], "there is no topic setting 'nope'"),
        (["topic", "alter", "x"], "say what is to change: --partitions, --set or --unset"),
    ],
)
def test_wrong_settings_are_told_before_a_cluster_is_asked(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
