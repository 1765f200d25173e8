"""A member of a group as a process: it tells what it reads and stores, until its input ends.

group_member.py SERVERS TOPIC GROUP SESSION_S COMMIT_S [by-hand]

`read PARTITION FIRST END TIME` for records that it has dealt with, `stored` when all of these are stored (by hand),
`assigned` when it is given partitions, `lost` when some were taken from it without asking.
"""

import sys
import threading
import time

from quiver import Consumer, Record
from quiver.errors import MemberFencedError


def tell(line: str) -> None:
    print(line, flush=True)


def tell_read(records: list[Record]) -> None:
    """Records of one partition follow each other."""
    now_s, first = time.monotonic(), 0
    for at, record in enumerate(records):
        following = records[at + 1] if at + 1 < len(records) else None
        if following is None or (following.partition, following.offset) != (record.partition, record.offset + 1):
            tell(f"read {record.partition} {records[first].offset} {record.offset + 1} {now_s}")
            first = at + 1


def main() -> None:
    servers, topic, group, session_s, commit_s, *by_hand = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    interval_s, stored_s = float(commit_s), time.monotonic()

    def store(*_: object) -> None:
        nonlocal stored_s
        if by_hand:
            stored_s = time.monotonic()
            try:
                consumer.commit()
            except MemberFencedError:  # it was held to be gone, which it might not hear before it ends
                tell("lost")
            else:
                tell("stored")

    settings = {"session_timeout": float(session_s), "commit_interval": None if by_hand else interval_s}
    told = {"on_assigned": lambda _: tell("assigned"), "on_revoked": store, "on_lost": lambda _: tell("lost")}
    with Consumer(servers, [topic], group=group, **settings, **told) as consumer:
        while not ended.is_set():
            if records := consumer.poll(timeout=0.1):
                tell_read(records)
            if time.monotonic() - stored_s >= interval_s:
                store()
        store()


if __name__ == "__main__":
    main()
