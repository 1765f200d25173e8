"""A real nginx with the written configuration: who gets what, and what happens to a request whose manager is lost."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.manager.nginx import Balanced, NginxSettings, render_nginx
from tests.system.nginx_kit import Nginx, StrawManager

pytestmark = [pytest.mark.system]

BODY_BYTES_MAX = 100_000
CHANGES = [
    ("POST", "/producer/produce"),
    ("PUT", "/v1/groups/g/topics/t/partitions/0/position"),
    ("PATCH", "/v1/topics/t"),
]
CHANGES += [
    ("DELETE", "/brokers/1"),
    ("POST", "/v1/topics/t/records"),
    ("GET", "/consumer/consume?topic=t&consumer_id=1"),
]
READS = [("GET", "/topics"), ("GET", "/size?topic=t&consumer_id=1"), ("HEAD", "/v1/topics")]
READS += [("GET", "/consumer/consume?topic=t&consumer_id=1&after=-1"), ("GET", "/v1/topics/t/partitions/0/records")]


class Straw:
    def __init__(self, directory: Path) -> None:
        self.primary, self.second, self.third = self.all = [StrawManager(name) for name in ("1", "2", "3")]
        self.nginx = Nginx(directory)
        balanced = Balanced(self.primary.place, (self.second.place, self.third.place))
        settings = NginxSettings(
            f"127.0.0.1:{self.nginx.port}", BODY_BYTES_MAX, str(self.nginx.run_dir), str(self.nginx.access_log)
        )
        self.nginx.config.write_text(render_nginx(balanced, settings))

    def call(self, method: str, target: str, body: bytes | None = None) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.nginx.port, timeout=20)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def asked(self) -> list[int]:
        return [len(manager.calls) for manager in self.all]


@pytest.fixture
def straw(tmp_path: Path) -> Iterator[Straw]:
    made = Straw(tmp_path)
    try:
        with made.nginx:
            yield made
    finally:
        for manager in made.all:
            manager.close()


def test_changes_reach_the_primary_and_reads_are_spread_evenly(straw: Straw) -> None:
    for method, target in CHANGES:
        if method != "GET":
            assert straw.call(method, target, b"{}")[:2] == (200, "1")
            assert straw.primary.calls[-1] == f"{method} {target}"
    count = len(straw.primary.calls)
    for _ in range(50):
        assert straw.call("GET", "/topics")[0] == 200
        assert straw.call("GET", CHANGES[-1][1])[0] == 200
    assert straw.asked() == [count, 50, 50]


@pytest.mark.parametrize(("method", "target"), CHANGES)
def test_what_was_sent_is_not_sent_again(straw: Straw, method: str, target: str) -> None:
    for manager in straw.all:
        manager.cuts = True
    status, body, headers = straw.call(method, target, None if method == "GET" else b"{}")
    assert (status, headers["Retry-After"], headers["Content-Type"]) == (503, "1", "application/json")
    assert "may or may not have been done" in body
    found = json.loads(body)
    assert found["error"]["retriable"] if target.startswith("/v1") else found["status"] == "failure"
    assert sum(straw.asked()) == 1


@pytest.mark.parametrize(("method", "target"), READS)
def test_what_only_reads_is_asked_elsewhere(straw: Straw, method: str, target: str) -> None:
    straw.second.cuts = straw.third.cuts = True
    assert straw.call(method, target)[0] == 200
    assert straw.asked() == [1, 1, 1]


@pytest.mark.parametrize(("method", "target"), CHANGES + READS)
@pytest.mark.parametrize("left", [0, 1, 2])
def test_who_is_gone_is_passed_over(straw: Straw, method: str, target: str, left: int) -> None:
    for manager in straw.all:
        if manager is not straw.all[left]:
            manager.close()
    status, body, _ = straw.call(method, target, None if method in ("GET", "HEAD") else b"{}")
    assert (status, body) == (200, str(left + 1) if method != "HEAD" else "")
    assert straw.all[left].calls == [f"{method} {target}"]


@pytest.mark.parametrize(("method", "target"), CHANGES + READS)
def test_when_all_are_gone_that_is_said(straw: Straw, method: str, target: str) -> None:
    for manager in straw.all:
        manager.close()
    status, body, headers = straw.call(method, target, None if method in ("GET", "HEAD") else b"{}")
    assert (status, headers["Retry-After"]) == (503, "1")
    if method != "HEAD":
        assert "no manager answers now" in body
        json.loads(body)


def test_a_refusal_is_passed_on_and_a_reader_tries_the_next(straw: Straw) -> None:
    straw.second.status = straw.third.status = straw.primary.status = 503
    assert straw.call("POST", "/producer/produce", b"{}")[:2] == (503, "1")
    assert straw.asked() == [1, 0, 0]
    straw.third.status = 200
    assert straw.call("GET", "/topics")[:2] == (200, "3")


def test_a_body_that_is_too_large_is_refused_as_a_manager_does(straw: Straw) -> None:
    large = b"x" * (BODY_BYTES_MAX + 1)
    status, body, _ = straw.call("POST", "/producer/produce", large)
    assert (status, json.loads(body)["status"]) == (400, "failure")
    status, body, _ = straw.call("POST", "/v1/topics/t/records", large)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert straw.asked() == [0, 0, 0]


def test_a_request_that_cannot_be_read_is_refused_in_json(straw: Straw) -> None:
    for target in ("/topics?name=" + "x" * 200_000, "/top%ics"):
        status, body, _ = straw.call("GET", target)
        assert (status, json.loads(body)["status"]) == (400, "failure")
    assert straw.asked() == [0, 0, 0]
