"""Who sits in the quorum: managers are added, let in, removed, and learn that they were.

What is wanted stands in the metadata (`metadata/manager_table.py`). The primary compares it with the membership of the
group and orders what is missing; admission does it one step at a time (`replication/admission.py`). Every manager keeps
where the others are, so that it finds them again when its settings name those of long ago.

Rule: one that was removed stays until a primary says that the group is without it. If it went before, the others might
be too few to let it go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from quiver.errors import InvalidRequestError, ManagerRemovedError, QuiverError
from quiver.manager.identity import Identity
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata.commands import AddManager, RemoveManager
from quiver.metadata.manager_table import EXPECTED, GONE, ManagerTable
from quiver.net.peers import Peers
from quiver.net.remote_link import RemoteLink
from quiver.raft import Membership
from quiver.replication.group import broker_of
from quiver.types import ManagerInfo
from quiver.wire.quorum_messages import GetQuorum, QuorumReply

logger = logging.getLogger("quiver.manager")

_KEPT_MIN: Final = 2  # the last one could not be mended from another
_ASK_S: Final = 1.0


class Wanted(NamedTuple):
    """`admits` may come in. `staying` are those that the group is to be, the leader first; none: as it is."""

    admits: frozenset[int]
    staying: tuple[int, ...]


def plan_seats(membership: Membership, table: ManagerTable, configured: Iterable[int], leader: int) -> Wanted:
    removed = table.removed
    voters = [broker_of(voter) for voter in membership.voters]
    staying = [manager for manager in voters if manager not in removed]
    leaves = any(broker_of(member) in removed for member in membership.members)
    return Wanted(
        frozenset({*configured, *table.addresses} - removed),
        tuple(sorted(staying, key=lambda manager: manager != leader)) if leaves else (),
    )


def changed_addresses(table: ManagerTable, configured: Collection[int], founders: Collection[int]) -> dict[int, str]:
    """Where managers are that the settings do not name, or that are others than when the quorum began; nowhere for
    those that were removed. Of the others the settings tell, so that they can be moved by changing these."""
    found: dict[int, str] = {}
    for row in table.rows.values():
        if row.phase == GONE:
            found[row.id] = ""
        elif row.id not in configured or row.replica_id not in founders:
            found[row.id] = row.address
    return found


def is_out(me: int, believes: bool, told: QuorumReply) -> bool:
    """`me` is a replica; it `believes` to vote, by its own log. Only a primary knows that it is not so."""
    if told.primary != told.manager_id or not told.members or me in told.members:
        return False
    return believes or broker_of(me) in told.removed


def rows_of(membership: Membership, table: ManagerTable, primary: int) -> list[ManagerInfo]:
    """Everybody who is one, is to be one, or is about to leave."""
    voters, learners = ({broker_of(one) for one in some} for some in (membership.voters, membership.learners))

    def state_of(manager: int) -> str:
        if manager in table.removed:
            return "leaving"
        if manager == primary:
            return "primary"
        return "secondary" if manager in voters else "newcomer" if manager in learners else EXPECTED

    known = table.rows
    shown = sorted(voters | learners | table.addresses.keys())
    return [
        ManagerInfo(manager, row.address if row else "", row.http if row else "", state_of(manager))
        for manager in shown
        for row in [known.get(manager)]
    ]


class Seats:
    """`configured`: the addresses of the managers that the settings name. `addresses`: where they are, kept current."""

    def __init__(
        self,
        quorum: MetadataQuorum,
        identity: Identity,
        configured: Mapping[int, str],
        peers: Peers | None,
        on_removed: Callable[[ManagerRemovedError], None],
    ) -> None:
        self._quorum = quorum
        self._identity = identity
        self._configured = configured
        self._peers = peers
        self._on_removed = on_removed
        self._ordered: tuple[int, Wanted] | None = None  # in which term
        self.addresses: dict[int, str] = {}
        self._use(identity.addresses)
        self._task: asyncio.Task[None] | None = None

    def start(self, is_in_touch: Callable[[], bool]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._find_out(is_in_touch))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- what was asked for is done ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Called when the metadata changed or another manager leads."""
        quorum, table = self._quorum, self._quorum.state.managers
        before = self._identity.addresses
        changed = changed_addresses(table, self._configured, self._identity.voters)
        self._identity.keep_addresses(changed, quorum.state.applied)
        if self._identity.addresses != before:
            self._use(self._identity.addresses)
        if not quorum.leads:
            return
        raft, replica = quorum.replica.raft, quorum.replica
        wanted = plan_seats(raft.membership, table, self._configured, quorum.me)
        if self._ordered != (raft.term, wanted):
            self._ordered = (raft.term, wanted)
            replica.admission.admits = wanted.admits
            replica.set_replicas(0, wanted.staying)

    def _use(self, changed: Mapping[int, str]) -> None:
        found = {**self._configured, **changed}
        self.addresses.clear()
        self.addresses.update({manager: at for manager, at in found.items() if at})
        if self._peers is not None:
            self._peers.set_addresses(self.addresses)

    # -- requests, at the primary --------------------------------------------------------------------------------

    async def add(self, manager: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequestError(f"{address[:100]!r} is not of the form HOST:PORT")
        if not self._configured:
            raise InvalidRequestError("this cluster has one manager for ever; one of several begins with --peers")
        self._check_new(manager)
        await self._quorum.propose(AddManager(manager, address))
        logger.info("manager_added manager=%d address=%s", manager, address)

    def _check_new(self, manager: int) -> None:
        members = self._managers_of(self._quorum.replica.raft.membership.members)
        if manager in members:
            leaves = manager in self._quorum.state.managers.removed
            raise InvalidRequestError(f"Manager {manager} {'is about to leave' if leaves else 'is part of'} the quorum")

    async def remove(self, manager: int) -> None:
        """Refused when the others could not go on without it. The same again changes nothing."""
        table, raft = self._quorum.state.managers, self._quorum.replica.raft
        members = self._managers_of(raft.membership.members)
        if manager in table.removed:
            return
        if manager not in members | table.addresses.keys():
            raise InvalidRequestError(f"Manager {manager} does not exist")
        voters = [voter for voter in raft.membership.voters if broker_of(voter) != manager]
        if manager in members and len(self._managers_of(voters) - table.removed) < _KEPT_MIN:
            raise InvalidRequestError(
                f"Manager {manager} cannot be removed: there would be fewer than {_KEPT_MIN}; add another one first"
            )
        if not Membership(tuple(voters)).has_majority(voter for voter in voters if voter not in raft.down):
            raise InvalidRequestError(f"Manager {manager} cannot be removed now: too few of the others answer")
        await self._quorum.propose(RemoveManager(manager))
        logger.info("manager_removed manager=%d", manager)

    def rows(self) -> list[ManagerInfo]:
        quorum = self._quorum
        return rows_of(quorum.replica.raft.membership, quorum.state.managers, quorum.primary)

    @staticmethod
    def _managers_of(replicas: Collection[int]) -> set[int]:
        return {broker_of(replica) for replica in replicas}

    # -- was this one removed? -----------------------------------------------------------------------------------

    async def _find_out(self, is_in_touch: Callable[[], bool]) -> None:
        """Whoever was removed hears nothing any more, and must ask why."""
        while True:
            await asyncio.sleep(_ASK_S)
            if is_in_touch() or self._quorum.leads:
                continue
            others = [(manager, at) for manager, at in self.addresses.items() if manager != self._quorum.me]
            for told in await asyncio.gather(*(self._ask(manager, at) for manager, at in others)):
                if told is not None and self._is_out(told):
                    logger.error("removed manager=%d by=%d", self._quorum.me, told.manager_id)
                    self._on_removed(ManagerTable.removal_of(self._quorum.me))
                    return

    def _is_out(self, told: QuorumReply) -> bool:
        raft = self._quorum.replica.raft
        is_ours = told.cluster_id == self._identity.cluster_id
        return is_ours and is_out(raft.me, raft.me in raft.membership.voters, told)

    async def _ask(self, manager: int, address: str) -> QuorumReply | None:
        link = RemoteLink(address, f"manager-{self._quorum.me}", -manager)
        try:
            reply, _ = await link.call(GetQuorum(), timeout_s=_ASK_S)
            assert isinstance(reply, QuorumReply)
            return reply
        except QuiverError:
            return None  # it is away, too
        finally:
            await link.close()
