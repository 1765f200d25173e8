"""What replicas of a group say to each other.

Rule: plain values, encoded as they are. `body` is what the caller sends along (the frames of an append, the state of a
snapshot); the core never looks at it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from quiver.raft.membership import Membership


class Message(Struct, array_like=True, frozen=True, tag=True):
    sender: int
    to: int
    term: int


class Vote(Message, frozen=True, tag="vote"):
    """Asks for a vote, or with `pre` whether there would be one: that changes nothing at anybody (thesis §9.6).

    `transfer`: the leader asked for this election, so a voter does not protect that leader.
    """

    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteReply(Message, frozen=True, tag="vote_reply"):
    granted: bool
    pre: bool = False


class Append(Message, frozen=True, tag="append"):
    """Entries that follow (prev_index, prev_term), up to and including `last`; none when last == prev_index.

    `terms` are runs: (first index with this term, term). `memberships` are the entries of that kind among them.
    """

    prev_index: int
    prev_term: int
    last: int
    commit: int
    terms: tuple[tuple[int, int], ...] = ()
    memberships: tuple[tuple[int, Membership], ...] = ()
    body: Any = None


class AppendReply(Message, frozen=True, tag="append_reply"):
    """Accepted: `match` is on the sender's disk and equal to the leader's. Refused: `match` is the prev_index that was
    refused, and (hint_index, hint_term) is where the two logs may still agree."""

    match: int
    accepted: bool = True
    hint_index: int = 0
    hint_term: int = 0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """`commit` is never above what the receiver is known to have. `round` proves leadership to readers."""

    commit: int
    round: int = 0
    quiesce: bool = False


class HeartbeatReply(Message, frozen=True, tag="heartbeat_reply"):
    """`commit` is what the sender knows to be committed: less than it was told means that it must compare its log."""

    round: int = 0
    commit: int = 0


class Snapshot(Message, frozen=True, tag="snapshot"):
    """The receiver lacks entries the leader no longer has: it begins anew after `index`, with `body`.

    The driver may send it in `parts`, of which this is number `part`, with a checksum of the whole body; the core sees
    whole ones.
    """

    index: int
    index_term: int
    membership: Membership = Membership()
    body: Any = None
    part: int = 0
    parts: int = 1
    checksum: int = 0


class TimeoutNow(Message, frozen=True, tag="timeout_now"):
    """The leader hands over: stand for election at once."""


class Join(Message, frozen=True, tag="join"):
    """A replica that its group does not have asks to be taken in, and says where its log ends: a new one has none.

    For the driver, as are the next three; the core does not know them."""

    last_index: int = 0
    last_term: int = 0


class Outdated(Message, frozen=True, tag="outdated"):
    """The answer to who is no member and has a log: while it was away, things may have gone from the others' logs that
    it never heard of. It begins anew, if its log still ends at (index, index_term)."""

    index: int
    index_term: int


class Repair(Message, frozen=True, tag="repair"):
    """A replica whose frame of entry `index` is damaged asks for it.

    `compacted` is the order of compaction that it has carried out: who is behind that does not answer."""

    index: int
    compacted: int = 0


class RepairReply(Message, frozen=True, tag="repair_reply"):
    """The frame is the body; nothing when the sender does not know that entry to be committed. `trimmed`: it is gone
    from the group's logs, and nobody will ever send it. `compacted` is the order that the sender has carried out: its
    frame may be shorter than that of a replica which has not."""

    index: int
    trimmed: bool = False
    compacted: int = 0
    body: Any = None


class Compacted(Message, frozen=True, tag="compacted"):
    """Asks whether the receiver has carried out the order of compaction `about`; the answer says with `index` which one
    it has. For the owner of the log."""

    about: int
    index: int | None = None


AnyMessage = (
    Vote
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | Snapshot
    | TimeoutNow
    | Join
    | Outdated
    | Repair
    | RepairReply
    | Compacted
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
encode_message = _encoder.encode
decode_message = _decoder.decode
