"""The nginx configuration that stands before the managers, as text.

Rule: pure. Changes go to the primary and only without it to another manager; reads go to the secondaries in turn. What
was sent is not sent a second time unless it only reads: `consume` without `after` moves a position, and counts as a
change here though it is a GET.
"""

from __future__ import annotations

import dataclasses
from typing import Final

# A manager that failed gets no request for so long, then one to see whether it is back.
FAIL_TIMEOUT_S: Final = 2
CONNECT_TIMEOUT_S: Final = 1
READ_TIMEOUT_S: Final = 45  # a long-polling fetch waits 30 s
# Shorter than the managers' own: a connection that just ends under a request would make its outcome unknown.
KEEP_ALIVE_S: Final = 30
_UNKNOWN: Final = "the manager was lost while it did this: it may or may not have been done"
_NOBODY: Final = "no manager answers now"


@dataclasses.dataclass(frozen=True, slots=True)
class Balanced:
    """The managers as host:port. `away` are known and get nothing until somebody writes that they are back."""

    primary: str
    secondaries: tuple[str, ...] = ()
    away: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class NginxSettings:
    """`run_dir` is for the pid, the error log and temporary files; empty: where this nginx has them anyway."""

    listen: str
    body_bytes_max: int
    run_dir: str = ""
    access_log: str = ""


def render_nginx(managers: Balanced, settings: NginxSettings) -> str:
    count = 1 + len(managers.secondaries)
    parts = (_MAIN, _MAPS, _upstreams(managers), _SERVER)
    text = "\n".join(parts)
    for name, value in {
        "@@FILES@@": _files(settings),
        "@@ACCESS@@": f"access_log {_quoted(settings.access_log)} quiver;"
        if settings.access_log
        else "access_log off;",
        "@@TEMP@@": _temp_paths(settings),
        "@@LISTEN@@": settings.listen,
        "@@BODY_MAX@@": str(settings.body_bytes_max),
        "@@TOO_LARGE@@": f"the body is larger than the limit of {settings.body_bytes_max} bytes",
        "@@REPEATS@@": f"0,{count - 1}",
        "@@TRIES@@": str(count),
        "@@CONNECT@@": str(CONNECT_TIMEOUT_S),
        "@@READ@@": str(READ_TIMEOUT_S),
        "@@UNKNOWN@@": _UNKNOWN,
        "@@NOBODY@@": _NOBODY,
    }.items():
        text = text.replace(name, value)
    return text


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _files(settings: NginxSettings) -> str:
    if not settings.run_dir:
        return ""
    pid, log = (_quoted(f"{settings.run_dir}/{name}") for name in ("nginx.pid", "error.log"))
    return f"pid {pid};\nerror_log {log} warn;\n"


def _temp_paths(settings: NginxSettings) -> str:
    if not settings.run_dir:
        return ""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"    {kind}_temp_path {_quoted(f'{settings.run_dir}/{kind}')};\n" for kind in kinds)


def _upstreams(managers: Balanced) -> str:
    first = (managers.primary,)
    return "\n".join(
        (
            _upstream("quiver_writes", first, managers.secondaries, managers.away),
            _upstream(
                "quiver_reads", managers.secondaries or first, first if managers.secondaries else (), managers.away
            ),
        )
    )


def _upstream(name: str, servers: tuple[str, ...], backups: tuple[str, ...], away: frozenset[str]) -> str:
    checked = f"max_fails=1 fail_timeout={FAIL_TIMEOUT_S}s"
    lines = [f"    upstream {name} {{", f"        zone {name} 128k;  # shared: all workers count and fail as one"]
    for server in (*servers, *backups):
        words = [server, *(["down"] if server in away else [checked]), *(["backup"] if server in backups else [])]
        lines.append(f"        server {' '.join(words)};")
    return "\n".join([*lines, "        keepalive 64;", f"        keepalive_timeout {KEEP_ALIVE_S}s;", "    }", ""])


_MAIN: Final = """\
# Written by 'quiver nginx-config'. Changes made here are lost when it is written again.
worker_processes auto;
@@FILES@@
events {
    worker_connections 4096;
}

http {
    log_format quiver '$time_iso8601 $remote_addr "$request" $status $upstream_addr $upstream_status $request_time';
    @@ACCESS@@
@@TEMP@@    default_type application/json;
    server_tokens off;
"""

_MAPS: Final = """\
    map $request_method $quiver_pool {
        default quiver_writes;
        GET     quiver_reads;
        HEAD    quiver_reads;
        OPTIONS quiver_reads;
    }

    # What must not be done twice. Consume with 'after' may: it gets the same message again.
    map "$request_method $uri $arg_after" $quiver_once {
        default 1;
        "~^(GET|HEAD) /consumer/consume $" 1;
        "~^(GET|HEAD|OPTIONS) " 0;
    }

    # Whether another manager may be asked: nothing was sent yet, and not all have been tried.
    map $upstream_bytes_sent $quiver_outcome {
        volatile;
        default unknown;
        "~^[0-](?:(?:, | : )[0-]){@@REPEATS@@}$" unsent;
        "~^[0-](?:(?:, | : )[0-])*$" nobody;
    }

    map $uri $quiver_api {
        default classic;
        "~^/(v1|openapi\\.json|docs)(/|$)" v1;
    }
    map $quiver_api $quiver_unknown {
        classic '{"status":"failure","message":"@@UNKNOWN@@"}';
        v1 '{"error":{"code":"outcome_unknown","message":"@@UNKNOWN@@","retriable":true}}';
    }
    map $quiver_api $quiver_nobody {
        classic '{"status":"failure","message":"@@NOBODY@@"}';
        v1 '{"error":{"code":"unavailable","message":"@@NOBODY@@","retriable":true}}';
    }
    map $quiver_api $quiver_too_large {
        classic '{"status":"failure","message":"@@TOO_LARGE@@"}';
        v1 '{"error":{"code":"body_too_large","message":"@@TOO_LARGE@@","retriable":false}}';
    }
"""

_SERVER: Final = """\
    server {
        listen @@LISTEN@@;
        merge_slashes off;
        client_max_body_size @@BODY_MAX@@;
        client_body_buffer_size 1m;
        client_body_timeout 10s;
        large_client_header_buffers 4 64k;
        recursive_error_pages on;
        error_page 400 414 494 = /-/unreadable;

        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        proxy_connect_timeout @@CONNECT@@s;
        proxy_read_timeout @@READ@@s;
        proxy_max_temp_file_size 0;

        location / {
            error_page 413 = @too_large;
            error_page 418 = @once;
            error_page 502 504 = @nobody;
            if ($quiver_once) {
                return 418;
            }
            proxy_next_upstream error timeout http_502 http_503 http_504;
            proxy_next_upstream_tries @@TRIES@@;
            proxy_pass http://$quiver_pool;
        }

        # What was sent stays with the manager that got it, whatever becomes of it there.
        location @once {
            error_page 413 = @too_large;
            error_page 502 504 = @again;
            proxy_next_upstream off;
            proxy_pass http://$quiver_pool;
        }

        location @again {
            error_page 418 = @unknown;
            error_page 421 = @nobody;
            error_page 502 504 = @again;
            if ($quiver_outcome = unknown) {
                return 418;
            }
            if ($quiver_outcome = nobody) {
                return 421;
            }
            proxy_next_upstream off;
            proxy_pass http://$quiver_pool;
        }

        location @unknown {
            add_header Retry-After 1 always;
            return 503 $quiver_unknown;
        }

        location @nobody {
            add_header Retry-After 1 always;
            return 503 $quiver_nobody;
        }

        location = /-/unreadable {
            internal;
            return 400 '{"status":"failure","message":"this is no HTTP request, or its head is too large"}';
        }

        location @too_large {
            if ($quiver_api = v1) {
                return 413 $quiver_too_large;
            }
            return 400 $quiver_too_large;
        }
    }
}
"""
