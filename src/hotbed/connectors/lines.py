# SPDX-License-Identifier: Apache-2.0
"""Text with one record a line: JSON lines and libsvm."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from hotbed.connectors.base import ReadPlan
from hotbed.connectors.files import FileSource, Paths
from hotbed.errors import DecodeError

BLOCK_BYTES = 1 << 22


class LineSource(FileSource):
    """Files cut into blocks of whole lines; a block that does not parse is read again line by line to name or skip the
    bad one."""

    @abstractmethod
    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        """Rows of some lines (no line ends, none blank). Raises ValueError (or an Arrow error) if any line is bad."""

    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        self.schema()
        number = 0
        try:
            with pa.input_stream(file) as stream:
                for lines in _blocks(stream):
                    kept = [(number + i, line) for i, line in enumerate(lines, 1) if line.strip()]
                    number += len(lines)
                    dropped = min(skip_rows, len(kept)) if plan.skips is None else 0
                    skip_rows -= dropped
                    for start in range(dropped, len(kept), batch_rows):
                        batch = self._parse(kept[start : start + batch_rows], file, plan)
                        skip = min(skip_rows, batch.num_rows)
                        skip_rows -= skip
                        if batch.num_rows > skip:
                            yield batch.slice(skip)
        except (OSError, pa.ArrowException) as error:
            raise DecodeError(
                f"{file}: cannot be read after line {number} — {error} — write the file again", file, number
            ) from error

    def _parse(self, numbered: list[tuple[int, bytes]], file: str, plan: ReadPlan) -> pa.RecordBatch:
        try:
            return self.parse([line for _, line in numbered], plan)
        except (ValueError, pa.ArrowException):
            pass
        good: list[bytes] = []
        for number, line in numbered:
            try:
                self.parse([line], plan)
                good.append(line)
            except (ValueError, pa.ArrowException) as error:
                cause = (str(error).splitlines() or [""])[0]
                message = f"{file}, line {number}: cannot be read — {cause}: {line[:80].decode(errors='replace')!r}"
                if plan.skips is None:
                    raise DecodeError(f"{message} — correct it or use on_error='skip'", file, number) from error
                plan.skips.add("value", message)
        return self.parse(good, plan)


def _blocks(stream: pa.NativeFile) -> Iterator[list[bytes]]:
    """Lists of lines, CRLF and LF ends removed."""
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        lines = (rest + head).split(b"\n")
        rest = tail
        yield [line[:-1] if line.endswith(b"\r") else line for line in lines]
    if rest:
        yield [rest.rstrip(b"\r")]


@dataclass(frozen=True)
class Jsonl(LineSource):
    """One JSON object a line. Columns and types come from the first 4 MiB; lists become list columns; an absent key is
    null.

    Raises DecodeError (file, line) for a line that is not an object of those types.

    Example: `hb.sources.Jsonl("events/*.jsonl.gz")`
    """

    path: Paths

    def schema(self) -> pa.Schema:
        cached: pa.Schema | None = self.__dict__.get("_schema")
        if cached is None:
            file = self.files()[0]
            try:
                with pa.input_stream(file) as stream:
                    lines = [line for line in next(_blocks(stream), []) if line.strip()]
            except OSError as error:
                raise DecodeError(f"{file}: cannot be read — {error} — write the file again", file) from error
            cached = _infer_json(lines, file)
            object.__setattr__(self, "_schema", cached)
        return cached

    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        schema = self.schema()
        if plan.columns is not None:
            schema = pa.schema([field for field in schema if field.name in plan.columns])
        schema = pa.schema(
            [pa.field(f.name, plan.types.get(f.name, f.type) if _is_number(f.type) else f.type) for f in schema]
        )
        if not lines:
            return pa.RecordBatch.from_arrays([pa.array([], type=field.type) for field in schema], schema=schema)
        options = pajson.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=False
        )
        data = b"\n".join(lines)
        table = pajson.read_json(io.BytesIO(data), read_options=_whole(data), parse_options=options)
        if table.num_rows != len(lines):
            raise ValueError(f"{len(lines)} lines hold {table.num_rows} objects")
        batch: pa.RecordBatch = table.combine_chunks().to_batches()[0]
        return batch.select(schema.names)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _infer_json(lines: list[bytes], file: str) -> pa.Schema:
    """Types of the first lines. Bad ones among them are no reason to give up: reading names or skips them."""
    found, count, data = None, len(lines), b""
    while found is None and count:
        try:
            data = b"\n".join(lines[:count])
            found = pajson.read_json(io.BytesIO(data), read_options=_whole(data)).schema
        except pa.ArrowException:
            lines, count = (lines, count // 2) if count > 1 else (lines[1:], len(lines) - 1)
    if found is None:
        raise DecodeError(f"{file}: holds no JSON object — no line of the first block is one — write one a line", file)
    # Arrow guesses times from strings; the Time role does that itself, zones included.
    return pa.schema([(field.name, _plain(field.type)) for field in _with_big_ids(data, found)])


def _with_big_ids(data: bytes, found: pa.Schema) -> pa.Schema:
    """Arrow reads integers above int64 as floats, which lose digits: such columns become uint64."""
    for place, field in enumerate(found):
        if pa.types.is_floating(field.type):
            wanted = pa.field(field.name, pa.uint64())
            options = pajson.ParseOptions(explicit_schema=pa.schema([wanted]), unexpected_field_behavior="ignore")
            try:
                pajson.read_json(io.BytesIO(data), read_options=_whole(data), parse_options=options)
                found = found.set(place, wanted)
            except pa.ArrowException:
                continue
    return found


def _whole(data: bytes) -> pajson.ReadOptions:
    """One block, so that types do not depend on where blocks end."""
    return pajson.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 10))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


@dataclass(frozen=True)
class Libsvm(LineSource):
    """`label index:value index:value ...` lines, with columns `label` float64, `indices` list<int64>, `values`
    list<float32>.

    `binary`: labels are classes: 0/1, or -1/1 where -1 reads as 0; anything else is an error. Otherwise they are
    numbers. Text after `#` is ignored. A schema takes it as `Id("features", column="indices", weights="values")`.

    Raises DecodeError (file, line). Format: https://www.csie.ntu.edu.tw/~cjlin/libsvm/
    """

    path: Paths
    binary: bool = True

    def schema(self) -> pa.Schema:
        return pa.schema(
            [("label", pa.float64()), ("indices", pa.list_(pa.int64())), ("values", pa.list_(pa.float32()))]
        )

    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        arrays = dict(zip(self.schema().names, _parse_libsvm(lines, self._labels), strict=True))
        names = [name for name in self.schema().names if plan.columns is None or name in plan.columns]
        return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=names)

    def _labels(self, labels: np.ndarray) -> np.ndarray:
        if not self.binary:
            return labels
        wrong = ~np.isin(labels, (-1.0, 0.0, 1.0))
        if wrong.any():
            raise ValueError(f"label {labels[wrong][0]:g} is not -1, 0 or 1 (numbers need binary=False)")
        return np.asarray(np.maximum(labels, 0.0))


def _parse_libsvm(lines: list[bytes], read_labels: Callable[[np.ndarray], np.ndarray]) -> list[pa.Array]:
    """Every field of all lines at once: label, index:value, index:value ..."""
    if any(b"#" in line for line in lines):
        lines = [line.partition(b"#")[0] for line in lines]
    fields = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(pa.array(lines, pa.binary()).cast(pa.string())))
    counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False)
    flat = fields.flatten()
    is_pair = np.ones(len(flat), dtype=bool)
    is_pair[np.cumsum(counts) - counts] = False
    labels = flat.filter(pa.array(~is_pair)).cast(pa.float64()).to_numpy(zero_copy_only=False)
    pairs = flat.filter(pa.array(is_pair))
    if not pc.all(pc.equal(pc.count_substring(pairs, ":"), 1), min_count=0).as_py():
        raise ValueError("not 'label index:value index:value ...'")
    parts = pc.split_pattern(pairs, ":").flatten()
    even = np.arange(0, len(parts), 2)
    indices = parts.take(pa.array(even)).cast(pa.int64())
    values = parts.take(pa.array(even + 1)).cast(pa.float32())
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts - 1)]).astype(np.int32))
    return [
        pa.array(read_labels(labels)),
        pa.ListArray.from_arrays(offsets, indices),
        pa.ListArray.from_arrays(offsets, values),
    ]
