"""Topic settings that cannot be are refused in one sentence at every door, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quiver import Admin
from quiver.errors import InvalidRequestError
from tests.manager.kit import HttpNode, fresh
from tests.manager.v1_kit import V1

pytestmark = pytest.mark.system

WRONG: list[tuple[str, Any, str]] = [
    ("retention.ms", 0, "retention.ms is a number from 1 to 9007199254740992, or -1 for no limit, not 0"),
    ("retention.ms", -5, "or -1 for no limit, not -5"),
    ("retention.ms", 2**60, "retention.ms is a number from 1 to"),
    ("retention.ms", True, "not True"),
    ("retention.bytes", "a lot", "retention.bytes is a number from 1 to"),
    ("cleanup", "never", "cleanup is delete, consumed or compact, not 'never'"),
    ("cleanup", 3, "cleanup is delete, consumed or compact, not 3"),
    ("tombstone.ms", -1, "tombstone.ms is a number from 0 to 9007199254740992, not -1"),
    ("segment.bytes", 10, "segment.bytes is a number from 1024 to 1073741824, not 10"),
    ("require.consumers", "perhaps", "require.consumers is true or false, not 'perhaps'"),
    ("require.consumers", 7, "require.consumers is true or false, not 7"),
    ("max.message.bytes", 0, "max.message.bytes is a number from 1 to 8388608, not 0"),
    ("replication.factor", 0, "replication.factor is a number from 1 to 100, not 0"),
    ("replication.factor", 10**9, "replication.factor is a number from 1 to 100, not 1000000000"),
    ("retention", 5, "there is no topic setting 'retention'; there are cleanup, max.message.bytes"),
    ("x" * 5000, 5, "there is no topic setting 'xxx"),
]


@pytest.fixture(scope="module")
def topic(node: HttpNode) -> Iterator[str]:
    with Admin(node.address) as admin:
        name = fresh()
        admin.create_topic(name, 1, {"retention.ms": 777})
        yield name
        assert admin.describe_topic(name).settings == {"retention.ms": 777}, "nothing of it all was set"


def check_sentence(message: str, part: str) -> None:
    assert part in message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=str)
def test_v1_refuses_it(node: HttpNode, topic: str, name: str, value: Any, message: str) -> None:
    new = fresh()
    with V1(node.http) as v1:
        for told in (
            v1.json("POST", "/v1/topics", {"name": new, "settings": {name: value}}),
            v1.json("PATCH", f"/v1/topics/{topic}", {"settings": {"retention.ms": 5, name: value}}),
        ):
            assert (told.status, told.error["code"]) == (400, "invalid_request")
            check_sentence(told.error["message"], message)
        assert v1.request("GET", f"/v1/topics/{new}").status == 404


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=str)
def test_the_sdk_refuses_it(node: HttpNode, topic: str, name: str, value: Any, message: str) -> None:
    new = fresh()
    with Admin(node.address) as admin:
        for ask in (
            lambda: admin.create_topic(new, 1, {name: value}),
            lambda: admin.alter_topic(topic, {name: value}),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                ask()
            check_sentence(caught.value.message, message)
        assert new not in admin.list_topics()


@pytest.mark.parametrize("settings", [5, [], "cleanup=delete", {"cleanup": 1.5}, {"cleanup": None}, {"cleanup": ["a"]}])
def test_settings_of_the_wrong_form_are_refused(node: HttpNode, topic: str, settings: Any) -> None:
    with V1(node.http) as v1:
        told = v1.json("POST", "/v1/topics", {"name": fresh(), "settings": settings})
        assert (told.status, told.error["code"]) == (400, "invalid_request")
        check_sentence(told.error["message"], "")
    if settings:
        with Admin(node.address) as admin, pytest.raises(InvalidRequestError) as caught:
            admin.create_topic(fresh(), 1, settings)
        check_sentence(caught.value.message, "")


@pytest.mark.parametrize("unset", ["cleanup", 5, ["nope"], [None], ["replication.factor"]])
def test_names_to_unset_of_the_wrong_form_are_refused(node: HttpNode, topic: str, unset: Any) -> None:
    with Admin(node.address) as admin, pytest.raises(InvalidRequestError) as caught:
        admin.alter_topic(topic, unset=unset)
    check_sentence(caught.value.message, "")
