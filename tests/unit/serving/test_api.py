# SPDX-License-Identifier: Apache-2.0
"""The REST API is what docs/openapi.json says, whatever it is asked: made-up requests by
schemathesis.

It is imported where its tests run, and makes its cases there: as a plugin of pytest it would do both
in each worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .conftest import Running
from .test_http import body

DOCUMENT = Path(__file__).parents[3] / "docs" / "openapi.json"
SETTINGS = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def specification() -> Any:
    from schemathesis import openapi

    return openapi.from_path(str(DOCUMENT))


@pytest.fixture(scope="module")
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
    ]


@pytest.fixture(scope="module")
def served(exported: Path) -> Iterator[Running]:
    found = Running(exported, grpc_port=None)
    yield found
    found.close()


def test_made_up_requests_are_answered_as_the_specification_says(
    served: Running, specification: Any, checks: list[Any]
) -> None:
    from schemathesis.pytest.lazy import get_all_tests

    def ask(case: Any) -> None:
        if "name" in case.path_parameters and len(str(case.path_parameters["name"])) % 2:
            case.path_parameters["name"] = "m"
        case.call_and_validate(base_url=f"http://{served.http}", checks=checks)

    tests = get_all_tests(schema=specification, test_func=ask, settings=SETTINGS, given_kwargs=None)
    operations = []
    for result in tests:
        operation, test = result.ok()
        test()
        operations.append(operation.label)
    assert len(operations) == sum(
        len(methods.keys() & {"get", "post"})
        for methods in specification.raw_schema["paths"].values()
    )


@pytest.mark.parametrize(
    "asked",
    [
        body(),
        body(id="7", outputs=[{"name": "prediction", "parameters": {"binary_data": False}}]),
        body(parameters={"binary_data_output": True}),
    ],
)
def test_right_requests_are_right_by_the_specification(
    running: Running, specification: Any, checks: list[Any], asked: Any
) -> None:
    infer = specification["/v2/models/{name}/infer"]["POST"]
    case = infer.Case(path_parameters={"name": "m"}, body=asked, media_type="application/json")
    response = case.call(base_url=f"http://{running.http}")
    assert response.status_code == 200
    case.validate_response(response, checks=checks)
