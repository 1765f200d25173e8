"""Files as jobs are told of them: which format they have, and one Spark path for many.

Rule: a path that exists here is meant literally; any other may be a pattern or an address that only Spark can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from quiver.errors import InvalidRequestError

Format = Literal["text", "csv", "json", "parquet"]

FORMATS: Final = get_args(Format)
_BY_SUFFIX: Final[dict[str, Format]] = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_PACKED: Final = (".gz", ".bz2", ".zst", ".lz4", ".snappy")
_SPECIAL: Final = re.compile(r"([{}\[\],*?\\])")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def check_format(name: str) -> Format:
    for known in get_args(Format):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise InvalidRequestError(f"the format {name!r} is not known: use one of {', '.join(FORMATS)}")


def format_of(paths: Sequence[str]) -> Format:
    """By the names of the files, in folders too; what has no known ending is text."""
    found = {_format_of_one(path) for path in paths}
    if len(found) > 1:
        raise InvalidRequestError(f"files of different formats ({', '.join(sorted(found))}): take one at a time")
    return found.pop() if found else "text"


def _format_of_one(path: str) -> Format:
    for _, _, names in os.walk(path):
        for name in sorted(names):
            if not name.startswith((".", "_")):
                return _by_suffix(name)
    return _by_suffix(path)


def _by_suffix(name: str) -> Format:
    file = Path(name)
    return _BY_SUFFIX.get(Path(file.stem).suffix if file.suffix in _PACKED else file.suffix, "text")


def spark_path(paths: Sequence[str], *, is_folder: bool = False) -> str:
    """One pattern for Spark, also for a single file: a stream would take that for a folder, if it were no pattern.

    `is_folder`: a single path stays one, so that folders like date=2026-01-31 below it are found to be columns.
    """
    if not paths:
        raise InvalidRequestError("name at least one file or folder")
    made = [_pattern(path) for path in paths]
    if is_folder and len(made) == 1:
        return made[0]
    roots = {_root(path) for path in made}
    if len(roots) > 1:
        raise InvalidRequestError(f"paths of several file systems ({', '.join(sorted(roots))}): take one at a time")
    root = roots.pop()
    return f"{root}{{{','.join(path.removeprefix(root) for path in made)}}}"


def is_folder(path: str) -> bool:
    """What is not here is one unless its name is that of a file."""
    return os.path.isdir(path) or not (os.path.isfile(path) or Path(path).suffix in _BY_SUFFIX)


def absolute(path: str) -> str:
    """From the root, or with the file system it names."""
    return path if _SCHEME.match(path) else os.path.abspath(path)


def literal(path: str) -> str:
    """A path that Spark does not take for a pattern."""
    return _SPECIAL.sub(r"\\\1", path)


def _pattern(path: str) -> str:
    return literal(os.path.abspath(path)) if os.path.exists(path) else absolute(path)


def _root(path: str) -> str:
    """`/`, or `hdfs://host:9000/`."""
    found = re.match(r"(?:[a-z][a-z0-9+.-]*:(?://[^/]*)?)?/", path, re.IGNORECASE)
    if found is None:
        raise InvalidRequestError(f"{path} is not a whole path: begin it with a / after its file system")
    return found[0]
