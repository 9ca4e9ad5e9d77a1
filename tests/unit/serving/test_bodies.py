# SPDX-License-Identifier: Apache-2.0
"""Requests that are too much are refused before anything of them is decoded; the others are decoded
in slices.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.errors import DataError, Overloaded
from hotbed.serving.protocol import bodies, rest
from hotbed.serving.protocol.bodies import SLICE, Bounds, Readers
from hotbed.serving.protocol.inputs import Candidates, ModelInputs
from hotbed.serving.protocol.rest import RequestReader
from hotbed.serving.protocol.tensors import Tensor
from hotbed.serving.server.endpoints import grpc as grpc_server
from hotbed.serving.server.endpoints.grpc import MESSAGES, SERVICE
from hotbed.serving.server.options import ServerLimits
from hotbed.serving.server.scoring.batching import DecodedRequest, QueuedRequest

from .conftest import Running

N = 20_000
SCHEMA = hb.Schema([hb.Id("user"), hb.Id("item")])
USER = {"name": "user", "datatype": "INT64", "shape": [1], "data": [7]}


class Decoded(AssertionError):
    """Values of a request that should have been refused were decoded."""


@pytest.fixture
def nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise Decoded

    monkeypatch.setattr(bodies.JsonValues, "slices", fail)
    monkeypatch.setattr(grpc_server.TypedValues, "slices", fail)
    monkeypatch.setattr(Tensor, "column", fail)


def item(**changes: Any) -> bytes:
    tensor = {"name": "item", "datatype": "INT64", "shape": [2], "data": [1, 2], **changes}
    return json.dumps({"inputs": [USER, tensor]}).encode()


def binary(shape: list[int], size: int) -> tuple[bytes, str]:
    spec = {
        "name": "item",
        "datatype": "INT64",
        "shape": shape,
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [USER, spec]}).encode()
    return head + bytes(size), str(len(head))


# Body, length of its head, and why it is refused.
REFUSED = {
    "candidates": (item(shape=[N], data=[1] * N), None, "too many candidates"),
    "nested": (item(shape=[N], data=[[1]] * N), None, "too many candidates"),
    "strings": (item(shape=[N], datatype="BYTES", data=["a"] * N), None, "too many candidates"),
    "list": (item(shape=[2, N], data=[1] * 2 * N), None, "at most 1024 values for each candidate"),
    "uncounted": (item(data=[1] * N), None, "shape \\[2\\] needs 2 values, got 20000"),
    "empty lists": (item(shape=[2, 1], data=[[]] * N), None, "needs 2 values"),
    "inputs": (json.dumps({"inputs": [USER] * N}).encode(), None, "at most 2, the columns"),
    "names": (
        json.dumps({"inputs": [USER | {"name": f"m{i}"} for i in range(N)]}).encode(),
        None,
        "at most 2",
    ),
    "unknown": (
        json.dumps({"inputs": [USER, USER | {"name": "m"}]}).encode(),
        None,
        "the model has no such input",
    ),
    "keys": (json.dumps({f"{i}": 1 for i in range(N)}).encode(), None, "beside the values"),
    "objects": (json.dumps({"zz": [{}] * N * 2}).encode(), None, "beside the values"),
    "dimensions": (item(shape=[1] * 60_000), None, "beside the values"),
    "digits": (
        item(shape=[0]).replace(b"[0]", b"[" + b"9" * 100_000 + b"]"),
        None,
        "beside the values",
    ),
    "id": (json.dumps({"id": "x" * 100_000, "inputs": []}).encode(), None, "beside the values"),
    "binary": (*binary([N], 8 * N), "too many candidates"),
    "binary list": (*binary([2, N], 16 * N), "at most 1024 values"),
    "binary size": (*binary([2], 8 * N), "expected 16 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("nothing_is_decoded")
def test_refused_json_is_never_decoded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, length, reason = REFUSED[case]
    decoded = list[int]()

    def read_json(text: bytes, *place: int) -> Any:
        decoded.append(len(text))
        return bodies.read_json(text, *place)

    monkeypatch.setattr(rest, "read_json", read_json)
    bounds = Bounds(inputs=2)
    with pytest.raises(DataError, match=reason):
        ModelInputs(SCHEMA).columns(RequestReader().read(body, length, bounds).tensors, bounds)
    assert sum(decoded) <= bounds.head_bytes
    assert sum(decoded) < 1000 or reason == "beside the values"


def message(shape: Sequence[int] = (2,), **contents: Any) -> Callable[[Any], None]:
    def fill(request: Any) -> None:
        tensor = request.inputs.add(name="price", datatype="FP32", shape=shape)
        for name, values in contents.items():
            getattr(tensor.contents, name).extend(values)

    return fill


def raw(size: int, shape: list[int]) -> Callable[[Any], None]:
    def fill(request: Any) -> None:
        request.inputs.add(name="price", datatype="FP32", shape=shape)
        request.raw_input_contents.append(bytes(size))

    return fill


def inputs(n: int) -> Callable[[Any], None]:
    return lambda request: request.inputs.extend([MESSAGES["InferInputTensor"]()] * n)


TOO_MUCH = [
    (inputs(N), "at most 4, the columns"),
    (message(shape=[1] * 80_000), "beside the values"),
    (message(fp32_contents=[1] * N), "needs 2 values"),
    (message(int64_contents=[1] * N), "needs 2 values"),
    (message(bytes_contents=[b""] * N), "needs 2 values"),
    (message(shape=[N], fp32_contents=[1] * N), "too many candidates"),
    (message(shape=[2, N], fp32_contents=[1] * N), "at most 1024 values"),
    (raw(4 * N, [2]), "expected 8 bytes"),
    (raw(1 << 20, [1 << 18]), "at most 1048576 bytes"),
    (lambda request: request.raw_input_contents.extend([b""] * N), "at most 4"),
]


@pytest.fixture(scope="module")
def lenient(exported: Any) -> Iterator[Running]:
    """A server that does not ask for all columns of its model: a request needs no more than one."""
    found = Running(exported)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.models.named("m").current.inputs, "names", [])
        yield found
    found.close()


@pytest.mark.parametrize("number", range(len(TOO_MUCH)))
@pytest.mark.usefixtures("nothing_is_decoded")
def test_refused_messages_are_never_decoded(
    lenient: Running, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, reason = TOO_MUCH[number]
    request = MESSAGES["ModelInferRequest"](model_name="m")
    fill(request)
    data = request.SerializeToString()
    with (
        grpc.insecure_channel(f"127.0.0.1:{lenient.server.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(data, timeout=20)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in refused.value.details()


def test_long_calls_other_than_for_predictions_are_refused(running: Running) -> None:
    load = MESSAGES["RepositoryModelLoadRequest"](model_name="m" * 70_000).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}") as channel:
        remote = channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")
        with pytest.raises(grpc.RpcError, match="at most 65536 bytes"):
            remote(load, timeout=20)
    connection = HTTPConnection(running.http, timeout=20)
    connection.request("POST", "/v2/repository/index", b" " * 70_000)
    assert connection.getresponse().status == 413
    connection.close()


def test_body_limit_follows_from_the_model() -> None:
    assert ServerLimits().bounds(2).body_bytes == 1 << 20
    assert ServerLimits().bounds(100).body_bytes == 4096 * 100 * 32
    assert ServerLimits(batch_rows=100_000).bounds(2).body_bytes == 6_400_000
    assert ServerLimits(body_bytes=5).bounds(100).body_bytes == 5


LONG = 3 * SLICE + 5
COLUMNS = {
    "numbers": ("INT64", [LONG], list(range(LONG))),
    "pairs": ("INT64", [LONG, 2], [[i, -i] for i in range(LONG)]),
    "flat pairs": ("INT64", [LONG, 2], list(range(2 * LONG))),
    "texts": ("BYTES", [LONG], [f'"],[{i}\\' for i in range(LONG)]),
    "floats": ("FP32", [LONG], [i / 8 for i in range(LONG)]),
    "first missing": ("INT64", [LONG], [None] * (LONG - 1) + [2**62 + 1]),
    "last missing": ("BYTES", [LONG], ["a"] + [None] * (LONG - 1)),
    "all missing": ("INT64", [LONG], [None] * LONG),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_values_decoded_in_slices_are_those_of_the_request(case: str) -> None:
    datatype, shape, data = COLUMNS[case]
    tensors = [USER, {"name": "item", "datatype": datatype, "shape": shape, "data": data}]
    bounds = Bounds(inputs=2, rows=LONG)
    for separators in ((",", ":"), (" ,\n", " :\t")):
        body = json.dumps({"inputs": tensors}, separators=separators).encode()
        num_rows, columns, _ = ModelInputs(SCHEMA).columns(
            RequestReader().read(body, None, bounds).tensors, bounds
        )
        expected = data if case != "flat pairs" else np.reshape(data, (-1, 2)).tolist()
        assert num_rows == LONG
        assert columns["item"].to_pylist() == expected


def test_values_decoded_in_slices_of_a_message_are_those_of_the_request() -> None:
    request = MESSAGES["ModelInferRequest"](model_name="m")
    for name, datatype, field, values in [
        ("user", "INT64", "int64_contents", list(range(LONG))),
        ("item", "BYTES", "bytes_contents", [b"%d" % i for i in range(LONG)]),
    ]:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[LONG])
        getattr(tensor.contents, field).extend(values)
    data = request.SerializeToString()
    bounds = Bounds(inputs=2, rows=LONG)
    divided = bodies.divide_message(data, bounds)
    head = MESSAGES["ModelInferRequest"].FromString(divided.head)
    _, columns, _ = ModelInputs(SCHEMA).columns(
        list(grpc_server.input_tensors(head, data, divided)), bounds
    )
    assert columns["user"].to_pylist() == list(range(LONG))
    assert columns["item"].to_pylist() == [f"{i}" for i in range(LONG)]


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[{"name":"user","datatype":"INT64","shape":[1],"data":[1],"data":[2]}]}',
        b'{"inputs":[{"name":"user","datatype":"INT64","shape":[1],"d\\u0061ta":[1]}]}',
        b'{"inp\\u0075ts":[{"name":"user","datatype":"INT64","shape":[1],"data":0}]}',
    ],
)
def test_values_that_are_hidden_in_json_are_refused(body: bytes) -> None:
    with pytest.raises(DataError, match="expected `data` once"):
        RequestReader().read(body, None, Bounds())


def test_long_requests_are_answered_as_short_ones(exported: Any, session: Any) -> None:
    running = Running(exported, ServerLimits(batch_rows=8000))
    rng = np.random.default_rng(0)
    columns = {"user": rng.integers(0, 60, 8000), "item": ["i5"] * 8000, "genres": ["g1|g2"] * 8000}
    columns["price"] = rng.random(8000).astype(np.float32)
    kinds = {"user": "INT64", "item": "BYTES", "genres": "BYTES", "price": "FP32"}
    tensors = [
        {
            "name": name,
            "datatype": kinds[name],
            "shape": [8000],
            "data": np.asarray(values).tolist(),
        }
        for name, values in columns.items()
    ]
    connection = HTTPConnection(running.http, timeout=20)
    connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": tensors}))
    found = json.loads(connection.getresponse().read())["outputs"][0]["data"]
    connection.close()
    assert np.abs(np.array(found) - session.predict(columns)).max() < 1e-6
    running.close()


def test_long_requests_that_wait_are_bounded() -> None:
    readers = Readers()
    readers._waiting = bodies._WAITING
    assert asyncio.run(readers.read(10, lambda: 7)) == 7
    with pytest.raises(Overloaded, match="too many long requests"):
        asyncio.run(readers.read(1 << 20, lambda: 7))


def test_only_few_values_are_scored_on_the_loop() -> None:
    async def is_small(columns: dict[str, Any], context: dict[str, Any]) -> bool:
        candidates = Candidates(2, columns, context)
        return QueuedRequest(DecodedRequest(candidates, lambda scores: None)).is_small

    few = pa.array([[1], [2]], pa.large_list(pa.int64()))
    many = pa.array([[1] * 100_000], pa.large_list(pa.int64()))
    assert asyncio.run(is_small({"user": np.zeros(2), "item": few}, {}))
    assert not asyncio.run(is_small({"user": np.zeros(2)}, {"item": many}))


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the lengths of nested lists, from the outside in; None if they differ."""
    if not isinstance(value, list):
        return ()
    shapes = {shape_of(inner) for inner in value}
    if None in shapes or len(shapes) > 1:
        return None
    return (len(value), *(shapes.pop() if shapes else ()))


def decoded(tensor: Tensor) -> Any:
    """Return the column of a tensor, as a server reads it."""
    tensor.check(Bounds())
    return tensor.column()


NUMBERS = st.integers(-3, 9) | st.just(2**63 - 1)
NESTED = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=4), max_leaves=12)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=2)


@given(shape=SHAPES, data=st.lists(NESTED, max_size=8), as_shape=st.booleans())
@example(shape=[2, 2], data=[[1], [2, 3, 4]], as_shape=False)
@example(shape=[3, 2], data=[[1, 3, 5], [2, 4, 6]], as_shape=False)
@example(shape=[3, 1], data=[[1, 2], [3]], as_shape=False)
@example(shape=[3], data=[[[[1, 2, 3]]]], as_shape=False)
@example(shape=[3, 0], data=[[], []], as_shape=False)
def test_nested_json_has_the_shape_that_it_says(
    shape: list[int], data: list[Any], as_shape: bool
) -> None:
    """Flat values, or the nesting that the shape says; everything else is refused."""
    if as_shape:
        data = np.arange(int(np.prod(shape))).reshape(shape).tolist()
    text = item(shape=shape, data=data)
    tensor = RequestReader().read(text, None, Bounds()).tensors[1]
    is_flat = not any(isinstance(value, list) for value in data)
    found = shape_of(data)
    fits = found in (tuple(shape), (*shape, 1)) and (len(shape) == 1 or found == tuple(shape))
    if is_flat:
        fits = len(data) == np.prod(shape)
    if not fits:
        with pytest.raises(DataError):
            decoded(tensor)
        return
    flat = np.array(data, dtype=object).reshape(-1).tolist()
    column = decoded(tensor)
    rows = column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
    width = shape[1] if len(shape) == 2 else 1
    if width == 1:
        assert rows == flat
    else:
        assert rows == [flat[start * width : (start + 1) * width] for start in range(shape[0])]


def test_values_of_a_long_tensor_are_flat_or_nested_throughout() -> None:
    flat = list(range(SLICE))
    mixed = [*flat, *[[1, 2]] * SLICE]
    body = item(shape=[len(flat) // 2 + SLICE, 2], data=mixed)
    tensor = RequestReader().read(body, None, Bounds()).tensors[1]
    with pytest.raises(DataError, match="flat values, or lists nested as the shape"):
        tensor.column()


@pytest.mark.parametrize(
    ("datatype", "data", "wanted"),
    [
        ("FP64", [10**19, 1, None, 2.5], [1e19, 1.0, None, 2.5]),
        ("FP32", [2**53 + 1, 16_777_217], [float(2**53), 16_777_216.0]),
        ("FP32", [10**400], None),
        ("FP32", [True, 1.0], None),
        ("FP64", ["1"], None),
        ("INT64", [1, True], None),
        ("UINT8", [False], None),
        ("BOOL", [True, False, None], [True, False, None]),
        ("BOOL", [1], None),
        ("BYTES", ["true", "false"], ["true", "false"]),
        ("BYTES", [True], None),
    ],
)
def test_json_numbers_are_those_of_their_datatype(
    datatype: str, data: list[Any], wanted: list[Any] | None
) -> None:
    body = item(datatype=datatype, shape=[len(data)], data=data)
    tensor = RequestReader().read(body, None, Bounds()).tensors[1]
    if wanted is None:
        with pytest.raises(DataError, match="item"):
            tensor.column()
    else:
        assert tensor.column().to_pylist() == wanted


def test_errors_in_values_name_their_place_in_the_body() -> None:
    body = item(datatype="BYTES", shape=[1], data=["x"]).replace(b'"x"', b'"\\ud83d"')
    tensor = RequestReader().read(body, None, Bounds()).tensors[1]
    with pytest.raises(DataError, match=rf"begin at byte {body.index(b'[' + bytes([34, 92]))}"):
        tensor.column()
