"""Which format files have, and one path for many of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.errors import InvalidRequestError
from quiver.spark.jobs.formats import check_format, format_of, spark_path


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.log", "text"),
        ("a", "text"),
        ("a.csv", "csv"),
        ("a.jsonl", "json"),
        ("a.ndjson.gz", "json"),
        ("s3a://bucket/a.parquet", "parquet"),
        ("a.log.zst", "text"),
    ],
)
def test_format_is_told_by_the_name(name: str, format: str) -> None:
    assert format_of([name]) == format


def test_folder_has_the_format_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "deep" / "part-0.parquet").touch()
    assert format_of([str(tmp_path)]) == "parquet"


def test_mistakes_are_told() -> None:
    with pytest.raises(InvalidRequestError, match="different formats"):
        format_of(["a.csv", "b.json"])
    with pytest.raises(InvalidRequestError, match="use one of text, csv, json, parquet"):
        check_format("xml")
    with pytest.raises(InvalidRequestError, match="at least one"):
        spark_path([])
    with pytest.raises(InvalidRequestError, match="several file systems"):
        spark_path(["/a", "hdfs://h:1/b"])


def test_what_exists_is_meant_literally_and_what_does_not_may_be_a_pattern(tmp_path: Path) -> None:
    odd = tmp_path / "a, {b}*.log"
    odd.touch()
    inside = str(tmp_path)[1:]
    assert spark_path([str(odd)]) == f"/{{{inside}/a\\, \\{{b\\}}\\*.log}}"
    assert spark_path([f"{tmp_path}/*.log"]) == f"/{{{inside}/*.log}}"
    assert spark_path(["hdfs://h:1/table"], is_folder=True) == "hdfs://h:1/table"
    assert spark_path(["hdfs://h:1/b", "hdfs://h:1/c/*"]) == "hdfs://h:1/{b,c/*}"
    assert spark_path(["/x", "/y"]) == "/{x,y}"
