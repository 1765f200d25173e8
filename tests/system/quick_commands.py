"""The `quiver` command in a process of its own that begins at once.

Python needs most of a second to import what a command needs. One process imports it, and forks for each command.

Rule: a command sees what it would see from a shell: its arguments, its directory, its environment, its standard files;
its exit code is the answer. Commands that start other processes are none for this.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.system.kit import ENVIRON

Run = subprocess.CompletedProcess[bytes]
_REQUEST_BYTES_MAX = 64 * 1024


class QuickCommands:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=ENVIRON,
                cwd=Path(__file__).parents[2],
            )
        self._socket = ours

    def run(self, arguments: Sequence[str], cwd: Path, columns: int, stdin: bytes) -> Run:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            files = [given.fileno(), out.fileno(), err.fileno()]
            request = {"cwd": str(cwd), "columns": str(columns), "arguments": arguments}
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            code = int(self._socket.recv(_REQUEST_BYTES_MAX))
            out.seek(0)
            err.seek(0)
            return Run(arguments, code, out.read(), err.read())

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


@functools.cache
def _shared() -> QuickCommands:
    made = QuickCommands()
    atexit.register(made.close)
    return made


def quick(*arguments: str, cwd: Path = Path(), columns: int = 200, stdin: bytes = b"") -> Run:
    """Runs `quiver` with these arguments to its end."""
    return _shared().run(arguments, cwd.absolute(), columns, stdin)


def _serve(requests: socket.socket) -> None:
    import quiver.client.sync
    import quiver.wire.records  # noqa: F401  # the heavy ones, which commands import when they need them
    from quiver.cli.main import main

    while True:
        message, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _command(main, json.loads(message), files)
        for file in files:
            os.close(file)
        _, status = os.waitpid(pid, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _command(main: Callable[[], None], request: dict[str, Any], files: list[int]) -> None:
    code: object = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["cwd"])
        os.environ["COLUMNS"] = request["columns"]
        sys.argv[1:] = request["arguments"]
        main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
