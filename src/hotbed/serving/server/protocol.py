# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol: its tensors, as columns; its requests and answers, as JSON and binary tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic_core import from_json

from hotbed.config import nearest
from hotbed.data.schema import Dense, Id, Schema
from hotbed.data.transforms import Extract, Hash, Map, Split
from hotbed.errors import DataError

if TYPE_CHECKING:
    from hotbed.serving.session import Scores

# Tensor type -> NumPy dtype of its binary form, little-endian.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"), "UINT8": np.dtype("u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"), "INT8": np.dtype("i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
EXTENSIONS = ["binary_tensor_data", "model_repository"]
_MOST = 1 << 30  # values along a dimension
HEADER_LENGTH = "Inference-Header-Content-Length"
_compact = json.JSONEncoder(separators=(",", ":")).encode
_HEADS, _HEAD_BYTES = 64, 16 << 10  # heads of requests that are remembered


def about() -> dict[str, Any]:
    """What the protocol tells of the server."""
    from hotbed import __version__

    return {"name": "hotbed", "version": __version__, "extensions": EXTENSIONS}


# Tensor type -> the Arrow type of its values where they come in a list.
_KINDS = {name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items()}
_KINDS |= {"FP16": pa.float32(), "BYTES": pa.string()}
# Those whose binary form is a column as it lies.
_PLAIN = {name: dtype for name, dtype in DTYPES.items() if name not in ("BOOL", "FP16")}
Column: TypeAlias = NDArray[Any] | pa.Array
"""Values of n candidates: NumPy for plain numbers, Arrow for strings, lists, and where some are missing."""


@dataclass(slots=True)
class Tensor:
    """One input of a request. `data`: binary (bytes-like), or values in a list, flat or nested as `shape` says."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any

    def column(self) -> Column:
        """Column [n] of a tensor [n] or [n, 1]; of lists for [n, k], empty ones for [n, 0].

        Numbers in binary are not copied.

        Raises DataError for what does not fit.
        """
        shape, plain = self.shape, _PLAIN.get(self.datatype)
        if (
            plain is not None
            and len(shape) == 1
            and isinstance(self.data, bytes)
            and len(self.data) == shape[0] * plain.itemsize
        ):
            return np.frombuffer(self.data, plain)  # the common case, kept short
        num_rows, width = (*shape, 1) if len(shape) == 1 else shape if len(shape) == 2 else (-1, 1)
        if not (0 <= num_rows <= _MOST and 0 <= width <= _MOST):
            what = f"received shape {str(shape)[:60]} — give [n], [n, 1] or [n, k]"
            raise DataError(f"input {self.name!r}: no column — {what}")
        size = num_rows * width
        flat = self._values(size)
        if len(flat) != size:
            what = f"shape {shape} needs {size} values — received {len(flat)}"
            raise DataError(f"input {self.name!r}: {what} — correct one")
        if not size:  # no values, so of any type: clients name one for them at random
            flat = pa.nulls(0)
        if width == 1:
            return flat
        return pa.LargeListArray.from_arrays(pa.array(np.arange(num_rows + 1) * width), pa.array(flat))

    def _values(self, size: int) -> Column:
        data = self.data
        if not isinstance(data, bytes | memoryview):
            return self._made(_flat(data), self._known(_KINDS))
        if self.datatype == "BYTES":
            return self._made(_texts(self.name, data), pa.string())
        dtype = self._known(DTYPES)
        if len(data) != size * dtype.itemsize:
            raise DataError(f"input {self.name!r}: {size} values of {self.datatype} are {size * dtype.itemsize} bytes — "
                            f"received {len(data)} — correct the shape")  # fmt: skip
        found = np.frombuffer(data, dtype)
        if dtype == np.bool_:
            return np.not_equal(found.view(np.uint8), 0)
        if dtype == np.float16:
            return found.astype(np.float32)
        return found if found.flags.aligned else found.copy()

    def _known(self, kinds: Mapping[str, Any]) -> Any:
        found = kinds.get(self.datatype)
        if found is None:
            raise DataError(f"input {self.name!r}: unknown datatype — received {self.datatype!r} — "
                            f"use BYTES or one of {', '.join(DTYPES)}")  # fmt: skip
        return found

    def _made(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        if pa.types.is_integer(kind) and float in set(map(type, values)):  # Arrow would cut fractions
            fraction = next(value for value in values if type(value) is float)
            raise DataError(
                f"input {self.name!r}: expected whole numbers for {self.datatype}, got {fraction!r}. "
                "Send ids as integers."
            )
        try:
            return pa.array(values, kind) if any(one is not None for one in values) else pa.nulls(len(values))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"input {self.name!r}: values that are no {self.datatype} — {str(error).splitlines()[0][:200]} — "
                            "correct them") from error  # fmt: skip


def _flat(values: Any) -> list[Any]:
    while isinstance(values, list) and values and isinstance(values[0], list):
        if not all(isinstance(one, list) for one in values):
            raise DataError("data: lists of uneven depth — received numbers beside lists — nest it as the shape says")
        values = [value for one in values for value in one]
    if not isinstance(values, list):
        raise DataError(f"data: no list — received {type(values).__name__} — give the values of the tensor in a list")
    return values


def _texts(name: str, data: bytes | memoryview) -> list[str]:
    """Strings, each behind its length in 4 bytes."""
    found, at, raw = [], 0, bytes(data)
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw):
            raise DataError(f"input {name!r}: a string goes on after the end — received {len(raw)} bytes — write 4 bytes of "
                            "length before each")  # fmt: skip
        found.append(text_of(name, raw[at + 4 : end]))
        at = end
    return found


def text_of(name: str, value: bytes) -> str:
    """UTF-8 as text; DataError for other bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"input {name!r}: a string that is no UTF-8 — received {value[:20]!r} — encode it") from error


class Block(NamedTuple):
    """Binary tensors of plain numbers that lie one after the other, all [n] of one type."""

    names: list[str]
    dtype: np.dtype[Any]
    n: int
    start: int

    def read(self, data: bytes) -> Iterable[tuple[str, Column]]:
        """Name and column of each, without a copy."""
        values = np.frombuffer(data, self.dtype, len(self.names) * self.n, self.start)
        return zip(self.names, values.reshape(len(self.names), self.n), strict=True)


@dataclass(frozen=True, eq=False)
class Head:
    """What an infer request says of its tensors, which all follow in binary; clients send the same one again and again.

    `sizes`: bytes of each tensor. `blocks`: where they lie, if all are plain numbers [n] that lie where numbers may lie.
    """

    tensors: Sequence[tuple[str, str, Sequence[int]]]
    sizes: Sequence[int]
    wanted: Mapping[str, bool] | None
    binary: bool

    @cached_property
    def blocks(self) -> Sequence[Block] | None:
        found, start = list[Block](), 0
        for (name, datatype, shape), size in zip(self.tensors, self.sizes, strict=True):
            dtype = _PLAIN.get(datatype)
            if dtype is None or len(shape) != 1 or start % dtype.itemsize:
                return None
            if found and (found[-1].dtype, found[-1].n) == (dtype, shape[0]):
                found[-1].names.append(name)
            else:
                found.append(Block([name], dtype, shape[0], start))
            start += size
        return found


@dataclass(frozen=True)
class Packed:
    """Binary tensors, one after the other, as `head` says."""

    head: Head
    data: bytes

    def tensors(self) -> list[Tensor]:
        """Each alone."""
        ends = list(accumulate(self.head.sizes))
        parts = [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [Tensor(*one, part) for one, part in zip(self.head.tensors, parts, strict=True)]


Given: TypeAlias = tuple[int, dict[str, Column], dict[str, Column]]
"""How many candidates, n; their columns; and, where n > 1, the context: tensors [1] that hold for each of them."""


class Inputs:
    """The tensors that a model takes: one for each raw column of its schema that serving reads."""

    def __init__(self, schema: Schema) -> None:
        self.names = schema.raw_columns(labels=False)
        self._allowed = {*self.names, *([] if schema.time is None else [schema.time.source])}
        self._schema = schema
        self._known = WeakKeyDictionary[Head, tuple[int, Sequence[Block]]]()

    def metadata(self) -> list[dict[str, Any]]:
        """Name, datatype and shape of each: BYTES or INT64 as the column was in training, FP32 for what is a number only.

        Of models that do not tell what their columns held, BYTES where a transform is for text.
        """
        dense = {column.source: column for column in self._schema.dense}
        held = dict.fromkeys(
            (one.source for one in self._schema.columns if isinstance(one, Dense | Id) and _of_text(one)), "text"
        )
        held.update(self._schema.types)
        numbers = set(dense) - self._read_as_ids()
        found = []
        for name in self.names:
            width = dense[name].width if name in dense else 1
            number = name in numbers or held.get(name) == "number"
            kind = "BYTES" if held.get(name) == "text" else "FP32" if number else "INT64"
            found.append({"name": name, "datatype": kind, "shape": [-1, width] if width > 1 else [-1]})
        return found

    def _read_as_ids(self) -> set[str]:
        """Raw columns whose integers must stay such: those of ids, and those that a Cross combines."""
        columns = [one for one in self._schema.columns if isinstance(one, Dense | Id)]
        crossed = {name for one in columns for step in one.transforms for name in step.inputs()}
        return crossed | {one.source for one in self._schema.ids}

    def columns(self, given: Sequence[Tensor] | Packed, max_rows: int) -> Given:
        """Raises DataError for tensors that are unknown, missing, given twice, too long or of different lengths."""
        if not isinstance(given, Packed):
            return self._columns(given, max_rows)
        known = self._known.get(given.head)
        if known is None:
            found = self._columns(given.tensors(), max_rows)
            if given.head.blocks is not None:
                self._known[given.head] = found[0], given.head.blocks
            return found
        num_rows, columns, context = known[0], dict[str, Column](), dict[str, Column]()
        for block in known[1]:
            (columns if block.n == num_rows else context).update(block.read(given.data))
        return num_rows, columns, context

    def _columns(self, tensors: Sequence[Tensor], max_rows: int) -> Given:
        found: dict[str, Column] = {}
        for tensor in tensors:
            if tensor.name not in self._allowed:
                name = tensor.name[:100]
                raise DataError(f"input {name!r}: the model has none — {nearest(name, self.names)}")
            found[tensor.name] = tensor.column()
        if len(found) < len(tensors):
            raise DataError(f"inputs: one is given twice — received {[one.name for one in tensors]} — give it once")
        missing = [name for name in self.names if name not in found]
        if missing:
            raise DataError(f"inputs are missing — received {sorted(found)} — add {missing}")
        lengths = {len(column) for column in found.values()}
        if len(lengths - {1}) > 1:
            raise DataError(f"inputs differ in length — received {sorted(lengths)} — give each n, or 1 for all")
        num_rows = max(lengths - {1}, default=1)
        if num_rows > max_rows:
            raise DataError(f"too many candidates — received {num_rows} — give at most {max_rows} in a request")
        columns = {name: column for name, column in found.items() if len(column) == num_rows}
        return num_rows, columns, {name: column for name, column in found.items() if name not in columns}


def _of_text(column: Dense | Id) -> bool:
    return bool(column.transforms) and isinstance(column.transforms[0], Split | Extract | Map | Hash)


@dataclass(frozen=True)
class Ask:
    """An infer request. `wanted`: outputs by name, and whether each goes back as a binary tensor; None = all outputs."""

    id: str
    tensors: Sequence[Tensor] | Packed
    wanted: Mapping[str, bool] | None
    binary: bool = False


class Asks:
    """Reads infer requests, and remembers heads that come again."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def read(self, body: bytes, header_length: str | None) -> Ask:
        """An infer request from the body of a POST; with a header length, binary tensors follow the JSON. Raises DataError."""
        if header_length is None:
            return _read(body, b"")[0]
        if not (len(header_length) <= 20 and header_length.isdecimal() and int(header_length) <= len(body)):
            raise DataError(f"{HEADER_LENGTH}: no length of a header — received {header_length[:40]!r} with a body of "
                            f"{len(body)} bytes — give the length of the JSON before the tensors")  # fmt: skip
        text, data = body[: int(header_length)], body[int(header_length) :]
        head = self._heads.get(text)
        if head is not None and len(data) == sum(head.sizes):
            return Ask("", Packed(head, data), head.wanted, head.binary)
        ask, head = _read(text, data)
        if head is not None and not ask.id and len(text) <= _HEAD_BYTES:
            if len(self._heads) >= _HEADS:
                del self._heads[next(iter(self._heads))]
            self._heads[text] = head
        return ask


def _read(text: bytes, data: bytes) -> tuple[Ask, Head | None]:
    """An infer request, and its head where all tensors are binary."""
    spec, rest, tensors, sizes = read_object(text), memoryview(data), list[Tensor](), list[int]()
    for one in _a(spec.get("inputs"), list, "inputs"):
        one = _a(one, dict, "inputs")
        parameters, values = one.get("parameters"), one.get("data")
        if parameters is not None and (size := _a(parameters, dict, "parameters").get("binary_data_size")) is not None:
            if type(size) is not int or not 0 <= size <= len(rest):
                raise DataError(f"binary_data_size: not in the body — received {str(size)[:60]}, {len(rest)} bytes are left — "
                                "correct it")  # fmt: skip
            values, rest = rest[:size], rest[size:]
            sizes.append(size)
        name, datatype = _a(one.get("name"), str, "name"), _a(one.get("datatype"), str, "datatype")
        shape = _a(one.get("shape"), list, "shape")
        if not all(type(length) is int for length in shape):
            raise DataError(f"input {name[:100]!r}: no column — received shape {str(shape)[:60]} — give whole numbers")
        tensors.append(Tensor(name, datatype, shape, values))
    if len(rest):
        raise DataError(f"bytes after the last tensor — received {len(rest)} — correct each binary_data_size")
    binary = bool(_a(spec.get("parameters", {}), dict, "parameters").get("binary_data_output", False))
    outputs = [_a(one, dict, "outputs") for one in _a(spec.get("outputs", []), list, "outputs")]
    wanted = {_a(one.get("name"), str, "name"): _wants_binary(one, binary) for one in outputs} or None
    ask, head = Ask(_a(spec.get("id", ""), str, "id"), tensors, wanted, binary), None
    if len(sizes) == len(tensors):
        head = Head([(one.name, one.datatype, one.shape) for one in tensors], sizes, wanted, binary)
    return ask, head


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises DataError for anything else."""
    try:
        found = from_json(body)
    except ValueError as error:
        raise DataError(f"the body is no JSON — {error} — send what the protocol asks for") from error
    return dict(_a(found, dict, "the body"))


def _wants_binary(output: Mapping[str, Any], default: bool) -> bool:
    return bool(_a(output.get("parameters", {}), dict, "parameters").get("binary_data", default))


def _a(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        what = f"no {kind.__name__} — received {type(value).__name__}"
        raise DataError(f"{name}: {what} — see the Open Inference Protocol")
    return value


def choose(
    outputs: Mapping[str, NDArray[np.float32]], wanted: Sequence[str] | None
) -> Mapping[str, NDArray[np.float32]]:
    """The outputs that were asked for. Raises DataError for unknown ones."""
    unknown = [name for name in wanted or () if name not in outputs]
    if unknown:
        raise DataError(f"output {unknown[0][:100]!r}: the model has none — {nearest(unknown[0][:100], list(outputs))}")
    return outputs if wanted is None else {name: outputs[name] for name in wanted}


def write_answer(ask: Ask, model: str, scores: Scores) -> tuple[bytes, int | None]:
    """The body of the answer and, where binary tensors follow the JSON, the length of the JSON."""
    described, tail = [], []
    for name, values in choose(scores.outputs, None if ask.wanted is None else list(ask.wanted)).items():
        one: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values)]}
        if ask.binary if ask.wanted is None else ask.wanted[name]:
            tail.append(np.ascontiguousarray(values, "<f4").tobytes())
            one["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            one["data"] = [value if math.isfinite(value) else None for value in values.tolist()]
        described.append(one)
    spec: dict[str, Any] = {"model_name": model, "model_version": str(scores.version), "outputs": described}
    if scores.late:
        spec["parameters"] = {"late_rows": scores.late}
    if ask.id:
        spec["id"] = ask.id
    head = _compact(spec).encode()
    return b"".join([head, *tail]), len(head) if tail else None
