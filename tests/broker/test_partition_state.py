"""The pure state: each verdict on a producer's sequence, positions, trims, and what a check-point keeps of them."""

from __future__ import annotations

import pytest

from quiver.broker import partition_state
from quiver.broker.partition_state import OFFSET_UNKNOWN, PRODUCER_BATCHES_MAX, PartitionState, Stored
from quiver.errors import OutOfOrderSequenceError, ProducerFencedError
from quiver.wire.frame import FLAG_BATCHES, FLAG_CLIENT, FLAG_UNSEQUENCED, Entry, FrameHeader, Kind
from quiver.wire.messages import Position
from tests.broker.state_kit import Log, data, positions, trim

# -- sequences -------------------------------------------------------------------------------------------------------


def test_next_batch_of_a_producer_is_new() -> None:
    log = Log()
    for sequence in (0, 3, 6):
        assert isinstance(log.produce(sequence), FrameHeader)
    log.commit()
    assert isinstance(log.produce(9), FrameHeader)


def test_retry_of_a_committed_batch_gets_its_first_offset() -> None:
    log = Log()
    log.produce(0)
    second = log.produce(3)
    log.commit()
    assert isinstance(second, FrameHeader)
    assert log.produce(3) == Stored(second.index, 3)


def test_retry_of_a_batch_in_the_tail_gets_its_place() -> None:
    log = Log()
    log.produce(0)
    log.commit()
    second = log.produce(3)
    log.produce(6)
    assert isinstance(second, FrameHeader)
    assert log.produce(3) == Stored(second.index, 3)


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("sequence", [1, 2, 4, 5, 7, 100])
def test_gap_or_overlap_is_refused_with_what_was_expected(sequence: int, committed: bool) -> None:
    log = Log()
    log.produce(0)
    log.produce(3)
    if committed:
        log.commit()
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.produce(sequence)
    assert caught.value.facts == {"expected": 6, "got": sequence}
    assert isinstance(log.produce(6), FrameHeader), "a refused batch changes nothing"


def test_unknown_producer_begins_at_zero_in_any_epoch() -> None:
    for epoch in (0, 5):
        with pytest.raises(OutOfOrderSequenceError):
            Log().produce(3, epoch=epoch)
        assert isinstance(Log().produce(0, epoch=epoch), FrameHeader)


@pytest.mark.parametrize("committed", [False, True])
def test_new_epoch_begins_at_zero_and_fences_the_old_one(committed: bool) -> None:
    log = Log()
    log.produce(0)
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.produce(3, epoch=1)
    assert caught.value.facts == {"expected": 0, "got": 3}
    log.produce(0, epoch=1)
    if committed:
        log.commit()
    for sequence in (0, 3):
        with pytest.raises(ProducerFencedError, match="epoch 1, not 0"):
            log.produce(sequence, epoch=0)
    assert isinstance(log.produce(3, epoch=1), FrameHeader)


def test_same_sequence_in_a_new_epoch_is_a_new_batch() -> None:
    log = Log()
    log.produce(0)
    log.commit()
    assert isinstance(log.produce(0, epoch=1), FrameHeader)
    assert isinstance(log.produce(0, epoch=1), Stored)


def test_tail_with_two_epochs_is_judged_by_the_newer() -> None:
    log = Log()
    log.produce(0)
    log.commit()
    log.produce(3)
    log.produce(0, epoch=1)
    assert isinstance(log.produce(3, epoch=1), FrameHeader)
    log.commit(1)
    assert isinstance(log.produce(0, epoch=1), Stored)
    log.commit()
    assert isinstance(log.produce(6, epoch=1), FrameHeader)


def test_producers_do_not_share_sequences() -> None:
    log = Log()
    log.produce(0, producer=1)
    assert isinstance(log.produce(0, producer=2), FrameHeader)
    with pytest.raises(OutOfOrderSequenceError):
        log.produce(3, producer=3)


def test_producer_zero_is_never_judged_nor_remembered() -> None:
    log = Log()
    for sequence in (5, 5, 0, 99):
        assert isinstance(log.produce(sequence, producer=0), FrameHeader)
    before = Log().state.image().state
    log.commit()
    assert log.state.image().state == before


@pytest.mark.parametrize("committed", [False, True])
def test_retries_get_their_offset_as_far_back_as_promised_and_are_known_beyond(committed: bool) -> None:
    log = Log()
    count = PRODUCER_BATCHES_MAX + 3
    for number in range(count):
        log.produce(number * 3)
        if committed:
            log.commit()
    log.commit()
    for number in range(count - PRODUCER_BATCHES_MAX, count):
        found = log.produce(number * 3)
        assert isinstance(found, Stored) and found.base_offset == number * 3
    for number in range(count - PRODUCER_BATCHES_MAX):
        assert log.produce(number * 3) == Stored(0, OFFSET_UNKNOWN), "stored for certain, the offset is forgotten"


def test_other_batch_under_remembered_numbers_is_refused() -> None:
    log = Log()
    log.produce(0, 9)
    log.produce(9, 9)
    for _ in range(3):
        for sequence, count in ((1, 1), (3, 6), (8, 1), (8, 2), (10, 8)):
            with pytest.raises(OutOfOrderSequenceError):
                log.produce(sequence, count)
        log.commit(1)


def test_batches_that_are_counted_are_known_by_their_place_whatever_is_in_them() -> None:
    log = Log()
    counts = [5, 1, 7] * 5  # more than are remembered
    for place, count in enumerate(counts):
        assert isinstance(log.produce(place, count, flags=FLAG_BATCHES), FrameHeader)
        if place % 2:
            log.commit()
    again = Log(log.state.image()) if not log.tail else log
    for place in range(len(counts)):
        assert isinstance(again.produce(place, 100, flags=FLAG_BATCHES), Stored)
    with pytest.raises(OutOfOrderSequenceError):
        again.produce(len(counts) + 1, flags=FLAG_BATCHES)
    assert isinstance(again.produce(len(counts), flags=FLAG_BATCHES), FrameHeader)
    assert isinstance(again.produce(0, epoch=1, flags=FLAG_BATCHES), FrameHeader), "the next micro-batch"
    with pytest.raises(ProducerFencedError):
        again.produce(len(counts) + 1, flags=FLAG_BATCHES)


def test_producer_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_state, "PRODUCERS_MAX", 3)
    log = Log()
    for producer in (1, 2, 3):
        log.produce(0, producer=producer)
    log.produce(3, producer=1)  # used again: now 2 is the oldest
    log.produce(0, producer=4)
    log.commit()
    for producer, sequence in ((1, 3), (3, 0), (4, 0)):
        assert isinstance(log.produce(sequence, producer=producer), Stored)
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.produce(3, producer=2)
    assert caught.value.facts["expected"] == 0, "the client sees that it must begin a new epoch"
    log.produce(0, producer=5)
    log.commit()
    with pytest.raises(OutOfOrderSequenceError):
        log.produce(3, producer=3)


def test_order_of_last_use_survives_a_check_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_state, "PRODUCERS_MAX", 3)
    log = Log()
    for producer, sequence in ((30, 0), (20, 0), (10, 0), (30, 3)):
        log.produce(sequence, producer=producer)
    log.commit()
    again = Log(log.state.image())
    again.produce(0, producer=40)
    again.commit()
    with pytest.raises(OutOfOrderSequenceError):
        again.produce(3, producer=20)
    assert isinstance(again.produce(3, producer=30), Stored)
    assert isinstance(again.produce(0, producer=10), Stored)


def test_batch_without_a_sequence_is_labelled_and_neither_judged_nor_remembered() -> None:
    log = Log()
    log.produce(0, producer=7)
    for _ in range(2):
        log.append(data(0, 4, producer=7, flags=FLAG_CLIENT | FLAG_UNSEQUENCED))
    assert isinstance(log.produce(3, producer=7), FrameHeader)
    log.commit()
    assert log.state.client_counts == {7: 8}
    assert isinstance(log.produce(3, producer=7), Stored)


def test_records_are_counted_by_client_once_committed_and_kept_by_the_check_point() -> None:
    log = Log()
    for client, count in ((5, 3), (6, 1), (5, 4)):
        log.append(data(0, count, producer=client, flags=FLAG_CLIENT | FLAG_UNSEQUENCED))
    assert log.state.client_counts == {}
    log.commit(2)
    log.roll_back()
    assert PartitionState(log.state.image()).client_counts == log.state.client_counts == {5: 3, 6: 1}


# -- roll back -------------------------------------------------------------------------------------------------------


def test_batch_that_was_rolled_back_is_new_again() -> None:
    log = Log()
    log.produce(0)
    log.commit()
    log.produce(3)
    log.produce(6)
    log.produce(0, producer=8)
    log.roll_back()
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.produce(6)
    assert caught.value.facts["expected"] == 3
    again = log.produce(3)
    assert isinstance(again, FrameHeader) and again.base_offset == 3
    assert isinstance(log.produce(0, producer=8), FrameHeader)
    assert isinstance(log.produce(0), Stored), "what is committed stays"


def test_epoch_that_was_rolled_back_does_not_fence() -> None:
    log = Log()
    log.produce(0)
    log.commit()
    log.produce(0, epoch=1)
    log.roll_back()
    assert isinstance(log.produce(3, epoch=0), FrameHeader)


# -- positions and trims ---------------------------------------------------------------------------------------------


def test_position_never_moves_back_unless_rewound() -> None:
    log = Log()
    for offset, rewind, expected in (
        (5, False, 5),
        (3, False, 5),
        (9, False, 9),
        (2, True, 2),
        (1, False, 2),
        (4, False, 4),
    ):
        log.append(positions(Position("group", offset, rewind)))
        log.commit()
        assert log.state.positions["group"] == expected


def test_expected_position_moves_only_from_there() -> None:
    log = Log()
    steps = [(5, 3, None), (5, -1, 5), (6, -1, 5), (9, 5, 9), (7, 9, 9), (12, 5, 9)]
    for offset, expected, result in steps:
        header = log.append(positions(Position("group", offset, expected=expected)))
        (payload,) = [payload for _, payload in log.tail]
        before = log.state.positions.get("group")
        refused = log.state.apply(header, payload)
        log.tail.clear()
        assert log.state.positions.get("group") == result
        assert bool(refused) == (expected != (-1 if before is None else before))


def test_position_of_zero_is_a_position() -> None:
    log = Log()
    log.append(positions(Position("a", 0), Position("b", 4)))
    log.commit()
    assert log.state.positions == {"a": 0, "b": 4}


def test_positions_and_trims_count_once_committed() -> None:
    log = Log()
    log.append(positions(Position("group", 5)))
    log.append(trim(3, 7))
    assert log.state.positions == {} and log.state.start_offset == 0
    log.roll_back()
    assert log.state.positions == {} and log.state.start_offset == 0


def test_log_start_only_rises() -> None:
    log = Log()
    for index, offset, expected in ((4, 10, (4, 10)), (2, 5, (4, 10)), (4, 10, (4, 10)), (9, 30, (9, 30))):
        log.append(trim(index, offset))
        log.commit()
        assert (log.state.trim_index, log.state.start_offset) == expected


def test_entries_without_records_use_no_offset() -> None:
    log = Log()
    log.produce(0, 5)
    log.append(positions(Position("group", 1)))
    log.append(trim(1, 0))
    log.append(Entry.control(Kind.NOOP, b""))
    log.produce(5, 2)
    log.commit()
    assert log.state.next_offset == 7
    assert log.state.applied_index == 5
