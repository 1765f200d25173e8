"""`quiver nginx-config`: writes the configuration of an nginx before the managers, and keeps it current.

Rule: managers are asked who leads; `decide` turns what they say into what nginx is told. While nobody leads nothing is
changed: what nginx has finds the way through the managers that are left.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import typer

from quiver.cli.cluster_file import find_running
from quiver.cli.options import DataDir, Servers, data_dir_of, examples, find_cluster, say
from quiver.cli.settings import load_settings
from quiver.client.managers import Roles, read_roles
from quiver.config import HTTP_PORT_DEFAULT
from quiver.errors import InvalidRequestError, UnavailableError, UsageError
from quiver.manager.nginx import Balanced, NginxSettings, render_nginx

LISTEN_DEFAULT: Final = "127.0.0.1:8080"
PID_FILE_DEFAULT: Final = "/run/nginx.pid"
LOOK_EVERY_S: Final = 1.0
ANSWER_S: Final = 1.0
# A manager that was silent at so many looks in a row gets no requests until it speaks. nginx itself notices one that is
# gone; one that is frozen or cut off takes connections and is noticed only here.
SILENCES_MAX: Final = 2
_RELOAD_S: Final = 30.0

Answers = Mapping[str, Roles | None]  # by the manager's URL; None: it did not say who leads


def register(app: typer.Typer) -> None:
    app.command(
        "nginx-config",
        epilog=examples(
            "quiver nginx-config > quiver.conf",
            "quiver nginx-config --listen 0.0.0.0:80 --http http://10.0.0.1:8002 --output /etc/nginx/nginx.conf",
            "quiver nginx-config --output quiver.conf --run-dir /tmp/quiver-nginx --watch &  nginx -c $PWD/quiver.conf",
            "quiver nginx-config --output /etc/nginx/nginx.conf --watch --reload 'systemctl reload nginx'",
        ),
    )(nginx_config)


def nginx_config(
    servers: Servers = None,
    data_dir: DataDir = None,
    http_urls: Annotated[
        str | None,
        typer.Option("--http", metavar="URL,...", show_default=False, help="HTTP address of a manager, or of several."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Where nginx listens; a port alone: on all addresses.")
    ] = LISTEN_DEFAULT,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="File to write. Default: standard output.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Directory for nginx's pid, error log and temporary files, so that it needs no root. "
            "Default: where nginx has them anyway.",
        ),
    ] = None,
    access_log: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Log of requests. Default: none.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on: write the file and reload nginx whenever a manager's role changes.")
    ] = False,
    reload: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            show_default=False,
            help=f"How --watch reloads nginx. Default: SIGHUP to the pid in RUN-DIR/nginx.pid, or {PID_FILE_DEFAULT}.",
        ),
    ] = None,
) -> None:
    """Write a complete nginx configuration for a running cluster.

    One port for everything: what changes something goes to the primary, reads go to the secondaries in turn. A manager
    that is gone gets nothing within seconds, and is used again when it is back.
    """
    if watch and output is None:
        raise UsageError("--watch needs --output: the file to keep current")
    if reload is not None and not watch:
        raise UsageError("--reload needs --watch")
    found = look(_find_urls(servers, data_dir, http_urls))
    now = decide(found, {})
    if now is None:
        raise UnavailableError(f"no manager of {', '.join(found)} says who leads")
    settings = _settings(listen, run_dir, access_log)
    if output is None:
        print(render_nginx(now, settings), end="")
        return
    write(output, render_nginx(now, settings))
    if watch:
        pid_file = Path(settings.run_dir) / "nginx.pid" if settings.run_dir else Path(PID_FILE_DEFAULT)
        _watch(now, settings, output, reload, pid_file)


def _find_urls(servers: str | None, data_dir: str | None, http_urls: str | None) -> list[str]:
    """Flags before environment, what was named before what is found."""
    if http_urls is not None:
        urls = [url.rstrip("/") for url in http_urls.split(",")]
        for url in urls:
            if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
                raise InvalidRequestError(f"{url!r} is not an address like http://127.0.0.1:{HTTP_PORT_DEFAULT}")
        return urls
    if servers is None and (data_dir is not None or not os.environ.get("QUIVER_SERVERS")):
        running = find_running(data_dir_of(data_dir))
        if running is not None and running.cluster is not None:
            return list(running.cluster.http)
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        return [manager.http for manager in admin.managers()]


def _settings(listen: str, run_dir: Path | None, access_log: Path | None) -> NginxSettings:
    host, _, port = listen.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535 or any(c in host for c in " ;{}\"'"):
        raise InvalidRequestError(f"--listen {listen!r} is not an address like 8080 or 127.0.0.1:8080")
    if run_dir is not None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the directory {run_dir}: {error.strerror}") from error
    paths = ("" if path is None else str(path.absolute()) for path in (run_dir, access_log))
    return NginxSettings(listen, load_settings({}).http_body_bytes_max, *paths)


# -- who is who ------------------------------------------------------------------------------------------------------


def look(urls: Sequence[str]) -> Answers:
    """Asks all at once, also those that the first only heard of."""
    with ThreadPoolExecutor(8) as threads:
        found: dict[str, Roles | None] = dict(zip(urls, threads.map(_ask, urls), strict=True))
        told = {url for roles in found.values() if roles is not None for url in roles.all}
        # An address that was given may be another name of a manager that the others call differently.
        if told:
            found = {url: roles for url, roles in found.items() if url in told}
        others = sorted(told - found.keys())
        return found | dict(zip(others, threads.map(_ask, others), strict=True))


def _ask(url: str) -> Roles | None:
    """A manager that does not know, or is cut off, refuses; that counts as silence."""
    try:
        with urlopen(f"{url}/replicas", timeout=ANSWER_S) as reply:
            body = msgspec.json.decode(reply.read())
    except (URLError, OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    return read_roles(body) if isinstance(body, dict) else None


def decide(answers: Answers, silences: Mapping[str, int]) -> Balanced | None:
    """What most of them say. `silences`: at how many looks in a row a manager said nothing."""
    said = [roles for roles in answers.values() if roles is not None]
    if not said:
        return None
    primaries = [roles.primary for roles in said]
    primary = max(primaries, key=lambda url: (primaries.count(url), answers.get(url) is not None, url))
    others = sorted({url for roles in said for url in roles.all} - {primary})
    away = frozenset(_place(url) for url, count in silences.items() if count >= SILENCES_MAX)
    return Balanced(_place(primary), tuple(map(_place, others)), away & {_place(url) for url in (primary, *others)})


def _place(url: str) -> str:
    return urlsplit(url).netloc


# -- nginx -----------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Replaced, never changed in place: nginx may read it at any moment."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def reload_nginx(command: str | None, pid_file: Path) -> str:
    """What became of it, for people."""
    if command is not None:
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=_RELOAD_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command!r} cannot be run: {error}"
        said = (done.stderr or done.stdout).strip().splitlines()
        return "nginx reloaded" if done.returncode == 0 else f"{command!r} failed: {said[-1] if said else ''}"
    try:
        os.kill(int(pid_file.read_text()), signal.SIGHUP)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return f"nginx does not run by {pid_file}; it will read the file when it starts"
    except PermissionError as error:
        return f"nginx cannot be reloaded: {error}; --reload names a command"
    return "nginx reloaded"


def _watch(now: Balanced, settings: NginxSettings, output: Path, reload: str | None, pid_file: Path) -> None:
    say(f"watching {now.primary} (primary), {', '.join(now.secondaries) or 'no secondaries'}")
    silences: dict[str, int] = {}
    while True:
        time.sleep(LOOK_EVERY_S)
        known = [f"http://{place}" for place in (now.primary, *now.secondaries)]
        answers = look(known)
        # While all are silent nobody can be told from the others.
        if not any(answers.values()):
            continue
        silences = {url: 0 if roles else silences.get(url, 0) + 1 for url, roles in answers.items()}
        found = decide(answers, silences)
        if found is None or found == now:
            continue
        now = found
        write(output, render_nginx(now, settings))
        away = f", away: {', '.join(sorted(now.away))}" if now.away else ""
        say(f"primary {now.primary}{away}: {reload_nginx(reload, pid_file)}")
