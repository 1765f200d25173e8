"""Where a job keeps how far it is, so that the same command goes on after a crash.

Rule: a state belongs to one job. Another one that is given it is refused, before it reads a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
from pyspark.sql import SparkSession

from quiver.errors import InvalidRequestError
from quiver.spark.jobs.folder import Folder

STATES: Final = "quiver-jobs"
_FILE: Final = "job.json"

Job = Mapping[str, str | list[str] | None]


def default_state(job: Job) -> str:
    """In the current directory, by what the job does: the same command finds it again."""
    digest = hashlib.blake2b(msgspec.json.encode(job, order="sorted"), digest_size=6).hexdigest()
    return f"{STATES}/{job['job']}-{job['topic']}-{digest}"


def open_state(spark: SparkSession, path: str, job: Job) -> Folder:
    """The folder at `path`, which is this job's from now on."""
    folder = Folder(spark, path)
    kept = folder.read(_FILE)
    if kept is None:
        folder.write(_FILE, msgspec.json.encode(job, order="sorted"))
        return folder
    known = msgspec.json.decode(kept, type=dict[str, str | list[str] | None])
    for name in sorted(known.keys() | job.keys()):
        if known.get(name) != job.get(name):
            if name == "uid":
                raise InvalidRequestError(
                    f"topic {job['topic']} was deleted and made again since {path} was begun: use another folder"
                )
            raise InvalidRequestError(
                f"{path} keeps the state of another job: there {name} is {_said(known.get(name))}, "
                f"here {_said(job.get(name))}; use another --state, or remove it to begin anew"
            )
    return folder


def _said(value: str | list[str] | None) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
