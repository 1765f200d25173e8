"""Three hosts, each behind a cable of its own, around a router that can drop what one of them says to another.

A host has a broker, and in a HostsCluster a manager too; otherwise the manager is at the router. All clients are at the
router, and are cut off from a host only when its cable is pulled. Runs in a private world
(private_world.py): each broker in a network namespace, packets between them forwarded by the kernel. A cut is a routing
rule that drops without a word, as a broken network does: connections stay open and nothing comes through.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import urlopen

from tests.system.kit import ENVIRON, SMALL_FILES, WAIT_S, until
from tests.system.private_world import ip
from tests.system.replicated_kit import BACK_S_MAX, BROKERS, LOG_TROUBLE, Replicas

MANAGER_HOST: Final = "10.0.0.1"
PORT: Final = 9400  # nobody else is in this world
BROKER_PORT: Final = 9401  # of a broker that has a manager beside it
HTTP_PORT: Final = 8002


def host(broker: int) -> str:
    return f"10.0.{broker}.2"


class NetworkCluster(Replicas):
    """Processes started by hand, as on several machines. They end with the `with` block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cuts: list[tuple[int, int]] = []
        self.servers = ",".join(self.address(broker) for broker in range(1, BROKERS + 1))

    def address(self, broker: int) -> str:
        return f"{host(broker)}:{PORT}"

    def cut(self, sender: int, receiver: int) -> None:
        """What `sender` says does not reach `receiver` any more; the other way is open."""
        ip("rule", "add", "from", host(sender), "to", host(receiver), "blackhole")
        self._cuts.append((sender, receiver))

    def pull_cable(self, broker: int) -> None:
        ip("link", "set", f"cable{broker}", "down")

    def cut_off(self, broker: int) -> None:
        self.mute(broker)
        self.deafen(broker)

    def mute(self, broker: int) -> None:
        """The others do not hear it; it hears them."""
        for other in self._others(broker):
            self.cut(broker, other)

    def deafen(self, broker: int) -> None:
        """It does not hear the others; they hear it."""
        for other in self._others(broker):
            self.cut(other, broker)

    @staticmethod
    def _others(broker: int) -> list[int]:
        return [other for other in range(1, BROKERS + 1) if other != broker]

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            ip("rule", "del", "from", host(sender), "to", host(receiver), "blackhole")
        self._cuts.clear()
        for broker in range(1, BROKERS + 1):
            ip("link", "set", f"cable{broker}", "up")

    def __enter__(self) -> Self:
        subprocess.run(("mount", "-t", "tmpfs", "none", "/run"), check=True)  # where ip keeps names of namespaces
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        ip("addr", "add", MANAGER_HOST, "dev", "lo")
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for broker in range(1, BROKERS + 1):
                self._lay_cable(broker)
            self._start_nodes()
            stack.pop_all()
        return self

    def _start_nodes(self) -> None:
        self._start("manager", 0, ["--role", "manager", "--host", MANAGER_HOST, "--http-port", "0"])()
        for broker in range(1, BROKERS + 1):
            self._start(f"broker-{broker}", broker, ["--role", "broker", "--manager", f"{MANAGER_HOST}:{PORT}"])()

    def __exit__(self, *_: object) -> None:
        self._end()

    @staticmethod
    def _lay_cable(broker: int) -> None:
        space, cable = f"broker{broker}", f"cable{broker}"
        ip("netns", "add", space)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("addr", "add", f"10.0.{broker}.1/24", "dev", cable)
        ip("link", "set", cable, "up")
        for link in ("lo", "eth0"):
            ip("-n", space, "link", "set", link, "up")
        ip("-n", space, "addr", "add", f"{host(broker)}/24", "dev", "eth0")
        ip("-n", space, "route", "add", "default", "via", f"10.0.{broker}.1")

    def _start(self, name: str, at: int, arguments: list[str], port: int = PORT) -> Callable[[], None]:
        """On a host, or at the router (0). Calling what it returns waits until the process serves."""
        inside = ["nsenter", f"--net=/run/netns/broker{at}", "--"] if at else []
        command = [*inside, sys.executable, "-m", "quiver.cli.node", "--data-dir", "data", "--insecure"]
        command += ["--port", str(port), "--node-id", str(at or 1), *(["--host", host(at)] if at else []), *arguments]
        read_end, write_end = os.pipe()
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [*command, "--ready-fd", str(write_end)],
                    stdin=subprocess.PIPE,  # it stops by itself when this process is gone
                    stdout=log,
                    stderr=log,
                    cwd=self._directory,
                    env=ENVIRON | SMALL_FILES,
                    pass_fds=(write_end,),
                )
            )
        os.close(write_end)
        pipe = os.fdopen(read_end, "rb")

        def until_ready() -> None:
            with pipe:
                said = json.loads(pipe.readline() or b"{}")
            assert "address" in said, f"{name} did not start: {said}"

        return until_ready

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(WAIT_S)
            assert process.stdin is not None
            process.stdin.close()


class HostsCluster(NetworkCluster):
    """A manager and a broker on each host."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.http = [f"http://{host(number)}:{HTTP_PORT}" for number in range(1, BROKERS + 1)]

    def address(self, broker: int) -> str:
        return f"{host(broker)}:{BROKER_PORT}"

    def _start_nodes(self) -> None:
        hosts = range(1, BROKERS + 1)
        peers = ",".join(f"{number}={host(number)}:{PORT}" for number in hosts)
        managers = ",".join(f"{host(number)}:{PORT}" for number in hosts)
        roles = ["--role", "manager", "--peers", peers, "--http-port", str(HTTP_PORT)]
        ready = [self._start(f"manager-{number}", number, roles) for number in hosts]
        roles = ["--role", "broker", "--manager", managers]
        ready += [self._start(f"broker-{number}", number, roles, BROKER_PORT) for number in hosts]
        for until_ready in ready:
            until_ready()

    def primary(self, other_than: int = 0) -> int:
        """The host whose manager says that it leads; of two that both say so the one of the later term."""

        def find() -> int:
            told = [(health["term"], number) for number, health in self._healths() if health["role"] == "primary"]
            found = max(told)[1] if told else 0
            return 0 if found == other_than else found

        return int(until(find, BACK_S_MAX))

    def until_managers_agree(self) -> None:
        """Until one leads and none is cut off."""

        def agree() -> bool:
            healths = [health for _, health in self._healths()]
            roles = sorted(health["role"] for health in healths)
            return roles == ["primary", "secondary", "secondary"] and not any(h["cut_off_since"] for h in healths)

        until(agree, BACK_S_MAX)

    def _healths(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, url in enumerate(self.http, start=1):
            with contextlib.suppress(OSError, http.client.HTTPException), urlopen(f"{url}/health", timeout=1) as reply:
                yield number, json.loads(reply.read())

    def trouble(self) -> list[str]:
        return [
            f"{path.name}: {line}"
            for path in self._directory.glob("*-[0-9].log")
            for line in path.read_text().splitlines()
            if any(word in line for word in LOG_TROUBLE)
        ]
