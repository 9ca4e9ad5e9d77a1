# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's Raw files: samples of one length, without a header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.compression import read_full
from hotbed.connectors.files import FileSource, Rows, Section, one_path
from hotbed.connectors.paths import Paths, size_of
from hotbed.connectors.position import RowPlace
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.samples import (
    KeyBits,
    batches_to_write,
    check_names,
    fixed_lists,
    matrix,
    wanted_fields,
)
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, DecodeError
from hotbed.files import new_file

NumberType = Literal["int32", "float32"]

_TILE_ROWS = 2048
"""Samples that are turned into columns at once, so that they stay in the processor's cache."""

_WORD = 4
_SKIP_BYTES = 1 << 20
_TYPES = {"int32": pa.int32(), "float32": pa.float32()}
_CODES = {"int32": "<i4", "float32": "<f4"}
_KEY_CODES = {32: "<u4", 64: "<i8"}


@dataclass(frozen=True)
class Raw(FileSource):
    """HugeCTR's Raw files: labels, dense values and a fixed number of keys in each slot.

    All values have 4 bytes, keys have 4 or 8. The columns are one for each label, `dense` with
    lists, and one for each slot: int64, with lists where a slot has more than one key. Whole dense
    numbers are returned as they are; HugeCTR trains on log(x + 1) of them, which is the transform
    `Log` here.

    Args:
        path: a file, a glob or a list of both.
        labels: the names of the labels.
        num_dense: the dense values of a sample.
        slots: the names of the slots, each with its number of keys.
        label_type: "int32" or "float32".
        dense_type: "int32" or "float32".
        key_bits: 32 for unsigned keys of 4 bytes, 64 for signed ones of 8.
        dense: the name of the dense column.

    Raises:
        DecodeError: the size of a file is not a multiple of the size of a sample.

    Example:
        >>> slots = {f"C{number}": 1 for number in range(26)}
        >>> source = hb.sources.Raw("train.bin", num_dense=13, slots=slots)

    Format: the section "Raw" of HugeCTR's "Dataset formats".
    """

    path: Paths
    labels: Sequence[str] = ("label",)
    num_dense: int = 0
    slots: Mapping[str, int] = field(default_factory=dict)
    label_type: NumberType = "int32"
    dense_type: NumberType = "int32"
    key_bits: KeyBits = 32
    dense: str = "dense"

    def __post_init__(self) -> None:
        checks.at_least("raw.num_dense", self.num_dense, 0)
        checks.one_of("raw.label_type", self.label_type, tuple(_CODES))
        checks.one_of("raw.dense_type", self.dense_type, tuple(_CODES))
        checks.one_of("raw.key_bits", self.key_bits, tuple(_KEY_CODES))
        object.__setattr__(self, "labels", checks.names(self.labels))
        check_names("raw", self._names())
        for name, num_keys in self.slots.items():
            checks.at_least(f"raw.slots.{name}", num_keys, 1, "Give its number of keys.")
        if not self._names():
            raise ConfigError(
                "raw: a sample must have a value, got no labels, dense values or slots. Describe "
                "the samples."
            )

    @property
    def sample_bytes(self) -> int:
        """The bytes of a sample."""
        return _WORD * self._num_words

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        if Section(file).compression is not None:
            return super().section(file, begin, end, extent)
        first_byte = begin * self.sample_bytes
        return Section(file, first_byte, end * self.sample_bytes, begin, end - begin)

    def place(self, section: Section, row: int) -> RowPlace:
        return RowPlace(section.file, section.rows + row + 1, "sample")

    @property
    def declared_types(self) -> pa.Schema:
        return self.infer()

    def infer(self) -> pa.Schema:
        fields: list[pa.Field] = []
        for name in self.labels:
            kind = _TYPES[self.label_type]
            fields.append(pa.field(name, kind))
        if self.num_dense:
            kind = pa.list_(_TYPES[self.dense_type], self.num_dense)
            fields.append(pa.field(self.dense, kind))
        for name, num_keys in self.slots.items():
            kind = pa.int64()
            if num_keys > 1:
                kind = pa.list_(kind, num_keys)
            fields.append(pa.field(name, kind))
        return pa.schema(fields)

    def num_rows(self) -> int | None:
        total = 0
        for file in self.files():
            if Section(file).compression is not None:
                return None
            total += self._num_samples(file)
        return total

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        file = section.file
        wanted = wanted_fields(self.schema(), plan)
        block_bytes = batch_rows * self.sample_bytes
        row = section.rows + skip_rows
        try:
            with self._open_after(section, skip_rows) as stream:
                while data := read_full(stream, block_bytes):
                    if len(data) % self.sample_bytes:
                        raise self._torn(file, row * self.sample_bytes + len(data))
                    words = np.frombuffer(data, "<u4")
                    samples = words.reshape(-1, self._num_words)
                    numbers = np.arange(row, row + len(samples)) + 1
                    yield self._batch(samples, wanted), numbers
                    row += len(samples)
        except (OSError, pa.ArrowException) as error:
            raise DecodeError(
                f"{file}: cannot be read after sample {row}, got {error}. Write the file again.",
                file,
                row,
            ) from error

    def write(self, rows: Source) -> int:
        """Write rows with the columns of this source as one file, and return their number.

        Raises:
            ConfigError: `path` is more than one file.
            SchemaError: a column is absent, has nulls, or has lists of another length.
        """
        path = one_path("raw.path", self.path)
        num_samples = 0
        with new_file(Path(path)) as file:
            for arrays in batches_to_write(rows, self._names(), path):
                parts: list[np.ndarray] = []
                for part in self._parts():
                    values = matrix(arrays[part.name], part.name, path, part.width)
                    contiguous = np.ascontiguousarray(values.astype(part.kind))
                    parts.append(contiguous.view("<u4"))
                words = np.concatenate(parts, axis=1)
                file.write(words.tobytes())
                num_samples += len(words)
        return num_samples

    def _parts(self) -> list[_RawColumn]:
        """Return the parts of a sample, in their order."""
        label_kind = _CODES[self.label_type]
        parts = [_RawColumn(name, 1, label_kind) for name in self.labels]
        if self.num_dense:
            dense_kind = _CODES[self.dense_type]
            parts.append(_RawColumn(self.dense, self.num_dense, dense_kind))
        for name, num_keys in self.slots.items():
            parts.append(_RawColumn(name, num_keys, _KEY_CODES[self.key_bits]))
        return parts

    def _names(self) -> list[str]:
        return [part.name for part in self._parts()]

    @property
    def _num_words(self) -> int:
        return sum(part.num_words for part in self._parts())

    def _num_samples(self, file: str) -> int:
        num_bytes = size_of(file)
        num_samples, rest = divmod(num_bytes, self.sample_bytes)
        if rest:
            raise self._torn(file, num_bytes)
        return num_samples

    def _torn(self, file: str, num_bytes: int) -> DecodeError:
        return DecodeError(
            f"{file}: its size must be a multiple of {self.sample_bytes} bytes "
            f"({len(self.labels)} labels, {self.num_dense} dense values and "
            f"{sum(self.slots.values())} keys of {self.key_bits} bits), got {num_bytes}. Correct "
            "the description of the samples, or write the file again.",
            file,
            num_bytes // self.sample_bytes + 1,
        )

    def _open_after(self, section: Section, num_samples: int) -> pa.NativeFile:
        """Return a stream of the bytes after the first samples of a section."""
        skipped = num_samples * self.sample_bytes
        if section.compression is None:
            self._num_samples(section.file)
            return replace(section, begin=section.begin + skipped).open()
        stream = section.open()
        while skipped and (data := stream.read(min(skipped, _SKIP_BYTES))):
            skipped -= len(data)
        return stream

    def _batch(self, words: np.ndarray, wanted: pa.Schema) -> pa.RecordBatch:
        """Return the columns `wanted` of samples [n, words]."""
        columns = _columns(words)
        arrays: dict[str, pa.Array] = {}
        place = 0
        for part in self._parts():
            first = place
            place += part.num_words
            if part.name not in wanted.names:
                continue
            if part.num_words == 1:
                values = columns[first].view(part.kind)
            else:
                several = np.ascontiguousarray(words[:, first:place])
                values = several.view(part.kind)
            if part.name in self.slots:
                values = values.astype(np.int64)
            if part.width == 1:
                arrays[part.name] = pa.array(values.reshape(-1))
            else:
                arrays[part.name] = fixed_lists(values)
        chosen = [_with_type(arrays[field.name], field.type) for field in wanted]
        return pa.RecordBatch.from_arrays(chosen, schema=wanted)


@dataclass(frozen=True)
class _RawColumn:
    """A column in a sample: `width` values of the NumPy type `kind`."""

    name: str
    width: int
    kind: str

    @property
    def num_words(self) -> int:
        return self.width * np.dtype(self.kind).itemsize // _WORD


def _with_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return one dense value a row as a list of length 1."""
    if array.type.equals(kind):
        return array
    return pa.FixedSizeListArray.from_arrays(array, 1)


def _columns(words: np.ndarray) -> np.ndarray:
    """Return words [n, words] as contiguous columns [words, n]."""
    columns = np.empty(words.shape[::-1], words.dtype)
    for start in range(0, len(words), _TILE_ROWS):
        end = start + _TILE_ROWS
        columns[:, start:end] = words[start:end].T
    return columns
