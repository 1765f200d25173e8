"""A member of a group as a process: prints every record it reads, as `partition offset time`, until its input ends.

group_member.py SERVERS TOPIC GROUP SESSION_S COMMIT_S
"""

import sys
import threading
import time

from quiver import Consumer


def main() -> None:
    servers, topic, group, session_s, commit_s = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    settings = {"session_timeout": float(session_s), "commit_interval": float(commit_s)}
    with Consumer(servers, [topic], group=group, **settings) as consumer:
        while not ended.is_set():
            records = consumer.poll(timeout=0.1)
            now_s = time.monotonic()
            if records:
                print("".join(f"{r.partition} {r.offset} {now_s}\n" for r in records), end="", flush=True)


if __name__ == "__main__":
    main()
