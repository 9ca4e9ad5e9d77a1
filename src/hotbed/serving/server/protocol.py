# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol: tensors as columns, and answers as JSON and binary tensors."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import did_you_mean
from hotbed.data.schema import Dense, Id, Schema
from hotbed.data.transforms import Extract, Hash, Map, Split
from hotbed.errors import DataError
from hotbed.serving.server.bodies import Bounds, Undecoded

if TYPE_CHECKING:
    from hotbed.serving.server.asks import Ask
    from hotbed.serving.session import Scores

# Tensor type -> NumPy dtype of its binary form, little-endian.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
EXTENSIONS = ["binary_tensor_data", "model_repository", "model_configuration", "statistics"]
# parameters of tensors that would change an answer
_NOT_OFFERED = ("shared_memory_region", "classification")
_MOST = 1 << 30  # values along a dimension
_compact = json.JSONEncoder(separators=(",", ":")).encode


def about() -> dict[str, Any]:
    """Return the server metadata of the protocol."""
    from hotbed import __version__

    return {"name": "hotbed", "version": __version__, "extensions": EXTENSIONS}


# Tensor type -> the Arrow type of its values in a list.
_KINDS = {name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items()}
_KINDS |= {"FP16": pa.float32(), "BYTES": pa.string()}
_INTEGERS = {kind.id for kind in _KINDS.values() if pa.types.is_integer(kind)}
# The types whose binary form is already a column.
_PLAIN = {name: dtype for name, dtype in DTYPES.items() if name not in ("BOOL", "FP16")}
Column: TypeAlias = NDArray[Any] | pa.Array
"""Values of n candidates: NumPy for plain numbers, Arrow for strings, lists and missing values."""


@dataclass(slots=True)
class Tensor:
    """One input of a request.

    `data`: bytes-like for a binary tensor; otherwise a list of values, flat or nested as `shape`
    says, or `Undecoded` values.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any

    def column(self) -> Column:
        """Return the column [n] of a tensor [n] or [n, 1]; of lists for [n, k], empty for [n, 0].

        Binary numbers are not copied.

        Raises:
            DataError: The values do not match the datatype or the shape.
        """
        shape = self.shape
        plain = _PLAIN.get(self.datatype)
        if (
            plain is not None
            and len(shape) == 1
            and isinstance(self.data, bytes)
            and len(self.data) == shape[0] * plain.itemsize
        ):
            return np.frombuffer(self.data, plain)  # the common case, kept short
        num_rows, width = self.dimensions()
        size = num_rows * width
        flat = self._values(size)
        if len(flat) != size:
            raise self._miscounted(size, len(flat))
        if not size:  # no values: clients send any datatype then
            flat = pa.nulls(0)
        if width == 1:
            return flat
        return pa.LargeListArray.from_arrays(
            pa.array(np.arange(num_rows + 1) * width), pa.array(flat)
        )

    def dimensions(self) -> tuple[int, int]:
        """Return candidates, and values of each. Raises DataError for other shapes than [n, k]."""
        shape = self.shape
        num_rows = -1
        width = 1
        if len(shape) == 1:
            num_rows = shape[0]
        elif len(shape) == 2:
            num_rows, width = shape
        if not (0 <= num_rows <= _MOST and 0 <= width <= _MOST):
            raise DataError(
                f"input {self.name!r}: expected a shape [n], [n, 1] or [n, k], got "
                f"{str(shape)[:60]}. Send one value or one list for each candidate."
            )
        return num_rows, width

    def check(self, bounds: Bounds) -> int:
        """Check the shape and the number of values, and return the number of candidates.

        Nothing is decoded.

        Raises:
            DataError: The tensor has more than `bounds` allow, or its number of values does not
                match its shape.
        """
        num_rows, width = self.dimensions()
        if num_rows > bounds.rows:
            raise _too_many(num_rows, bounds)
        if width > bounds.list_length:
            raise DataError(
                f"input {self.name!r}: expected at most {bounds.list_length} values for each "
                f"candidate, got {width}. Send shorter lists, or raise list_length of the server."
            )
        size = num_rows * width
        data = self.data
        if isinstance(data, (bytes, memoryview)):
            self._check_binary(size)
        elif isinstance(data, Undecoded):
            empty_lists = 0 if width else num_rows  # `entries` may count each empty list
            if not size <= data.entries <= size + empty_lists:
                raise self._miscounted(size, data.entries)
        return num_rows

    def _check_binary(self, size: int) -> None:
        num_bytes = len(self.data)
        if self.datatype == "BYTES":
            if num_bytes < 4 * size:
                raise self._miscounted(size, num_bytes // 4)
            return
        expected = size * self._known(DTYPES).itemsize
        if num_bytes != expected:
            raise DataError(
                f"input {self.name!r}: expected {expected} bytes for {size} values of "
                f"{self.datatype}, got {num_bytes}. Correct the shape or the data."
            )

    def _miscounted(self, size: int, num_values: int) -> DataError:
        return DataError(
            f"input {self.name!r}: shape {list(self.shape)} needs {size} values, got {num_values}. "
            "Correct the shape or the data."
        )

    def _values(self, size: int) -> Column:
        data = self.data
        if isinstance(data, Undecoded):
            kind = self._known(_KINDS)
            parts = [self._decoded(_flat(values), kind) for values in data.slices()]
            return parts[0] if len(parts) == 1 else _joined(parts, kind)
        if not isinstance(data, bytes | memoryview):
            return self._made(_flat(data), self._known(_KINDS))
        if self.datatype == "BYTES":
            return self._made(_texts(self.name, data), pa.string())
        self._check_binary(size)
        dtype = self._known(DTYPES)
        values = np.frombuffer(data, dtype)
        if dtype == np.bool_:
            return np.not_equal(values.view(np.uint8), 0)
        if dtype == np.float16:
            return values.astype(np.float32)
        if not values.flags.aligned:
            return values.copy()
        return values

    def _decoded(self, values: list[Any], kind: pa.DataType) -> Column:
        if self.datatype == "INT64":
            numbers = _whole_numbers(values)
            if numbers is not None:
                return numbers
        return self._made(values, kind)

    def _known(self, kinds: Mapping[str, Any]) -> Any:
        """Return the entry of the datatype. Raises DataError for an unknown datatype."""
        kind = kinds.get(self.datatype)
        if kind is None:
            raise DataError(
                f"input {self.name!r}: expected a datatype of the protocol, got "
                f"{self.datatype!r}. Use BYTES or one of {', '.join(DTYPES)}."
            )
        return kind

    def _made(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        if kind.id in _INTEGERS and float in map(type, values):  # Arrow would cut fractions
            fraction = next(value for value in values if type(value) is float)
            raise DataError(
                f"input {self.name!r}: expected whole numbers for {self.datatype}, got "
                f"{fraction!r}. Send ids as integers."
            )
        try:
            if values and values[0] is None and all(value is None for value in values):
                return pa.nulls(len(values))
            return pa.array(values, kind) if values else pa.nulls(0)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"input {self.name!r}: the values are not {self.datatype}: "
                f"{str(error).splitlines()[0][:200]}. Correct the values or the datatype."
            ) from error


def _whole_numbers(values: list[Any]) -> NDArray[np.int64] | None:
    """Return `values` as a column; None if it is empty or not all of them are integers."""
    if not values:
        return None
    try:
        return np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        return None


def _joined(parts: Sequence[Column], kind: pa.DataType) -> pa.Array:
    """Join slices of one column; slices without a value have no type."""
    arrays = [pa.array(part) if isinstance(part, np.ndarray) else part for part in parts]
    if all(values.type == pa.null() for values in arrays):
        return pa.nulls(sum(map(len, arrays)))
    return pa.concat_arrays([values.cast(kind) for values in arrays])


def _too_many(num_rows: int, bounds: Bounds) -> DataError:
    return DataError(
        f"too many candidates: expected at most {bounds.rows} in a request, got {num_rows}. "
        "Send several requests, or raise batch_rows of the server."
    )


def _flat(values: Any) -> list[Any]:
    while isinstance(values, list) and values and isinstance(values[0], list):
        if not all(isinstance(inner, list) for inner in values):
            raise DataError(
                "data: expected lists of the same depth, got values next to lists. "
                "Nest the data as the shape says."
            )
        values = [value for inner in values for value in inner]
    if not isinstance(values, list):
        raise DataError(
            f"data: expected a list, got {type(values).__name__}. "
            "Send the values of the tensor in a list."
        )
    return values


def _texts(name: str, data: bytes | memoryview) -> list[str]:
    """Return the strings of `data`, each of which follows its length in 4 bytes."""
    texts = []
    start = 0
    raw = bytes(data)
    while start < len(raw):
        end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
        if end > len(raw):
            raise DataError(
                f"input {name!r}: expected a string up to byte {end}, got {len(raw)} bytes. "
                "Write the length of each string in 4 bytes before it."
            )
        texts.append(text_of(name, raw[start + 4 : end]))
        start = end
    return texts


def text_of(name: str, value: bytes) -> str:
    """Return UTF-8 as text. Raises DataError for other bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"input {name!r}: expected a string in UTF-8, got {value[:20]!r}. Encode it as UTF-8."
        ) from error


class Block(NamedTuple):
    """Consecutive binary tensors of plain numbers, all [n] of one type."""

    names: list[str]
    dtype: np.dtype[Any]
    n: int
    start: int

    def read(self, data: bytes) -> Iterable[tuple[str, Column]]:
        """Return the name and the column of each tensor, without a copy."""
        values = np.frombuffer(data, self.dtype, len(self.names) * self.n, self.start)
        return zip(self.names, values.reshape(len(self.names), self.n), strict=True)


@dataclass(frozen=True, eq=False)
class Head:
    """The JSON of an infer request whose tensors all follow in binary.

    Clients send the same head again and again. `sizes`: bytes of each tensor.
    """

    tensors: Sequence[tuple[str, str, Sequence[int]]]
    sizes: Sequence[int]
    wanted: Mapping[str, bool] | None
    binary: bool

    @cached_property
    def blocks(self) -> Sequence[Block] | None:
        """The tensors in blocks; None unless all are plain numbers [n], aligned in the body."""
        blocks = list[Block]()
        start = 0
        for (name, datatype, shape), size in zip(self.tensors, self.sizes, strict=True):
            dtype = _PLAIN.get(datatype)
            if dtype is None or len(shape) != 1 or start % dtype.itemsize:
                return None
            if blocks and (blocks[-1].dtype, blocks[-1].n) == (dtype, shape[0]):
                blocks[-1].names.append(name)
            else:
                blocks.append(Block([name], dtype, shape[0], start))
            start += size
        return blocks


@dataclass(frozen=True)
class Packed:
    """Consecutive binary tensors, as described by `head`."""

    head: Head
    data: bytes

    def tensors(self) -> list[Tensor]:
        """Return the tensors one by one."""
        ends = list(accumulate(self.head.sizes))
        parts = [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        described = zip(self.head.tensors, parts, strict=True)
        return [Tensor(*description, part) for description, part in described]


Given: TypeAlias = tuple[int, dict[str, Column], dict[str, Column]]
"""The number of candidates, n; their columns; if n > 1, the context: columns [1], valid for all."""


class Inputs:
    """The tensors that a model takes: one for each raw column of its schema that serving reads."""

    def __init__(self, schema: Schema) -> None:
        self.names = schema.raw_columns(labels=False)
        self.allowed = {*self.names, *([] if schema.time is None else [schema.time.source])}
        self._schema = schema
        self._known = WeakKeyDictionary[Head, tuple[int, Sequence[Block]]]()

    def metadata(self) -> list[dict[str, Any]]:
        """Return name, datatype and shape of each tensor.

        The datatype is BYTES for columns that were text in training, INT64 for integers (ids, and
        columns that a Cross combines), FP32 for other numbers. The shape of lists is [-1, -1]. If
        the model does not record the types of its columns, those with a transform of text are
        BYTES, and those with weights are lists.
        """
        dense = {column.source: column for column in self._schema.dense}
        weighted = [column for column in self._schema.ids if column.weights]
        lists = {name for column in weighted for name in (column.source, column.weights)}
        lists |= {name for name, shape in self._schema.shapes.items() if shape != "value"}
        types = dict.fromkeys(
            (
                column.source
                for column in self._schema.columns
                if isinstance(column, Dense | Id) and _of_text(column)
            ),
            "text",
        )
        types.update(self._schema.types)
        numbers = set(dense) - self._read_as_ids()
        tensors = []
        for name in self.names:
            kind = "INT64"
            if types.get(name) == "text":
                kind = "BYTES"
            elif name in numbers or types.get(name) == "number":
                kind = "FP32"
            shape = [-1]
            if name in dense and dense[name].width > 1:
                shape = [-1, dense[name].width]
            elif name in lists:
                shape = [-1, -1]
            tensors.append({"name": name, "datatype": kind, "shape": shape})
        return tensors

    def _read_as_ids(self) -> set[str]:
        """Return the raw columns that stay integers: of ids, and those that a Cross combines."""
        columns = [column for column in self._schema.columns if isinstance(column, Dense | Id)]
        steps = [step for column in columns for step in column.transforms]
        crossed = {name for step in steps for name in step.inputs()}
        return crossed | {column.source for column in self._schema.ids}

    def columns(self, given: Sequence[Tensor] | Packed, bounds: Bounds) -> Given:
        """Check all tensors of a request, then decode them.

        Raises:
            DataError: Tensors are unknown, missing, sent twice, too long or of different lengths.
        """
        if not isinstance(given, Packed):
            return self._columns(given, bounds)
        layout = self._known.get(given.head)
        if layout is None:
            decoded = self._columns(given.tensors(), bounds)
            if given.head.blocks is not None:
                self._known[given.head] = decoded[0], given.head.blocks
            return decoded
        num_rows, blocks = layout
        columns = dict[str, Column]()
        context = dict[str, Column]()
        for block in blocks:
            if block.n == num_rows:
                columns.update(block.read(given.data))
            else:
                context.update(block.read(given.data))
        return num_rows, columns, context

    def _columns(self, tensors: Sequence[Tensor], bounds: Bounds) -> Given:
        self._check_names(tensors)
        lengths = {tensor.check(bounds) for tensor in tensors}
        if len(lengths - {1}) > 1:
            raise DataError(
                f"inputs differ in length: expected n or 1 for each, got {sorted(lengths)}. "
                "Send each column for all candidates, or with one value that holds for all."
            )
        num_rows = max(lengths - {1}, default=1)
        columns = dict[str, Column]()
        context = dict[str, Column]()
        for tensor in tensors:
            column = tensor.column()
            if len(column) == num_rows:
                columns[tensor.name] = column
            else:
                context[tensor.name] = column
        return num_rows, columns, context

    def _check_names(self, tensors: Sequence[Tensor]) -> None:
        names = set[str]()
        for tensor in tensors:
            if tensor.name not in self.allowed:
                name = tensor.name[:100]
                raise DataError(
                    f"input {name!r}: the model has no such input. {did_you_mean(name, self.names)}"
                )
            if tensor.name in names:
                raise DataError(
                    f"input {tensor.name!r}: expected once, got it twice. Send it once."
                )
            names.add(tensor.name)
        missing = [name for name in self.names if name not in names]
        if missing:
            raise DataError(f"inputs are missing: got {sorted(names)}. Add {missing}.")


def _of_text(column: Dense | Id) -> bool:
    return bool(column.transforms) and isinstance(
        column.transforms[0], Split | Extract | Map | Hash
    )


def check_tensor_parameters(where: str, parameters: Collection[str]) -> None:
    """Raise DataError for parameters of an input or output that the server does not offer."""
    if not parameters:
        return
    for name in _NOT_OFFERED:
        if name in parameters:
            raise DataError(
                f"{where}: the server does not offer the parameter {name!r}. "
                "Send values in the request, and read them in the answer."
            )


def check_load(parameters: Iterable[str]) -> None:
    """Raise DataError if a load request has its own model files or configuration."""
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise DataError(
                f"load: a model is loaded as it was exported, got the parameter {name[:100]!r}. "
                "Export the model that you want, and load it without parameters."
            )


def choose(
    outputs: Mapping[str, NDArray[np.float32]], wanted: Sequence[str] | None
) -> Mapping[str, NDArray[np.float32]]:
    """Return the outputs in `wanted`, or all if it is None. Raises DataError for unknown ones."""
    unknown = [name for name in wanted or () if name not in outputs]
    if unknown:
        raise DataError(
            f"output {unknown[0][:100]!r}: the model has no such output. "
            f"{did_you_mean(unknown[0][:100], list(outputs))}"
        )
    if wanted is None:
        return outputs
    return {name: outputs[name] for name in wanted}


def write_answer(ask: Ask, model: str, scores: Scores) -> tuple[bytes, int | None]:
    """Return the body of the answer and, if binary tensors follow the JSON, the JSON's length."""
    wanted = ask.wanted
    if wanted is None:
        wanted = dict.fromkeys(scores.outputs, ask.binary)
    described = []
    tail = []
    for name, values in choose(scores.outputs, list(wanted)).items():
        output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values)]}
        if wanted[name]:
            tail.append(np.ascontiguousarray(values, "<f4").tobytes())
            output["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            output["data"] = [value if math.isfinite(value) else None for value in values.tolist()]
        described.append(output)
    spec: dict[str, Any] = {
        "model_name": model,
        "model_version": str(scores.version),
        "outputs": described,
    }
    if scores.late:
        spec["parameters"] = {"late_rows": scores.late}
    if ask.id:
        spec["id"] = ask.id
    head = _compact(spec).encode()
    return b"".join([head, *tail]), len(head) if tail else None
