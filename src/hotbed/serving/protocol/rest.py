# SPDX-License-Identifier: Apache-2.0
"""Infer requests and answers over REST: JSON, and binary tensors behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from hotbed.errors import DataError
from hotbed.serving.protocol.bodies import (
    Bounds,
    DividedRequest,
    JsonValues,
    divide_json,
    read_json,
)
from hotbed.serving.protocol.inputs import (
    HeadCache,
    InputHead,
    JsonTensors,
    PackedTensors,
    RequestHead,
)
from hotbed.serving.protocol.offered import (
    answer_parameters,
    check_tensor_parameters,
    choose_outputs,
    times_parameter,
)
from hotbed.serving.protocol.tensors import Tensor

if TYPE_CHECKING:
    from hotbed.serving.session import Scores

HEADER_LENGTH = "Inference-Header-Content-Length"
_JSON_TYPES = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}


@dataclass(frozen=True)
class InferRequest:
    """An infer request, not decoded yet.

    Attributes:
        id: the client's name of the request, "" for none.
        tensors: the inputs.
        outputs: the requested outputs by name, and whether each is returned as a binary tensor;
            None = all outputs.
        binary: whether outputs are binary by default.
    """

    id: str
    tensors: Sequence[Tensor] | PackedTensors | JsonTensors
    outputs: Mapping[str, bool] | None
    binary: bool = False


class JsonHead(NamedTuple):
    """The JSON of a request without an id; `outputs` and `binary` as in `InferRequest`."""

    head: RequestHead
    outputs: Mapping[str, bool] | None
    binary: bool


class RequestReader:
    """Reads infer requests, and caches the heads that clients repeat. Threads may share it."""

    def __init__(self) -> None:
        self._heads = HeadCache[JsonHead]()  # before binary tensors
        self._json_heads = HeadCache[JsonHead]()  # without the values that were among them

    def decoded_bytes(self, body: bytes, header_length: str | None) -> int:
        """Return how many bytes `read` decodes: none of binary numbers behind a cached head.

        Raises DataError for a wrong header length.
        """
        if header_length is not None:
            length = _json_length(body, header_length)
            cached = self._heads.find(body[:length])
            num_tensor_bytes = len(body) - length
            if cached and cached.head.blocks and cached.head.num_bytes == num_tensor_bytes:
                return 0
        return len(body)

    def read(self, body: bytes, header_length: str | None, bounds: Bounds) -> InferRequest:
        """Return the infer request in the body of a POST.

        With a header length, binary tensors follow the JSON. Values in JSON are not decoded yet.
        Raises DataError for a body that is not an infer request.
        """
        if header_length is None:
            return self._read_json(body, bounds)
        length = _json_length(body, header_length)
        text = body[:length]
        data = body[length:]
        cached = self._heads.find(text)
        if cached is not None and len(data) == cached.head.num_bytes:
            tensors = PackedTensors(cached.head, data)
            return InferRequest("", tensors, cached.outputs, cached.binary)
        divided = divide_json(text, bounds)
        request, inputs, kinds = _read(divided, text, data)
        if not request.id and kinds == {memoryview}:
            self._heads.add(text, JsonHead(RequestHead(inputs), request.outputs, request.binary))
        return request

    def _read_json(self, body: bytes, bounds: Bounds) -> InferRequest:
        divided = divide_json(body, bounds)
        cached = self._json_heads.find(divided.head)
        if cached is not None and len(divided.spans) == len(cached.head.inputs):
            tensors = JsonTensors(cached.head, body, divided.spans)
            return InferRequest("", tensors, cached.outputs, cached.binary)
        request, inputs, kinds = _read(divided, body, b"")
        if not request.id and kinds == {JsonValues}:
            head = JsonHead(RequestHead(inputs), request.outputs, request.binary)
            self._json_heads.add(divided.head, head)
        return request


def _json_length(body: bytes, header_length: str) -> int:
    """Return the bytes of the JSON of a body, before the binary tensors."""
    is_number = len(header_length) <= 20 and header_length.isdecimal()
    if not is_number or int(header_length) > len(body):
        raise DataError(
            f"{HEADER_LENGTH}: expected a number of at most {len(body)}, the bytes of the body, "
            f"got {header_length[:40]!r}. Send the length of the JSON before the tensors."
        )
    return int(header_length)


def _read(
    divided: DividedRequest, text: bytes, binary: bytes
) -> tuple[InferRequest, list[InputHead], set[type]]:
    """Return an infer request, how its head describes each tensor, and the types of their data."""
    spec = read_object(divided.head)
    spans = enumerate(divided.spans)
    rest = memoryview(binary)
    tensors = list[Tensor]()
    inputs = list[InputHead]()
    for entry in _objects(spec.get("inputs"), "inputs"):
        name = check_type(entry.get("name"), str, "name")
        datatype = check_type(entry.get("datatype"), str, "datatype")
        parameters = _parameters(entry)
        where = f"input {name[:100]!r}"
        check_tensor_parameters(where, parameters)
        times = times_parameter(where, parameters.get("arrow_type"))
        tensor = Tensor(name, datatype, _shape(name, entry), None, times)
        tensor.is_base64 = parameters.get("content_type") == "base64"
        if "data" in entry:
            number, span = next(spans, (-1, None))
            if span is None or entry["data"] != number:
                raise DataError(
                    f"input {name[:100]!r}: expected `data` once, got it twice or with escapes. "
                    "Send the values once, under the plain key."
                )
            tensor.data = JsonValues(text, span)
        size = _binary_size(parameters, len(rest))
        if size is not None:
            tensor.data = rest[:size]
            rest = rest[size:]
        tensors.append(tensor)
        described = InputHead(name, datatype, tensor.shape, size or 0, times, tensor.is_base64)
        inputs.append(described)
    if len(rest):
        raise DataError(
            f"the body: expected no bytes after the last tensor, got {len(rest)}. "
            "Correct each binary_data_size."
        )
    parameters = check_type(spec.get("parameters", {}), dict, "parameters")
    in_binary = check_type(parameters.get("binary_data_output", False), bool, "binary_data_output")
    outputs = _requested_outputs(spec, in_binary)
    request_id: str = check_type(spec.get("id", ""), str, "id")
    request = InferRequest(request_id, tensors, outputs, in_binary)
    return request, inputs, {type(tensor.data) for tensor in tensors}


def _requested_outputs(spec: Mapping[str, Any], in_binary: bool) -> dict[str, bool] | None:
    """Return the requested outputs and whether each is binary; None = all outputs."""
    outputs = dict[str, bool]()
    for output in _objects(spec.get("outputs", []), "outputs"):
        name = check_type(output.get("name"), str, "name")
        parameters = check_type(output.get("parameters", {}), dict, "parameters")
        check_tensor_parameters(f"output {name[:100]!r}", parameters)
        outputs[name] = check_type(parameters.get("binary_data", in_binary), bool, "binary_data")
    return outputs or None


def _shape(name: str, entry: Mapping[str, Any]) -> list[int]:
    shape = check_type(entry.get("shape"), list, "shape")
    if not all(type(length) is int for length in shape):
        raise DataError(
            f"input {name[:100]!r}: expected a shape of whole numbers, got "
            f"{str(shape)[:60]}. Send [n], [n, 1] or [n, k]."
        )
    return list(shape)


def _parameters(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an input."""
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    return dict(check_type(parameters, dict, "parameters"))


def _binary_size(parameters: Mapping[str, Any], num_left: int) -> int | None:
    """Return the bytes of an input, of the `num_left` bytes; None if the input is not binary."""
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or not 0 <= size <= num_left:
        raise DataError(
            f"binary_data_size: expected at most {num_left}, the bytes that are left, got "
            f"{str(size)[:60]}. Send the size of the tensor in bytes."
        )
    return size


def check_type(value: Any, kind: type, name: str) -> Any:
    """Return `value`. Raises DataError if it is not a `kind`."""
    if not isinstance(value, kind):
        raise DataError(
            f"{name}: expected {_JSON_TYPES[kind]}, got {type(value).__name__}. "
            "Send what the Open Inference Protocol specifies."
        )
    return value


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises DataError for anything else."""
    return dict(check_type(read_json(body), dict, "the body"))


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return `value`. Raises DataError if it is not a list of objects."""
    return [check_type(entry, dict, name) for entry in check_type(value, list, name)]


def write_answer(request: InferRequest, model: str, scores: Scores) -> tuple[bytes, int | None]:
    """Return the body of the answer and, if binary tensors follow the JSON, the JSON's length."""
    is_binary = request.outputs
    if is_binary is None:
        is_binary = dict.fromkeys(scores.outputs, request.binary)
    described = []
    tail = []
    for name, values in choose_outputs(scores.outputs, list(is_binary)).items():
        output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if is_binary[name]:
            data = np.ascontiguousarray(values, "<f4").tobytes()
            output["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            output["data"] = values.reshape(-1).tolist()
        described.append(output)
    spec: dict[str, Any] = {
        "model_name": model,
        "model_version": str(scores.version),
        "outputs": described,
    }
    parameters = answer_parameters(scores)
    if parameters:
        spec["parameters"] = parameters
    if request.id:
        spec["id"] = request.id
    head = to_json(spec, inf_nan_mode="null")  # JSON has no infinity and no NaN
    if not tail:
        return head, None
    return b"".join([head, *tail]), len(head)
