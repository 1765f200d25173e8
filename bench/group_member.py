"""A member of a group as a process: prints `PARTITION TIME` for each partition of every poll, until its input ends.

group_member.py SERVERS TOPIC GROUP SESSION_S
"""

from __future__ import annotations

import sys
import threading
import time

from quiver import Consumer


def main() -> None:
    servers, topic, group, session_s = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    settings = {"session_timeout": float(session_s), "commit_interval": 0.2}
    with Consumer(servers, [topic], group=group, start="latest", **settings) as consumer:
        while not ended.is_set():
            records = consumer.poll(timeout=0.1)
            now_s = time.monotonic()
            read = dict.fromkeys(record.partition for record in records)
            print("".join(f"{number} {now_s}\n" for number in read), end="", flush=True)


if __name__ == "__main__":
    main()
