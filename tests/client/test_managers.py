"""Which manager a call goes to."""

from __future__ import annotations

from quiver.client.managers import AVOID_S, REFRESH_S, REFRESH_S_MIN, Managers, Roles, read_roles

A, B, C = "http://a:1", "http://b:2", "http://c:3"
ROLES = Roles(A, (B, C))


def following() -> Managers:
    managers = Managers([A])
    managers.learn(ROLES, 0.0)
    return managers


def test_changes_go_to_the_primary_and_reads_to_the_secondaries_in_turn() -> None:
    managers = following()
    assert [managers.order(False, 0.0)[0] for _ in range(3)] == [A, A, A]
    assert [managers.order(True, 0.0)[0] for _ in range(4)] == [B, C, B, C]
    assert managers.order(True, 0.0) == [B, C, A]


def test_changes_do_not_disturb_the_turn_of_reads() -> None:
    managers = following()
    firsts = []
    for _ in range(4):
        managers.order(False, 0.0)
        firsts.append(managers.order(True, 0.0)[0])
    assert firsts == [B, C, B, C]


def test_who_failed_comes_last_for_a_while_and_is_never_left_out() -> None:
    managers = following()
    managers.failed(A, 10.0)
    assert managers.order(False, 10.0) == [B, C, A]
    assert managers.order(False, 10.0 + AVOID_S)[0] == A
    managers.failed(A, 20.0)
    managers.answered(A)
    assert managers.order(False, 20.0)[0] == A
    for url in (A, B, C):
        managers.failed(url, 30.0)
    assert sorted(managers.order(False, 30.0)) == [A, B, C]


def test_who_is_who_is_asked_at_first_after_a_failure_and_now_and_then() -> None:
    managers = Managers([A])
    assert managers.should_ask(100.0)
    assert not managers.should_ask(100.0)  # somebody asks already
    managers.learn(ROLES, 100.0)
    assert not managers.should_ask(100.0 + REFRESH_S - 1)
    assert managers.should_ask(100.0 + REFRESH_S)
    managers.learn(ROLES, 200.0)
    managers.failed(B, 201.0)
    assert managers.should_ask(201.0)
    assert not managers.should_ask(201.0 + REFRESH_S_MIN / 2)
    assert managers.should_ask(201.0 + REFRESH_S_MIN)


def test_without_knowledge_the_given_ones_are_used_in_their_order() -> None:
    managers = Managers([A, B, A])
    assert managers.order(True, 0.0) == [A, B]
    assert managers.order(False, 0.0) == [A, B]
    managers.failed(A, 0.0)
    assert managers.order(True, 0.0) == [B, A]
    managers.learn(ROLES, 1.0)
    managers.keep_to_given(2.0)
    assert managers.order(True, 9.0) == [A, B]


def test_an_answer_is_read_and_a_strange_one_refused() -> None:
    a, b = {"ip": "10.0.0.1", "port": 8002}, {"ip": "::1", "port": 8003}
    assert read_roles({"primary": a, "replicas": [b]}) == Roles("http://10.0.0.1:8002", ("http://[::1]:8003",))
    assert read_roles({"primary": a, "replicas": [a]}) == Roles("http://10.0.0.1:8002", ())
    for strange in ({}, {"primary": a}, {"primary": {"ip": 3}, "replicas": []}, {"primary": a, "replicas": "x"}):
        assert read_roles(strange) is None
