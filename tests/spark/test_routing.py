"""Which partition a task's rows go to, without Spark and servers."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from quiver.spark.routing import route
from quiver.wire.partitioning import partition_of_key

keys = st.none() | st.binary(max_size=3)
COUNT = 5
names = st.none() | st.integers(0, COUNT - 1)
pieces = st.lists(st.lists(st.tuples(keys, names), min_size=1, max_size=12), min_size=1, max_size=4)

Rows = list[tuple[bytes | None, int | None]]


def tables(rows: list[Rows], columns: tuple[str, ...]) -> list[pa.Table]:
    """Each row has its place as value."""
    made = []
    for number, piece in enumerate(rows):
        table = {
            "value": pa.array([b"%d/%d" % (number, row) for row in range(len(piece))]),
            "key": pa.array([key for key, _ in piece], pa.binary()),
            "partition": pa.array([name for _, name in piece], pa.int32()),
        }
        made.append(pa.table({column: table[column] for column in ("value", *columns)}))
    return made


@given(pieces, st.integers(0, 2**64), st.sampled_from([(), ("key",), ("partition",), ("key", "partition")]))
def test_rows_go_where_they_say_by_their_key_or_in_turn(rows: list[Rows], turn: int, columns: tuple[str, ...]) -> None:
    given_tables = tables(rows, columns)
    parts = list(route(given_tables[0], given_tables[1:], turn, COUNT))
    found: dict[int, list[bytes]] = defaultdict(list)
    for partition, part in parts:
        assert part.num_rows and "partition" not in part.column_names
        assert all(column.num_chunks == 1 for column in part.columns)
        found[partition] += part["value"].to_pylist()
    expected: dict[int, list[bytes]] = defaultdict(list)
    for number, piece in enumerate(rows):
        for row, (key, name) in enumerate(piece):
            target = (turn + number) % COUNT
            if "key" in columns and key is not None:
                target = partition_of_key(key, COUNT)
            if "partition" in columns and name is not None:
                target = name
            expected[target].append(b"%d/%d" % (number, row))
    assert found == expected  # and so the rows of a partition keep their order
    assert len(parts) == len(
        {(number, at) for at, values in expected.items() for number in {v.split(b"/")[0] for v in values}}
    )


@given(pieces, st.integers(0, 2**64))
def test_same_rows_make_the_same_parts(rows: list[Rows], turn: int) -> None:
    first, second = (
        [(at, part.to_pydict()) for at, part in route(made[0], made[1:], turn, COUNT)]
        for made in (tables(rows, ("key", "partition")), tables(rows, ("key", "partition")))
    )
    assert first == second
