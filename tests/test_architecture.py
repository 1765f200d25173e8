"""Reads the source and holds it to the import table, to a graph without cycles, and to the size limits.

The same table stands in ARCHITECTURE.md. A room is a package under src/quiver; three names are not:
`shared` is types, errors, config, clock and topic_settings; `face` is what users import: quiver, quiver.aio and
quiver.classic; `metadata.store` is the one module of metadata that may do I/O.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# A room may always import itself. Imports inside functions and under TYPE_CHECKING count too.
TABLE = """
| room           | may import                                                                                    | never imports                                           |
|----------------|-----------------------------------------------------------------------------------------------|---------------------------------------------------------|
| shared         |                                                                                               |                                                         |
| raft           | shared                                                                                        | asyncio os time random logging pyarrow socket threading |
| wire           | shared                                                                                        | asyncio socket                                          |
| metadata       | shared                                                                                        | asyncio os time random logging pyarrow socket threading |
| metadata.store | shared metadata                                                                               |                                                         |
| log            | shared raft wire                                                                              |                                                         |
| net            | shared raft wire                                                                              |                                                         |
| replication    | shared raft wire log net                                                                      |                                                         |
| broker         | shared raft wire log net replication                                                          |                                                         |
| manager        | shared raft wire log net replication metadata metadata.store                                  |                                                         |
| client         | shared wire net                                                                               |                                                         |
| face           | shared client                                                                                 |                                                         |
| spark          | shared raft wire log net replication metadata metadata.store broker manager client face       |                                                         |
| cli            | shared raft wire log net replication metadata metadata.store broker manager client face spark |                                                         |
| testing        | shared raft wire log net replication metadata metadata.store broker manager client face       |                                                         |
"""  # noqa: E501

# Reading these formats runs code that the sender chose.
NOBODY_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
ONLY_ROOM_THAT_IMPORTS = {"pyspark": "spark"}

# Modules outside a package of their own, by their name under quiver.
ROOM_OF_MODULE = {
    "": "face",
    "aio": "face",
    "classic": "face",
    "types": "shared",
    "errors": "shared",
    "config": "shared",
    "clock": "shared",
    "topic_settings": "shared",
    "metadata.store": "metadata.store",
    "__main__": "cli",
}

# (importing module, room): single exceptions from the table.
EXCEPTIONS: set[tuple[str, str]] = {("quiver.cli.sim", "testing")}

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
# "quiver/log/segment.py" or "quiver/log/segment.py:Segment.append" -> why it may be longer.
ALLOWED: dict[str, str] = {}

ROOT = Path(__file__).parent.parent


def parse_table(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """The rows below the first line `| room | ... |`: room -> (rooms it may import, modules it must not)."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("| room "):
            break
    next(lines, None)
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        room, may_import, never_imports = (cell.replace("`", "").split() for cell in line.strip("|").split("|"))
        table[room[0]] = (set(may_import), set(never_imports))
    return table


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int
    at_load: bool  # runs when the module is loaded: not in a function, not under TYPE_CHECKING


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: str
    is_package: bool
    line_count: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.name)


def room_of(module: str) -> str:
    inside = module.partition(".")[2]
    return ROOM_OF_MODULE.get(inside, inside.partition(".")[0])


def read_modules(src: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((src / "quiver").rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(src).as_posix()
        modules[name] = Module(name, where, is_package, len(text.splitlines()), ast.parse(text, where))
    return modules


def imports_of(module: Module, known: dict[str, Module]) -> Iterator[Import]:
    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, at_load)
            case ast.ImportFrom(names=names):
                base = absolute_base(module, node)
                for alias in names:
                    submodule = f"{base}.{alias.name}"
                    yield Import(submodule if submodule in known else base, node.lineno, at_load)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                for child in ast.iter_child_nodes(node):
                    yield from visit(child, False)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.body:
                    yield from visit(child, False)
                for child in node.orelse:
                    yield from visit(child, at_load)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from visit(child, at_load)

    return visit(module.tree, True)


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, node.module] if node.module else package)


def import_breaches(modules: dict[str, Module]) -> list[str]:
    table = parse_table(TABLE)
    breaches = []
    for module in modules.values():
        if module.room not in table:
            breaches.append(f"{module.path}: the room {module.room} is not in the table")
            continue
        for imported in imports_of(module, modules):
            reason = refusal(module, imported.target, table)
            if reason:
                breaches.append(f"{module.path}:{imported.line}: {reason}")
    return breaches


def refusal(module: Module, target: str, table: dict[str, tuple[set[str], set[str]]]) -> str | None:
    may_import, never_imports = table[module.room]
    top = target.partition(".")[0]
    if top == "quiver":
        room = room_of(target)
        if room == module.room or room in may_import or (module.name, room) in EXCEPTIONS:
            return None
        return f"{module.room} may not import {room} ({target})"
    if top in NOBODY_IMPORTS:
        return f"nobody may import {top}"
    if top in never_imports:
        return f"{module.room} may not import {top}"
    if ONLY_ROOM_THAT_IMPORTS.get(top, module.room) != module.room:
        return f"only {ONLY_ROOM_THAT_IMPORTS[top]} may import {top}"
    return None


def import_cycles(modules: dict[str, Module]) -> list[str]:
    """Strongly connected components of the imports that run when modules are loaded."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for imported in imports_of(module, modules):
            if not imported.at_load:
                continue
            # Loading a.b.c loads a and a.b first; those that hold the importer itself are under way already.
            parts = imported.target.split(".")
            parents = [".".join(parts[:depth]) for depth in range(1, len(parts))]
            loaded = {parent for parent in parents if not f"{name}.".startswith(f"{parent}.")}
            edges[name] |= (loaded | {imported.target}) & modules.keys()

    reachable: dict[str, set[str]] = {}
    for start in modules:
        seen: set[str] = set()
        queue = list(edges[start])
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                queue.extend(edges[name])
        reachable[start] = seen
    components = {
        frozenset(other for other in reachable[name] if name in reachable[other])
        for name in modules
        if name in reachable[name]
    }
    return sorted(f"import cycle: {', '.join(sorted(component))}" for component in components)


def size_breaches(modules: dict[str, Module], allowed: dict[str, str]) -> list[str]:
    too_long = {}
    for module in modules.values():
        if module.line_count > FILE_LINES_MAX:
            too_long[module.path] = f"{module.line_count} lines, more than {FILE_LINES_MAX}"
        for name, line_count in functions_of(module.tree):
            if line_count > FUNCTION_LINES_MAX:
                too_long[f"{module.path}:{name}"] = f"{line_count} lines, more than {FUNCTION_LINES_MAX}"
    breaches = [f"{where}: {what}" for where, what in too_long.items() if where not in allowed]
    return breaches + [f"{where}: needs no allowance any more" for where in allowed if where not in too_long]


def functions_of(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from functions_of(child, inner)


# The source


@pytest.fixture(scope="module")
def source() -> dict[str, Module]:
    modules = read_modules(ROOT / "src")
    assert "quiver.errors" in modules
    return modules


def test_source_keeps_to_the_import_table(source: dict[str, Module]) -> None:
    breaches = import_breaches(source)
    assert not breaches, "\n".join(breaches)


def test_source_has_no_import_cycle(source: dict[str, Module]) -> None:
    breaches = import_cycles(source)
    assert not breaches, "\n".join(breaches)


def test_source_keeps_to_the_size_limits(source: dict[str, Module]) -> None:
    breaches = size_breaches(source, ALLOWED)
    assert not breaches, "\n".join(breaches)


def test_import_table_stands_in_architecture_page() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert parse_table(page) == parse_table(TABLE)


def test_import_table_names_only_its_own_rooms() -> None:
    table = parse_table(TABLE)
    assert table["broker"] == ({"shared", "raft", "wire", "log", "net", "replication"}, set())
    assert set().union(*(may_import for may_import, _ in table.values())) <= table.keys()


# The checker: a check that cannot fail is no check


def fake_source(src: Path, files: dict[str, str]) -> dict[str, Module]:
    for name, text in files.items():
        path = src / "quiver" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_modules(src)


@pytest.mark.parametrize(
    ("name", "text", "breach"),
    [
        ("errors.py", "from quiver.raft import node", "shared may not import raft (quiver.raft.node)"),
        ("raft/core.py", "import quiver.wire", "raft may not import wire (quiver.wire)"),
        ("raft/core.py", "import os.path", "raft may not import os"),
        ("raft/core.py", "def f():\n    from time import monotonic", "raft may not import time"),
        ("metadata/state.py", "import asyncio", "metadata may not import asyncio"),
        ("metadata/state.py", "from . import store", "metadata may not import metadata.store (quiver.metadata.store)"),
        ("wire/frame.py", "import socket", "wire may not import socket"),
        ("log/segment.py", "from quiver.net.server import Server", "log may not import net (quiver.net.server)"),
        ("log/segment.py", "from ..net import server", "log may not import net (quiver.net.server)"),
        ("log/__init__.py", "from ..net import server", "log may not import net (quiver.net.server)"),
        ("broker/owner.py", "from quiver import client", "broker may not import client (quiver.client)"),
        ("broker/owner.py", "from quiver import Producer", "broker may not import face (quiver)"),
        (
            "broker/owner.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quiver.manager",
            "broker may not import manager (quiver.manager)",
        ),
        ("manager/health.py", "import quiver.broker", "manager may not import broker (quiver.broker)"),
        ("client/producer.py", "import quiver.log", "client may not import log (quiver.log)"),
        ("aio.py", "import quiver.net", "face may not import net (quiver.net)"),
        ("cli/node.py", "import quiver.testing", "cli may not import testing (quiver.testing)"),
        ("cli/jobs.py", "from pyspark.sql import SparkSession", "only spark may import pyspark"),
        ("spark/jobs.py", "import pickle", "nobody may import pickle"),
        ("testing/disk.py", "from cloudpickle import dumps", "nobody may import cloudpickle"),
        ("utils/text.py", "", "the room utils is not in the table"),
        ("helpers.py", "", "the room helpers is not in the table"),
    ],
)
def test_breach_of_the_import_table_is_reported(tmp_path: Path, name: str, text: str, breach: str) -> None:
    others = dict.fromkeys(
        ["__init__.py", "client/__init__.py", "metadata/store.py", "net/server.py", "raft/node.py"], ""
    )
    (found,) = import_breaches(fake_source(tmp_path, {**others, name: text}))
    assert found.startswith(f"quiver/{name}:")
    assert found.endswith(f": {breach}")


def test_imports_that_the_table_allows_are_not_reported(tmp_path: Path) -> None:
    modules = fake_source(
        tmp_path,
        {
            "__init__.py": "from quiver.client.producer import Producer\nfrom quiver.errors import QuiverError",
            "client/producer.py": "import asyncio\nfrom quiver import errors, types\nfrom . import batcher",
            "client/batcher.py": "import pyarrow",
            "errors.py": "",
            "types.py": "from quiver.errors import QuiverError",
            "metadata/store.py": "import os\nfrom .state import State",
            "metadata/state.py": "",
            "spark/source.py": "from pyspark.sql.datasource import DataSource",
            "__main__.py": "from quiver.cli.main import main",
            "cli/main.py": "from quiver import Producer",
        },
    )
    assert import_breaches(modules) == []
    assert import_cycles(modules) == []


def test_import_cycle_is_reported_whole(tmp_path: Path) -> None:
    modules = fake_source(
        tmp_path,
        {
            "log/__init__.py": "",
            "log/a.py": "from quiver.log.b import B",
            "log/b.py": "class B:\n    from . import c",
            "log/c.py": "try:\n    import quiver.log.a\nexcept ImportError:\n    pass",
            "log/d.py": "from quiver.log import a",
        },
    )
    assert import_cycles(modules) == ["import cycle: quiver.log.a, quiver.log.b, quiver.log.c"]


def test_cycle_through_another_package_is_reported(tmp_path: Path) -> None:
    modules = fake_source(
        tmp_path,
        {"log/a.py": "import quiver.wire.b", "wire/__init__.py": "import quiver.log.a", "wire/b.py": ""},
    )
    assert import_cycles(modules) == ["import cycle: quiver.log.a, quiver.wire"]


def test_imports_that_do_not_run_at_load_make_no_cycle(tmp_path: Path) -> None:
    modules = fake_source(
        tmp_path,
        {
            "log/a.py": "import typing\nif typing.TYPE_CHECKING:\n    import quiver.log.b",
            "log/b.py": "import quiver.log.a\ndef f():\n    import quiver.log.b",
        },
    )
    assert import_cycles(modules) == []


def test_long_file_and_long_function_are_reported(tmp_path: Path) -> None:
    def function(line_count: int) -> str:
        return "    def f(self):\n" + "        pass\n" * (line_count - 1)

    modules = fake_source(
        tmp_path,
        {
            "log/fits.py": "\n" * FILE_LINES_MAX,
            "log/long.py": "\n" * (FILE_LINES_MAX + 1),
            "log/fine.py": "class C:\n" + function(FUNCTION_LINES_MAX),
            "log/deep.py": "class C:\n" + function(FUNCTION_LINES_MAX + 1),
        },
    )
    assert sorted(size_breaches(modules, {})) == [
        "quiver/log/deep.py:C.f: 61 lines, more than 60",
        "quiver/log/long.py: 401 lines, more than 400",
    ]
    reasons = {"quiver/log/deep.py:C.f": "a table", "quiver/log/long.py": "a table"}
    assert size_breaches(modules, reasons) == []
    assert size_breaches(modules, {**reasons, "quiver/log/fine.py": "a table"}) == [
        "quiver/log/fine.py: needs no allowance any more"
    ]
