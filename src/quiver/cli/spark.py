"""`quiver spark ingest|archive|replay|verify`: bulk jobs on Spark, with a bar of its tasks and a table at the end.

Rule: the work is in `quiver.spark`; here are words, bars and exit codes.
"""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from quiver.cli import spark_verify
from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster, say
from quiver.cli.progress import SparkTasks
from quiver.cli.render import print_json, table
from quiver.cli.spark_job import Conf, Format, Master, State, Topic, session
from quiver.errors import InvalidRequestError
from quiver.types import check_topic_name

Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", show_default=False, help="Only messages of this time (ISO, UTC) and later."),
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", show_default=False, help="Only messages from before this time.")
]
Partitions = Annotated[
    list[int] | None,
    typer.Option("--partition", min=0, metavar="N", show_default=False, help="Only this one, may be repeated."),
]
Offsets = Annotated[
    tuple[int, int] | None,
    typer.Option(metavar="FIRST END", show_default=False, help="Only these offsets of each partition, END exclusive."),
]

_commands = typer.Typer(no_args_is_help=True, help="Bulk jobs on Spark: files and archives into topics, and back.")


def register(app: typer.Typer) -> None:
    spark_verify.register(_commands)
    app.add_typer(
        _commands,
        name="spark",
        epilog=examples(
            "quiver spark ingest logs /var/log/app/*.log",
            "quiver spark archive logs /archive",
            "quiver spark replay /archive again --source logs",
            "quiver spark verify logs --produced sent.jsonl --consumed c1=c1.jsonl --consumed c2=c2.jsonl",
        ),
    )


@_commands.command(
    epilog=examples(
        "quiver spark ingest logs /var/log/app/*.log",
        "quiver spark ingest orders orders/ --format csv --key customer",
        "quiver spark ingest events s3a://bucket/events/ --format parquet --value payload --master spark://host:7077",
    )
)
def ingest(
    topic: Topic,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", show_default=False, help="Files or folders.")],
    format: Format = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Column, or field of a JSON line, for the key."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Column to send instead of the row as JSON.")
    ] = None,
    state: State = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: AsJson = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Send files to a topic: a line of text or JSON, or a row of CSV or Parquet, is a message.

    The same command again sends only what it has not sent; killed in the middle, it goes on where it was.
    """
    check_topic_name(topic)
    found = find_cluster(servers, data_dir)
    with session("ingest", master, conf) as spark, SparkTasks() as bar:
        from quiver.spark import ingest as run

        done = run(
            spark,
            topic,
            paths,
            servers=found,
            format=format,
            key=key,
            value=value,
            state=state,
            on_progress=bar.show,
        )
    rate = round(done.rows / max(done.seconds, 1e-6))
    if as_json:
        print_json({"topic": topic, "rows": done.rows, "seconds": round(done.seconds, 3), "state": done.state})
        return
    row = (topic, done.rows, f"{done.seconds:.1f}", rate, done.state)
    table("Ingested", ("topic", "messages", "seconds", "messages/s", "state"), [row])
    if not done.rows:
        say("nothing new: this job has sent these files before; remove its state to send them again")


@_commands.command(
    epilog=examples(
        "quiver spark archive logs /archive",
        "quiver spark archive logs s3a://bucket/archive --continuous --every '5 minutes' --trim",
    )
)
def archive(
    topic: Topic,
    path: Annotated[str, typer.Argument(metavar="DIR", show_default=False, help="Folder of the archive.")],
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Go on with what comes, until Ctrl-C. Else: what is there now.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="With --continuous: how often.")] = "1 minute",
    trim: Annotated[
        bool, typer.Option("--trim", help="Let the topic forget what is archived and read by all its other consumers.")
    ] = False,
    rows_per_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Messages in a batch, at most.")] = 5_000_000,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: AsJson = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Add what a topic has, and the archive has not, to Parquet files by topic, partition and day.

    Each message is in exactly one file, also when the job is killed; the same command goes on where it was.
    """
    check_topic_name(topic)
    found = find_cluster(servers, data_dir)
    with session("archive", master, conf) as spark, SparkTasks() as bar:
        from quiver.spark import archive as run

        done = run(
            spark,
            topic,
            path,
            servers=found,
            continuous=continuous,
            every=every,
            trim=trim,
            rows_per_batch=rows_per_batch,
            on_progress=bar.show,
        )
    if as_json:
        print_json({"topic": topic, "rows": done.rows, "files": done.files, "ends": done.ends, "path": done.path})
        return
    row = (topic, done.rows, done.files, done.batches, f"{done.seconds:.1f}", done.path)
    table("Archived", ("topic", "messages", "files", "batches", "seconds", "archive"), [row])
    if not done.rows:
        say("nothing new: the archive has all that the topic has")


@_commands.command(
    epilog=examples(
        "quiver spark replay /archive logs",
        "quiver spark replay /archive again --source logs --since 2026-11-15 --until 2026-11-16",
        "quiver spark replay s3a://bucket/archive again --source logs --offsets 0 1000000 --spread",
    )
)
def replay(
    path: Annotated[str, typer.Argument(metavar="DIR", show_default=False, help="Folder of the archive.")],
    topic: Topic,
    source: Annotated[
        str | None, typer.Option(metavar="TOPIC", show_default=False, help="Topic in the archive, if it is another.")
    ] = None,
    since: Since = None,
    until: Until = None,
    partition: Partitions = None,
    offsets: Offsets = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Let keys choose partitions. Else: those the messages came from.")
    ] = False,
    state: State = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: AsJson = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Send an archive, or a range of it, to a topic: in the order of each partition, each message once.

    The same command again sends only what it has not sent; killed in the middle, it goes on where it was.
    """
    check_topic_name(topic)
    moments = {"since": _moment(since, "--since"), "until": _moment(until, "--until")}
    found = find_cluster(servers, data_dir)
    with session("replay", master, conf) as spark, SparkTasks() as bar:
        from quiver.spark import replay as run

        done = run(
            spark,
            path,
            topic,
            servers=found,
            source=source,
            partitions=partition,
            offsets=offsets,
            spread=spread,
            state=state,
            on_progress=bar.show,
            **moments,
        )
    if as_json:
        print_json({"topic": topic, "rows": done.rows, "seconds": round(done.seconds, 3), "state": done.state})
        return
    row = (topic, done.rows, done.parts, f"{done.seconds:.1f}", done.state)
    table("Replayed", ("topic", "messages", "parts", "seconds", "state"), [row])
    if not done.parts:
        say("nothing new: this job has sent it all before; remove its state to send it again")


def _moment(text: str | None, option: str) -> datetime.datetime | None:
    if text is None:
        return None
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(f"{option} is a time such as 2026-01-31T12:00:00Z, not {text!r}") from error
