"""Planted bugs of consumer groups: fencing, ownership, positions at a hand-over, the primary's memory."""

from __future__ import annotations

from typing import Any

from quiver.broker.partition_state import PartitionState
from quiver.client.consumer import ConsumerEngine
from quiver.client.group_admin import GroupAdmin
from quiver.client.positions import Positions
from quiver.manager.groups import Groups
from quiver.metadata import group_table
from quiver.metadata.groups import Group, Share, changed
from quiver.testing.plants.registry import Patch, plant


@plant("fence-not-checked", "a partition stores the position of a member whose successor has claimed it")
def _fence_not_checked() -> list[Patch]:
    return [(PartitionState, "is_fenced", lambda self, position: False)]


@plant("epochs-counted-by-group", "a group that is empty or made again counts epochs and generations from the start")
def _epochs_counted_by_group() -> list[Patch]:
    def counting(group: Group, change: Any, counts: Any, next_epoch: int) -> tuple[Group, int]:
        mine = max([group.generation, *(share.epoch for share in group.shares)]) + 1
        after, _ = changed(group, change, counts, 1 if not group.members else mine)
        return after, next_epoch

    return [(group_table, "changed", counting)]


@plant("given-before-let-go", "a partition is given to its next reader while the last one still has it")
def _given_before_let_go() -> list[Patch]:
    def hasty(group: Group, change: Any, counts: Any, next_epoch: int) -> tuple[Group, int]:
        after, number = changed(group, change, counts, next_epoch)
        shares = []
        for share in after.shares:
            if share.target and share.owner != share.target:
                share, number = Share(share.topic, share.partition, share.target, number, share.target), number + 1
            shares.append(share)
        return Group(after.name, after.strategy, after.generation, after.members, tuple(shares)), number

    return [(group_table, "changed", hasty)]


@plant("claim-sets-back", "who takes a partition over sets its position back to the beginning")
def _claim_sets_back() -> list[Patch]:
    move = PartitionState._move

    def forgetful(self: Any, position: Any) -> bool:
        done = move(self, position)
        if done and position.act == "claim" and position.consumer in self.positions:
            self.positions[position.consumer] = position.offset
        return done

    return [(PartitionState, "_move", forgetful)]


@plant("released-before-stored", "a member lets go of a partition before it has stored how far it was")
def _released_before_stored() -> list[Patch]:
    async def hasty(self: Any, taken: Any) -> None:
        if taken.revoked:
            await self._member.release(taken.revoked)
            await self.stored.commit_settled(taken.revoked)
            for pair in taken.revoked:
                self._forget(pair)

    return [(ConsumerEngine, "finish_revoke", hasty)]


@plant("stored-when-handed-out", "in the background what was handed out is stored, whether it was dealt with or not")
def _stored_when_handed_out() -> list[Patch]:
    commit = Positions.commit_settled

    async def hasty(self: Any, pairs: Any = None) -> None:
        self.settle()
        await commit(self, pairs)

    return [(Positions, "commit_settled", hasty)]


@plant("takeover-forgets-members", "a new primary misses only those members that it has heard of itself")
def _takeover_forgets_members() -> list[Patch]:
    def forgetful(self: Any) -> None:
        if self._term != self._quorum.term:
            self._term = self._quorum.term
            self._leaving_since.clear()
            self._deadlines = {}

    return [(Groups, "_know_sessions", forgetful)]


@plant("reset-without-claim", "a group is set back after a look that nobody is there, without claiming its partitions")
def _reset_without_claim() -> list[Patch]:
    async def trusting(self: Any, name: str, positions: Any) -> None:
        await self._commit(name, positions, "")

    return [(GroupAdmin, "_set", trusting)]
