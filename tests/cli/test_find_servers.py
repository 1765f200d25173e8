"""How a client command finds its cluster, and where a node gets its settings from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.cli.cluster_file import (
    BrokerEntry,
    Cluster,
    SupervisorEntry,
    find_running,
    read_cluster,
    supervisor_lock,
    write_cluster,
)
from quiver.cli.options import find_servers
from quiver.cli.settings import load_settings
from quiver.errors import InvalidRequestError, UnavailableError

CLUSTER = Cluster(("127.0.0.1:7001",), (BrokerEntry(1, 11, "127.0.0.1:7001"),), SupervisorEntry(10))


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("QUIVER_SERVERS", "QUIVER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose supervisor lives (here)."""
    data_dir = tmp_path / "quiver-data"
    data_dir.mkdir()
    with supervisor_lock(data_dir) as lock:
        assert lock.acquire()
        write_cluster(data_dir, CLUSTER)
        yield data_dir


def test_flags_come_before_environment(running: Path) -> None:
    environ = {"QUIVER_SERVERS": "env:1", "QUIVER_DATA_DIR": "/nowhere"}
    assert find_servers("flag:1", str(running), environ) == "flag:1"
    assert find_servers(None, str(running), environ) == "127.0.0.1:7001"
    assert find_servers(None, None, environ) == "env:1"


def test_the_data_directory_of_the_environment_and_the_default_one_are_used(running: Path) -> None:
    assert find_servers(None, None, {"QUIVER_DATA_DIR": str(running)}) == "127.0.0.1:7001"
    assert find_servers(None, None, {}) == "127.0.0.1:7001"


def test_without_anything_the_default_address_is_tried() -> None:
    assert find_servers(None, None, {}) == "127.0.0.1:9400"


def test_a_named_directory_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no cluster runs on .*; 'quiver up --data-dir .*' starts one"):
        find_servers(None, str(tmp_path), {})
    with pytest.raises(UnavailableError, match="no cluster runs on"):
        find_servers(None, None, {"QUIVER_DATA_DIR": str(tmp_path)})


def test_a_cluster_file_without_a_living_supervisor_does_not_count(tmp_path: Path) -> None:
    write_cluster(tmp_path, CLUSTER)
    assert read_cluster(tmp_path) == CLUSTER
    assert find_running(tmp_path) is None
    with pytest.raises(UnavailableError, match="no cluster runs on"):
        find_servers(None, str(tmp_path), {})


def test_a_cluster_that_is_still_starting_is_said_to_be(running: Path) -> None:
    (running / "cluster.json").unlink()
    with pytest.raises(UnavailableError, match="is still starting"):
        find_servers(None, str(running), {})


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path) -> None:
    (tmp_path / "quiver.toml").write_text('data_dir = "from-file"\nport = 1\nhost = "::1"\n[log]\nretention_ms = 5\n')
    settings = load_settings({"data_dir": "from-flag", "port": None}, environ={"QUIVER_PORT": "2"})
    assert (settings.data_dir, settings.port, settings.host) == ("from-flag", 2, "::1")
    assert settings.log.retention_ms == 5


@pytest.mark.parametrize(
    ("environ", "toml", "message"),
    [
        ({"QUIVER_PORT": "high"}, "", "QUIVER_PORT: 'high' is not a valid int"),
        ({"QUIVER_PORT": "70000"}, "", "port 70000 is not a port"),
        ({"QUIVER_NODE_ID": "0"}, "", "node id 0 is not allowed"),
        ({}, "port = ", "is not valid TOML"),
        ({}, "prot = 1", "unknown setting 'prot'"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, environ: dict[str, str], toml: str, message: str) -> None:
    (tmp_path / "quiver.toml").write_text(toml)
    with pytest.raises(InvalidRequestError, match=message):
        load_settings({}, environ=environ)


def test_a_settings_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"the settings file other\.toml does not exist"):
        load_settings({}, "other.toml", environ={})
    with pytest.raises(InvalidRequestError, match="cannot read the settings file"):
        load_settings({}, str(tmp_path), environ={})
