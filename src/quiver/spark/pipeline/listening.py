"""Hears how far the streaming queries of a Connect session are, in a thread of its own.

Rule: Spark's own listeners are not used. The client of 4.3 holds a lock while it takes one off and waits for the last
events, which need that lock: where one comes in that moment, it hangs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyspark.sql.connect.proto as pb2
from pyspark.errors import PySparkException

logger = logging.getLogger("quiver.spark")

_LOST: Final = (PySparkException, ValueError)  # the latter by a channel that was closed meanwhile

OnProgress = Callable[[str, Mapping[str, Any]], None]


class Listening:
    """Progress of queries that have a name goes to `hear`: the name, and Spark's StreamingQueryProgress as JSON."""

    def __init__(self, client: Any, hear: OnProgress) -> None:
        self._client = client
        self._hear = hear
        self._running: set[str] = set()  # queries that told of progress and not of their end
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def on(self) -> Iterator[Listening]:
        answers = self._client.execute_command_as_iterator(_command(add=True))
        for answer in answers:
            if answer["streaming_query_listener_events_result"].HasField("listener_bus_listener_added"):
                break
        thread = threading.Thread(target=self._run, args=(answers,), name="quiver listening", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            try:
                self._client.execute_command(_command(add=False))
                thread.join()
            except _LOST as error:
                logger.warning("pipeline_progress_not_left error=%r", str(error))  # it ends with the session

    def wait(self, timeout_s: float) -> bool:
        """True once all queries that told of progress have told their end, which is the last that they tell."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _run(self, answers: Iterator[Mapping[str, Any]]) -> None:
        try:
            for answer in answers:
                for event in answer["streaming_query_listener_events_result"].events:
                    self._take(event.event_type, json.loads(event.event_json))
        except _LOST as error:
            logger.warning("pipeline_progress_lost error=%r", str(error))  # the run itself does not depend on it

    def _take(self, kind: int, told: Mapping[str, Any]) -> None:
        if kind == pb2.QUERY_PROGRESS_EVENT and (name := told["progress"]["name"]) is not None:
            with self._changed:
                self._running.add(told["progress"]["runId"])
            self._hear(name, told["progress"])
        elif kind == pb2.QUERY_TERMINATED_EVENT:
            with self._changed:
                self._running.discard(told["runId"])
                self._changed.notify_all()


def _command(*, add: bool) -> pb2.Command:
    command = pb2.Command()
    if add:
        command.streaming_query_listener_bus_command.add_listener_bus_listener = True
    else:
        command.streaming_query_listener_bus_command.remove_listener_bus_listener = True
    return command
