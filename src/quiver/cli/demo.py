"""`make demo`: a cluster that loses three nodes, and the whole way of a log line; at the end nothing is missing.

Three brokers and three managers. First `demo_r33`: producers and consumers, a broker and the primary manager killed.
Then `demo_pipeline`: log lines through a pipeline on Spark, another broker killed.

Rule: everything is real and in a temporary directory; nothing is left running. Only the chart stays.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quiver.cli.cluster import down
from quiver.cli.cluster_file import Cluster, read_cluster
from quiver.cli.demo_pipeline import PipelineDemo, draw, show
from quiver.cli.demo_r33 import R33
from quiver.cli.launch import make_plan, start_detached

console = Console(stderr=True)
_COLUMNS: Final = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def run_r33(data_dir: Path, cluster: Cluster, lines: int) -> bool:
    with Progress(*_COLUMNS, console=console) as progress:
        r33 = R33(data_dir, cluster, lines, progress)
        r33.run()
    return r33.show()


def run_pipeline(data_dir: Path, cluster: Cluster, lines: int, chart: Path) -> bool:
    with Progress(*_COLUMNS, console=console) as progress:
        demo = PipelineDemo(data_dir, cluster, lines, progress)
        found = demo.run()
    draw(found.counts, demo.killed, chart)
    return show(demo.sent, found)


def run(cluster_lines: int, lines: int, chart: Path) -> bool:
    """`lines` 0 leaves out what needs Spark."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quiver-demo-") as directory:
        data_dir = Path(directory)
        plan = make_plan({"data_dir": directory, "port": 0}, restart=True, config=None, brokers=3, managers=3)
        start_detached(plan, console.print)
        try:
            cluster = read_cluster(data_dir)
            assert cluster is not None
            console.print(f"three brokers at {', '.join(broker.address for broker in cluster.brokers)}")
            console.print(f"three managers at {', '.join(cluster.http)}")
            right = run_r33(data_dir, cluster, cluster_lines)
            if lines:
                console.print(f"{time.monotonic() - began_s:.0f} s so far")
                cluster = read_cluster(data_dir) or cluster  # with the nodes that took the place of those killed
                right = run_pipeline(data_dir, cluster, lines, chart) and right
            return right
        finally:
            down(directory)


def main(
    lines: Annotated[int, typer.Option(min=0, help="Log lines to send through the pipeline; 0: no Spark.")] = 200_000,
    cluster_lines: Annotated[int, typer.Option(min=400, help="Lines of an SDK producer before that.")] = 10_000,
    chart: Annotated[Path, typer.Option(help="Where to draw the chart.")] = Path("quiver-demo.png"),
) -> None:
    """Kill brokers and the primary manager under load and under a pipeline on Spark; check what arrived."""
    began_s = time.monotonic()
    right = run(cluster_lines, lines, chart)
    where = f"chart in {chart}; " if lines else ""
    console.print(f"{where}{time.monotonic() - began_s:.0f} s in all")
    if not right:
        console.print("[red]what was found is not what was sent[/]")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
