"""A Spark data source that reads nothing: it hands the same Arrow batch to Spark over and over.

What Spark itself costs with rows of this schema in batches of this size; no source can be faster.
Options: rows (of each partition, joined by commas), rowsPerBatch, valueBytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from measure import make_values
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from quiver.spark.options import ARROW_SCHEMA, SPARK_TYPES
from quiver.wire.records import batch_from_lists


class NothingSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in SPARK_TYPES.items())

    def reader(self, schema: StructType) -> NothingReader:
        return NothingReader(self.options)


class NothingReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._rows = [int(rows) for rows in options["rows"].split(",")]
        self._batch_rows = int(options["rowsPerBatch"])
        self._value_bytes = int(options["valueBytes"])

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(len(self._rows))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = make_batch(partition.value, self._batch_rows, self._value_bytes)
        left = self._rows[partition.value]
        while left > 0:
            yield batch if left >= batch.num_rows else batch.slice(0, left)
            left -= batch.num_rows


def make_batch(partition: int, rows: int, value_bytes: int) -> pa.RecordBatch:
    """As the real source's: the record columns are made by the codec that the SDK uses."""
    records = batch_from_lists([1_700_000_000_000_000], None, make_values(rows, value_bytes), None)
    columns = [
        pa.repeat(pa.scalar("nothing", pa.string()), rows),
        pa.repeat(pa.scalar(partition, pa.int32()), rows),
        pa.array(range(rows), pa.int64()),
        *records.columns,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)
