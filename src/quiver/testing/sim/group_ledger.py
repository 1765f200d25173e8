"""Holds consumer groups to their rules: one owner, no commit of who was fenced, positions that rise, nothing skipped.

What the managers decide is judged when it is committed, what brokers store when it is applied, what members do when
they do it: the three must tell one story.

Rule: it only looks, and believes no epoch or position that it did not see being given or stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.metadata.commands import ChangeGroup, Command, DeleteGroup, FenceGroup, decode_command
from quiver.metadata.groups import Group, Released
from quiver.metadata.state import State
from quiver.testing.sim.manager_node import ManagerNode
from quiver.testing.sim.metadata_ledger import MetadataLedger
from quiver.testing.sim.node import Node
from quiver.testing.sim.world import Violation
from quiver.wire.frame import FrameHeader, Kind
from quiver.wire.group_messages import GroupBeat, GroupReply, Held, JoinGroup
from quiver.wire.messages import Position

Pair = tuple[str, int]

_positions_decoder = msgspec.msgpack.Decoder(list[Position])


class Reading:
    """What the member that claimed a partition at one epoch has done with it."""

    def __init__(self, begin: int | None) -> None:
        """None: where it begins is not stored yet."""
        self.member = ""  # who was handed records
        self.begin = begin
        self.says_begin = False  # its own reader said where it begins
        self.handed = self.done = begin or 0  # up to which offset records were handed out, and were dealt with

    def begin_at(self, offset: int) -> None:
        self.begin = self.handed = self.done = offset


class Shared:
    """The model of one partition, as far as its group is concerned."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.index = 0  # of the last entry in here
        self.end = 0  # of its records
        self.epoch = 0
        self.position: int | None = None
        self.readings: dict[int, Reading] = {}  # by epoch
        self.skipped: list[tuple[int, int]] = []  # what nobody needs to read: a reset went past it

    def unread(self) -> int | None:
        """The first offset that no member has dealt with."""
        parts = [(one.begin or 0, one.done) for one in self.readings.values()]
        reached = 0
        for begin, end in sorted([*parts, *self.skipped]):
            if begin > reached:
                break
            reached = max(reached, end)
        return reached if reached < self.end else None


class GroupLedger(MetadataLedger):
    """`start` is where members begin that find no position."""

    def __init__(self, managers: int, topic: str, start: str) -> None:
        super().__init__(managers)
        self.topic = topic
        self._start = start
        self.shared: dict[int, Shared] = {}  # by partition
        self.generations: dict[int, Group] = {}
        self._given: dict[int, tuple[str, Pair, str]] = {}  # epoch -> group, partition and owner
        self._resets: dict[int, None] = {}  # epochs of those who set positions
        self._opened: dict[int, Partition] = {}  # the partitions of the broker that were looked at
        self._owners: dict[tuple[Pair, int], str] = {}

    @property
    def state(self) -> State:
        """What is committed."""
        return self._model

    # -- what managers decide ------------------------------------------------------------------------------------

    def _check_once(self, command: Command, payload: bytes, index: int) -> None:
        if not isinstance(command, (ChangeGroup, DeleteGroup, FenceGroup)):  # these may be said twice
            super()._check_once(command, payload, index)

    def _enter_command(self, index: int, payload: bytes) -> None:
        before, command = dict(self._model.groups), decode_command(payload)
        super()._enter_command(index, payload)
        for name, group in self._model.groups.items():
            if group is not before.get(name):
                self._check_group(command, before.get(name, Group(name)), group)
        if isinstance(command, FenceGroup) and isinstance(epoch := self.results[index], int):
            self._give(epoch, command.group, ("", 0), "")
            self._resets[epoch] = None
            if command.group in before and before[command.group].members:
                raise Violation("at rest", f"{command} was let through while the group has members")

    def _check_group(self, command: Command, old: Group, new: Group) -> None:
        if (old.members, old.shares) == (new.members, new.shares):
            return
        if self.generations.setdefault(new.generation, new) is not new or new.generation <= old.generation:
            raise Violation("generations once", f"{command} makes generation {new.generation} of {new.name} again")
        members, let_go = {member.id for member in new.members}, _let_go(command)
        had = {(share.topic, share.partition): share for share in old.shares}
        if len({(share.topic, share.partition) for share in new.shares}) < len(new.shares):
            raise Violation("one owner", f"{new} has a partition twice")
        for share in new.shares:
            pair = (share.topic, share.partition)
            before = had.get(pair)
            if share.owner not in members:
                raise Violation("one owner", f"{share} belongs to nobody who is a member")
            if before is not None and before.epoch == share.epoch:
                if before.owner != share.owner:
                    raise Violation("one owner", f"{before} becomes {share}, with the same epoch")
                continue
            self._give(share.epoch, new.name, pair, share.owner)
            if before is not None and before.owner in members:
                released = Released(before.owner, *pair, before.epoch)
                if released not in let_go and before.owner not in let_go:
                    raise Violation("one owner", f"{before} has not let go, and {share} follows")

    def _give(self, epoch: int, group: str, pair: Pair, owner: str) -> None:
        if epoch in self._given:
            raise Violation("epochs once", f"epoch {epoch} is of {self._given[epoch]} and of {(group, pair, owner)}")
        self._given[epoch] = group, pair, owner

    def told(self, node: Node, request: Any, answer: Any) -> None:
        """A manager answers a member."""
        if not isinstance(request, (JoinGroup, GroupBeat)):
            return
        try:
            self._check_told(node, request, answer)
        except Violation as violation:
            self.found.append(violation)
            raise

    def _check_told(self, node: Node, request: JoinGroup | GroupBeat, answer: GroupReply) -> None:
        if isinstance(request, GroupBeat):
            for released in request.released:
                self._check_release(request.member, released)
            if answer.generation == request.generation:
                return
        group = self.generations.get(answer.generation)
        if group is None or group.name != request.group:
            raise Violation("one view", f"{node.name} tells of generation {answer.generation}, which is none")
        mine = [share for share in group.shares if share.owner == request.member]
        held = [Held(share.topic, share.partition, share.epoch) for share in mine]
        leaving = [Held(share.topic, share.partition, share.epoch) for share in mine if share.target != share.owner]
        coming = sum(share.target == request.member != share.owner for share in group.shares)
        if (answer.held, answer.leaving, answer.coming) != (held, leaving, coming):
            raise Violation("one view", f"{node.name} tells {request.member} {answer}, it has {held}, leaves {leaving}")

    def _check_release(self, member: str, held: Held) -> None:
        """Who lets go in order has dealt with everything that it was handed, and stored that."""
        shared = self.shared.get(held.partition)
        reading = shared.readings.get(held.epoch) if shared is not None else None
        if shared is None or reading is None or shared.epoch != held.epoch:
            return  # it never began, or another has it by now
        if reading.done < reading.handed:
            raise Violation("orderly", f"{member} lets go of {held} and has {reading.handed - reading.done} in hand")
        if (shared.position if shared.position is not None else reading.begin or 0) < reading.done:
            detail = f"{member} lets go of {held} at {reading.done}, {shared.position} is stored"
            raise Violation("orderly", detail)

    # -- what brokers store --------------------------------------------------------------------------------------

    def check(self, node: Node) -> None:
        if isinstance(node, ManagerNode):
            super().check(node)
            return
        for number, partition in node.hosting.partitions.get(self.topic, {}).items():
            if isinstance(partition, Partition) and self._opened.get(number) is not partition:
                self._opened[number] = partition
                self._come_back(number, partition)

    def _come_back(self, number: int, partition: Partition) -> None:
        """A partition was opened: what is in its log counts, whether it was seen being applied or not."""
        shared = self._shared(number)
        if partition.state.applied_index < shared.index:
            raise Violation("2 committed stays", f"{shared.pair} comes back without entry {shared.index}")
        for _, header, payload in partition._log.scan(max(1, shared.index + 1)):
            if header.index <= partition.state.applied_index:
                self._enter_entry(shared, header, payload, None)
        self._check_position(shared, partition.state)

    def _shared(self, number: int) -> Shared:
        return self.shared.setdefault(number, Shared((self.topic, number)))

    def applied(
        self, node: Node, state: PartitionState, header: FrameHeader, payload: Any, refused: Sequence[int]
    ) -> None:
        partitions = node.hosting.partitions.get(self.topic, {}).items()
        found = (number for number, one in partitions if isinstance(one, Partition) and one.state is state)
        number = next(found, -1)
        if number < 0 or number not in self._opened:
            return  # it is being opened
        shared = self._shared(number)
        try:
            self._enter_entry(shared, header, payload, refused)
            self._check_position(shared, state)
        except Violation as violation:
            self.found.append(violation)
            raise

    def _check_position(self, shared: Shared, state: PartitionState) -> None:
        found = state.positions_of(None)
        if [*found.values()] != ([] if shared.position is None else [shared.position]):
            detail = f"{found} is the position in {shared.pair} after {shared.index}, not {shared.position}"
            raise Violation("7 positions", detail)

    def _enter_entry(self, shared: Shared, header: FrameHeader, payload: Any, refused: Sequence[int] | None) -> None:
        if header.index <= shared.index:
            return
        shared.index, shared.end = header.index, header.next_offset
        if header.kind == Kind.POSITIONS:
            for at, position in enumerate(_positions_decoder.decode(payload)):
                rightful = self._is_rightful(shared, position)
                if refused is not None and rightful is (at in refused):
                    how = "stores" if at not in refused else "is refused"
                    raise Violation("no fenced commit", f"{position} {how}, epoch {shared.epoch} has {shared.pair}")
                if rightful:
                    self._enter_position(shared, position)

    def _is_rightful(self, shared: Shared, position: Position) -> bool:
        if not position.epoch:  # somebody who shares nothing, and takes nothing from a member that is there
            group, owner = self._model.groups.get(position.consumer), self._given.get(shared.epoch)
            return group is None or owner is None or owner[2] not in {member.id for member in group.members}
        if position.act == "claim":
            return position.epoch >= shared.epoch
        return position.epoch == shared.epoch

    def _enter_position(self, shared: Shared, position: Position) -> None:
        epoch, offset, known = position.epoch, position.offset, shared.position
        if position.act == "claim":
            if epoch != shared.epoch:
                shared.epoch = epoch
                shared.readings[epoch] = Reading(0 if known is None and self._start == "earliest" else known)
        elif position.act == "forget":
            shared.epoch, shared.position = 0, None
        elif position.rewind:
            if epoch and epoch not in self._resets:
                raise Violation("7 positions", f"{position} moves {shared.pair} back from {known}, and is no reset")
            shared.skipped.append((known or 0, offset))
            shared.position = offset
        else:
            reading = shared.readings[epoch]
            # The first of its group says where "latest" was; again, where it had to begin once more.
            if reading.begin is None or (reading.says_begin and not reading.member and offset > reading.done):
                reading.says_begin = True
                reading.begin_at(offset)
                shared.skipped.append((0, offset))
            if offset > reading.done:
                detail = f"{position} is stored, {reading.member} has dealt with {shared.pair} up to {reading.done}"
                raise Violation("at least once", detail)
            shared.position = offset if known is None else max(known, offset)

    # -- what members do -----------------------------------------------------------------------------------------

    def owned(self, member: str, owned: dict[Pair, int]) -> None:
        """What a member takes for its own, after an event of it."""
        for key in owned.items():
            if self._owners.setdefault(key, member) != member:
                raise Violation("one owner", f"{member} and {self._owners[key]} read {key[0]} at epoch {key[1]}")

    def handed(self, member: str, pair: Pair, epoch: int, first: int, end: int) -> None:
        """Records were handed to the application."""
        reading = self._shared(pair[1]).readings.get(epoch)
        if reading is None:
            raise Violation("one owner", f"{member} reads {pair} at epoch {epoch}, which nobody claimed")
        if not reading.member:
            reading.member = member
        if reading.member != member:
            raise Violation("one owner", f"{member} and {reading.member} read {pair} at epoch {epoch}")
        if reading.begin is None:  # it was made since its reader began: all of it is new
            reading.begin = 0
        if first != reading.handed:
            raise Violation("no gap", f"{member} gets {pair} from {first} on, it was at {reading.handed}")
        reading.handed = end

    def done(self, pair: Pair, epoch: int) -> None:
        """The application is done with what it was handed."""
        reading = self._shared(pair[1]).readings[epoch]
        reading.done = reading.handed

    def committed(self, member: str, pair: Pair, epoch: int, offset: int) -> None:
        """A member was told that this is stored."""
        shared = self._shared(pair[1])
        if shared.epoch == epoch and (shared.position is None or shared.position < offset):
            raise Violation("2 committed stays", f"{member} stored {offset} of {pair}, which is at {shared.position}")


def _let_go(command: Command) -> set[Any]:
    """Members that left and partitions that were let go of."""
    if not isinstance(command, ChangeGroup):
        return set()
    return {*command.change.left, *command.change.released}
