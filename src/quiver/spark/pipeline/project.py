"""A pipeline's folder: made from a template, found again, and read.

Rule: what a user can get wrong here is told in one line, and nothing that is there is written over.
"""

from __future__ import annotations

import dataclasses
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from quiver.errors import InvalidRequestError
from quiver.types import check_topic_name

SPEC_NAMES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
STORAGE: Final = "storage"


@dataclasses.dataclass(frozen=True, slots=True)
class Topics:
    lines: str = "logs"
    dead_letters: str = "dead-letters"
    counts: str = "counts"


def write_project(folder: Path, servers: str, topics: Topics) -> list[str]:
    """The names of the files that were written."""
    if folder.exists():
        raise InvalidRequestError(f"{folder} is there already: choose another name")
    for topic in dataclasses.astuple(topics):
        check_topic_name(topic)
    words = {
        "name": folder.name,
        "storage": (folder.absolute() / STORAGE).as_uri(),
        "servers": servers,
        **dataclasses.asdict(topics),
    }
    with as_file(files("quiver.spark.pipeline") / "template") as template:
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "gitignore").rename(folder / ".gitignore")
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in written:
        text = path.read_text()
        for name, word in words.items():
            text = text.replace(f"{{{{ {name} }}}}", word)
        path.write_text(text)
    return [str(path.relative_to(folder)) for path in written]


def find_spec(where: Path) -> Path:
    """The spec of a project, by its folder or its own name; folders above are looked at too."""
    if where.is_file():
        return where.absolute()
    for folder in (where.absolute(), *where.absolute().parents):
        for name in SPEC_NAMES:
            if (folder / name).is_file():
                return folder / name
    raise InvalidRequestError(
        f"there is no {SPEC_NAMES[0]} in {where} or above: 'quiver pipeline init NAME' makes a project"
    )
