# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over REST, asked by its stock client, by ours, and by hand."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import ConfigError, DataError, NotServed, Overloaded, ServingError
from hotbed.serving.server.options import ServerLimits

from .conftest import Running, draw

pytestmark = [
    # wrong requests, and each is asked of one server
    pytest.mark.filterwarnings("ignore:table .* is fed both"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),  # the stock client leaves sockets open
]
KINDS = {"user": "INT64", "item": "BYTES", "genres": "BYTES", "price": "FP32"}


def tensors(columns: dict[str, Any], binary: bool = True) -> list[Any]:
    found = []
    for name, values in columns.items():
        array = np.array(values, object) if KINDS[name] == "BYTES" else np.asarray(values)
        found.append(triton.InferInput(name, list(array.shape), KINDS[name]))
        found[-1].set_data_from_numpy(array, binary_data=binary)
    return found


def ask(
    where: str, method: str, path: str, body: Any = None, headers: Any = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(where, timeout=60)
    data = json.dumps(body) if isinstance(body, dict) else body
    connection.request(method, path, data, headers or {})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def body(n: int = 3, **changes: Any) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": KINDS[name], "shape": [n], "data": np.asarray(values).tolist()}
        for name, values in draw(n, 5).items()
    ]
    return {"inputs": inputs, **changes}


def user(datatype: str, shape: list[int], data: list[Any], name: str = "user") -> dict[str, Any]:
    return body(
        inputs=[
            *body()["inputs"][1:],
            {"name": name, "datatype": datatype, "shape": shape, "data": data},
        ]
    )


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(running.http) as found:
        yield found


@pytest.mark.parametrize("binary", [False, True])
def test_the_stock_client_gets_the_scores_of_the_session(
    client: Any, session: Any, binary: bool
) -> None:
    columns = draw(50, 7)
    wanted = [triton.InferRequestedOutput("prediction", binary_data=binary)]
    found = client.infer("m", tensors(columns, binary), request_id="7", outputs=wanted)
    assert np.abs(found.as_numpy("prediction") - session.predict(columns)).max() < 1e-6
    assert found.get_response()["id"] == "7"
    assert found.get_response()["model_version"] == str(session.model.version)


def test_health_metadata_and_repository_are_answered(client: Any, session: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", str(session.model.version))
    assert not client.is_model_ready("n")
    assert client.get_server_metadata()["extensions"] == [
        "binary_tensor_data",
        "model_repository",
        "model_configuration",
        "statistics",
    ]
    told = client.get_model_metadata("m")
    assert {one["name"]: one["datatype"] for one in told["inputs"]} == KINDS
    assert told["outputs"] == [{"name": "prediction", "datatype": "FP32", "shape": [-1]}]
    (entry,) = client.get_model_repository_index()
    assert (entry["name"], entry["state"], entry["reason"]) == ("m", "READY", "")


def test_a_model_is_unloaded_and_loaded_while_the_server_runs(exported: Any) -> None:
    running = Running(exported, grpc_port=None)
    with triton.InferenceServerClient(running.http) as client:
        client.unload_model("m")
        assert not client.is_server_ready()
        assert not client.is_model_ready("m")
        with pytest.raises(InferenceServerException, match="not loaded"):
            client.infer("m", tensors(draw(3, 1)))
        assert client.get_model_repository_index()[0]["state"] == "UNAVAILABLE"
        client.load_model("m")
        assert client.is_server_ready()
        assert client.infer("m", tensors(draw(3, 1))).as_numpy("prediction").shape == (3,)
        with pytest.raises(InferenceServerException, match="unknown"):
            client.load_model("etc")
    running.close()


def test_our_client_gets_the_scores_of_the_session(running: Running, session: Any) -> None:
    with hb.Client(f"http://{running.http}") as client:
        told_by(client, session, draw(40, 3))
    with pytest.raises(ConfigError, match=r"Client\.url.*got 'ftp://localhost'"):
        hb.Client("ftp://me:secret@localhost")  # no error shows a password
    with pytest.raises(ServingError, match=r"^127\.0\.0\.1:1: the server does not answer"):
        hb.Client("http://me:secret@127.0.0.1:1").models()


def told_by(client: hb.Client, session: Any, columns: dict[str, Any]) -> None:
    assert np.abs(client.predict("m", columns) - session.predict(columns)).max() < 1e-6
    rest = {name: values for name, values in columns.items() if name != "user"}
    found = client.ask("m", rest, context={"user": 7})
    assert found.version == session.model.version
    assert np.abs(found.outputs["prediction"] - session.predict(rest, {"user": 7})).max() < 1e-6
    assert client.models()[0]["state"] == "READY"
    with pytest.raises(NotServed, match="unknown"):
        client.predict("n", columns)
    with pytest.raises(DataError, match="inputs are missing"):
        client.predict("m", rest)
    with pytest.raises(DataError, match="a tensor cannot hold"):
        client.predict("m", {**columns, "user": [{"id": 1}] * 40})


@pytest.mark.parametrize(
    "request_body, headers, status, reason",
    [
        (b"{", {}, 400, "not JSON"),
        (b"[]", {}, 400, "the body: expected an object"),
        ({}, {}, 400, "inputs: expected a list"),
        (b"[" * 10_000, {}, 400, "not JSON"),
        (b"[" * 100_000, {}, 400, "beside the values of its tensors"),
        (body(inputs=[]), {}, 400, "inputs are missing"),
        (user("INT64", [3], [1, 2, 3], "usr"), {}, 400, "Did you mean 'user'"),
        (
            body(inputs=[*body()["inputs"], body()["inputs"][0]]),
            {},
            400,
            "Send each column of the model once",
        ),
        (
            body(inputs=[*body()["inputs"][1:], body()["inputs"][1]]),
            {},
            400,
            "expected once, got it twice",
        ),
        (user("INT64", [4], [1, 2, 3]), {}, 400, "needs 4 values"),
        (user("INT64", [3], [1, "x", 3]), {}, 400, "values are not INT64"),
        (user("INT64", [0, 2**70], []), {}, 400, "expected a shape"),
        (user("INT64", [10**4000], [1]), {}, 400, "expected a shape"),
        (user("INT64", [3], [10**4000, 1, 2]), {}, 400, "values are not INT64"),
        (user("INT65", [3], [1, 2, 3]), {}, 400, "expected a datatype"),
        (user("INT64", [-1], []), {}, 400, "expected a shape"),
        (user("FP32", [3], [1, 2, 3]), {}, 400, "expected integers or strings"),
        (body(outputs=[{"name": "predicton"}]), {}, 400, "Did you mean 'prediction'"),
        (body(5000), {}, 400, "too many candidates"),
        (body(), {"Content-Encoding": "gzip"}, 415, "Send the body as it is"),
        (body(), {"Content-Encoding": "identity, GZIP"}, 415, "Send the body as it is"),
        (
            body(),
            {"Inference-Header-Content-Length": "9999999"},
            400,
            "Content-Length: expected a number",
        ),
        (b" " * 2_000_000, {}, 413, "too long"),
    ],
)
def test_a_wrong_request_is_refused_with_a_reason(
    exported: Any, small: Running, request_body: Any, headers: Any, status: int, reason: str
) -> None:
    found, _, data = ask(small.http, "POST", "/v2/models/m/infer", request_body, headers)
    assert found == status, data
    assert reason in json.loads(data)["error"]


@pytest.fixture(scope="module")
def small(exported: Any) -> Iterator[Running]:
    found = Running(exported, ServerLimits(body_bytes=1_000_000), grpc_port=None)
    yield found
    found.close()


def test_a_body_without_a_length_is_bounded_too(small: Running) -> None:
    connection = http.client.HTTPConnection(small.http, timeout=60)
    connection.request(
        "POST",
        "/v2/models/m/infer",
        iter([b" " * 300_000] * 5),
        encode_chunked=True,
        headers={"Transfer-Encoding": "chunked"},
    )
    assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v2/models/n", 404),
        ("GET", "/v2/models/m/versions/77/ready", 404),
        ("POST", "/v2/models/n/infer", 404),
        ("GET", "/v2/models/m/infer", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/%2e%2e%2fetc/ready", 404),
        ("POST", "/v2/repository/models/n/load", 404),
    ],
)
def test_an_unknown_path_is_answered_with_its_status(
    running: Running, method: str, path: str, status: int
) -> None:
    found, _, data = ask(running.http, method, path)
    assert found == status
    assert json.loads(data)["error"]


@pytest.mark.parametrize("ready", ["x", 1, None, []])
def test_an_index_whose_ready_is_not_a_boolean_is_rejected(running: Running, ready: Any) -> None:
    status, answer = post(running, "/v2/repository/index", {"ready": ready})
    assert status == 400
    assert answer["error"].startswith("ready: expected a boolean, got ")


def test_an_index_may_name_the_ready_models_only(running: Running) -> None:
    for spec in ({}, {"ready": False}, {"ready": True}):
        status, answer = post(running, "/v2/repository/index", spec)
        assert status == 200
        assert [entry["name"] for entry in answer] == ["m"]


def post(running: Running, path: str, spec: Any) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    connection = http.client.HTTPConnection(running.http, timeout=20)
    connection.request("POST", path, json.dumps(spec))
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read())
    connection.close()
    return result


def test_missing_values_come_as_null(running: Running, session: Any) -> None:
    asked = body()
    asked["inputs"][0]["data"][1] = None
    columns = draw(3, 5)
    expected = session.predict(
        {**columns, "user": [int(columns["user"][0]), None, int(columns["user"][2])]}
    )
    found = json.loads(ask(running.http, "POST", "/v2/models/m/infer", asked)[2])["outputs"][0][
        "data"
    ]
    assert np.abs(np.array(found) - expected).max() < 1e-6


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
shapes = st.lists(st.integers(-2, 5) | st.just(2**70), max_size=3) | values
datatypes = st.sampled_from(["INT64", "BYTES", "FP32", "FP16", "BOOL", "UINT8", "INT7"]) | values
inputs = st.fixed_dictionaries(
    {"name": st.sampled_from(list(KINDS)) | values, "datatype": datatypes, "shape": shapes},
    optional={
        "data": values,
        "parameters": st.fixed_dictionaries(
            {}, optional={"binary_data_size": st.integers(-5, 50) | values}
        ),
    },
)
requests = st.fixed_dictionaries(
    {"inputs": st.lists(inputs, max_size=5) | values},
    optional={"outputs": values, "id": values, "parameters": values},
)


@settings(max_examples=100)
@given(asked=requests, at=st.integers(-1, 3), tail=st.binary(max_size=60), split=st.booleans())
def test_made_up_requests_get_a_reason_and_never_an_error_of_the_server(
    running: Running, asked: Any, at: int, tail: bytes, split: bool
) -> None:
    # one wrong input among right ones goes deeper
    if at >= 0 and isinstance(asked["inputs"], list):
        right = body()["inputs"]
        asked["inputs"] = [*right[:at], *asked["inputs"][:1], *right[at + 1 :]]
    head = json.dumps(asked).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if split else {}
    status, _, data = ask(running.http, "POST", "/v2/models/m/infer", head + tail, headers)
    assert status in (200, 400), (status, data)
    if status == 400:
        assert json.loads(data)["error"]


def test_too_many_waiting_requests_are_refused_not_queued(exported: Any) -> None:
    running = Running(exported, ServerLimits(queue_rows=4), grpc_port=None)
    model, client = running.models.named("m"), hb.Client(f"http://{running.http}")
    held = model.queue()._changed
    with held:  # nothing is taken from the queue meanwhile
        model.queue()._rows = 4
    with pytest.raises(Overloaded, match="Try again later"):
        client.predict("m", draw(3, 1))
    status, headers, _ = ask(running.http, "POST", "/v2/models/m/infer", body())
    assert (status, headers["retry-after"]) == (429, "1")
    with held:
        model.queue()._rows = 0
    assert client.predict("m", draw(3, 1)).shape == (3,)
    client.close()
    running.close()


def test_metrics_count_requests_versions_and_batches(running: Running) -> None:
    with hb.Client(f"http://{running.http}") as client:
        client.predict("m", draw(3, 1))
    ask(running.http, "POST", "/v2/models/nobody/infer", body())
    text = ask(running.http, "GET", "/metrics")[2].decode()
    assert 'hotbed_requests_total{model="m",outcome="ok",protocol="http"}' in text
    assert 'hotbed_requests_total{model="",outcome="NotServed",protocol="http"}' in text
    for name in (
        "request_seconds_bucket",
        "model_version",
        "model_ready",
        "batches_total",
        "waiting_rows",
        "model_age_seconds",
    ):
        assert f"hotbed_{name}{{" in text, name
