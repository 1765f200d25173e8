"""The text of the nginx configuration; what nginx makes of it is tested in tests/system/test_nginx.py."""

from __future__ import annotations

import re

from quiver.manager.http_server import KEEP_ALIVE_S as MANAGER_KEEP_ALIVE_S
from quiver.manager.nginx import KEEP_ALIVE_S, Balanced, NginxSettings, render_nginx

SETTINGS = NginxSettings("127.0.0.1:8080", 1000)


def servers(text: str, pool: str) -> list[str]:
    block = re.search(rf"upstream {pool} {{(.*?)\n    }}", text, re.DOTALL)
    assert block is not None
    return re.findall(r"server (.*);", block.group(1))


def test_changes_go_to_the_primary_and_reads_to_the_secondaries() -> None:
    text = render_nginx(Balanced("a:1", ("b:2", "c:3")), SETTINGS)
    checked = "max_fails=1 fail_timeout=2s"
    assert servers(text, "quiver_writes") == [f"a:1 {checked}", f"b:2 {checked} backup", f"c:3 {checked} backup"]
    assert servers(text, "quiver_reads") == [f"b:2 {checked}", f"c:3 {checked}", f"a:1 {checked} backup"]


def test_a_primary_that_is_alone_does_all() -> None:
    text = render_nginx(Balanced("a:1"), SETTINGS)
    assert len(servers(text, "quiver_writes")) == len(servers(text, "quiver_reads")) == 1
    assert "backup" not in text


def test_who_is_away_gets_nothing() -> None:
    text = render_nginx(Balanced("a:1", ("b:2", "c:3"), frozenset({"b:2"})), SETTINGS)
    assert "b:2 down" in servers(text, "quiver_reads")
    assert "b:2 down backup" in servers(text, "quiver_writes")


def test_nothing_is_left_to_fill_in_and_paths_are_quoted() -> None:
    settings = NginxSettings("8080", 1000, '/a dir/with "quotes"', "/log dir/access.log")
    text = render_nginx(Balanced("a:1", ("b:2",)), settings)
    assert "@@" not in text
    assert r'pid "/a dir/with \"quotes\"/nginx.pid";' in text
    assert 'access_log "/log dir/access.log" quiver;' in text
    assert "listen 8080;" in text
    assert "pid " not in render_nginx(Balanced("a:1"), SETTINGS)


def test_idle_connections_end_at_nginx_first() -> None:
    """Otherwise a request could meet the end of its connection, and its outcome would be unknown."""
    assert KEEP_ALIVE_S < MANAGER_KEEP_ALIVE_S
