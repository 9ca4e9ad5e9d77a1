# SPDX-License-Identifier: Apache-2.0
"""Tensors of a request, checked and decoded into columns."""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import DataError
from hotbed.serving.protocol.bodies import SLICE, Bounds, JsonValues, Undecoded
from hotbed.serving.trained_types import times_of_counts

T = TypeVar("T")

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
# The types whose binary form is already a column.
PLAIN_DTYPES = {name: dtype for name, dtype in DTYPES.items() if name not in ("BOOL", "FP16")}
# Tensor type -> the Arrow type of its values in a list.
_ARROW_TYPES = {name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items()}
_ARROW_TYPES |= {"FP16": pa.float32(), "BYTES": pa.string()}
# Tensor type -> the type code of an array of its values, where that is what their list becomes.
_ARRAY_CODES = {"FP32": "f", "FP64": "d"}
_INTEGERS = {kind.id for kind in _ARROW_TYPES.values() if pa.types.is_integer(kind)}
_LONGEST_SIDE = 1 << 30  # values along a dimension
_LARGEST = (1 << 63) - 1  # of int64

ColumnValues: TypeAlias = NDArray[Any] | pa.Array
"""Values of n candidates: NumPy for plain numbers, Arrow for strings, lists and missing values."""


@dataclass(slots=True)
class Tensor:
    """One input of a request.

    Attributes:
        data: bytes-like for a binary tensor; otherwise a list of values, flat or nested as `shape`
            says, or `Undecoded` values.
        times: the type of times whose unit whole numbers count; None = they are numbers.
        is_base64: whether strings in a list are bytes in Base64.
        nesting: lengths of the lists of a candidate in nested data; None = those of `shape`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any
    times: pa.DataType | None = None
    is_base64: bool = False
    nesting: Sequence[int] | None = None

    def column(self) -> ColumnValues:
        """Return the column [n] of a tensor [n] or [n, 1]; of lists for [n, k], empty for [n, 0].

        Binary numbers are not copied.

        Raises:
            DataError: the values do not match the datatype or the shape.
        """
        shape = self.shape
        data = self.data
        dtype = PLAIN_DTYPES.get(self.datatype)
        if (
            dtype is not None
            and self.times is None
            and len(shape) == 1
            and isinstance(data, bytes)
            and len(data) == shape[0] * dtype.itemsize
        ):
            return np.frombuffer(data, dtype)  # the common case, kept short
        num_rows, width = self.dimensions()
        size = num_rows * width
        values = self._values(size)
        if len(values) != size:
            raise self._miscounted(size, len(values))
        if not size:  # no values: clients send any datatype then
            values = pa.nulls(0)
        if self.times is not None:
            values = times_of_counts(self.name, pa.array(values), self.times)
        if width == 1:
            return values
        offsets = pa.array(np.arange(num_rows + 1) * width)
        return pa.LargeListArray.from_arrays(offsets, pa.array(values))

    def dimensions(self) -> tuple[int, int]:
        """Return candidates, and values of each. Raises DataError for other shapes than [n, k]."""
        shape = self.shape
        num_rows = -1
        width = 1
        if len(shape) == 1:
            num_rows = shape[0]
        elif len(shape) == 2:
            num_rows, width = shape
        if not (0 <= num_rows <= _LONGEST_SIDE and 0 <= width <= _LONGEST_SIDE):
            raise DataError(
                f"input {self.name!r}: expected a shape [n], [n, 1] or [n, k], got "
                f"{str(shape)[:60]}. Send one value or one list for each candidate."
            )
        return num_rows, width

    def check(self, bounds: Bounds) -> int:
        """Check the shape and the number of values, and return the number of candidates.

        Nothing is decoded.

        Raises:
            DataError: the tensor has more than `bounds` allow, or its number of values does not
                match its shape.
        """
        num_rows, width = self.dimensions()
        if num_rows > bounds.rows:
            raise DataError(
                f"too many candidates: expected at most {bounds.rows} in a request, got "
                f"{num_rows}. Send several requests, or raise batch_rows of the server."
            )
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
            if data.entries not in (size, size + empty_lists):
                raise self._miscounted(size, data.entries)
        return num_rows

    def _check_binary(self, size: int) -> None:
        num_bytes = len(self.data)
        if self.datatype == "BYTES":
            if num_bytes < 4 * size:
                raise self._miscounted(size, num_bytes // 4)
            return
        expected = size * self._look_up(DTYPES).itemsize
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

    def _values(self, size: int) -> ColumnValues:
        """Return all values, flat."""
        data = self.data
        if isinstance(data, Undecoded):
            kind = self._look_up(_ARROW_TYPES)
            self._check_booleans()
            slices = [self._decode(values, kind) for values in self._flat_slices(data)]
            if len(slices) == 1:
                return slices[0]
            return self._join(slices, kind)
        if not isinstance(data, bytes | memoryview):
            return self._to_arrow(self._flatten(data), self._look_up(_ARROW_TYPES))
        if self.datatype == "BYTES":
            return _text(_strings(self.name, data))
        self._check_binary(size)
        return _numbers(data, self._look_up(DTYPES))

    def _check_booleans(self) -> None:
        """Raise DataError for JSON booleans in a tensor of numbers."""
        if self.datatype in ("BOOL", "BYTES") or not isinstance(self.data, JsonValues):
            return
        if self.data.has_booleans:
            raise DataError(
                f"input {self.name!r}: expected numbers for {self.datatype}, got a boolean. Send "
                "numbers, or the datatype BOOL where the metadata of the model says so."
            )

    def _flat_slices(self, data: Undecoded) -> Iterator[list[Any]]:
        """Yield the values a slice at a time, all of them flat or all of them nested."""
        first_nests = None
        for values in data.slices():
            flat = self._flatten(values)
            nests = flat is not values
            if first_nests not in (None, nests):
                raise self._misnested()
            first_nests = nests
            yield flat

    def _flatten(self, data: Any) -> list[Any]:
        """Return values that are flat, or nested as the shape says, as one list."""
        if not isinstance(data, list):
            raise DataError(
                f"input {self.name!r}: expected a list of values, got {type(data).__name__}. "
                "Send the values of the tensor in a list."
            )
        values: list[Any] = data
        if not values or not isinstance(values[0], list):
            return values  # a later list is refused, as no datatype has it
        for length in self.nesting or self.shape[1:] or (1,):
            if not all(isinstance(inner, list) and len(inner) == length for inner in values):
                raise self._misnested()
            values = [value for inner in values for value in inner]
        return values

    def _misnested(self) -> DataError:
        return DataError(
            f"input {self.name!r}: expected flat values, or lists nested as the shape "
            f"{list(self.shape)} says, got lists of other lengths or depths. Fill short lists with "
            "the padding of the column, or send a request for each length."
        )

    def _decode(self, values: list[Any], kind: pa.DataType) -> ColumnValues:
        if self.datatype == "INT64":
            integers = _integers(values)
            if integers is not None:
                return integers
            if any(type(value) is int and value > _LARGEST for value in values):
                kind = pa.uint64()
        if self.is_base64 and self.datatype == "BYTES":
            values = [self._from_base64(value) for value in values]
        if any(type(value) is bytes for value in values):
            return _text(values)
        return self._to_arrow(values, kind)

    def _from_base64(self, value: Any) -> bytes | None:
        if value is None:
            return None
        try:
            return b64decode(value, validate=True)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"input {self.name!r}: expected strings in Base64, got {value!r:.40}. Encode them, "
                "or leave out content_type."
            ) from error

    def _join(self, slices: Sequence[ColumnValues], kind: pa.DataType) -> pa.Array:
        """Join slices of one column; slices without a value have no type."""
        arrays = []
        for values in slices:
            if isinstance(values, np.ndarray):
                values = pa.array(values)
            arrays.append(values)
        types = {values.type for values in arrays} - {pa.null()}
        if not types:
            return pa.nulls(sum(map(len, arrays)))
        for wide in (pa.uint64(), pa.binary()):
            if wide in types:
                kind = wide
        try:
            return pa.concat_arrays([values.cast(kind) for values in arrays])
        except pa.ArrowInvalid as error:
            raise self._misfit(error) from error

    def _look_up(self, by_datatype: Mapping[str, T]) -> T:
        """Return the entry of the datatype. Raises DataError for an unknown datatype."""
        entry = by_datatype.get(self.datatype)
        if entry is None:
            raise DataError(
                f"input {self.name!r}: expected a datatype of the protocol, got "
                f"{self.datatype!r}. Use BYTES or one of {', '.join(DTYPES)}."
            )
        return entry

    def _to_arrow(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        if not values:
            return pa.nulls(0)
        if kind.id in _INTEGERS and float in map(type, values):  # Arrow would cut fractions
            fraction = next(value for value in values if type(value) is float)
            raise DataError(
                f"input {self.name!r}: expected whole numbers for {self.datatype}, got "
                f"{fraction!r}. Send ids as integers."
            )
        if values[0] is None and all(value is None for value in values):
            return pa.nulls(len(values))
        try:
            if pa.types.is_floating(kind) and int in map(type, values):  # Arrow refuses large ones
                values = [float(value) if type(value) is int else value for value in values]
            return pa.array(values, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise self._misfit(error) from error

    def _misfit(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0][:200]
        return DataError(
            f"input {self.name!r}: the values are not {self.datatype}: {reason}. "
            "Correct the values or the datatype."
        )


def _numbers(data: bytes | memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers of a binary tensor; a copy only if their form or place demands it."""
    values = np.frombuffer(data, dtype)
    if dtype == np.bool_:
        return np.not_equal(values.view(np.uint8), 0)
    if dtype == np.float16:
        return values.astype(np.float32)
    if not values.flags.aligned:
        return values.copy()
    return values


def flat_numbers(datatype: str, size: int, data: JsonValues) -> NDArray[Any] | None:
    """Return `size` numbers that are a flat list; None where `Tensor.column` has to look."""
    if data.entries != size or size > SLICE:
        return None
    if datatype == "INT64":
        return data.integers()
    code = _ARRAY_CODES.get(datatype)
    if code is None or data.has_booleans:
        return None
    (values,) = data.slices()
    try:
        numbers = array(code, values)
    except (TypeError, OverflowError):
        return None
    return np.frombuffer(numbers, DTYPES[datatype]) if len(numbers) == size else None


def _integers(values: list[Any]) -> NDArray[np.int64] | None:
    """Return `values` as a column; None if it is empty or not all of them are integers."""
    if not values:
        return None
    try:
        return np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        return None


def _text(values: Sequence[bytes | None]) -> pa.Array:
    """Return bytes as text, or as they are where one of them is not UTF-8."""
    column = pa.array(values, pa.binary())
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return column


def _strings(name: str, data: bytes | memoryview) -> list[bytes]:
    """Return the strings of `data`, each of which follows its length in 4 bytes."""
    texts = []
    raw = bytes(data)
    start = 0
    while start < len(raw):
        length = int.from_bytes(raw[start : start + 4], "little")
        end = start + 4 + length
        if end > len(raw):
            raise DataError(
                f"input {name!r}: expected a string up to byte {end}, got {len(raw)} bytes. "
                "Write the length of each string in 4 bytes before it."
            )
        texts.append(raw[start + 4 : end])
        start = end
    return texts
