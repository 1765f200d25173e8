"""`quiver status`: the nodes of a cluster, when everyone was last heard of, and the partitions they hold."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, NoReturn
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import typer

from quiver.cli.cluster_file import Running, find_running
from quiver.cli.heartbeats import CLIENTS_SHOWN, ago, client_cells, client_report, last_heartbeats, left_out
from quiver.cli.options import CONNECT_TIMEOUT_S, AsJson, DataDir, Servers, data_dir_of, examples, not_running, say
from quiver.cli.rates import Rates
from quiver.cli.rates import shown as shown_rate
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import human_bytes, print_json, table
from quiver.errors import UnavailableError
from quiver.types import ManagerInfo, NodeInfo, PartitionStatus

Replicas = dict[int, list[PartitionStatus]]  # what each broker that answers has


class Answer(NamedTuple):
    """What the nodes said; of each manager that answers, what it says of itself; of one, what it says of everyone."""

    nodes: list[NodeInfo]
    replicas: Replicas
    managers: list[ManagerInfo]
    health: dict[int, dict[str, Any]]
    seen: dict[str, Any]


_HEALTH_TIMEOUT_S = 1.0
_CLEAR: Final = "\x1b[2J\x1b[H"  # the screen, and back to its first place

_COLUMNS = (
    "topic",
    "partition",
    "state",
    "leader",
    "term",
    "replicas",
    "first",
    "next",
    "messages",
    "rate/s",
    "size",
    "segments",
)


def register(app: typer.Typer) -> None:
    lines = (
        *("quiver status", "quiver status --json", "quiver status --watch", "quiver status --clients"),
        "quiver status --servers 10.0.0.5:9400",
    )
    app.command(epilog=examples(*lines))(status)


def status(
    servers: Servers = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again and again, with rates, until Ctrl-C; JSON: one a line.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks of --watch.")
    ] = 2.0,
    clients: Annotated[
        bool, typer.Option("--clients", help=f"All producers and consumers, not only the last {CLIENTS_SHOWN} of each.")
    ] = False,
) -> None:
    """Show nodes, who leads them, topics, partitions, leaders, how far behind replicas are, and the last heartbeat of
    every manager, broker, producer and consumer.

    Exit code 1 without an answer.
    """
    if servers is None and data_dir is None:
        servers = os.environ.get("QUIVER_SERVERS") or None

    def look() -> dict[str, Any]:
        if servers:
            return remote_report(_ask(servers), clients)
        return _local_report(data_dir_of(data_dir), as_json and not watch, clients)

    if watch:
        keep_watching(look, interval, as_json)
    report = look()
    if as_json:
        print_json(report)
    else:
        _draw(report)
    if "error" in report:
        say(f"error: {report['error']}")
        raise typer.Exit(EXIT_FAILED)


def keep_watching(look: Callable[[], dict[str, Any]], interval_s: float, as_json: bool) -> NoReturn:
    """Draws what is seen, over what was seen before. A cluster that does not answer is told, and looked for again."""
    rates = Rates()
    try:
        while True:
            try:
                report = look()
                rates.look(report["topics"], time.monotonic())
            except UnavailableError as error:
                report = {"running": False, "error": error.message}
            if as_json:
                print(msgspec.json.encode(report).decode(), flush=True)
            else:
                if sys.stdout.isatty():
                    print(_CLEAR, end="")
                print(datetime.datetime.now().strftime("%H:%M:%S"))
                if report["running"]:
                    _draw(report)
                if "error" in report:
                    print(f"error: {report['error']}")
                sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt as error:
        raise typer.Exit(0) from error


def _local_report(path: Path, as_json: bool, clients: bool) -> dict[str, Any]:
    running = find_running(path)
    if running is None:
        if as_json:
            print_json({"running": False, "data_dir": str(path)})
        raise not_running(path)
    if running.cluster is None:
        return local_report(path, running, None, f"the cluster on {path} is still starting")
    try:
        answer = _ask(",".join(running.cluster.servers))
    except UnavailableError as error:
        return local_report(path, running, None, f"the cluster runs but does not answer: {error.message}")
    return local_report(path, running, answer, clients=clients)


def _ask(servers: str) -> Answer:
    from quiver import Admin

    with Admin(servers, request_timeout=CONNECT_TIMEOUT_S) as admin:
        managers = admin.managers()
        health = {row.id: found for row in managers if (found := _health(f"{row.http}/v1/health")) is not None}
        # The primary hears of everyone first.
        tellers = [row for row in managers if row.id in health]
        tellers.sort(key=lambda row: health[row.id].get("role") != "primary")
        seen = next((found for row in tellers if (found := _health(f"{row.http}/health")) is not None), {})
        return Answer(admin.nodes(), admin.replica_status(), managers, health, seen)


def _health(url: str) -> dict[str, Any] | None:
    """What a manager says of itself, whether it is well or not."""
    try:
        with urlopen(url, timeout=_HEALTH_TIMEOUT_S) as reply:
            raw = reply.read()
    except HTTPError as error:
        raw = error.read()  # a 503 has the same body
    except (OSError, HTTPException):
        return None
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None


def manager_row(health: dict[str, Any] | None) -> dict[str, Any]:
    """`lag`: transactions that are not in its database yet."""
    if health is None:
        return {"state": "unreachable", "role": None, "term": None, "lag": None}
    state = f"cut off since {health['cut_off_since']}" if health.get("cut_off_since") else "online"
    if health.get("trouble"):
        state = f"takes no changes: {health['trouble']}"
    return {"state": state} | {name: health.get(name) for name in ("role", "term", "lag")}


def remote_report(answer: Answer, clients: bool = False) -> dict[str, Any]:
    """What can be known from outside: no pids."""
    nodes, replicas, managers, health, seen = answer
    heard = last_heartbeats(seen, "manager"), last_heartbeats(seen, "broker")
    return {
        "running": True,
        "servers": [node.address for node in nodes],
        "managers": [
            {"id": row.id, "address": row.address, "http": row.http}
            | manager_row(health.get(row.id))
            | {"last_heartbeat": heard[0].get(row.id)}
            for row in sorted(managers, key=lambda row: row.id)
        ],
        "brokers": [
            {
                "id": node.id,
                "address": node.address,
                "state": "online" if node.id in replicas else "unreachable",
                "last_heartbeat": heard[1].get(node.id),
            }
            for node in sorted(nodes, key=lambda node: node.id)
        ],
        "topics": topic_rows(replicas),
    } | client_report(seen, clients)


def local_report(
    path: Path, running: Running, answer: Answer | None, error: str | None = None, *, clients: bool = False
) -> dict[str, Any]:
    """What the supervisor knows joined with what the nodes answered; `answer` None when they did not."""
    cluster = running.cluster
    seen = answer.seen if answer else {}
    heard = last_heartbeats(seen, "manager"), last_heartbeats(seen, "broker")
    online = set(answer.replicas) if answer else set()
    health = answer.health if answer else {}
    report: dict[str, Any] = {
        "running": True,
        "data_dir": str(path),
        "supervisor": {"pid": running.pid},
        "servers": list(cluster.servers) if cluster else [],
        "managers": [
            {"id": manager.id, "pid": manager.pid, "address": manager.address, "http": manager.http}
            | manager_row(health.get(manager.id))
            | {"last_heartbeat": heard[0].get(manager.id)}
            for manager in (cluster.managers if cluster else ())
        ],
        "brokers": [
            {
                "id": broker.id,
                "pid": broker.pid,
                "address": broker.address,
                "state": "online" if broker.id in online else "unreachable",
                "last_heartbeat": heard[1].get(broker.id),
            }
            for broker in (cluster.brokers if cluster else ())
        ],
        "topics": topic_rows(answer.replicas) if answer else [],
    } | client_report(seen, clients)
    if error is not None:
        report["error"] = error
    return report


def topic_rows(replicas: Replicas) -> list[dict[str, Any]]:
    """Topics by name, each with its partitions in order. Offsets: `next_offset` is the one the next message gets."""
    partitions: dict[tuple[str, int], dict[int, PartitionStatus]] = {}
    for broker, statuses in replicas.items():
        for one in statuses:
            partitions.setdefault((one.topic, one.partition), {})[broker] = one
    topics: dict[str, list[dict[str, Any]]] = {}
    for (name, _), held in sorted(partitions.items()):
        topics.setdefault(name, []).append(_partition_row(held))
    return [{"name": name, "partitions": rows} for name, rows in topics.items()]


def _partition_row(held: dict[int, PartitionStatus]) -> dict[str, Any]:
    """What the leader says, or without one the replica that is furthest; and all replicas, as far as they are known."""
    leading = [broker for broker, one in held.items() if one.role == "leader"]
    teller = max(leading or held, key=lambda broker: (held[broker].term, held[broker].next_offset))
    one = held[teller]
    lags = {replica.broker: replica for replica in one.replicas}
    return {
        "partition": one.partition,
        "state": one.state,
        "leader": teller if leading else 0,
        "term": one.term,
        "start_offset": one.start_offset,
        "next_offset": one.next_offset,
        "messages": one.next_offset - one.start_offset,
        "size_bytes": one.size_bytes,
        "segments": one.segments,
        "detail": one.detail,
        "replicas": [
            {
                "broker": broker,
                "role": held[broker].role if broker in held else "away",
                "state": held[broker].state if broker in held else "unreachable",
                "voter": lags[broker].voter if broker in lags else None,
                "lag": lags[broker].lag if broker in lags else None,
            }
            for broker in sorted(held.keys() | lags.keys())
        ],
    }


def replica_text(row: dict[str, Any]) -> str:
    """'2', or what is to be said of it: '2 (14 behind)', '3 (unreachable)'."""
    said = [] if row["state"] == "online" else [row["state"]]
    if row["voter"] is False:
        said.append("learner")
    if row["lag"]:
        said.append(f"{row['lag']:,} behind")
    return f"{row['broker']} ({', '.join(said)})" if said else str(row["broker"])


def _draw(report: dict[str, Any]) -> None:
    if "data_dir" in report:
        print(f"Cluster on {report['data_dir']}, supervisor pid {report['supervisor']['pid']}")
    now = datetime.datetime.now(datetime.UTC)
    shown = ("id", "pid", "address", "http", "state", "role", "term", "lag")
    managers = [
        [*(str("-" if row.get(name) is None else row[name]) for name in shown), ago(row["last_heartbeat"], now)]
        for row in report["managers"]
    ]
    if (len(report["brokers"]) > 1 or len(managers) > 1) and managers:
        table("Managers", (*shown, "last heartbeat"), managers)
    brokers = [
        (str(row["id"]), str(row.get("pid", "-")), row["address"], row["state"], ago(row["last_heartbeat"], now))
        for row in report["brokers"]
    ]
    if brokers:
        table("Brokers", ("id", "pid", "address", "state", "last heartbeat"), brokers)
    if clients := client_cells(report, now):
        table("Clients", ("kind", "id", "topic", "last heartbeat"), clients)
    if more := left_out(report):
        print(f"and {more:,} more clients: 'quiver status --clients' shows all.")
    rows = [
        (
            topic["name"],
            row["partition"],
            f"{row['state']}: {row['detail']}" if row["detail"] else row["state"],
            row["leader"] or "none",
            row["term"],
            ", ".join(map(replica_text, row["replicas"])),
            row["start_offset"],
            row["next_offset"],
            row["messages"],
            shown_rate(row.get("rate")),
            human_bytes(row["size_bytes"]),
            row["segments"],
        )
        for topic in report["topics"]
        for row in topic["partitions"]
    ]
    if rows:
        table("Partitions", _COLUMNS, rows)
    elif "error" not in report:
        print("No topics yet: 'quiver topic create NAME' makes one.")
