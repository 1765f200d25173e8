"""Raft as a pure core: messages, ticks and proposals go in, a `Ready` comes out. The caller does what it says.

No clock, file, socket or random source in here: `now_ms` and random numbers are arguments, so a run can be replayed.
The core holds no entries, only their terms; entries are frames in the caller's log, by index.

What the caller must do, or nothing here is true:

 1. One caller, one thread. After `tick`, `step`, `propose` or any other input, call `ready` and do what it says before
    the next input that may depend on it.
 2. `ready.hard_state` is on disk, synced, before any message of that `Ready` leaves.
 3. `ready.work` is done on the log in its order. A `Truncate` waits for writes that are under way. An `Install` is on
    disk before any message of that `Ready` leaves.
 4. Entries of `Extend` and `Own` may be written while messages leave. When they are on disk, synced, call `synced` with
    the last index and its term; never for a write that a `Truncate` has overtaken.
 5. A proposed entry is appended to the log under the index and term that `propose` returned, in that order.
 6. Messages may be lost, delayed, doubled and reordered, but not changed. The frames that belong to an `Append` are
    those of prev_index + 1 to last, byte for byte as the log has them, checked when they arrive; one whose checksum is
    wrong is not stepped. A `Snapshot` takes the state at `index` and what is needed to go on from there.
 7. Entries up to `commit` are applied once, in order, from a state that is on disk; after a restart the core is given a
    `commit` that is not above what was committed and not below what the state has applied.
 8. A write or sync that fails ends the replica: call `fail`. A disk that is full and gave the tail back: finish what
    the last `Ready` said (its hard state, its truncations), then call `rewound` with what the log now ends with.
 9. The log's prefix is trimmed only at or below `commit`; then call `trimmed`.
10. A replica id is never used again by a replica that has lost anything it had acknowledged. It comes back under a new
    id, as a learner.
11. `tick` comes every few milliseconds while `quiet` is false; a quiet group needs none. Tell the core when the
    connection to a peer is lost (`peer_down`) and back (`peer_up`): a quiet group has no other way to know.
12. Three short ways lead around `step`, `synced` and `ready`: `is_next` and `follow`; of the leader `is_plain` and
    `note`; of the leader `is_even`, `propose`, `spread` and `sent`. Each only if its question, asked just before, says
    yes and all of the last `Ready` is done. Before `follow` the entry is on disk, synced; `note` may commit.
"""

from quiver.raft.core import Raft
from quiver.raft.membership import Membership
from quiver.raft.messages import AnyMessage, Append, Message, Snapshot, decode_message, encode_message
from quiver.raft.ready import Extend, Install, Own, Ready, Role, Truncate
from quiver.raft.terms import TermRuns

__all__ = [
    "AnyMessage",
    "Append",
    "Extend",
    "Install",
    "Membership",
    "Message",
    "Own",
    "Raft",
    "Ready",
    "Role",
    "Snapshot",
    "TermRuns",
    "Truncate",
    "decode_message",
    "encode_message",
]
