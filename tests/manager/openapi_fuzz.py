"""Requests that schemathesis makes from /openapi.json: what it promises is kept, what it forbids is refused.

Most right requests, and the right parts of wrong ones, are aimed at what is there: names by chance meet nothing but
404. What v1 forbids must be refused, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi import checks

from quiver.manager.v1_routes import PRODUCE_HEADERS
from tests.manager.kit import Api
from tests.manager.v1_kit import V1, log_of

TOPIC: Final = "fuzz"
GROUP: Final = "readers"
NEW_TOPICS: Final = ("fuzz-new-1", "fuzz-new-2")
TIMEOUT_S: Final = 30
# How thousands of partitions are made, and how somebody waits, are tests of their own.
PARTITIONS_MAX: Final = 3
WAIT_MS_MAX: Final = 5
TOPIC_SETTINGS: Final = ({}, {"retention.ms": 86_400_000}, {"cleanup": "consumed", "require.consumers": False})
RECORD: Final = {"value": "v", "key": "k", "headers": {"h": "x"}}
FORM: Final = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
# Refused here for good: it is the only broker, and brokers join by themselves.
NEVER: Final = {"DELETE /v1/brokers/{broker}", "DELETE /brokers/{broker_id}", "POST /brokers"}


class OpenApiFuzz:
    """`cases` of each operation, and what came of them."""

    def __init__(self, http: str, cases: int, number: int, numbers: dict[str, int], spare: int) -> None:
        """`spare`: a consumer that may be forgotten."""
        self._http = http
        self._cases = cases
        self._number = number
        self._numbers = numbers
        self._spare = spare
        self._session = requests.Session()
        schema = schemathesis.openapi.from_url(f"{http}/openapi.json")
        self.operations = [found.ok() for found in schema.get_all_operations()]
        self.statuses: Counter[int] = Counter()
        self.successes: Counter[str] = Counter()
        self.not_made: list[str] = []

    def right_requests(self, operation: Any) -> None:
        self._run(operation, GenerationMode.POSITIVE, FORM)

    def wrong_requests(self, operation: Any) -> None:
        # The classic contract understands numbers that are written as text, and ignores what it does not know.
        is_strict = operation.path.startswith("/v1/")
        wanted = (*FORM, checks.negative_data_rejection) if is_strict else FORM
        try:
            self._run(operation, GenerationMode.NEGATIVE, wanted)
        except Unsatisfiable:  # it gives up where almost any value of a path is right
            self.not_made.append(operation.label)

    def _run(self, operation: Any, mode: GenerationMode, wanted: Sequence[Any]) -> None:
        @seed(self._number)
        @settings(
            max_examples=self._cases,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def each(data: st.DataObject) -> None:
            case = data.draw(operation.as_strategy(mode))
            self._aim(case, data)
            answer = case.call(base_url=self._http, session=self._session, timeout=TIMEOUT_S)
            self.statuses[answer.status_code] += 1
            if answer.status_code < 300:
                self.successes[operation.label] += 1
            case.validate_response(answer, checks=list(wanted))

        each()

    def _aim(self, case: Case, data: st.DataObject) -> None:
        assert case.meta is not None
        wrong = {where for where, part in case.meta.components.items() if part.mode.is_negative}
        at_it = data.draw(st.integers(0, 3)) > 0
        if at_it and len(wrong) > 1:
            wrong.discard(ParameterLocation.PATH)  # else it is a 404, whatever is wrong with the rest
        changes = case.method in ("PATCH", "DELETE")
        makes = case.path in ("/topics", "/v1/topics") or case.path.endswith("/register")
        parts = {
            ParameterLocation.PATH: case.path_parameters,
            ParameterLocation.QUERY: case.query,
            ParameterLocation.BODY: case.body,
        }
        if at_it and ParameterLocation.HEADER not in wrong:
            for name in PRODUCE_HEADERS:
                case.headers.pop(name, None)
        for where, fields in parts.items():
            if where in wrong or not isinstance(fields, dict):
                continue
            if changes or makes:
                self._put(fields, data, st.sampled_from(NEW_TOPICS), "topic", "topic_name", "name")
            elif at_it:
                self._put(fields, data, st.just(TOPIC), "topic", "topic_name", "name")
            if at_it:
                self._put(fields, data, st.integers(0, 1), "partition", "partition_id")
                for name, number in self._numbers.items():
                    self._put(fields, data, st.just(number), name)
                self._put(fields, data, st.integers(0, 1), "offset")
                fields.pop("expected", None)
                if "records" in fields:
                    fields["records"] = [RECORD] * len(fields["records"])
                self._put(fields, data, st.just(GROUP), "group")
            self._put(fields, data, st.just(self._spare), "consumer")
            self._put(fields, data, st.integers(1, PARTITIONS_MAX), "partitions")
            self._put(fields, data, st.integers(0, WAIT_MS_MAX), "wait_ms")
            self._put(fields, data, st.sampled_from(TOPIC_SETTINGS), "settings")

    @staticmethod
    def _put(fields: dict[str, Any], data: st.DataObject, values: st.SearchStrategy[Any], *names: str) -> None:
        for name in names:
            if fields.get(name) is not None:
                fields[name] = data.draw(values)


def fuzz_openapi(http: str, cases: int, number: int) -> None:
    """`cases` right and as many wrong requests of each operation."""
    with Api(http) as api, V1(http) as v1:
        api.create(TOPIC, 2)
        numbers = {"producer_id": api.producer(TOPIC), "consumer_id": api.consumer(TOPIC)}
        v1.produce(TOPIC, ["a", "b"])
        place = f"/v1/groups/{GROUP}/topics/{TOPIC}/partitions/0/position"
        assert v1.json("PUT", place, {"offset": 1}).status == 200
        fuzz = OpenApiFuzz(http, cases, number, numbers, api.consumer(TOPIC))
        for operation in fuzz.operations:
            fuzz.right_requests(operation)
        missed = {operation.label for operation in fuzz.operations} - fuzz.successes.keys()
        assert missed <= NEVER, missed
        for operation in fuzz.operations:
            if not (operation.path_parameters or operation.query or operation.headers or operation.body):
                continue  # it takes nothing that could be wrong
            before = log_of(v1)
            fuzz.wrong_requests(operation)
            if operation.path.startswith("/v1/"):
                assert log_of(v1) == before, operation.label
    assert len(fuzz.not_made) <= 2, fuzz.not_made
    assert {200, 201, 202, 204, 400, 404, 409} <= fuzz.statuses.keys(), fuzz.statuses
