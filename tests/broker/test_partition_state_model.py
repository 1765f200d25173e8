"""Whatever happens: no sequence twice, and a check-point with the rest says the same as all entries."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.broker.partition_state import PartitionState, Trim
from quiver.errors import OutOfOrderSequenceError, ProducerFencedError
from quiver.log.checkpoint import Checkpoint
from quiver.wire.frame import FrameHeader, Kind
from quiver.wire.messages import Position
from tests.broker.state_kit import Log, positions, trim

PRODUCED = st.tuples(
    st.integers(1, 4), st.integers(0, 2), st.integers(0, 12).map(lambda n: n * 2), st.sampled_from((1, 2, 4))
)
EVENTS = st.lists(
    st.one_of(
        PRODUCED,
        st.builds(Position, st.sampled_from(("a", "b")), st.integers(0, 50), st.booleans()),
        st.builds(
            Position,
            st.sampled_from(("a", "b")),
            st.integers(0, 50),
            st.booleans(),
            epoch=st.integers(0, 5),
            act=st.sampled_from(("move", "claim", "claim", "forget")),
        ),
        st.builds(Trim, st.integers(1, 50), st.integers(0, 50)),
        st.sampled_from(("commit", "roll back")),
    ),
    max_size=60,
)


def play(log: Log, event: Any) -> None:
    if isinstance(event, Position):
        log.append(positions(event))
    elif isinstance(event, Trim):
        log.append(trim(event.index, event.offset))
    elif event == "commit":
        log.commit()
    elif event == "roll back":
        log.roll_back()
    else:
        producer, epoch, sequence, count = event
        with contextlib.suppress(OutOfOrderSequenceError, ProducerFencedError):
            log.produce(sequence, count, producer=producer, epoch=epoch)


def verdicts(state: PartitionState) -> list[Any]:
    """What the state says to every batch the events could bring."""
    found: list[Any] = []
    for producer in range(1, 5):
        for epoch in range(3):
            for sequence in range(40):
                try:
                    found.append(state.judge(producer, epoch, sequence, 2))
                except (OutOfOrderSequenceError, ProducerFencedError) as error:
                    found.append((error.code, error.facts))
    return found


def whole(state: PartitionState) -> Any:
    return state.image(), state.positions, state.epochs, state.start_offset, state.trim_index, verdicts(state)


@given(events=EVENTS)
@settings(deadline=None, max_examples=60)
def test_image_gives_the_same_state_back(events: list[Any]) -> None:
    log = Log()
    for event in events:
        play(log, event)
    log.roll_back()
    assert whole(PartitionState(log.state.image())) == whole(log.state)


@given(events=EVENTS, cut=st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_check_point_and_the_rest_give_the_same_as_all_entries(events: list[Any], cut: int) -> None:
    log = Log()
    committed: list[tuple[FrameHeader, Any]] = []
    apply = log.state.apply
    log.state.apply = lambda header, payload: (committed.append((header, payload)), apply(header, payload))  # type: ignore
    for event in [*events, "commit"]:
        play(log, event)
    from_all, from_part = PartitionState(Checkpoint()), PartitionState(Checkpoint())
    for number, (header, payload) in enumerate(committed):
        if number == cut:
            from_part = PartitionState(from_part.image())
        from_all.apply(header, payload)
        from_part.apply(header, payload)
    assert whole(from_part) == whole(from_all) == whole(log.state)


@given(events=EVENTS)
@settings(deadline=None, max_examples=60)
def test_no_sequence_is_in_the_log_twice(events: list[Any]) -> None:
    log = Log()
    committed: list[FrameHeader] = []
    apply = log.state.apply
    log.state.apply = lambda header, payload: (committed.append(header), apply(header, payload))  # type: ignore
    for event in [*events, "commit"]:
        play(log, event)
    batches = [(h.producer_id, h.producer_epoch, h.sequence) for h in committed if h.kind == Kind.DATA]
    assert len(set(batches)) == len(batches)
    ends: dict[tuple[int, int], int] = {}
    for header in committed:
        if header.kind == Kind.DATA:
            producer = (header.producer_id, header.producer_epoch)
            assert header.sequence == ends.get(producer, 0), "no gap and no overlap"
            ends[producer] = header.sequence + header.record_count
