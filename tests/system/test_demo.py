"""The part of the demo that needs no Spark, with few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.kit import ENVIRON

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def test_the_demo_kills_a_broker_and_the_primary_and_finds_all(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "quiver.cli.demo", "--cluster-lines", "800", "--lines", "0"],
        env=ENVIRON | {"TMPDIR": str(tmp_path), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the same") == 3
    assert "which led, with SIGKILL" in run.stderr
    assert "the primary, with SIGKILL" in run.stderr
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if os.fsencode(tmp_path) in _read(path)]
    assert left == []
    assert list(tmp_path.iterdir()) == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
