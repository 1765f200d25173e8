"""The `quiver` command on real processes: a cluster begins, serves, survives kills, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quiver.cli.lock import holder_pid, is_held
from tests.system.quick_commands import Run, quick

pytestmark = pytest.mark.system

QUIVER = (sys.executable, "-m", "quiver.cli.main")
WAIT_S = 60.0
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")} | {"COLUMNS": "200"}


def quiver(*arguments: str, cwd: Path, stdin: bytes = b"") -> Run:
    return subprocess.run([*QUIVER, *arguments], input=stdin, capture_output=True, cwd=cwd, env=ENVIRON, timeout=WAIT_S)


def succeeds(run: Run) -> bytes:
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout


def fails(run: Run, code: int, message: str) -> None:
    """One line for the user, never a stack trace."""
    lines = run.stderr.decode().splitlines()
    assert run.returncode == code, lines
    assert len([line for line in lines if line.startswith("error: ")]) == 1, lines
    assert message in lines[-1]
    assert "Traceback" not in run.stderr.decode()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _is_free(lock: Path) -> bool:
    return not is_held(lock)


class Cluster:
    """A detached cluster in a temporary directory, on a free port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "quiver-data"  # the default: commands run in `directory` find it

    def up(self, *arguments: str) -> bytes:
        return succeeds(self.run("up", "--detach", "--port", "0", *arguments))

    def run(self, *arguments: str, stdin: bytes = b"") -> Run:
        return quiver(*arguments, cwd=self.directory, stdin=stdin)

    def file(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data_dir / "cluster.json").read_bytes())
        return found

    def broker(self) -> dict[str, Any]:
        found: dict[str, Any] = self.file()["brokers"][0]
        return found

    def node_lock(self) -> Path:
        return self.data_dir / "broker-1" / "lock"

    def end(self) -> None:
        for path in (self.data_dir / "supervisor.lock", self.node_lock()):
            pid = holder_pid(path)
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
            until(partial(_is_free, path))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


class Running(Cluster):
    """Of its commands, those that are clients begin at once."""

    def run(self, *arguments: str, stdin: bytes = b"") -> Run:
        if arguments[0] == "up":
            return super().run(*arguments, stdin=stdin)
        return quick(*arguments, cwd=self.directory, stdin=stdin)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests that only use it as clients, each with a topic of its own."""
    made = Running(tmp_path_factory.mktemp("cli"))
    try:
        made.up()
        yield made
    finally:
        made.end()


@pytest.fixture
def topic(running: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"t{abs(hash(request.node.nodeid))}"
    succeeds(running.run("topic", "create", name))
    return name


# -- a cluster begins and ends ---------------------------------------------------------------------------------------


def test_a_cluster_comes_up_takes_messages_and_goes_down(cluster: Cluster) -> None:
    assert b"in the background" in cluster.up()
    found = cluster.file()
    broker = cluster.broker()
    assert found["servers"] == [broker["address"]]
    assert found["http"] == [found["managers"][0]["http"]]
    assert holder_pid(cluster.data_dir / "supervisor.lock") == found["supervisor"]["pid"]
    assert holder_pid(cluster.node_lock()) == broker["pid"]

    succeeds(cluster.run("topic", "create", "logs", "--partitions", "2"))
    produced = cluster.run("produce", "logs", stdin=b"one\ntwo\nthree")
    assert b"sent 3 messages in " in produced.stderr
    assert sorted(succeeds(cluster.run("consume", "logs")).splitlines()) == [b"one", b"three", b"two"]

    status = json.loads(succeeds(cluster.run("status", "--json")))
    assert status["running"] is True
    (shown,) = status["brokers"]
    assert shown.pop("last_heartbeat") is not None
    assert shown == broker | {"state": "online"}
    partitions = status["topics"][0]["partitions"]
    assert [row["state"] for row in partitions] == ["online", "online"]
    assert sum(row["messages"] for row in partitions) == 3
    assert b"logs" in succeeds(cluster.run("status"))

    assert b"has stopped" in succeeds(cluster.run("down"))
    assert not is_held(cluster.node_lock())
    assert not (cluster.data_dir / "cluster.json").exists()

    cluster.up()
    assert len(succeeds(cluster.run("consume", "logs")).splitlines()) == 3


def test_a_killed_node_comes_back_on_its_port_and_cluster_json_has_its_new_pid(cluster: Cluster) -> None:
    cluster.up()
    before = cluster.broker()
    succeeds(cluster.run("topic", "create", "logs"))
    succeeds(cluster.run("produce", "logs", stdin=b"kept\n"))
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: cluster.broker()["pid"] != before["pid"])
    after = cluster.broker()
    assert after["address"] == before["address"]
    assert holder_pid(cluster.node_lock()) == after["pid"]
    assert succeeds(cluster.run("consume", "logs")) == b"kept\n"
    log = (cluster.data_dir / "logs" / "supervisor.log").read_text()
    assert f"broker-1 (pid {before['pid']}) was killed by SIGKILL; starting it again in 0.1 s" in log


def test_without_restart_a_killed_node_ends_the_cluster_with_code_1(cluster: Cluster) -> None:
    with _foreground(cluster, "--no-restart") as supervisor:
        os.kill(cluster.broker()["pid"], signal.SIGKILL)
        _, stderr = supervisor.communicate(timeout=WAIT_S)
    assert supervisor.returncode == 1
    assert b"was killed by SIGKILL; the cluster ends (--no-restart)" in stderr
    assert not (cluster.data_dir / "cluster.json").exists()


def test_a_node_ends_when_its_supervisor_is_killed_and_up_works_again_at_once(cluster: Cluster) -> None:
    cluster.up()
    before = cluster.file()
    os.kill(before["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not is_held(cluster.data_dir / "supervisor.lock"))
    fails(cluster.run("status"), 1, "no cluster runs on")
    cluster.up()  # waits for the orphan to leave the directory
    assert cluster.broker()["pid"] != before["brokers"][0]["pid"]
    os.kill(cluster.file()["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not is_held(cluster.node_lock()))


def test_a_second_up_on_the_same_directory_is_refused(cluster: Cluster) -> None:
    cluster.up()
    before = cluster.file()
    for arguments in (("--detach",), ()):
        fails(cluster.run("up", "--port", "0", *arguments), 2, "a cluster runs already on")
    assert cluster.file() == before


@pytest.mark.parametrize("arguments", [("--detach",), ()])
def test_a_port_in_use_is_said_in_one_line(cluster: Cluster, arguments: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = cluster.run("up", "--port", str(port), *arguments)
    fails(run, 2, f"cannot listen on 127.0.0.1:{port}: the port is in use by another process")
    assert len([line for line in run.stderr.splitlines() if b"is still starting" not in line]) == 1  # a slow start
    assert not (cluster.data_dir / "cluster.json").exists()
    assert not is_held(cluster.data_dir / "supervisor.lock")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_foreground_up_clean(cluster: Cluster, number: signal.Signals) -> None:
    with _foreground(cluster) as supervisor:
        supervisor.send_signal(number)
        stdout, stderr = supervisor.communicate(timeout=WAIT_S)
    assert supervisor.returncode == 0
    assert b"Ctrl-C stops it" in stdout
    assert stderr == b""
    assert not (cluster.data_dir / "cluster.json").exists()
    assert not is_held(cluster.node_lock())
    assert "node_stopping" in (cluster.data_dir / "logs" / "broker-1.log").read_text()


def test_up_refuses_what_the_user_has_to_correct(cluster: Cluster) -> None:
    (cluster.directory / "a-file").touch()
    fails(cluster.run("up", "--host", "0.0.0.0", "--port", "0"), 2, "say --insecure if you accept that")
    fails(cluster.run("up", "--data-dir", "a-file/data"), 2, "cannot write to the data directory")
    (cluster.directory / "quiver.toml").write_text("prot = 1\n")
    fails(cluster.run("up"), 2, "unknown setting 'prot'")


def test_up_takes_its_settings_from_the_file_in_the_current_directory(cluster: Cluster) -> None:
    (cluster.directory / "quiver.toml").write_text('data_dir = "elsewhere"\nport = 0\n[log]\nretention_ms = 1000\n')
    cluster.data_dir = cluster.directory / "elsewhere"
    succeeds(cluster.run("up", "--detach"))
    assert succeeds(cluster.run("topic", "list")) == b""
    succeeds(cluster.run("down"))


def test_down_and_status_say_that_nothing_runs(cluster: Cluster) -> None:
    fails(cluster.run("down"), 1, "no cluster runs on")
    run = cluster.run("status", "--json")
    fails(run, 1, "no cluster runs on")
    assert json.loads(run.stdout)["running"] is False
    fails(cluster.run("topic", "list", "--data-dir", "."), 1, "no cluster runs on")
    fails(cluster.run("topic", "list", "--servers", "127.0.0.1:1"), 1, "no server answers")


# -- one node, without a supervisor ----------------------------------------------------------------------------------


def test_a_node_serves_alone_keeps_its_directory_and_stops_at_the_end_of_its_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quiver.cli.node", "--data-dir", str(tmp_path), "--port", "0"]
    read_fd, write_fd = os.pipe()
    with subprocess.Popen(
        [*command, "--ready-fd", str(write_fd)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(write_fd,),
        env=ENVIRON,
    ) as node:
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as reader:
            ready = json.loads(reader.readline())
            assert reader.read() == b""
        assert (ready["id"], ready["pid"]) == (1, node.pid)
        host, _, port = ready["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()

        second = subprocess.run(command, capture_output=True, env=ENVIRON, stdin=subprocess.DEVNULL, timeout=60)
        fails(second, 2, "is in use by another process")

        assert node.stdin is not None
        node.stdin.close()
        assert node.wait(WAIT_S) == 0


# -- client commands -------------------------------------------------------------------------------------------------


def test_a_bad_topic_name_is_refused(running: Cluster) -> None:
    fails(running.run("topic", "create", "a/b"), 2, "topic name 'a/b' is not allowed: use 1 to 249 of")


def test_topics_are_created_listed_described_and_deleted(running: Cluster) -> None:
    assert b"Created topic life with 3 partitions." in succeeds(
        running.run("topic", "create", "life", "--partitions", "3")
    )
    fails(running.run("topic", "create", "life"), 2, "life already exists")
    assert b"life" in succeeds(running.run("topic", "list")).splitlines()
    assert "life" in json.loads(succeeds(running.run("topic", "list", "--json")))
    described = json.loads(succeeds(running.run("topic", "describe", "life", "--json")))
    assert [row["partition"] for row in described["partitions"]] == [0, 1, 2]
    assert b"earliest" in succeeds(running.run("topic", "describe", "life"))
    succeeds(running.run("topic", "delete", "life"))
    fails(running.run("topic", "describe", "life"), 2, "life does not exist")
    fails(running.run("produce", "life", stdin=b"x\n"), 2, "life does not exist")
    fails(running.run("consume", "life"), 2, "life does not exist")


def test_settings_are_set_shown_altered_and_unset(running: Cluster) -> None:
    succeeds(running.run("topic", "create", "kept", "--set", "cleanup=consumed", "--set", "retention.ms=5000"))
    altered = succeeds(running.run("topic", "alter", "kept", "--set", "require.consumers=yes", "--unset", "cleanup"))
    assert altered == b"Topic kept has 1 partition, with require.consumers=true, retention.ms=5000.\n"
    described = json.loads(succeeds(running.run("topic", "describe", "kept", "--json")))
    assert described["settings"].items() >= {"require.consumers": True, "retention.ms": 5000}.items()
    (row,) = described["partitions"]
    assert (row["state"], row["rate"], row["segments"]) == ("online", 0.0, 1) and row["size_bytes"] >= 0
    shown = succeeds(running.run("topic", "describe", "kept", "--rate-over", "0"))
    assert b"require.consumers" in shown and b"rate/s" in shown
    fails(running.run("produce", "kept", stdin=b"x\n"), 2, "Topic kept takes no messages while it has no consumer")
    fails(running.run("topic", "alter", "kept", "--set", "replication.factor=2"), 2, "one replica of everything")
    succeeds(running.run("topic", "delete", "kept"))


def test_status_is_watched_until_ctrl_c(running: Cluster) -> None:
    command = [*QUIVER, "status", "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=running.directory, env=ENVIRON) as watching:
        assert watching.stdout is not None
        looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(WAIT_S) == 0
    assert all(look["running"] and look["brokers"][0]["state"] == "online" for look in looks)


def test_a_file_is_produced_line_by_line_and_consumed_the_same(running: Cluster, topic: str) -> None:
    content = b"".join(b"%d \xff\x00\r\n" % number for number in range(50_000)) + b"\n\nlast"
    (running.directory / "input").write_bytes(content)
    run = running.run("produce", topic, "--file", "input")
    succeeds(run)
    assert b"sent 50,003 messages in " in run.stderr
    assert succeeds(running.run("consume", topic)) == content + b"\n"


def test_keys_travel_and_json_shows_everything(running: Cluster, topic: str) -> None:
    succeeds(running.run("produce", topic, "--key-separator", ":", stdin=b"k:v:w\n:\xff\n"))
    first, second = map(json.loads, succeeds(running.run("consume", topic, "--format", "json")).splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {"topic": topic, "partition": 0, "offset": 0, "key": "k", "value": "v:w", "headers": []}
    assert (second["key"], second["value"]) == ("", {"base64": "/w=="})


def test_a_bad_line_is_named_and_those_before_it_are_stored(running: Cluster, topic: str) -> None:
    run = running.run("produce", topic, "--key-separator", ":", stdin=b"a:1\nb:2\nnothing\nc:3\n")
    fails(run, 2, "line 3 has no key: ':' is not in it")
    assert b"sent 2 messages" in run.stderr
    assert succeeds(running.run("consume", topic)) == b"1\n2\n"
    too_long = running.run("produce", topic, stdin=b"x\n" + b"y" * (1024 * 1024 + 1))
    fails(too_long, 2, "line 2 is longer than a message may be")
    assert succeeds(running.run("consume", topic)) == b"1\n2\nx\n"
    fails(running.run("produce", topic, "--partition", "7", stdin=b"x\n"), 2, "not 7")


def test_consume_begins_where_it_is_told(running: Cluster, topic: str) -> None:
    succeeds(running.run("produce", topic, stdin=b"0\n1\n2\n"))
    stamped = json.loads(succeeds(running.run("consume", topic, "--format", "json", "--max", "1")))["timestamp"]
    assert succeeds(running.run("consume", topic, "--from", "1", "--max", "1")) == b"1\n"
    assert succeeds(running.run("consume", topic, "--from", "3")) == b""
    assert succeeds(running.run("consume", topic, "--from", "latest")) == b""
    assert succeeds(running.run("consume", topic, "--from", stamped, "--partition", "0")) == b"0\n1\n2\n"
    assert succeeds(running.run("consume", topic, "--from", "2100-01-01")) == b""
    fails(running.run("consume", topic, "--from", "4"), 2, "offset 4 is out of range")
    fails(running.run("consume", topic, "--partition", "1"), 2, "has no partition 1")


def test_a_group_goes_on_where_it_stopped(running: Cluster, topic: str) -> None:
    succeeds(running.run("produce", topic, stdin=b"0\n1\n2\n"))
    assert succeeds(running.run("consume", topic, "--group", "g", "--max", "2")) == b"0\n1\n"
    assert succeeds(running.run("consume", topic, "--group", "g")) == b"2\n"
    assert succeeds(running.run("consume", topic, "--group", "g")) == b""
    assert succeeds(running.run("consume", topic, "--group", "other", "--max", "1")) == b"0\n"


def test_follow_waits_for_more_and_ctrl_c_ends_it(running: Cluster, topic: str) -> None:
    command = [*QUIVER, "consume", topic, "--follow"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=running.directory, env=ENVIRON
    ) as follower:
        assert follower.stdout is not None
        succeeds(running.run("produce", topic, stdin=b"first\n"))
        assert follower.stdout.readline() == b"first\n"
        succeeds(running.run("produce", topic, stdin=b"second\n"))
        assert follower.stdout.readline() == b"second\n"
        follower.send_signal(signal.SIGINT)
        _, stderr = follower.communicate(timeout=WAIT_S)
    assert follower.returncode == 130
    assert stderr == b"interrupted\n"


def test_a_closed_pipe_ends_consume_quietly(running: Cluster, topic: str) -> None:
    succeeds(running.run("produce", topic, stdin=b"x" * 99 + b"\n" + b"line\n" * 100_000))
    for follow in ((), ("--follow",)):
        with subprocess.Popen(
            [*QUIVER, "consume", topic, *follow],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=running.directory,
            env=ENVIRON,
        ) as reader:
            assert reader.stdout is not None and reader.stderr is not None
            assert len(reader.stdout.readline()) == 100
            reader.stdout.close()
            assert reader.stderr.read() == b""
            assert reader.wait(WAIT_S) == 0


def test_a_pipe_that_closes_while_nothing_comes_ends_follow(running: Cluster, topic: str) -> None:
    succeeds(running.run("produce", topic, stdin=b"only\n"))
    with subprocess.Popen(
        [*QUIVER, "consume", topic, "--follow"], stdout=subprocess.PIPE, cwd=running.directory, env=ENVIRON
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"only\n"
        reader.stdout.close()
        assert reader.wait(WAIT_S) == 0


def _foreground(cluster: Cluster, *arguments: str) -> subprocess.Popen[bytes]:
    """`quiver up` in the foreground, when it takes messages."""
    supervisor = subprocess.Popen(
        [*QUIVER, "up", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cluster.directory,
        env=ENVIRON,
    )
    until(lambda: (cluster.data_dir / "cluster.json").exists() or supervisor.poll() is not None)
    assert supervisor.poll() is None
    return supervisor
