# SPDX-License-Identifier: Apache-2.0
"""Requests whose head came before are read as if it had not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed.errors import DataError
from hotbed.serving.protocol.bodies import Bounds
from hotbed.serving.protocol.inputs import JsonTensors, ModelInputs, PackedTensors
from hotbed.serving.protocol.rest import RequestReader
from hotbed.serving.server.endpoints.grpc import MESSAGES, InferCall, InferenceService

SCHEMA = hb.Schema([hb.Id("user"), hb.Id("item"), hb.Dense("price"), hb.Dense("age")])
BOUNDS = Bounds(rows=100)
NAMES = {"<i8": "INT64", "<f4": "FP32", "|u1": "UINT8", "<i4": "INT32"}


def request(columns: dict[str, Any], **more: Any) -> tuple[bytes, str]:
    """A body with binary tensors, and the length of its head."""
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    inputs = [
        {
            "name": name,
            "datatype": NAMES[values.dtype.str],
            "shape": list(values.shape),
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in arrays.items()
    ]
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + b"".join(values.tobytes() for values in arrays.values()), str(len(head))


def columns(seed: int, n: int = 5) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "user": draw.integers(0, 9, 1),
        "item": draw.integers(0, 9, n),
        "price": draw.random(n, np.float32),
        "age": draw.integers(0, 99, n).astype(np.uint8),
    }


def told(asks: RequestReader, inputs: ModelInputs, body: bytes, length: str) -> Any:
    n, found, context = inputs.columns(asks.read(body, length, BOUNDS).tensors, BOUNDS)
    return n, *(
        {name: values.tolist() for name, values in part.items()} for part in (found, context)
    )


@pytest.mark.parametrize(
    "order", [["user", "item", "price", "age"], ["age", "price", "user", "item"]]
)
def test_data_is_that_of_the_request_after_any_other_requests(order: list[str]) -> None:
    asks, inputs = RequestReader(), ModelInputs(SCHEMA)
    for seed in range(5):
        given = {name: columns(seed)[name] for name in order}
        n, found, context = told(asks, inputs, *request(given))
        assert n == 5
        assert found == {name: given[name].tolist() for name in ("item", "price", "age")}
        assert context == {"user": given["user"].tolist()}
    assert isinstance(asks.read(*request(given), BOUNDS).tensors, PackedTensors)


def test_numbers_lie_where_numbers_may_lie_and_are_not_copied() -> None:
    asks, inputs = RequestReader(), ModelInputs(SCHEMA)
    for order in (["user", "item", "price", "age"], ["age", "price", "user", "item"]):
        for seed in range(3):
            _, found, context = inputs.columns(
                asks.read(*request({o: columns(seed)[o] for o in order}), BOUNDS).tensors, BOUNDS
            )
            assert all(values.flags.aligned for values in (*found.values(), *context.values()))
    _, found, _ = inputs.columns(asks.read(*request(columns(0)), BOUNDS).tensors, BOUNDS)
    _, found, _ = inputs.columns(asks.read(*request(columns(0)), BOUNDS).tensors, BOUNDS)
    assert not any(values.flags.owndata for values in found.values())


def test_a_known_head_with_other_data_is_refused_as_at_first() -> None:
    asks, inputs = RequestReader(), ModelInputs(SCHEMA)
    body, length = request(columns(0))
    assert told(asks, inputs, body, length)[0] == 5
    for wrong in (body[:-1], body + b"x", body[: int(length)]):
        for reader in (asks, RequestReader()):
            with pytest.raises(DataError, match=r"binary_data_size"):
                reader.read(wrong, length, BOUNDS)


def test_a_head_that_one_model_knows_is_checked_for_another() -> None:
    asks, inputs = RequestReader(), ModelInputs(SCHEMA)
    for _ in range(2):
        told(asks, inputs, *request(columns(0)))
    other = ModelInputs(hb.Schema([hb.Id("user"), hb.Id("item"), hb.Dense("price")]))
    with pytest.raises(DataError, match="'age': the model has no such input"):
        told(asks, other, *request(columns(0)))
    with pytest.raises(DataError, match="too many candidates"):
        inputs.columns(RequestReader().read(*request(columns(0, 101)), BOUNDS).tensors, BOUNDS)


def test_heads_are_bounded_in_number_and_those_with_an_id_are_not_kept() -> None:
    asks, inputs = RequestReader(), ModelInputs(SCHEMA)
    for n in range(1, 200):
        told(asks, inputs, *request(columns(0, n % 90 + 2)))
        told(asks, inputs, *request(columns(0), id=str(n)))
    assert len(asks._heads._heads) <= 64
    assert len(inputs._layouts) <= 64  # what no head needs is let go
    assert asks.read(*request(columns(0), id="7"), BOUNDS).id == "7"


VALUES = [
    "[1,2,3]",
    "[ 1, -2 ,3 ]",
    "[1.0,2.5,3e2]",
    "[-0,0,-0.0]",
    "[1,null,3]",
    "[null,null,null]",
    "[true,2,3]",
    "[NaN,1,2]",
    "[1e300,1,2]",
    "[1e400,1,2]",
    "[9223372036854775807,1,2]",
    "[9223372036854775808,1,2]",
    "[18446744073709551616,1,2]",
    "[0.1,16777217,9007199254740993]",
    '["1","2","3"]',
    '["a,b",2]',
    "[[1],[2],[3]]",
    "[[1,2,3]]",
    "[1,2]",
    "[1,2,3,4]",
    "[1,2,]",
    "[01,2,3]",
    "[]",
    "[[],1,2]",
    '{"1":2,"3":4,"5":6}',
    "7",
    '"1,2"',
    "null",
    "[" + "1," * 4999 + "1]",
]


def json_request(datatype: str, values: str, length: int = 3) -> bytes:
    item = {"name": "item", "datatype": "INT64", "shape": [length], "data": [5] * length}
    price = {"name": "price", "datatype": datatype, "shape": [length], "data": "?"}
    return json.dumps({"inputs": [item, price]}).replace('"?"', values).encode()


def outcome(asks: RequestReader, inputs: ModelInputs, body: bytes) -> Any:
    """The columns as they are encoded, or the error."""
    bounds = Bounds(rows=5000)
    try:
        n, columns, context = inputs.columns(asks.read(body, None, bounds).tensors, bounds)
    except DataError as error:
        return str(error)
    parts = []
    for part in (columns, context):
        for name, values in part.items():
            array = pa.array(values)
            parts.append((name, str(array.type), repr(array.to_pylist())))  # of NaN and -0.0, too
    return n, parts


@pytest.mark.parametrize("datatype", ["INT64", "FP32", "FP64", "INT32", "UINT64", "BOOL", "BYTES"])
def test_json_behind_a_known_head_is_read_as_at_first(datatype: str) -> None:
    inputs = ModelInputs(hb.Schema([hb.Id("item"), hb.Dense("price")]))
    for length in (3, 5000):
        asks = RequestReader()
        valid = "[" + ",".join(["1"] * length) + "]"
        for _ in range(2):
            outcome(asks, inputs, json_request(datatype, valid, length))
        for values in VALUES:
            body = json_request(datatype, values, length)
            fresh = ModelInputs(hb.Schema([hb.Id("item"), hb.Dense("price")]))
            expected = outcome(RequestReader(), fresh, body)
            assert outcome(asks, inputs, body) == expected, values
    known = asks.read(json_request(datatype, valid, length), None, Bounds(rows=5000))
    assert isinstance(known.tensors, JsonTensors)


def test_a_json_head_that_one_model_knows_is_checked_for_another() -> None:
    asks, inputs = RequestReader(), ModelInputs(hb.Schema([hb.Id("item"), hb.Dense("price")]))
    body = json_request("FP32", "[1,2,3]")
    for _ in range(2):
        assert outcome(asks, inputs, body)[0] == 3
    assert "'price': the model has no such input" in outcome(
        asks, ModelInputs(hb.Schema([hb.Id("item")])), body
    )


def message(values: dict[str, Any], **fields: Any) -> Any:
    """A ModelInferRequest with raw contents."""
    infer = MESSAGES["ModelInferRequest"](model_name="m", **fields)
    for name, array in values.items():
        infer.inputs.add(name=name, datatype=NAMES[array.dtype.str], shape=array.shape)
        infer.raw_input_contents.append(array.tobytes())
    return infer


def grpc_service() -> InferenceService:
    models: Any = SimpleNamespace(bounds=BOUNDS)
    return InferenceService(models)


def decode(service: InferenceService, infer: Any) -> tuple[InferCall, Any]:
    """A request as the service reads it, and its candidates as lists."""
    call = service._read(infer.SerializeToString())
    tensors = call.packed or service._tensors(call)
    n, columns, context = ModelInputs(SCHEMA).columns(tensors, BOUNDS)
    parts = [{name: each.tolist() for name, each in part.items()} for part in (columns, context)]
    return call, (n, parts)


def test_a_grpc_head_that_came_before_is_read_as_at_first() -> None:
    service = grpc_service()
    for seed in range(4):
        call, candidates = decode(service, message(columns(seed)))
        assert candidates == decode(grpc_service(), message(columns(seed)))[1]
        assert (call.packed is not None) == (seed > 0)
    call, _ = decode(service, message(columns(0), id="7"))
    assert (call.packed, call.head.id) == (None, "7")
    decode(service, message(columns(0), id="7"))
    assert decode(service, message(columns(0), id="7"))[0].packed is None


def test_a_known_grpc_head_with_other_contents_is_refused_as_at_first() -> None:
    service = grpc_service()
    for _ in range(2):
        decode(service, message(columns(0)))
    whole = message(columns(0))
    moved = message(columns(0))  # as many bytes in all
    moved.raw_input_contents[1] += whole.raw_input_contents[2][:4]
    moved.raw_input_contents[2] = whole.raw_input_contents[2][4:]
    fewer = message(columns(0))
    fewer.raw_input_contents.pop()
    both = message(columns(0))
    both.inputs[0].contents.int64_contents.append(7)
    for wrong in (moved, fewer, both):
        errors = []
        for reader in (service, grpc_service()):
            with pytest.raises(DataError) as error:
                decode(reader, wrong)
            errors.append(str(error.value))
        assert errors[0] == errors[1]
