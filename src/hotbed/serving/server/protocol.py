# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol: its tensors, as columns; its requests and answers, as JSON and
binary tensors.
"""

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

from hotbed.config import nearest
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
# parameters of tensors that change an answer
_NOT_OFFERED = ("shared_memory_region", "classification")
_MOST = 1 << 30  # values along a dimension
_compact = json.JSONEncoder(separators=(",", ":")).encode


def about() -> dict[str, Any]:
    """What the protocol tells of the server."""
    from hotbed import __version__

    return {"name": "hotbed", "version": __version__, "extensions": EXTENSIONS}


# Tensor type -> the Arrow type of its values where they come in a list.
_KINDS = {name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items()}
_KINDS |= {"FP16": pa.float32(), "BYTES": pa.string()}
_INTEGERS = {kind.id for kind in _KINDS.values() if pa.types.is_integer(kind)}
# Those whose binary form is a column as it lies.
_PLAIN = {name: dtype for name, dtype in DTYPES.items() if name not in ("BOOL", "FP16")}
Column: TypeAlias = NDArray[Any] | pa.Array
"""Values of n candidates: NumPy for plain numbers, Arrow for strings, lists, and where some are
missing.
"""


@dataclass(slots=True)
class Tensor:
    """One input of a request. `data`: binary (bytes-like), or values in a list, flat or nested as
    `shape` says; those may be undecoded."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any

    def column(self) -> Column:
        """Column [n] of a tensor [n] or [n, 1]; of lists for [n, k], empty ones for [n, 0].

        Numbers in binary are not copied.

        Raises DataError for what does not fit.
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
        if not size:  # no values, so of any type: clients name one for them at random
            flat = pa.nulls(0)
        if width == 1:
            return flat
        return pa.LargeListArray.from_arrays(
            pa.array(np.arange(num_rows + 1) * width), pa.array(flat)
        )

    def dimensions(self) -> tuple[int, int]:
        """Return the candidates, and the values of each. Raises DataError for other shapes."""
        shape = self.shape
        num_rows = -1
        width = 1
        if len(shape) == 1:
            num_rows = shape[0]
        elif len(shape) == 2:
            num_rows, width = shape
        if not (0 <= num_rows <= _MOST and 0 <= width <= _MOST):
            what = f"received shape {str(shape)[:60]} — give [n], [n, 1] or [n, k]"
            raise DataError(f"input {self.name!r}: no column — {what}")
        return num_rows, width

    def check(self, bounds: Bounds) -> int:
        """Check shape and count of values before any is decoded; return the number of candidates.

        Raises DataError for more than `bounds` allow, and for a count that is not the shape's.
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
            empty_lists = 0 if width else num_rows  # they may be written, and count
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
                f"input {self.name!r}: {size} values of {self.datatype} are {expected} bytes — "
                f"received {num_bytes} — correct the shape"
            )

    def _miscounted(self, size: int, num_values: int) -> DataError:
        what = f"shape {list(self.shape)} needs {size} values — received {num_values}"
        return DataError(f"input {self.name!r}: {what} — correct one")

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
        found = np.frombuffer(data, dtype)
        if dtype == np.bool_:
            return np.not_equal(found.view(np.uint8), 0)
        if dtype == np.float16:
            return found.astype(np.float32)
        return found if found.flags.aligned else found.copy()

    def _decoded(self, values: list[Any], kind: pa.DataType) -> Column:
        whole = _whole_numbers(values) if self.datatype == "INT64" else None
        return self._made(values, kind) if whole is None else whole

    def _known(self, kinds: Mapping[str, Any]) -> Any:
        found = kinds.get(self.datatype)
        if found is None:
            raise DataError(
                f"input {self.name!r}: unknown datatype — received {self.datatype!r} — "
                f"use BYTES or one of {', '.join(DTYPES)}"
            )
        return found

    def _made(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        if kind.id in _INTEGERS and float in map(type, values):  # Arrow would cut fractions
            fraction = next(value for value in values if type(value) is float)
            raise DataError(
                f"input {self.name!r}: expected whole numbers for {self.datatype}, got "
                f"{fraction!r}. "
                "Send ids as integers."
            )
        try:
            if values and values[0] is None and all(value is None for value in values):
                return pa.nulls(len(values))
            return pa.array(values, kind) if values else pa.nulls(0)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"input {self.name!r}: values that are no {self.datatype} — "
                f"{str(error).splitlines()[0][:200]} — "
                "correct them"
            ) from error


def _whole_numbers(values: list[Any]) -> NDArray[np.int64] | None:
    """Integers as a column; None where some are missing, or are something else."""
    try:
        return np.frombuffer(array("q", values), np.int64) if values else None
    except (TypeError, OverflowError):
        return None


def _joined(parts: Sequence[Column], kind: pa.DataType) -> pa.Array:
    """Slices of one column, of which those without a value have no type."""
    arrays = [pa.array(part) if isinstance(part, np.ndarray) else part for part in parts]
    if all(one.type == pa.null() for one in arrays):
        return pa.nulls(sum(map(len, arrays)))
    return pa.concat_arrays([one.cast(kind) for one in arrays])


def _too_many(num_rows: int, bounds: Bounds) -> DataError:
    return DataError(
        f"too many candidates — received {num_rows} — give at most {bounds.rows} in a request"
    )


def _flat(values: Any) -> list[Any]:
    while isinstance(values, list) and values and isinstance(values[0], list):
        if not all(isinstance(one, list) for one in values):
            raise DataError(
                "data: lists of uneven depth — received numbers beside lists — nest it as the "
                "shape says"
            )
        values = [value for one in values for value in one]
    if not isinstance(values, list):
        raise DataError(
            f"data: no list — received {type(values).__name__} — give the values of the tensor in "
            "a list"
        )
    return values


def _texts(name: str, data: bytes | memoryview) -> list[str]:
    """Strings, each behind its length in 4 bytes."""
    found = []
    at = 0
    raw = bytes(data)
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw):
            raise DataError(
                f"input {name!r}: a string goes on after the end — received {len(raw)} bytes — "
                "write 4 bytes of "
                "length before each"
            )
        found.append(text_of(name, raw[at + 4 : end]))
        at = end
    return found


def text_of(name: str, value: bytes) -> str:
    """UTF-8 as text; DataError for other bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"input {name!r}: a string that is no UTF-8 — received {value[:20]!r} — encode it"
        ) from error


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
    """What an infer request says of its tensors, which all follow in binary; clients send the same
    one again and again.

    `sizes`: bytes of each tensor. `blocks`: where they lie, if all are plain numbers [n] that lie
    where numbers may lie.
    """

    tensors: Sequence[tuple[str, str, Sequence[int]]]
    sizes: Sequence[int]
    wanted: Mapping[str, bool] | None
    binary: bool

    @cached_property
    def blocks(self) -> Sequence[Block] | None:
        found = list[Block]()
        start = 0
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
"""How many candidates, n; their columns; and, where n > 1, the context: tensors [1] that hold for
each of them.
"""


class Inputs:
    """The tensors that a model takes: one for each raw column of its schema that serving reads."""

    def __init__(self, schema: Schema) -> None:
        self.names = schema.raw_columns(labels=False)
        self.allowed = {*self.names, *([] if schema.time is None else [schema.time.source])}
        self._schema = schema
        self._known = WeakKeyDictionary[Head, tuple[int, Sequence[Block]]]()

    def metadata(self) -> list[dict[str, Any]]:
        """Name, datatype and shape of each: BYTES or INT64 as the column was in training, FP32 for
            what is a number only.

        The shape of lists is [-1, -1]. Of models that do not tell what their columns held, BYTES
        where a transform is for text, lists where there are weights.
        """
        dense = {column.source: column for column in self._schema.dense}
        weighted = [column for column in self._schema.ids if column.weights]
        lists = {name for column in weighted for name in (column.source, column.weights)}
        lists |= {name for name, shape in self._schema.shapes.items() if shape != "value"}
        held = dict.fromkeys(
            (
                one.source
                for one in self._schema.columns
                if isinstance(one, Dense | Id) and _of_text(one)
            ),
            "text",
        )
        held.update(self._schema.types)
        numbers = set(dense) - self._read_as_ids()
        found = []
        for name in self.names:
            width = dense[name].width if name in dense else 1
            number = name in numbers or held.get(name) == "number"
            kind = "BYTES" if held.get(name) == "text" else "FP32" if number else "INT64"
            shape = [-1]
            if width > 1:
                shape = [-1, width]
            elif name in lists:
                shape = [-1, -1]
            found.append({"name": name, "datatype": kind, "shape": shape})
        return found

    def _read_as_ids(self) -> set[str]:
        """Raw columns whose integers must stay such: those of ids, and those that a Cross combines."""
        columns = [one for one in self._schema.columns if isinstance(one, Dense | Id)]
        crossed = {name for one in columns for step in one.transforms for name in step.inputs()}
        return crossed | {one.source for one in self._schema.ids}

    def columns(self, given: Sequence[Tensor] | Packed, bounds: Bounds) -> Given:
        """Decode the tensors of a request once all of them have been checked.

        Raises DataError for tensors that are unknown, missing, given twice, too long or of
        different lengths.
        """
        if not isinstance(given, Packed):
            return self._columns(given, bounds)
        known = self._known.get(given.head)
        if known is None:
            found = self._columns(given.tensors(), bounds)
            if given.head.blocks is not None:
                self._known[given.head] = found[0], given.head.blocks
            return found
        num_rows = known[0]
        columns = dict[str, Column]()
        context = dict[str, Column]()
        for block in known[1]:
            (columns if block.n == num_rows else context).update(block.read(given.data))
        return num_rows, columns, context

    def _columns(self, tensors: Sequence[Tensor], bounds: Bounds) -> Given:
        self._check_names(tensors)
        lengths = {tensor.check(bounds) for tensor in tensors}
        if len(lengths - {1}) > 1:
            raise DataError(
                f"inputs differ in length — received {sorted(lengths)} — give each n, or 1 for all"
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
                raise DataError(f"input {name!r}: the model has none — {nearest(name, self.names)}")
            if tensor.name in names:
                raise DataError(
                    f"inputs: one is given twice — received {tensor.name!r} — give it once"
                )
            names.add(tensor.name)
        missing = [name for name in self.names if name not in names]
        if missing:
            raise DataError(f"inputs are missing — received {sorted(names)} — add {missing}")


def _of_text(column: Dense | Id) -> bool:
    return bool(column.transforms) and isinstance(
        column.transforms[0], Split | Extract | Map | Hash
    )


def check_tensor_parameters(where: str, parameters: Collection[str]) -> None:
    """Raise DataError for parameters of an input or output that ask for what the server does not
    offer.
    """
    if not parameters:
        return
    for name in _NOT_OFFERED:
        if name in parameters:
            raise DataError(
                f"{where}: the server does not offer the parameter {name!r}. "
                "Send values in the request, and read them in the answer."
            )


def check_load(parameters: Iterable[str]) -> None:
    """Raise DataError where a load brings a model or a configuration of its own."""
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise DataError(
                f"load: a model is loaded as it was exported, got the parameter {name[:100]!r}. "
                "Export the model that you want, and load it without."
            )


def choose(
    outputs: Mapping[str, NDArray[np.float32]], wanted: Sequence[str] | None
) -> Mapping[str, NDArray[np.float32]]:
    """The outputs that were asked for. Raises DataError for unknown ones."""
    unknown = [name for name in wanted or () if name not in outputs]
    if unknown:
        raise DataError(
            f"output {unknown[0][:100]!r}: the model has none — "
            f"{nearest(unknown[0][:100], list(outputs))}"
        )
    return outputs if wanted is None else {name: outputs[name] for name in wanted}


def write_answer(ask: Ask, model: str, scores: Scores) -> tuple[bytes, int | None]:
    """The body of the answer and, where binary tensors follow the JSON, the length of the JSON."""
    described = []
    tail = []
    for name, values in choose(
        scores.outputs, None if ask.wanted is None else list(ask.wanted)
    ).items():
        one: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values)]}
        if ask.binary if ask.wanted is None else ask.wanted[name]:
            tail.append(np.ascontiguousarray(values, "<f4").tobytes())
            one["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            one["data"] = [value if math.isfinite(value) else None for value in values.tolist()]
        described.append(one)
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
