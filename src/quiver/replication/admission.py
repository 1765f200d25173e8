"""Takes replicas on new disks into their group: learner, then out with the predecessor, then voter.

Rule: one step at a time, and the next only when the one before is committed. The predecessor leaves before the newcomer
votes: it will never answer again, and counting it would make the majority larger for nothing.
"""

from __future__ import annotations

from quiver.raft import Membership, Raft
from quiver.replication.group import broker_of


class Admission:
    def __init__(self) -> None:
        self._newcomers: dict[int, int] = {}  # broker -> the replica it has now

    def asked(self, replica: int) -> None:
        self._newcomers[broker_of(replica)] = replica

    def next_step(self, raft: Raft) -> Membership | None:
        """The membership that this leader should propose now."""
        membership, leader = raft.membership, raft.leader
        if leader is None or raft.membership_index > raft.commit:
            return None
        heard = [raft.me, *(peer for peer, progress in leader.progress.items() if progress.active)]
        for learner in membership.learners:
            if learner not in heard and any(broker_of(peer) == broker_of(learner) for peer in heard):
                self._newcomers.pop(broker_of(learner), None)
                return membership.without(learner)  # that broker has another replica now, and it is there
        for broker, new in list(self._newcomers.items()):
            old = [peer for peer in membership.members if broker_of(peer) == broker and peer != new]
            if new in membership.voters or not (old or new in membership.learners):
                del self._newcomers[broker]
            elif new not in membership.learners:
                return membership.with_learner(new)
            elif leader.progress[new].match >= raft.commit:
                return membership.without(old[0]) if old else membership.with_voter(new)
        return None
