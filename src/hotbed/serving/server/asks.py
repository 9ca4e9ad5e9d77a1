# SPDX-License-Identifier: Apache-2.0
"""Infer requests as clients send them over REST: JSON, and binary tensors behind it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotbed.errors import DataError
from hotbed.serving.server.bodies import Bounds, JsonValues, divide_json, read_json
from hotbed.serving.server.protocol import Head, Packed, Tensor, check_tensor_parameters

HEADER_LENGTH = "Inference-Header-Content-Length"
_HEADS = 64  # cached heads of requests
_HEAD_BYTES = 16 << 10  # the longest head that is cached
_JSON_TYPES = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}


@dataclass(frozen=True)
class Ask:
    """An infer request.

    `wanted`: the requested outputs by name, and whether each is returned as a binary tensor; None =
    all outputs. `binary`: whether outputs are binary by default.
    """

    id: str
    tensors: Sequence[Tensor] | Packed
    wanted: Mapping[str, bool] | None
    binary: bool = False


class Asks:
    """Reads infer requests, and caches the heads that clients repeat. Threads may share it."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._changing = threading.Lock()

    def known(self, body: bytes, header_length: str | None) -> Ask | None:
        """Return the request if it is binary numbers behind a cached head, else None.

        Nothing is decoded. Raises DataError for a wrong header length.
        """
        if header_length is None:
            return None
        text, data = _divided(body, header_length)
        head = self._heads.get(text)
        if head is None or head.blocks is None or len(data) != sum(head.sizes):
            return None
        return Ask("", Packed(head, data), head.wanted, head.binary)

    def read(self, body: bytes, header_length: str | None, bounds: Bounds) -> Ask:
        """Return the infer request in the body of a POST.

        With a header length, binary tensors follow the JSON. Values in JSON are not decoded yet.
        Raises DataError for a body that is not an infer request.
        """
        if header_length is None:
            return _read(body, b"", bounds)[0]
        text, data = _divided(body, header_length)
        head = self._heads.get(text)
        if head is not None and len(data) == sum(head.sizes):
            return Ask("", Packed(head, data), head.wanted, head.binary)
        ask, head = _read(text, data, bounds)
        if head is not None and not ask.id and len(text) <= _HEAD_BYTES:
            with self._changing:
                if len(self._heads) >= _HEADS:
                    del self._heads[next(iter(self._heads))]
                self._heads[text] = head
        return ask


def _divided(body: bytes, header_length: str) -> tuple[bytes, bytes]:
    """Return the JSON of a body, and the binary tensors behind it."""
    is_number = len(header_length) <= 20 and header_length.isdecimal()
    if not is_number or int(header_length) > len(body):
        raise DataError(
            f"{HEADER_LENGTH}: expected a number of at most {len(body)}, the bytes of the body, "
            f"got {header_length[:40]!r}. Send the length of the JSON before the tensors."
        )
    return body[: int(header_length)], body[int(header_length) :]


def _read(text: bytes, binary: bytes, bounds: Bounds) -> tuple[Ask, Head | None]:
    """Return an infer request, and its head if all tensors are binary."""
    divided = divide_json(text, bounds)
    spec = read_object(divided.head)
    parts = enumerate(divided.parts)
    rest = memoryview(binary)
    tensors = list[Tensor]()
    sizes = list[int]()
    for entry in _a(spec.get("inputs"), list, "inputs"):
        entry = _a(entry, dict, "inputs")
        name = _a(entry.get("name"), str, "name")
        tensor = Tensor(name, _a(entry.get("datatype"), str, "datatype"), _shape(entry), None)
        if "data" in entry:
            number, part = next(parts, (-1, None))
            if part is None or entry["data"] != number:
                raise DataError(
                    f"input {name[:100]!r}: expected `data` once, got it twice or with escapes. "
                    "Send the values once, under the plain key."
                )
            tensor.data = JsonValues(text, part)
        size = _binary_size(entry, len(rest))
        if size is not None:
            tensor.data = rest[:size]
            rest = rest[size:]
            sizes.append(size)
        tensors.append(tensor)
    if len(rest):
        raise DataError(
            f"the body: expected no bytes after the last tensor, got {len(rest)}. "
            "Correct each binary_data_size."
        )
    parameters = _a(spec.get("parameters", {}), dict, "parameters")
    in_binary = _a(parameters.get("binary_data_output", False), bool, "binary_data_output")
    outputs = _a(spec.get("outputs", []), list, "outputs")
    outputs = [_a(output, dict, "outputs") for output in outputs]
    wanted = {
        _a(output.get("name"), str, "name"): _wants_binary(output, in_binary) for output in outputs
    }
    ask = Ask(_a(spec.get("id", ""), str, "id"), tensors, wanted or None, in_binary)
    head = None
    if len(sizes) == len(tensors):
        described = [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
        head = Head(described, sizes, ask.wanted, in_binary)
    return ask, head


def _shape(spec: Mapping[str, Any]) -> list[int]:
    shape = _a(spec.get("shape"), list, "shape")
    if not all(type(length) is int for length in shape):
        raise DataError(
            f"input {spec['name'][:100]!r}: expected a shape of whole numbers, got "
            f"{str(shape)[:60]}. Send [n], [n, 1] or [n, k]."
        )
    return list(shape)


def _binary_size(spec: Mapping[str, Any], left: int) -> int | None:
    """Return the bytes of an input, of the `left` bytes; None if the input is not binary."""
    parameters = spec.get("parameters")
    if parameters is None:
        return None
    _a(parameters, dict, "parameters")
    check_tensor_parameters(f"input {spec['name'][:100]!r}", parameters)
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or not 0 <= size <= left):
        raise DataError(
            f"binary_data_size: expected at most {left}, the bytes that are left, got "
            f"{str(size)[:60]}. Send the size of the tensor in bytes."
        )
    return size


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises DataError for anything else."""
    return dict(_a(read_json(body), dict, "the body"))


def _wants_binary(output: Mapping[str, Any], default: bool) -> bool:
    parameters = _a(output.get("parameters", {}), dict, "parameters")
    check_tensor_parameters(f"output {output['name'][:100]!r}", parameters)
    binary: bool = _a(parameters.get("binary_data", default), bool, "binary_data")
    return binary


def _a(value: Any, kind: type, name: str) -> Any:
    """Return `value`. Raises DataError if it is not a `kind`."""
    if not isinstance(value, kind):
        raise DataError(
            f"{name}: expected {_JSON_TYPES[kind]}, got {type(value).__name__}. "
            "Send what the Open Inference Protocol specifies."
        )
    return value
