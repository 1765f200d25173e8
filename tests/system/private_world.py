"""Tests in a world of their own: a network and mounts that nobody else sees and that vanish with the test.

    @in_private_world
    def test_something(tmp_path: Path) -> None: ...

The test runs again in another pytest, under `unshare` (util-linux): a network namespace in which it may cut what it
likes, and a mount namespace for disks of a size it likes. In a user namespace, so that root is not needed.

Rule: only Linux's own tools, ip and mount. A machine that forbids namespaces skips, and says why; but never in CI.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

UNSHARE: Final = ("unshare", "--map-root-user", "--net", "--mount", "--fork", "--kill-child", "--")
PROBE: Final = "ip link set lo up && ip link add p type veth peer name q && mount -t tmpfs -o size=1m none /run"
_INSIDE: Final = "IN_PRIVATE_WORLD"


def in_private_world(test: Callable[[Path], None]) -> Callable[[Path, pytest.FixtureRequest], None]:
    @functools.wraps(test)
    def run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
        if os.environ.get(_INSIDE):
            ip("link", "set", "lo", "up")
            test(tmp_path)
            return
        if (why := why_impossible()) is not None:
            told = f"NOT TESTED: this machine allows no private network and mounts ({why})"
            assert os.environ.get("CI") != "true", told
            pytest.skip(told)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        inner = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner"))
        done = subprocess.run(
            [*UNSHARE, *inner, request.node.nodeid.partition("@")[0]],  # xdist adds the group's name
            cwd=request.config.rootpath,
            env=environ | {_INSIDE: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest must see that it takes `request`
    return run


@functools.cache
def why_impossible() -> str | None:
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def ip(*words: str) -> None:
    """`ip WORDS` in this world."""
    subprocess.run(("ip", *words), check=True, capture_output=True)


def mount_small_disk(directory: Path, size_bytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(directory)), check=True)
