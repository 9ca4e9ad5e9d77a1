# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's Norm files: samples of varying length with a header and, usually, checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa

from hotbed import _core, checks
from hotbed.connectors.files import FileSource, Rows, Section, one_path
from hotbed.connectors.hugectr.file_list import read_file_list
from hotbed.connectors.hugectr.norm_format import (
    LIST_ENDING,
    NormHeader,
    read_header,
    samples_bytes,
)
from hotbed.connectors.paths import Paths, expand
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
from hotbed.errors import ConfigError, DecodeError, SchemaError
from hotbed.files import new_file

BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Norm(FileSource):
    """HugeCTR's Norm files: labels, dense values, and any number of keys in each slot.

    The columns are float32 for each label, `dense` with lists of float32, and lists of int64 for
    each slot. With `on_error="skip"`, samples with a wrong checksum are left out and counted.

    Args:
        path: a file, a glob or a list of both. A file that ends in `.txt` is a file list: a count,
            then one path a line.
        labels: the names of the labels; the values after them are dense. None = `label`, or
            `label_0`, `label_1`, … by the header.
        slots: the names of the slots. None = `slot_0`, `slot_1`, …
        dense: the name of the dense column.
        key_bits: 32 for unsigned keys of 4 bytes, 64 for signed ones of 8: the header does not say.
        checksum: whether samples must have a checksum. None = as the first file.

    Raises:
        DecodeError: a file is not a Norm file or is torn, or a sample is damaged (file, sample).
        SchemaError: a file has other numbers of values or slots.

    Example: `hb.sources.Norm("criteo/file_list.txt", slots=[f"C{i}" for i in range(26)])`

    Format: the section "Norm" of HugeCTR's "Dataset formats".
    """

    path: Paths
    labels: Sequence[str] | None = None
    slots: Sequence[str] | None = None
    dense: str = "dense"
    key_bits: KeyBits = 32
    checksum: bool | None = None

    def __post_init__(self) -> None:
        checks.one_of("norm.key_bits", self.key_bits, (32, 64))
        for name in ("labels", "slots"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.names(getattr(self, name)))
        check_names("norm", [*(self.labels or ()), self.dense, *(self.slots or ())])

    def files(self) -> list[str]:
        files: list[str] = []
        for file in expand(self.path):
            if file.endswith(LIST_ENDING):
                files += expand(read_file_list(file))
            else:
                files.append(file)
        return files

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        return Section(file, rows=begin, num_rows=end - begin)

    def place(self, section: Section, row: int) -> RowPlace:
        return RowPlace(section.file, section.rows + row + 1, "sample")

    def infer(self) -> pa.Schema:
        num_dense = self._first.num_floats - len(self._labels)
        fields: list[pa.Field] = []
        for name in self._labels:
            fields.append(pa.field(name, pa.float32()))
        if num_dense:
            values = pa.list_(pa.float32(), num_dense)
            fields.append(pa.field(self.dense, values))
        for name in self._slots:
            keys = pa.list_(pa.int64())
            fields.append(pa.field(name, keys))
        return pa.schema(fields)

    def num_rows(self) -> int:
        total = 0
        for file in self.files():
            total += self._header_of(file).num_samples
        return total

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        file = section.file
        wanted = wanted_fields(self.schema(), plan)
        slots = [name in wanted.names for name in self._slots]
        reading = _NormReading(section, self._header_of(file), slots, self.key_bits // 8, plan)
        skip = skip_rows
        try:
            with section.open() as stream:
                for samples in reading.samples(stream, batch_rows):
                    begin, end = np.searchsorted(samples.numbers, reading.bounds, "right")
                    dropped = min(skip, end - begin)
                    skip -= dropped
                    begin += dropped
                    if begin < end:
                        batch = self._batch(samples, wanted)
                        yield batch.slice(begin, end - begin), samples.numbers[begin:end]
        except (OSError, pa.ArrowException) as error:
            raise DecodeError(
                f"{file}: cannot be read after sample {reading.number}, got {error}. Write the "
                "file again.",
                file,
                reading.number,
            ) from error

    def write(self, rows: Source) -> int:
        """Write rows with the columns of this source as one file, and return their number.

        `labels` and `slots` must be named. Samples have checksums unless `checksum` is False. A
        slot holds lists of keys or single keys. The column `dense` may be absent.

        Raises:
            ConfigError: a name is missing, or `path` is more than one file.
            SchemaError: a column is absent, has nulls, or has lists of other lengths.
        """
        path = one_path("norm.path", self.path)
        if self.labels is None or self.slots is None:
            raise ConfigError(
                f"norm.write: labels and slots must be named, got labels={self.labels!r} and "
                f"slots={self.slots!r}. Name them."
            )
        widths: dict[str, int | None] = dict.fromkeys(self.labels, 1)
        if self.dense in rows.schema().names:
            widths[self.dense] = None
        header = NormHeader(
            self.checksum is not False, label_dim=len(self.labels), num_slots=len(self.slots)
        )
        with new_file(Path(path)) as file:
            file.write(header.to_bytes())
            for arrays in batches_to_write(rows, [*widths, *self.slots], path):
                parts: list[np.ndarray] = []
                for name, width in widths.items():
                    parts.append(matrix(arrays[name], name, path, width))
                    widths[name] = parts[-1].shape[1]
                floats = np.concatenate(parts, axis=1)
                slots = [arrays[name] for name in self.slots]
                data = samples_bytes(
                    floats.astype("<f4"), slots, self.key_bits // 8, header.checksum
                )
                file.write(data)
                header = replace(
                    header,
                    num_samples=header.num_samples + len(floats),
                    dense_dim=floats.shape[1] - header.label_dim,
                )
            file.seek(0)
            file.write(header.to_bytes())
        return header.num_samples

    @cached_property
    def _first(self) -> NormHeader:
        """The header of the first file, to which the others must be equal in their dimensions."""
        file = self.files()[0]
        header = read_header(file)
        if self.checksum not in (None, header.checksum):
            raise SchemaError(
                f"{file}: expected checksum={self.checksum}, got a file with "
                f"checksum={header.checksum}. Give that (Check_t.Sum is True in HugeCTR)."
            )
        if self.slots is not None and len(self.slots) != header.num_slots:
            raise SchemaError(
                f"{file}: expected {len(self.slots)} slots, got {header.num_slots} by the header. "
                "Name as many slots as the file has."
            )
        if self.labels is not None and len(self.labels) > header.num_floats:
            raise SchemaError(
                f"{file}: expected {len(self.labels)} labels, got {header.num_floats} labels and "
                "dense values by the header. Name fewer labels."
            )
        return header

    def _header_of(self, file: str) -> NormHeader:
        """Return the header of a file.

        Raises:
            SchemaError: its samples have another layout than those of the first file.
        """
        header = read_header(file)
        first = self._first
        if header.layout != first.layout:
            raise SchemaError(
                f"{file}: its layout differs from the first file's, got {header.layout} instead "
                f"of {first.layout} (checksum, labels and dense values, slots). Write all files "
                "with one layout."
            )
        return header

    @cached_property
    def _labels(self) -> list[str]:
        if self.labels is not None:
            return list(self.labels)
        count = self._first.label_dim
        if count == 1:
            return ["label"]
        return _numbered("label", count)

    @cached_property
    def _slots(self) -> list[str]:
        if self.slots is not None:
            return list(self.slots)
        return _numbered("slot", self._first.num_slots)

    def _batch(self, samples: _Samples, wanted: pa.Schema) -> pa.RecordBatch:
        """Return the columns `wanted` of some samples."""
        arrays: dict[str, pa.Array] = {}
        labels = samples.floats[:, : len(self._labels)]
        for name, values in zip(self._labels, labels.T, strict=True):
            contiguous = np.ascontiguousarray(values)
            arrays[name] = pa.array(contiguous)
        if self.dense in wanted.names:
            dense = samples.floats[:, len(self._labels) :]
            arrays[self.dense] = fixed_lists(dense)
        for name, slot in zip(self._slots, samples.slots, strict=True):
            if name in wanted.names:
                offsets, keys = slot
                arrays[name] = pa.ListArray.from_arrays(offsets, keys)
        columns = [arrays[name] for name in wanted.names]
        return pa.RecordBatch.from_arrays(columns, schema=wanted)


@dataclass(frozen=True)
class _Samples:
    """Good samples of a block: their numbers in the file from 1, values [n, floats], and slots."""

    numbers: np.ndarray
    floats: np.ndarray
    slots: list[tuple[np.ndarray, np.ndarray]]


@dataclass
class _NormReading:
    """The samples of one section; `number`: how many of the file were read so far, good and bad."""

    section: Section
    header: NormHeader
    wanted: list[bool]
    key_bytes: int
    plan: ReadPlan
    number: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """The numbers of the samples before the section, and of its last sample."""
        first = self.section.rows
        if self.section.num_rows is None:
            return first, self.header.num_samples
        return first, first + self.section.num_rows

    def samples(self, stream: pa.NativeFile, batch_rows: int) -> Iterator[_Samples]:
        """Yield the samples after the header up to the end of the section.

        Raises:
            DecodeError: the file ends early or late, or a sample is bad and the plan has no skips.
        """
        stream.read(self.header.num_bytes)
        data = b""
        _, last = self.bounds
        while self.number < last:
            more: bytes = stream.read(BLOCK_BYTES)
            if not more:
                self._fail(self.number, f"the end of the file, {len(data)} bytes after its begin")
            data += more
            start = 0
            while self.number < last:
                block = np.frombuffer(data, np.uint8, offset=start)
                num_bytes, samples = self._read(block, batch_rows)
                if not num_bytes:
                    break
                start += num_bytes
                if len(samples.numbers):
                    yield samples
            data = data[start:]
        if last < self.header.num_samples:
            return
        data += stream.read(1)
        if data:
            self._fail(self.number, f"{len(data)} or more bytes after the last one")

    def _read(self, data: np.ndarray, batch_rows: int) -> tuple[int, _Samples]:
        """Return the bytes of the samples that `data` begins with, and the good ones of them."""
        missing = self.bounds[1] - self.number
        num_bytes, lost, good, wrong_sum, misshapen, floats, slots = _core.read_norm(
            data,
            self.header.num_floats,
            self.wanted,
            self.key_bytes,
            self.header.checksum,
            min(batch_rows, missing),
        )
        if lost and not num_bytes:
            self._fail(self.number, "an impossible length")
        begin = self.number
        self.number += len(good) + len(wrong_sum) + len(misshapen)
        self._leave_out("checksum", "a wrong checksum", begin + wrong_sum)
        self._leave_out("length", "a length that is not that of its slots", begin + misshapen)
        samples = _Samples(begin + good + 1, floats.reshape(-1, self.header.num_floats), slots)
        return num_bytes, samples

    def _leave_out(self, reason: str, fault: str, indices: np.ndarray) -> None:
        indices = indices[indices >= self.section.rows]
        if not len(indices):
            return
        first = int(indices[0])
        if self.plan.skips is None:
            self._fail(first, fault)
        self.plan.skips.add(reason, self._message(first, fault), len(indices))

    def _message(self, index: int, fault: str) -> str:
        count = self.header.num_samples
        return f"{self.section.file}, sample {index + 1} of {count}: it cannot be read, got {fault}"

    def _fail(self, index: int, fault: str) -> NoReturn:
        message = self._message(index, fault)
        raise DecodeError(
            f"{message}. Write the file again, or use on_error='skip'.",
            self.section.file,
            index + 1,
        )


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}_{number}" for number in range(count)]
