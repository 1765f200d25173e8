"""`quiver spark verify`: was what everybody saw of a topic the same, whole, once, in order?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster
from quiver.cli.progress import SparkTasks
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import print_json, table
from quiver.cli.spark_job import Conf, Format, Master, Topic, pair, session
from quiver.types import check_topic_name

if TYPE_CHECKING:
    from quiver.spark.jobs.verify import Verified

Produced = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", show_default=False, help="Log of what was produced, may be repeated."),
]
Consumed = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        show_default=False,
        help="Log of a consumer, as 'quiver consume --json' writes it; may be repeated.",
    ),
]
Id = Annotated[
    str | None,
    typer.Option(
        metavar="SQL", show_default=False, help="Column or expression that names a message. Default: id, else value."
    ),
]


def register(commands: typer.Typer) -> None:
    commands.command(
        epilog=examples(
            "quiver spark verify logs",
            "quiver spark verify logs --produced sent.jsonl --consumed c1=c1.jsonl --consumed c2=c2.jsonl",
            "quiver spark verify orders --archive /archive --stored --id \"get_json_object(value, '$.id')\"",
        )
    )(verify)


def verify(
    topic: Topic,
    produced: Produced = None,
    consumed: Consumed = None,
    archive: Annotated[
        str | None, typer.Option(metavar="DIR", show_default=False, help="Archive of 'quiver spark archive'.")
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Also what the topic holds now. So it is when nothing else is named.")
    ] = False,
    id: Id = None,
    format: Format = None,
    show: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Examples of each difference.")] = 5,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: AsJson = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Compare what was produced with what consumers saw: no gap, nothing twice, nothing lost, one order for all.

    Ends with 0 when all is right and with 1 when something differs. A log has some of the columns topic, partition,
    offset, id, value and seq (its order; else the order of lines); a log of text has one id a line.
    """
    check_topic_name(topic)
    logs: dict[str, list[str]] = {}
    for name, path in (pair(one, "--consumed") for one in consumed or ()):
        logs.setdefault(name, []).append(path)
    from_topic = stored or not (logs or archive)
    found = find_cluster(servers, data_dir) if from_topic else None
    with session("verify", master, conf) as spark, SparkTasks() as bar:
        from quiver.spark import verify as run
        from quiver.spark.jobs.formats import check_format

        result = run(
            spark,
            topic,
            produced=produced,
            consumed=logs,
            archive=archive,
            servers=found,
            id=id,
            format=None if format is None else check_format(format),
            examples=show,
            on_progress=bar.show,
        )
    if as_json:
        print_json(result_fields(result))
    else:
        show_result(result)
    if not result.right:
        raise typer.Exit(EXIT_FAILED)


def result_fields(result: Verified) -> dict[str, object]:
    return {
        "topic": result.topic,
        "right": result.right,
        "produced": result.produced,
        "checks": list(result.checks),
        "sides": [side._asdict() for side in result.sides],
        "findings": [
            {"what": one.what, "who": one.who, "count": one.count, "examples": list(one.examples)}
            for one in result.findings
        ],
    }


def show_result(result: Verified) -> None:
    rows: list[tuple[object, ...]] = [
        (one.who, one.partition, one.rows, "-" if one.first is None else f"{one.first:,} to {one.last:,}")
        for one in result.sides
    ]
    if result.produced is not None:
        rows.insert(0, ("produced", "-", result.produced, "-"))
    table(f"Topic {result.topic}", ("who", "partition", "messages", "offsets"), rows)
    if result.right:
        print(f"All is right: {', '.join(result.checks)}.")
        return
    for one in result.findings:
        print(f"{one.who or 'all'}: {one.count:,} {one.what}")
        for example in one.examples:
            print(f"    {example}")
