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
_HEADS = 64  # heads of requests that are remembered
_HEAD_BYTES = 16 << 10  # of each


@dataclass(frozen=True)
class Ask:
    """An infer request. `wanted`: outputs by name, and whether each goes back as a binary tensor;
    None = all outputs."""

    id: str
    tensors: Sequence[Tensor] | Packed
    wanted: Mapping[str, bool] | None
    binary: bool = False


class Asks:
    """Reads infer requests, and remembers heads that come again. Threads may share it."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._changing = threading.Lock()

    def known(self, body: bytes, header_length: str | None) -> Ask | None:
        """An infer request of numbers in binary whose head came before: nothing is decoded."""
        if header_length is None:
            return None
        text, data = _divided(body, header_length)
        head = self._heads.get(text)
        if head is None or head.blocks is None or len(data) != sum(head.sizes):
            return None
        return Ask("", Packed(head, data), head.wanted, head.binary)

    def read(self, body: bytes, header_length: str | None, bounds: Bounds) -> Ask:
        """An infer request from the body of a POST.

        With a header length, binary tensors follow the JSON. Values in JSON are not decoded yet.
        Raises DataError.
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
    """The JSON of a body, and the binary tensors behind it."""
    is_number = len(header_length) <= 20 and header_length.isdecimal()
    if not is_number or int(header_length) > len(body):
        raise DataError(
            f"{HEADER_LENGTH}: no length of a header — received {header_length[:40]!r} "
            f"with a body of {len(body)} bytes — give the length of the JSON before the tensors"
        )
    return body[: int(header_length)], body[int(header_length) :]


def _read(text: bytes, binary: bytes, bounds: Bounds) -> tuple[Ask, Head | None]:
    """An infer request, and its head where all tensors are binary."""
    divided = divide_json(text, bounds)
    spec = read_object(divided.head)
    parts = enumerate(divided.parts)
    rest = memoryview(binary)
    tensors = list[Tensor]()
    sizes = list[int]()
    for one in _a(spec.get("inputs"), list, "inputs"):
        one = _a(one, dict, "inputs")
        name = _a(one.get("name"), str, "name")
        tensor = Tensor(name, _a(one.get("datatype"), str, "datatype"), _shape(one), None)
        if "data" in one:
            number, part = next(parts, (-1, None))
            if part is None or one["data"] != number:
                raise DataError(
                    f"input {name[:100]!r}: expected `data` once, got it twice or with escapes. "
                    "Send the values once, under the plain key."
                )
            tensor.data = JsonValues(text, part)
        size = _binary_size(one, len(rest))
        if size is not None:
            tensor.data = rest[:size]
            rest = rest[size:]
            sizes.append(size)
        tensors.append(tensor)
    if len(rest):
        problem = f"bytes after the last tensor — received {len(rest)}"
        raise DataError(f"{problem} — correct each binary_data_size")
    parameters = _a(spec.get("parameters", {}), dict, "parameters")
    in_binary = _a(parameters.get("binary_data_output", False), bool, "binary_data_output")
    outputs = [_a(one, dict, "outputs") for one in _a(spec.get("outputs", []), list, "outputs")]
    wanted = {_a(one.get("name"), str, "name"): _wants_binary(one, in_binary) for one in outputs}
    ask = Ask(_a(spec.get("id", ""), str, "id"), tensors, wanted or None, in_binary)
    head = None
    if len(sizes) == len(tensors):
        described = [(one.name, one.datatype, one.shape) for one in tensors]
        head = Head(described, sizes, ask.wanted, in_binary)
    return ask, head


def _shape(spec: Mapping[str, Any]) -> list[int]:
    shape = _a(spec.get("shape"), list, "shape")
    if not all(type(length) is int for length in shape):
        problem = f"input {spec['name'][:100]!r}: no column — received shape {str(shape)[:60]}"
        raise DataError(f"{problem} — give whole numbers")
    return list(shape)


def _binary_size(spec: Mapping[str, Any], left: int) -> int | None:
    """How many of the `left` bytes are those of an input; None where it is not binary."""
    parameters = spec.get("parameters")
    if parameters is None:
        return None
    _a(parameters, dict, "parameters")
    check_tensor_parameters(f"input {spec['name'][:100]!r}", parameters)
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or not 0 <= size <= left):
        received = f"received {str(size)[:60]}, {left} bytes are left"
        raise DataError(f"binary_data_size: not in the body — {received} — correct it")
    return size


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises DataError for anything else."""
    return dict(_a(read_json(body), dict, "the body"))


def _wants_binary(output: Mapping[str, Any], default: bool) -> bool:
    parameters = _a(output.get("parameters", {}), dict, "parameters")
    check_tensor_parameters(f"output {output['name'][:100]!r}", parameters)
    binary: bool = _a(parameters.get("binary_data", default), bool, "binary_data")
    return binary


def _a(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        what = f"no {kind.__name__} — received {type(value).__name__}"
        raise DataError(f"{name}: {what} — see the Open Inference Protocol")
    return value
