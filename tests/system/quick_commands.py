"""The `quiver` command in a process of its own that begins at once.

Python needs most of a second to import what a command needs. One process imports it, and forks for each command.

Rule: a command sees what it would see from a shell: its arguments, its directory, its standard files; its exit code is
the answer. Commands that start other processes are none for this.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

Run = subprocess.CompletedProcess[bytes]
_REQUEST_BYTES_MAX = 64 * 1024


class QuickCommands:
    """Ends with the `with` block."""

    def __init__(self, environ: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environ,
                cwd=Path(__file__).parents[2],
            )
        self._socket = ours

    def run(self, *arguments: str, cwd: Path, stdin: bytes = b"") -> Run:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            files = [given.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [json.dumps([str(cwd), *arguments]).encode()], files)
            code = int(self._socket.recv(_REQUEST_BYTES_MAX))
            out.seek(0)
            err.seek(0)
            return Run(arguments, code, out.read(), err.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(60)


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


def _command(main: object, request: list[str], files: list[int]) -> None:
    code: object = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request[0])
        sys.argv[1:] = request[1:]
        assert callable(main)
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
