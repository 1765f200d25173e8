"""Three brokers, each behind a cable of its own, around a router that can drop what one of them says to another.

The manager and all clients are at the router and are cut off only when a cable is pulled. Runs in a private world
(private_world.py): each broker in a network namespace, packets between them forwarded by the kernel. A cut is a routing
rule that drops without a word, as a broken network does: connections stay open and nothing comes through.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from tests.system.kit import ENVIRON, SMALL_FILES, WAIT_S
from tests.system.private_world import ip
from tests.system.replicated_kit import BROKERS, Replicas

MANAGER_HOST: Final = "10.0.0.1"
PORT: Final = 9400  # nobody else is in this world


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
            roles = ["--role", "manager", "--http-port", "0"]
            self._start("manager", (), ["--node-id", "1", "--host", MANAGER_HOST, *roles])
            for broker in range(1, BROKERS + 1):
                self._lay_cable(broker)
                inside = ("nsenter", f"--net=/run/netns/broker{broker}", "--")
                roles = ["--role", "broker", "--manager", f"{MANAGER_HOST}:{PORT}"]
                self._start(f"broker-{broker}", inside, ["--node-id", str(broker), "--host", host(broker), *roles])
            stack.pop_all()
        return self

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

    def _start(self, name: str, inside: tuple[str, ...], arguments: list[str]) -> None:
        """Returns when it serves."""
        command = [*inside, sys.executable, "-m", "quiver.cli.node", "--data-dir", "data", "--insecure"]
        command += ["--port", str(PORT), *arguments]
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as pipe, (self._directory / f"{name}.log").open("ab") as log:
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
            said = json.loads(pipe.readline() or b"{}")
        assert "address" in said, f"{name} did not start: {said}"

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(WAIT_S)
            assert process.stdin is not None
            process.stdin.close()
