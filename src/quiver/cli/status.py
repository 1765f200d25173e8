"""`quiver status`: the nodes of a cluster and the partitions they hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from quiver.cli.cluster_file import Running, find_running
from quiver.cli.options import CONNECT_TIMEOUT_S, AsJson, DataDir, Servers, data_dir_of, examples, not_running, say
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import human_bytes, print_json, table
from quiver.errors import UnavailableError
from quiver.types import NodeInfo, PartitionStatus

Replicas = dict[int, list[PartitionStatus]]  # what each broker that answers has
Answer = tuple[list[NodeInfo], Replicas]

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
    "size",
    "segments",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples("quiver status", "quiver status --json", "quiver status --servers 10.0.0.5:9400"))(
        status
    )


def status(servers: Servers = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show nodes, topics, partitions, leaders and how far behind replicas are. Exit code 1 without an answer."""
    if servers is None and data_dir is None:
        servers = os.environ.get("QUIVER_SERVERS") or None
    report = remote_report(*_ask(servers)) if servers else _local_report(data_dir_of(data_dir), as_json)
    if as_json:
        print_json(report)
    else:
        _draw(report)
    if "error" in report:
        say(f"error: {report['error']}")
        raise typer.Exit(EXIT_FAILED)


def _local_report(path: Path, as_json: bool) -> dict[str, Any]:
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
    return local_report(path, running, answer)


def _ask(servers: str) -> Answer:
    from quiver import Admin

    with Admin(servers, request_timeout=CONNECT_TIMEOUT_S) as admin:
        return admin.nodes(), admin.replica_status()


def remote_report(nodes: list[NodeInfo], replicas: Replicas) -> dict[str, Any]:
    """What can be known from outside: no pids."""
    return {
        "running": True,
        "servers": [node.address for node in nodes],
        "brokers": [
            {"id": node.id, "address": node.address, "state": "online" if node.id in replicas else "unreachable"}
            for node in sorted(nodes, key=lambda node: node.id)
        ],
        "topics": topic_rows(replicas),
    }


def local_report(path: Path, running: Running, answer: Answer | None, error: str | None = None) -> dict[str, Any]:
    """What the supervisor knows joined with what the nodes answered; `answer` None when they did not."""
    cluster = running.cluster
    online = set(answer[1]) if answer else set()
    report: dict[str, Any] = {
        "running": True,
        "data_dir": str(path),
        "supervisor": {"pid": running.pid},
        "servers": list(cluster.servers) if cluster else [],
        "managers": [
            {"id": manager.id, "pid": manager.pid, "address": manager.address, "http": manager.http}
            for manager in (cluster.managers if cluster else ())
        ],
        "brokers": [
            {
                "id": broker.id,
                "pid": broker.pid,
                "address": broker.address,
                "state": "online" if broker.id in online else "unreachable",
            }
            for broker in (cluster.brokers if cluster else ())
        ],
        "topics": topic_rows(answer[1]) if answer else [],
    }
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


def _replica(row: dict[str, Any]) -> str:
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
    managers = [(str(row["id"]), str(row["pid"]), row["address"], row["http"]) for row in report.get("managers", ())]
    if len(report["brokers"]) > 1 and managers:
        table("Managers", ("id", "pid", "address", "http"), managers)
    brokers = [(str(row["id"]), str(row.get("pid", "-")), row["address"], row["state"]) for row in report["brokers"]]
    if brokers:
        table("Brokers", ("id", "pid", "address", "state"), brokers)
    rows = [
        (
            topic["name"],
            row["partition"],
            f"{row['state']}: {row['detail']}" if row["detail"] else row["state"],
            row["leader"] or "none",
            row["term"],
            ", ".join(map(_replica, row["replicas"])),
            row["start_offset"],
            row["next_offset"],
            row["messages"],
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
