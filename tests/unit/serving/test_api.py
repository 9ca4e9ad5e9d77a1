# SPDX-License-Identifier: Apache-2.0
"""The REST API is what docs/openapi.json says, whatever it is asked: made-up requests by
schemathesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .conftest import Running
from .test_http import body

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_path(str(Path(__file__).parents[3] / "docs" / "openapi.json"))


@pytest.fixture(scope="module")
def served(exported: Path) -> Iterator[Running]:
    found = Running(exported, grpc_port=None)
    yield found
    found.close()


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_requests_are_answered_as_the_specification_says(
    case: Any, served: Running
) -> None:
    if "name" in case.path_parameters and len(str(case.path_parameters["name"])) % 2:
        case.path_parameters["name"] = "m"
    case.call_and_validate(base_url=f"http://{served.http}", checks=CHECKS)


@pytest.mark.parametrize(
    "asked",
    [
        body(),
        body(id="7", outputs=[{"name": "prediction", "parameters": {"binary_data": False}}]),
        body(parameters={"binary_data_output": True}),
    ],
)
def test_right_requests_are_right_by_the_specification(running: Running, asked: Any) -> None:
    infer = schema["/v2/models/{name}/infer"]["POST"]
    case = infer.Case(path_parameters={"name": "m"}, body=asked, media_type="application/json")
    response = case.call(base_url=f"http://{running.http}")
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)
