"""Streaming queries from topic to topic by a real Spark: nothing lost and nothing repeated, whatever stops them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from quiver import Admin
from quiver.wire.messages import Fetch, Produce
from tests.spark.kit import QUERY_TIMEOUT_S, Lake, finish, numbered, start, wait_for
from tests.system.kit import Node
from tests.system.proxy import Proxy, Step


def rows_by_batch(query: StreamingQuery) -> list[int]:
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had died after the last micro-batch was written and before it noted that."""
    commits = checkpoint / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


def test_available_now_takes_all_there_is_in_steps_of_the_limit(lake: Lake, tmp_path: Path) -> None:
    source, sink = lake.new_topic(2), lake.new_topic(2)
    lake.fill(source, numbered(500, "p0"), 0)
    lake.fill(source, numbered(100, "p1"), 1)
    stream = lake.read_stream(source, startingOffsets="earliest", maxRowsPerTrigger=250, group=f"of {source}")
    columns = stream.select("value", F.concat("value", F.lit("-key")).alias("key"), "timestamp", "headers")
    query = finish(lake.write_stream(columns, sink, tmp_path / "checkpoint"))
    assert rows_by_batch(query) == [250, 250, 100]
    assert sorted(filter(None, lake.stored(sink))) == numbered(500, "p0") + numbered(100, "p1")
    with Admin(lake.servers) as admin:
        assert [one.lag for one in admin.describe_group(f"of {source}")[1]] == [0, 0]  # the last batch is committed too


def test_query_goes_on_from_its_checkpoint_without_loss_or_repetition(lake: Lake, tmp_path: Path) -> None:
    source, sink, checkpoint = lake.new_topic(), lake.new_topic(), tmp_path / "checkpoint"
    rows = numbered(900)
    lake.fill(source, numbered(50, "before the query"))
    copy = lake.write_stream(lake.read_stream(source, maxRowsPerTrigger=200).select("value"), sink, checkpoint)

    # It begins at the end: what was there before is not its business.
    query = start(copy)
    wait_for(query, lambda: query.status["message"].startswith("Waiting"))
    lake.fill(source, rows[:300])
    query.processAllAvailable()
    assert lake.stored(sink) == rows[:300]

    # It is stopped in the middle and goes on.
    lake.fill(source, rows[300:600])
    wait_for(query, lambda: len(lake.stored(sink)) > 300)
    query.stop()
    finish(copy)
    assert lake.stored(sink) == rows[:600]

    # Its last micro-batch is replayed: the sink knows it.
    forget_last_commit(checkpoint)
    lake.fill(source, rows[600:])
    replayed = finish(copy)
    assert sum(rows_by_batch(replayed)) > 300
    assert lake.stored(sink) == rows


def test_micro_batch_that_was_stopped_half_way_is_completed(lake: Lake, node: Node, tmp_path: Path) -> None:
    source, sink, checkpoint = lake.new_topic(), lake.new_topic(), tmp_path / "checkpoint"
    rows = [value + b"." * 1000 for value in numbered(13_000)]  # 13 MB: one task, four pieces
    lake.fill(source, rows)
    stream = lake.read_stream(source, startingOffsets="earliest").select("value")
    with Proxy(node.address) as proxy:
        # Only the first piece passes, however often it is sent, and nothing after the query has stopped.
        proxy.held = lambda batch: batch.sequence > 0
        query = start(lake.via(proxy.address).write_stream(stream, sink, checkpoint))
        wait_for(query, lambda: lake.stored(sink))
        query.stop()
    half = lake.stored(sink)
    assert 0 < len(half) < len(rows)
    assert half == rows[: len(half)]
    finish(lake.write_stream(stream, sink, checkpoint))
    assert lake.stored(sink) == rows


def test_aggregation_that_is_replayed_is_stored_once(lake: Lake, tmp_path: Path) -> None:
    """Behind a shuffle rows may come in another order; a micro-batch of few is recognised all the same."""
    source, sink, checkpoint = lake.new_topic(), lake.new_topic(2), tmp_path / "checkpoint"
    lake.fill(source, [b"word-%d" % (number % 10) for number in range(300)])
    words = lake.read_stream(source, startingOffsets="earliest").groupBy("value").count()
    frame = words.select(F.col("value").alias("key"), F.col("count").cast("string").alias("value"))
    counts = lake.write_stream(frame, sink, checkpoint).outputMode("complete")
    finish(counts)
    assert lake.stored(sink) == [b"30"] * 10
    forget_last_commit(checkpoint)
    finish(counts)
    assert lake.stored(sink) == [b"30"] * 10


def test_node_killed_under_a_query_costs_no_row_and_doubles_none(lake: Lake, tmp_path: Path) -> None:
    rows = [value + b"." * 2000 for value in numbered(6000)]  # 12 MB
    killed = threading.Event()
    with Node(tmp_path / "node") as node, Proxy(node.address) as proxy:
        direct, through = Lake(lake.spark, node.address), Lake(lake.spark, proxy.address)
        source, sink = direct.new_topic(2), direct.new_topic(2)
        for partition in range(2):
            direct.fill(source, rows[partition::2], partition)

        def kill() -> None:
            node.kill()
            killed.set()

        def restart() -> None:
            for _ in range(3):
                assert killed.wait(QUERY_TIMEOUT_S)
                killed.clear()
                node.start()

        proxy.cut(Step.BEFORE_REPLY, Fetch, skip=1, before=kill)
        proxy.cut(Step.BEFORE_REPLY, Produce, skip=1, before=kill)
        proxy.cut(Step.AFTER_REQUEST, Produce, skip=2, before=kill)
        restarter = threading.Thread(target=restart)
        restarter.start()
        stream = through.read_stream(source, startingOffsets="earliest", maxRowsPerTrigger=3000)
        query = finish(through.write_stream(stream.select("value", "timestamp"), sink, tmp_path / "checkpoint"))
        restarter.join()
        assert proxy.cuts_left == 0
        assert rows_by_batch(query) == [3000, 3000]
        assert sorted(filter(None, direct.stored(sink))) == rows


def test_topic_that_was_made_again_stops_the_query(lake: Lake, tmp_path: Path) -> None:
    source, sink = lake.new_topic(), lake.new_topic()
    lake.fill(source, numbered(10))
    stream = lake.read_stream(source, startingOffsets="earliest").select("value")
    copy = lake.write_stream(stream, sink, tmp_path / "checkpoint")
    finish(copy)
    with Admin(lake.servers) as admin:
        admin.delete_topic(source)
        admin.create_topic(source)
    lake.fill(source, numbered(50))  # more than before: only its uid tells that it is another one
    with pytest.raises(StreamingQueryException, match="was deleted and made again since it was last read"):
        finish(copy)
