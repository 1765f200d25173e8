"""A child process that behaves like a node as the supervisor sees it: reports ready, then waits for its end.

stand_in.py HOW --port P --http-port P --ready-fd N
"""

import json
import os
import signal
import sys


def main() -> int:
    how = sys.argv[1]
    print(*sys.argv[1:], flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http_port = int(sys.argv[sys.argv.index("--http-port") + 1])
    ready_fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
    if how == "user-mistake":
        os.write(ready_fd, b'{"error": "the port is in use", "code": 2}\n')
        return 2
    if how == "crash":
        raise RuntimeError("broken on purpose")
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = f"127.0.0.1:{port or 40000 + os.getpid() % 10000}"
    http = f"http://127.0.0.1:{http_port or 50000 + os.getpid() % 10000}"
    os.write(ready_fd, json.dumps({"id": 1, "pid": os.getpid(), "address": address, "http": http}).encode() + b"\n")
    os.close(ready_fd)
    if how == "deaf":
        signal.pause()
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
