"""The OpenAPI document is true: what it allows is answered as it says, and nothing makes the server fail."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving_process import RuntimeProcess, clock_runtime

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory):
    with clock_runtime(tmp_path_factory.mktemp("documented"), "--served-model-name", "clock") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def api_schema(clock: RuntimeProcess) -> Any:
    return schemathesis.openapi.from_url(f"{clock.url}/openapi.json")


OPERATIONS = [
    ("/v1/completions", "post"),
    ("/v1/chat/completions", "post"),
    ("/v1/embeddings", "post"),
    ("/tokenize", "post"),
    ("/detokenize", "post"),
    ("/v1/models", "get"),
    ("/v1/models/{model}", "get"),
    ("/version", "get"),
    ("/health/live", "get"),
    ("/health/ready", "get"),
    ("/metrics", "get"),
]


def test_every_operation_is_tried(api_schema: Any) -> None:
    assert {(o.ok().path, o.ok().method) for o in api_schema.get_all_operations()} == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_documented(
    api_schema: Any, clock: RuntimeProcess, path: str, method: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and method == "get":
        return  # there is nothing to get wrong
    operation = api_schema[path][method]

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=clock.url, checks=CHECKS, timeout=60)

    call()


def test_the_server_is_unharmed_after_all_that(clock: RuntimeProcess) -> None:
    assert clock.complete(max_tokens=3).json()["choices"][0]["text"]
    assert clock.gauges()["running"] == 0
