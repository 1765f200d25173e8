"""Hypothesis drives a log with arbitrary steps and compares it with a list."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quiver.log.flush import CheckpointJob, FlushJob
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import Kind, walk_frames
from tests.log.log_kit import ROOMY, SETTINGS, Driver, Stored, control, data


class LogMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1), roomy=st.booleans())
    def start(self, seed: int, roomy: bool) -> None:
        self.driver = Driver(FaultyDisk(seed), ROOMY if roomy else SETTINGS)
        self.driver.open()
        self.job: FlushJob | None = None
        self.checkpoint_job: CheckpointJob | None = None
        self.number = 0
        self.now_s = 0.0

    @property
    def stored(self) -> list[Stored]:
        """What readers must find."""
        return self.driver.entries[self.driver.live.first_index - 1 : self.driver.acked - 1]

    # -- change ------------------------------------------------------------------------------------------------------

    @rule(
        size=st.sampled_from((0, 1, 50, 120, 300, 1200)),
        records=st.integers(1, 5),
        timestamp=st.integers(0, 500),
        passed_s=st.sampled_from((0.0, 0.0, 0.0, SETTINGS.segment_age_ms_max / 1000)),
    )
    def append_data(self, size: int, records: int, timestamp: int, passed_s: float) -> None:
        self.number += 1
        self.now_s += passed_s
        self.driver.append(data(self.number, size, records, timestamp), self.number // 5, self.now_s)

    @rule(kind=st.sampled_from([kind for kind in Kind if kind != Kind.DATA]), size=st.sampled_from((0, 30, 400)))
    def append_control(self, kind: Kind, size: int) -> None:
        self.number += 1
        self.driver.append(control(self.number, kind, size), self.number // 5, self.now_s)

    @precondition(lambda self: self.job is None)
    @rule()
    def begin_flush(self) -> None:
        self.job = self.driver.live.begin_flush()

    @precondition(lambda self: self.job is not None)
    @rule()
    def finish_flush(self) -> None:
        assert self.job is not None
        self.job.run()
        self.driver.live.finish_flush(self.job, None)
        self.driver.acked = self.driver.live.synced_index
        self.job = None

    def first_free(self) -> int:
        """The first index that no check-point stands for, not even one that is being written."""
        begun = self.checkpoint_job.checkpoint.index if self.checkpoint_job is not None else 0
        return max(begun, self.driver.live.checkpoint.index) + 1

    @precondition(lambda self: self.job is None and self.first_free() < self.driver.acked)
    @rule(where=st.floats(0, 1))
    def truncate(self, where: float) -> None:
        first = self.first_free()
        self.driver.truncate(first + int(where * (self.driver.acked - 1 - first)))

    @precondition(lambda self: self.checkpoint_job is None and self.first_free() < self.driver.acked)
    @rule(where=st.floats(0, 1))
    def begin_checkpoint(self, where: float) -> None:
        first = self.first_free()
        self.checkpoint_job = self.driver.begin_checkpoint(first + int(where * (self.driver.acked - 1 - first)))

    @precondition(lambda self: self.checkpoint_job is not None)
    @rule()
    def finish_checkpoint(self) -> None:
        assert self.checkpoint_job is not None
        self.driver.finish_checkpoint(self.checkpoint_job)
        self.checkpoint_job = None

    @rule(where=st.floats(0, 1))
    def trim(self, where: float) -> None:
        self.driver.trim(1 + int(where * self.driver.live.checkpoint.index))

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        if self.job is not None and crash:
            self.job.run()  # written, but the process ends before it says so
        self.job = self.checkpoint_job = None
        self.driver.crash() if crash else self.driver.kill()
        self.driver.open()

    # -- read --------------------------------------------------------------------------------------------------------

    @rule(where=st.floats(0, 1), bytes_max=st.sampled_from((1, 200, 500, 5000)))
    def read(self, where: float, bytes_max: int) -> None:
        log = self.driver.live
        batches = [entry for entry in self.stored if entry.record_count]
        offset = log.base_offset + int(where * (log.next_offset - log.base_offset))
        expected = [entry for entry in batches if entry.base_offset + entry.record_count > offset]
        chunk = log.read(offset, bytes_max)
        found = [Stored.of(header, payload) for _, header, payload in walk_frames(chunk)]
        found_batches = [entry for entry in found if entry.record_count]
        assert found_batches == expected[: len(found_batches)]
        assert bool(found) == bool(expected)
        assert len(chunk) <= bytes_max or len(found) == 1
        if found:
            assert found[0].record_count and found[-1].record_count

    @rule(where=st.floats(0, 1))
    def scan(self, where: float) -> None:
        log = self.driver.live
        index = log.first_index + int(where * (log.next_index - log.first_index))
        found = [Stored.of(header, payload) for _, header, payload in log.scan(index)]
        assert found == [entry for entry in self.stored if entry.index >= index]

    @rule(timestamp=st.integers(-1, 510))
    def find_timestamp(self, timestamp: int) -> None:
        expected = [entry.index for entry in self.stored if entry.record_count and entry.timestamp_max >= timestamp]
        found = self.driver.live.find_timestamp(timestamp, self.driver.acked)
        assert (found and found.index) == (expected[0] if expected else None)

    @invariant()
    def ends_agree(self) -> None:
        log, entries = self.driver.live, self.driver.entries
        assert log.next_index == len(entries) + 1
        assert log.synced_index == self.driver.acked
        assert log.next_offset == sum(entry.record_count for entry in entries)
        assert log.last_term == (entries[-1].term if entries else 0)
        if entries[log.first_index - 1 :]:
            assert log.base_offset == entries[log.first_index - 1].base_offset


LogMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_log_behaves_as_a_list = LogMachine.TestCase
