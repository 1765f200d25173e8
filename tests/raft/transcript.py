"""Scenarios as text: a few pure replicas, driven by hand, and what they said and did.

A file has blocks: command lines, `----`, what came of them. Lines with `#` are for the reader. `pytest tests/raft
--regenerate` writes what comes of them now; read the difference before you keep it.

A message waits until it is delivered, an entry until it is synced, time until it is told. In the output `1->2 ...` is a
message that leaves, `> 1->2 ...` one that arrives, `x 1->2 ...` one that is lost; `5@2` is entry 5 of term 2; `1: ...`
is what changed at replica 1.

    group 1,2,3 [log=1,1,2] [term=2] [commit=1] [learners=4] [election_ms=600 ...]   begins; a log is given by its terms
    node 4 [voters=1,2,3] [log=...] [term=...] [vote=...] [commit=...]               one replica with another past
    random 1=0 2=300               what spreads the time-outs of a replica from its next tick on
    wait 600 [1 2]                 time passes; those, or all, are told
    campaign 1 | propose 1 a b | membership 1 1,2,3 [learners=4] | read 1 r | transfer 1 2 | wake 1
    sync [1] [index]               what is written is on disk, at one replica or all
    deliver|copy|drop [1->2] [kind] [first|last]      messages that are under way now; `copy` leaves them there
    hand 1->2 [kind] to=3          a message for 2 comes to replica 3
    settle                         all is delivered and synced until nothing is left
    rest                           time passes and all is delivered until the group is quiet
    elect 1                        1 stands, and only votes are delivered
    cut 1 2,3 | heal               what is said between them is lost
    crash 1 | restart 1 [commit=2] | down 1 2 | up 1 2 (1 learns of its connection to 2)
    trim 1 3 | full 1 | fail 1 | set 1 may_lead=no
    states [1] | progress 1 | messages
    silently ...                   any command, without its output
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from quiver.config import RaftSettings
from quiver.errors import QuiverError
from quiver.raft import AnyMessage, Append, Extend, Install, Membership, Own, Ready, Snapshot, Truncate
from quiver.raft.messages import AppendReply, Heartbeat, HeartbeatReply, TimeoutNow, Vote, VoteReply
from quiver.types import HardState
from tests.raft.kit import Disk, Entry, PureNode

SETTINGS = RaftSettings(heartbeat_ms=100, election_ms=1000, append_bytes_max=100, quiesce_ms=2000)
TURNS_MAX = 200  # of `settle`; more is a group that never comes to rest


def play(text: str) -> str:
    """The same text, with what comes of its commands now."""
    group = Transcript()
    lines = []
    for line in _without_output(text):
        lines.append(line)
        if line == "----":
            lines += group.take_output()
        elif line and not line.startswith("#"):
            group.run(line)
    return "\n".join(lines).rstrip() + "\n"


def regenerate(path: Path) -> None:
    path.write_text(play(path.read_text()))


def _without_output(text: str) -> Iterator[str]:
    in_output = False
    for line in text.splitlines():
        in_output = in_output and bool(line)
        if not in_output:
            yield line
        in_output = in_output or line == "----"


class Transcript:
    def __init__(self) -> None:
        self.nodes: dict[int, PureNode] = {}
        self.crashed: dict[int, Disk] = {}
        self.under_way: list[AnyMessage] = []
        self.now_ms = 0
        self._randoms: dict[int, int] = {}
        self._cuts: set[tuple[int, int]] = set()
        self._settings = SETTINGS
        self._seen: dict[int, dict[str, str]] = {}
        self._output: list[str] = []
        self._tells_sent = True
        self._first = ""

    def take_output(self) -> list[str]:
        output, self._output = self._output or ["ok"], []
        return output

    def run(self, line: str) -> None:
        said = list(self._output)
        self._run(line.removeprefix("silently "))
        if line.startswith("silently "):
            self._output = said

    def _run(self, line: str) -> None:
        name, *words = line.split()
        command: Callable[..., None] = getattr(self, f"do_{name}")
        plain = [word for word in words if "=" not in word]
        try:
            command(*plain, **dict(word.split("=") for word in words if "=" in word))
        except QuiverError as error:
            self._output.append(f"! {type(error).__name__}: {error}")
        for node in self.nodes.values():
            self._take_ready(node)

    # -- the group -----------------------------------------------------------------------------------------------

    def do_group(
        self, voters: str, learners: str = "", log: str = "", term: str = "", commit: str = "0", **settings: str
    ) -> None:
        self.__init__()  # type: ignore[misc]  # the scene begins anew
        self._settings = dataclasses.replace(SETTINGS, **{name: int(value) for name, value in settings.items()})
        self._first = _membership(Membership(_ids(voters), _ids(learners)))
        for replica in _ids(voters) + _ids(learners):
            self.do_node(str(replica), voters, learners, log, term, commit)

    def do_node(
        self,
        replica: str,
        voters: str = "",
        learners: str = "",
        log: str = "",
        term: str = "",
        commit: str = "0",
        vote: str = "0",
    ) -> None:
        entries = [Entry(entry_term) for entry_term in _ids(log)]
        terms = [entry.term for entry in entries]
        hard_state = HardState(int(term or max(terms, default=0)), int(vote))
        base = Membership(_ids(voters), _ids(learners))
        self._start(int(replica), Disk(hard_state, base=base, entries=entries, commit=int(commit)))

    def do_random(self, **randoms: str) -> None:
        self._randoms |= {int(replica): int(random) for replica, random in randoms.items()}

    def do_crash(self, replica: str) -> None:
        node = self.nodes.pop(int(replica))
        del node.disk.entries[node.clean :]
        self.crashed[node.me] = node.disk

    def do_restart(self, replica: str, commit: str = "") -> None:
        disk = self.crashed.pop(int(replica))
        disk.commit = int(commit or disk.commit)
        self._start(int(replica), disk)
        self._output.append(f"{replica}: {self._describe(int(replica))}")

    def _start(self, replica: int, disk: Disk) -> None:
        random = self._randoms.get(replica, 0)
        self.nodes[replica] = PureNode(replica, self._settings, disk, self.now_ms, random)
        self.nodes = dict(sorted(self.nodes.items()))
        self._seen[replica] = self._state(self.nodes[replica])

    # -- inputs --------------------------------------------------------------------------------------------------

    def do_wait(self, passed_ms: str, *replicas: str) -> None:
        self.now_ms += int(passed_ms)
        self._output.append(f"[{self.now_ms} ms]")
        for replica in map(int, replicas or self.nodes):
            self.nodes[replica].raft.tick(self.now_ms, self._randoms.get(replica, 0))
            self._take_ready(self.nodes[replica])

    def do_campaign(self, replica: str) -> None:
        self.nodes[int(replica)].raft.campaign()

    def do_propose(self, replica: str, *values: str) -> None:
        for value in values:
            self.nodes[int(replica)].propose(value)
            self._take_ready(self.nodes[int(replica)])

    def do_membership(self, replica: str, voters: str = "", learners: str = "") -> None:
        self.nodes[int(replica)].propose_membership(Membership(_ids(voters), _ids(learners)))

    def do_read(self, replica: str, context: str) -> None:
        self.nodes[int(replica)].raft.read(context)

    def do_transfer(self, replica: str, to: str) -> None:
        self.nodes[int(replica)].raft.transfer(int(to))

    def do_wake(self, replica: str) -> None:
        self.nodes[int(replica)].raft.wake()

    def do_sync(self, replica: str = "", index: str = "") -> None:
        for node in [self.nodes[int(replica)]] if replica else list(self.nodes.values()):
            node.sync(int(index) if index else None)
            self._take_ready(node)

    def do_down(self, replica: str, peer: str) -> None:
        self.nodes[int(replica)].raft.peer_down(int(peer))

    def do_up(self, replica: str, peer: str) -> None:
        self.nodes[int(replica)].raft.peer_up(int(peer))

    def do_trim(self, replica: str, start: str) -> None:
        self.nodes[int(replica)].trim(int(start))

    def do_full(self, replica: str) -> None:
        self.nodes[int(replica)].full()

    def do_fail(self, replica: str) -> None:
        self.nodes[int(replica)].raft.fail()

    def do_set(self, replica: str, **flags: str) -> None:
        for name, value in flags.items():
            setattr(self.nodes[int(replica)].raft, name, value == "yes")

    # -- messages ------------------------------------------------------------------------------------------------

    def do_deliver(self, *words: str) -> None:
        for message in self._pick(words):
            self.under_way.remove(message)
            self._step(message)

    def do_copy(self, *words: str) -> None:
        for message in self._pick(words):
            self._step(message)

    def do_hand(self, *words: str, to: str) -> None:
        for message in self._pick(words):
            self.under_way.remove(message)
            self._output.append(f"> {_message(message)} (at {to})")
            self.nodes[int(to)].raft.step(message, self.now_ms)

    def do_drop(self, *words: str) -> None:
        for message in self._pick(words):
            self.under_way.remove(message)
            self._output.append(f"x {_message(message)}")

    def do_cut(self, *sides: str) -> None:
        first, second = map(_ids, sides)
        self._cuts |= {pair for a in first for b in second for pair in ((a, b), (b, a))}

    def do_heal(self) -> None:
        self._cuts.clear()

    def do_settle(self) -> None:
        self._tells_sent = False
        for _ in range(TURNS_MAX):
            for node in self.nodes.values():
                self._take_ready(node)
            self.do_deliver()
            self.do_sync()
            if not self.under_way:
                break
        else:
            self._output.append("! does not come to rest")
        self._tells_sent = True

    def do_rest(self) -> None:
        for _ in range(TURNS_MAX):
            self.do_wait(str(self._settings.election_ms // 2))
            self.do_settle()
            if all(node.raft.quiet for node in self.nodes.values()):
                return
        self._output.append("! does not come to rest")

    def do_elect(self, replica: str) -> None:
        self.do_campaign(replica)
        self._take_ready(self.nodes[int(replica)])
        for kind in ("pre-vote", "pre-vote-reply", "vote", "vote-reply"):
            self.do_deliver(kind)

    def _pick(self, words: tuple[str, ...]) -> list[AnyMessage]:
        found = list(self.under_way)
        for word in words:
            if "->" in word:
                sender, to = word.split("->")
                found = [m for m in found if sender in ("", str(m.sender)) and to in ("", str(m.to))]
            elif word in ("first", "last"):
                found = found[:1] if word == "first" else found[-1:]
            else:
                found = [m for m in found if _kind(m) == word]
        if not found and words:
            self._output.append("! there is no such message")
        return found

    def _step(self, message: AnyMessage) -> None:
        node = self.nodes.get(message.to)
        lost = node is None or (message.sender, message.to) in self._cuts
        self._output.append(f"{'x' if lost else '>'} {_message(message)}")
        if not lost:
            assert node is not None
            node.raft.step(message, self.now_ms)
            self._take_ready(node)

    # -- output --------------------------------------------------------------------------------------------------

    def do_states(self, *replicas: str) -> None:
        for replica in map(int, replicas or self.nodes):
            self._output.append(f"{replica}: {self._describe(replica)}")

    def do_progress(self, replica: str) -> None:
        leader = self.nodes[int(replica)].raft.leader
        assert leader is not None
        for peer, progress in leader.progress.items():
            flight = f" in_flight={progress.in_flight}" if progress.in_flight else ""
            waits = " waits" if progress.waits else ""
            self._output.append(
                f"{peer}: {progress.way.value} match={progress.match} next={progress.next}{flight}{waits}"
            )

    def do_messages(self) -> None:
        self._output += [_message(message) for message in self.under_way]

    def _describe(self, replica: int) -> str:
        node = self.nodes[replica]
        entries = " ".join(_entry(index, entry) for index, entry in enumerate(node.entries, node.start + 1))
        before = f"({node.start}@{node.start_term}) " if node.start else ""
        usual = {"quiet": "no", "members": self._first}
        state = " ".join(f"{name}={value}" for name, value in self._state(node).items() if value != usual.get(name))
        return f"{state} synced={node.start + node.clean} log=[{before}{entries}]"

    def _state(self, node: PureNode) -> dict[str, str]:
        raft = node.raft
        state = {"role": raft.role.value, "term": raft.term, "leader": raft.leader_id or "?", "commit": raft.commit}
        return {name: str(value) for name, value in state.items()} | {
            "quiet": "yes" if raft.quiet else "no",
            "members": _membership(raft.membership),
        }

    def _take_ready(self, node: PureNode) -> None:
        while (ready := node.ready()) is not None:
            self._tell_ready(node, ready)
        state = self._state(node)
        changed = [f"{name}={value}" for name, value in state.items() if value != self._seen[node.me][name]]
        if changed:
            self._output.append(f"{node.me}: {' '.join(changed)}")
        self._seen[node.me] = state

    def _tell_ready(self, node: PureNode, ready: Ready) -> None:
        if ready.hard_state is not None:
            self._output.append(
                f"{node.me} saves term={ready.hard_state.term} vote={ready.hard_state.voted_for or '?'}"
            )
        self._output += [f"{node.me} {_work(work)}" for work in ready.work]
        self._output += [f"{node.me} answers {context} at {index}" for context, index in ready.reads]
        self._output += [f"{node.me} cannot answer {context}" for context in ready.lost_reads]
        if self._tells_sent:
            self._output += [_message(message) for message in ready.messages]
        self.under_way += ready.messages


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def _entry(index: int, entry: Entry) -> str:
    value = _membership(entry.membership) if entry.membership is not None else entry.value
    return f"{index}@{entry.term}{':' + value if value else ''}"


def _membership(membership: Membership) -> str:
    learners = f"+{','.join(map(str, membership.learners))}" if membership.learners else ""
    return f"({','.join(map(str, membership.voters))}{learners})"


def _work(work: Truncate | Extend | Own | Install) -> str:
    if isinstance(work, Truncate):
        return f"removes {work.index} and after"
    if isinstance(work, Extend):
        entries = work.append.body[work.first - work.append.prev_index - 1 :]
        return f"appends {' '.join(_entry(index, entry) for index, entry in enumerate(entries, work.first))}"
    if isinstance(work, Own):
        return f"appends {work.index}@{work.term}"
    return f"begins anew after {work.snapshot.index}@{work.snapshot.index_term}"


def _kind(message: AnyMessage) -> str:
    name = {AppendReply: "append-reply", HeartbeatReply: "heartbeat-reply", TimeoutNow: "timeout-now"}.get(
        type(message)
    )
    if isinstance(message, (Vote, VoteReply)):
        name = ("pre-" if message.pre else "") + ("vote" if isinstance(message, Vote) else "vote-reply")
    return name or type(message).__name__.lower()


def _message(message: AnyMessage) -> str:
    return f"{message.sender}->{message.to} {_kind(message)} term={message.term}{_facts(message)}"


def _facts(message: AnyMessage) -> str:
    if isinstance(message, Vote):
        return f" last={message.last_index}@{message.last_term}{' transfer' if message.transfer else ''}"
    if isinstance(message, VoteReply):
        return " granted" if message.granted else " refused"
    if isinstance(message, Append):
        entries = " ".join(
            _entry(index, entry) for index, entry in enumerate(message.body or (), message.prev_index + 1)
        )
        return f" prev={message.prev_index}@{message.prev_term} entries=[{entries}] commit={message.commit}"
    if isinstance(message, AppendReply) and not message.accepted:
        return f" refused={message.match} hint={message.hint_index}@{message.hint_term}"
    if isinstance(message, AppendReply):
        return f" match={message.match}"
    if isinstance(message, Heartbeat):
        return f" commit={message.commit} round={message.round}{' quiesce' if message.quiesce else ''}"
    if isinstance(message, HeartbeatReply):
        return f" commit={message.commit} round={message.round}"
    if isinstance(message, Snapshot):
        return f" index={message.index}@{message.index_term} members={_membership(message.membership)}"
    return ""
