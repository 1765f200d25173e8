from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import InputPartition
from spark_nothing import NothingReader

from quiver.spark.options import ARROW_SCHEMA


def test_a_source_out_of_nothing_hands_over_the_rows_it_was_asked_for():
    reader = NothingReader({"rows": "25,7", "rowsPerBatch": "10", "valueBytes": "100"})
    assert [partition.value for partition in reader.partitions()] == [0, 1]
    batches = list(reader.read(InputPartition(0)))
    assert [batch.num_rows for batch in batches] == [10, 10, 5]
    assert {batch.schema for batch in batches} == {ARROW_SCHEMA}
    assert {len(value) for value in batches[0].column("value").to_pylist()} == {100}
    assert [batch.num_rows for batch in reader.read(InputPartition(1))] == [7]
