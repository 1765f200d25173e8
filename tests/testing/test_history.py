"""The judge of histories: each kind of wrong is seen, and what is right is not called wrong."""

from __future__ import annotations

from quiver.testing.history import (
    DUPLICATE,
    GAP,
    LOST,
    MISPLACED,
    PHANTOM,
    REORDERED,
    REWOUND,
    TOLD_PER_KIND_MAX,
    History,
)
from quiver.types import Record, RecordMetadata


def record(offset: int, value: bytes, partition: int = 0) -> Record:
    return Record("t", partition, offset, 0, None, value)


def told(history: History, *values: bytes, name: str = "p", first: int = 0, partition: int = 0) -> None:
    """A producer that sent these and got them acknowledged one after the other."""
    log = history.producer(name)
    for offset, value in enumerate(values, first):
        log.sent(value)
        log.acknowledged(value, RecordMetadata("t", partition, offset))


def saw(history: History, *records: Record, name: str = "c") -> None:
    reader = history.reader(name)
    for one in records:
        reader.saw(one)


def kinds(history: History) -> list[str]:
    return [violation.kind for violation in history.judge()]


def test_clean_history_has_no_violation() -> None:
    history = History()
    told(history, b"a", b"b", name="p1")
    told(history, b"c", name="p2", first=2)
    told(history, b"d", name="p2", partition=1)
    saw(history, record(0, b"a"), record(0, b"d", 1), record(1, b"b"), record(2, b"c"), name="c1")
    saw(history, record(0, b"a"), record(1, b"b"), record(2, b"c"), record(0, b"d", 1), name="c2")
    assert history.judge() == []
    assert history.acknowledged_count == 4


def test_an_empty_history_is_clean() -> None:
    assert History().judge() == []


def test_acknowledged_and_never_seen_is_lost() -> None:
    history = History()
    told(history, b"a", b"b")
    saw(history, record(0, b"a"))
    assert [str(violation) for violation in history.judge()] == [
        "lost: 'b' of p was acknowledged at t-0@1 and nobody saw it"
    ]


def test_what_was_never_acknowledged_may_be_missing_or_there() -> None:
    history = History()
    log = history.producer("p")
    for value in (b"missing", b"there"):
        log.sent(value)
    saw(history, record(0, b"there"))
    assert history.judge() == []


def test_the_same_message_at_two_offsets_is_a_duplicate() -> None:
    history = History()
    told(history, b"a", b"b")
    saw(history, record(0, b"a"), record(1, b"b"), record(2, b"a"))
    assert [str(violation) for violation in history.judge()] == ["duplicate: 'a' is stored 2 times: t-0@0, t-0@2"]


def test_the_same_message_in_two_partitions_is_a_duplicate() -> None:
    history = History()
    told(history, b"a")
    saw(history, record(0, b"a"), record(0, b"a", 1))
    assert kinds(history) == [DUPLICATE]


def test_an_offset_handed_twice_to_one_reader_is_a_duplicate() -> None:
    history = History()
    told(history, b"a", b"b")
    saw(history, record(0, b"a"), record(1, b"b"), record(1, b"b"))
    assert kinds(history) == [DUPLICATE]


def test_a_reader_that_is_opened_again_may_see_records_again() -> None:
    history = History()
    told(history, b"a", b"b")
    saw(history, record(0, b"a"), record(1, b"b"))
    saw(history, record(1, b"b"))
    assert history.judge() == []


def test_messages_of_one_producer_that_changed_places_are_reordered() -> None:
    history = History()
    log = history.producer("p")
    for value in (b"first", b"second"):
        log.sent(value)
    saw(history, record(0, b"second"), record(1, b"first"))
    assert [str(violation) for violation in history.judge()] == [
        "reordered: 'second' of p at t-0@0 was sent after 'first' at offset 1"
    ]


def test_messages_of_different_producers_and_partitions_have_no_order() -> None:
    history = History()
    for name, values in (("p1", (b"a", b"b")), ("p2", (b"c", b"d"))):
        log = history.producer(name)
        for value in values:
            log.sent(value)
    saw(history, record(0, b"c"), record(1, b"a"), record(0, b"b", 1), record(2, b"d"))
    assert history.judge() == []


def test_readers_that_see_different_orders_are_reported() -> None:
    history = History()
    for name, value in (("p1", b"a"), ("p2", b"b")):
        history.producer(name).sent(value)
    saw(history, record(0, b"a"), record(1, b"b"), name="c1")
    saw(history, record(0, b"b"), record(1, b"a"), name="c2")
    assert [str(violation) for violation in history.judge()] == [
        "reordered: t-0@0 is 'a' for c1 and 'b' for c2",
        "reordered: t-0@1 is 'b' for c1 and 'a' for c2",
    ]


def test_a_reader_that_gets_offsets_in_the_wrong_order_is_reported() -> None:
    history = History()
    told(history, b"a", b"b", b"c")
    saw(history, record(0, b"a"), record(2, b"c"), record(1, b"b"))
    assert kinds(history) == [GAP, REORDERED]


def test_seen_and_never_sent_is_a_phantom() -> None:
    history = History()
    told(history, b"a")
    saw(history, record(0, b"a"), record(1, b"x"))
    assert [str(violation) for violation in history.judge()] == ["phantom: 'x' at t-0@1 was never sent"]


def test_told_that_it_failed_and_stored_all_the_same_is_a_phantom() -> None:
    history = History()
    log = history.producer("p")
    log.sent(b"a")
    log.failed(b"a")
    saw(history, record(0, b"a"))
    assert kinds(history) == [PHANTOM]


def test_failed_and_absent_is_clean() -> None:
    history = History()
    log = history.producer("p")
    log.sent(b"a")
    log.failed(b"a")
    assert history.judge() == []


def test_stored_elsewhere_than_acknowledged_is_misplaced() -> None:
    history = History()
    told(history, b"a", first=5)
    saw(history, record(4, b"a"))
    assert [str(violation) for violation in history.judge()] == [
        "misplaced: 'a' was acknowledged at t-0@5 and stands at t-0@4"
    ]


def test_offsets_that_are_not_dense_are_a_gap() -> None:
    history = History()
    log = history.producer("p")
    log.sent(b"a")
    log.sent(b"b")
    saw(history, record(0, b"a"))
    saw(history, record(2, b"b"))
    assert [str(violation) for violation in history.judge()] == ["gap: t-0@0 is followed by offset 2"]


def test_a_hole_that_only_one_reader_has_is_a_gap() -> None:
    history = History()
    told(history, b"a", b"b", b"c")
    saw(history, record(0, b"a"), record(1, b"b"), record(2, b"c"), name="whole")
    saw(history, record(0, b"a"), record(2, b"c"), name="holed")
    assert [str(violation) for violation in history.judge()] == ["gap: holed got t-0@2 where offset 1 follows"]


def test_a_reader_may_jump_when_it_says_so() -> None:
    history = History()
    told(history, b"a", b"b", b"c")
    saw(history, record(0, b"a"), record(1, b"b"), record(2, b"c"))
    reader = history.reader("seeker")
    for step in (record(2, b"c"), None, record(0, b"a"), record(1, b"b"), record(2, b"c")):
        if step is None:
            reader.jumped("t", 0, 0)
        else:
            reader.saw(step)
    assert history.judge() == []


def test_a_reader_that_resumes_beyond_what_its_name_saw_is_a_gap() -> None:
    history = History()
    told(history, b"a", b"b", b"c", b"d")
    saw(history, *(record(offset, value) for offset, value in enumerate((b"a", b"b", b"c", b"d"))), name="whole")
    for first, values in ((0, (b"a",)), (3, (b"d",))):
        reader = history.reader("group")
        reader.resumed("t", 0, first)
        for offset, value in enumerate(values, first):
            reader.saw(record(offset, value))
    assert [str(violation) for violation in history.judge()] == [
        "gap: group resumed at t-0@3 and had seen nothing from 1 on"
    ]


def test_a_reader_that_resumes_earlier_is_clean_and_must_begin_there() -> None:
    history = History()
    told(history, b"a", b"b", b"c")
    saw(history, record(0, b"a"), record(1, b"b"), record(2, b"c"), name="group")
    reader = history.reader("group")
    reader.resumed("t", 0, 1)
    reader.saw(record(1, b"b"))
    assert history.judge() == []
    late = history.reader("group")
    late.resumed("t", 0, 1)
    late.saw(record(2, b"c"))
    assert [str(violation) for violation in history.judge()] == ["gap: group got t-0@2 where offset 1 follows"]


def test_a_committed_position_that_moves_back_is_rewound() -> None:
    history = History()
    group = history.group("g")
    group.committed("t", 0, 5)
    group.found("t", 0, 5)
    group.committed("t", 0, 4)
    assert [str(violation) for violation in history.judge()] == ["rewound: g committed t-0@4 after 5 was committed"]


def test_a_committed_position_that_is_gone_is_rewound() -> None:
    history = History()
    group = history.group("g")
    group.found("t", 0, None)
    group.committed("t", 0, 5)
    group.committed("t", 1, 1)
    group.found("t", 0, None)
    group.found("t", 1, 9)  # a commit whose reply was lost may count
    assert kinds(history) == [REWOUND]


def test_many_violations_of_one_kind_are_counted_and_the_other_kinds_still_told() -> None:
    history = History()
    told(history, *(b"%d" % number for number in range(1000)))
    saw(history, record(1000, b"x"))
    found = history.judge()
    assert len(found) == TOLD_PER_KIND_MAX + 2
    assert {violation.kind for violation in found} == {LOST, PHANTOM}
    assert str(found[-1]) == f"lost: ... and {1000 - TOLD_PER_KIND_MAX} more"


def test_long_values_are_shortened_in_reports() -> None:
    history = History()
    told(history, b"v" * 10_000)
    (violation,) = history.judge()
    assert violation.kind == LOST
    assert len(violation.detail) < 200


def test_kinds_are_told_apart_in_one_history() -> None:
    history = History()
    told(history, b"lost", b"moved", b"twice")
    saw(history, record(0, b"moved"), record(2, b"twice"), record(3, b"twice"))
    assert set(kinds(history)) == {LOST, MISPLACED, DUPLICATE, GAP}
