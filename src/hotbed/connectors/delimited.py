# SPDX-License-Identifier: Apache-2.0
"""Fields with something between them: csv, tsv and their relatives, and libsvm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hotbed.connectors.base import Place, ReadPlan, Skips
from hotbed.connectors.files import FileSource, Paths
from hotbed.connectors.lines import LineSource
from hotbed.errors import ConfigError, DecodeError, SchemaError

SAMPLE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 22
# An integer is written without sign "+", leading zeros or point: "007" and hex hashes made of digits stay strings.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(), "uint64": pa.uint64(), "float64": pa.float64(), "float32": pa.float32(), "string": pa.string(),
}  # fmt: skip


@dataclass(frozen=True)
class Csv(FileSource):
    r"""Delimited text, a line a row; LF and CRLF, gzip/zstd/bz2 by file ending.

    `delimiter`: one or more characters (`"\t"` for tsv, `"::"`). `header`: the first line holds the names. `columns`:
    without header the names in order, as a list or as a mapping name -> type ("int64", "uint64", "float64", "float32",
    "string"; None = infer); with header a list renames all columns and a mapping declares types of some.
    `null_values`: texts that mean "missing". `quote`: None where quotes are ordinary characters. Types are inferred
    from the first MiB: a column is integer only if all its values there are plain integers, so hex hashes and "007"
    stay strings.

    Raises DecodeError (file, row = 1-based line, column) at a bad number or a line with too few or too many fields.

    Example: `hb.sources.Csv("day_0.tsv", delimiter="\t", header=False, columns=["label", "I1", "C1"])`
    """

    path: Paths
    delimiter: str = ","
    header: bool = True
    columns: Sequence[str] | Mapping[str, str | None] | None = None
    null_values: Sequence[str] = ("",)
    quote: str | None = '"'
    encoding: str = "utf8"

    def __post_init__(self) -> None:
        if not self.delimiter:
            raise ConfigError(
                "delimiter: must not be empty — received '' — give the text between two fields, such as ','"
            )
        if self.quote is not None and len(self.quote) != 1:
            raise ConfigError(f"quote: one character or None — received {self.quote!r} — use '\"' or None")
        for name, kind in self._declared().items():
            if kind is not None and kind not in _TYPES:
                raise ConfigError(f"columns.{name}: unknown type — received {kind!r} — use one of {', '.join(_TYPES)}")

    def schema(self) -> pa.Schema:
        cached: pa.Schema | None = self.__dict__.get("_schema")
        if cached is None:
            cached = self._infer(self.files()[0])
            object.__setattr__(self, "_schema", cached)
        return cached

    def place(self, file: str, row: int) -> Place:
        return Place(file, row + (2 if self.header else 1), "line")

    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        names = [name for name in schema.names if plan.columns is None or name in plan.columns]
        types = {name: plan.types.get(name, schema.field(name).type) for name in names}
        try:
            yield from _drop(self._batches(file, names, types, plan.skips, threads=True), skip_rows)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if plan.skips is None:
                # Only a single-threaded reader knows the line, so the slow reader runs on the way to an error.
                try:
                    for _ in self._batches(file, names, types, None, threads=False):
                        pass
                except (pa.ArrowException, OSError, UnicodeDecodeError) as located:
                    raise _decode_error(located, file, schema.names) from located
            raise _decode_error(error, file, schema.names) from error

    def _declared(self) -> dict[str, str | None]:
        return dict(self.columns) if isinstance(self.columns, Mapping) else {}

    def _options(self, threads: bool, skips: Skips | None) -> dict[str, Any]:
        names = None
        if self.columns is not None and not (self.header and isinstance(self.columns, Mapping)):
            names = list(self.columns)

        def leave_out(row: Any) -> str:
            if skips is None:
                return "error"
            line = f"line {row.number}: " if row.number else ""
            skips.add("fields", f"{line}{row.actual_columns} fields instead of {row.expected_columns}: {row.text!r}")
            return "skip"

        return {
            "read_options": pacsv.ReadOptions(
                use_threads=threads,
                block_size=BLOCK_BYTES,
                column_names=names,
                autogenerate_column_names=names is None and not self.header,
                skip_rows=1 if names is not None and self.header else 0,
                encoding=self.encoding,
            ),
            "parse_options": pacsv.ParseOptions(
                delimiter=self.delimiter if len(self.delimiter) == 1 else "\x1f",
                quote_char=self.quote or False,
                double_quote=self.quote is not None,
                newlines_in_values=self.quote is not None,
                invalid_row_handler=leave_out,
            ),
        }

    def _open(self, file: str) -> Any:
        if len(self.delimiter) == 1:
            return file
        # pyarrow takes one byte; long delimiters become the unit separator. The file passes through memory whole.
        with pa.input_stream(file) as stream:
            return pa.BufferReader(stream.read().replace(self.delimiter.encode(), b"\x1f"))

    def _batches(
        self, file: str, names: list[str], types: Mapping[str, pa.DataType], skips: Skips | None, threads: bool
    ) -> Iterator[pa.RecordBatch]:
        # Where bad numbers are to be skipped, pyarrow must not see them: text first, then a cast that forgives.
        asked = {name: pa.string() if skips is not None else kind for name, kind in types.items()}
        convert = pacsv.ConvertOptions(
            column_types=asked, include_columns=names, null_values=list(self.null_values), strings_can_be_null=True
        )
        try:
            reader = pacsv.open_csv(self._open(file), convert_options=convert, **self._options(threads, skips))
        except pa.ArrowKeyError as error:
            raise SchemaError(
                f"{file}: a column is absent — {error} — give all files the columns of the first: {self.schema().names}"
            ) from error
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        with reader:
            for batch in reader:
                yield batch if skips is None else _forgive(batch, types, skips, file)

    def _infer(self, file: str) -> pa.Schema:
        try:
            with pa.input_stream(file) as stream:
                head = stream.read(SAMPLE_BYTES)
        except OSError as error:
            raise _decode_error(error, file, []) from error
        if len(head) == SAMPLE_BYTES and b"\n" in head:
            head = head[: head.rindex(b"\n") + 1]
        head = head.replace(self.delimiter.encode(), b"\x1f") if len(self.delimiter) > 1 else head
        options = self._options(threads=False, skips=None)
        options["parse_options"].invalid_row_handler = lambda row: "skip"  # reading will name it
        try:
            names = pacsv.read_csv(pa.BufferReader(head), **options).schema.names
            convert = pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=list(self.null_values),
                strings_can_be_null=True,
            )
            table = pacsv.read_csv(pa.BufferReader(head), convert_options=convert, **options)
        except pa.ArrowException as error:
            raise _decode_error(error, file, []) from error
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(
                f"{file}: columns {twice} appear twice — received {names} — rename all with columns=[...]"
            )
        declared = self._declared()
        unknown = [name for name in declared if name not in names]
        if unknown:
            raise SchemaError(
                f"{file}: declared columns {unknown} are absent — the file has {names} — correct `columns`"
            )
        return pa.schema(
            [(name, _TYPES[declared.get(name) or ""] if declared.get(name) else _infer(table[name])) for name in names]
        )


def _infer(column: pa.ChunkedArray) -> pa.DataType:
    """The narrowest of int64, uint64, float64 and string that loses nothing."""
    values = column.drop_null()
    if len(values) == 0:
        return pa.string()
    if pc.all(pc.match_substring_regex(values, _INTEGER)).as_py():
        for kind in (pa.int64(), pa.uint64()):
            try:
                values.cast(kind)
                return kind
            except pa.ArrowInvalid:
                continue
        return pa.string()
    if pc.any(pc.match_substring_regex(values, r"^-?0[0-9]")).as_py():
        return pa.string()
    try:
        values.cast(pa.float64())
        return pa.float64()
    except pa.ArrowInvalid:
        return pa.string()


def _drop(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        dropped = min(rows, batch.num_rows)
        rows -= dropped
        if batch.num_rows > dropped:
            yield batch.slice(dropped)


def _forgive(batch: pa.RecordBatch, types: Mapping[str, pa.DataType], skips: Skips, file: str) -> pa.RecordBatch:
    """`batch` of strings cast to `types`; rows with a value that does not fit are left out and counted."""
    text = pl.DataFrame(batch)
    wanted = pl.DataFrame(pa.schema(list(types.items())).empty_table()).schema
    cast = text.select([pl.col(name).cast(kind, strict=False) for name, kind in wanted.items()])
    bad = pl.Series([False]).new_from_index(0, len(text)) if not len(text) else pl.repeat(False, len(text), eager=True)
    for name in wanted:
        wrong = cast[name].is_null() & text[name].is_not_null()
        if wrong.any():
            skips.add(
                "value",
                f"{file}: column {name!r}: {text[name].filter(wrong)[0]!r} is not {wanted[name]}",
                int(wrong.sum()),
            )
            bad = bad | wrong
    kept = cast.filter(~bad).to_arrow().cast(pa.schema(list(types.items()))).combine_chunks().to_batches()
    return kept[0] if kept else pa.schema(list(types.items())).empty_table().to_batches()[0]


def _decode_error(error: Exception, file: str, names: list[str]) -> DecodeError:
    text = (str(error).splitlines() or [""])[0]
    row = re.search(r"Row #(\d+)", text)
    column = re.search(r"In CSV column #(\d+)", text)
    line = int(row.group(1)) if row else None
    name = names[int(column.group(1))] if column and int(column.group(1)) < len(names) else None
    where = file + (f", line {line}" if line else "") + (f", column {name!r}" if name else "")
    what = text.rsplit("Row #", 1)[-1].split(": ", 1)[-1] if row else text
    return DecodeError(
        f"{where}: cannot be read — {what} — correct it, declare the column's type in `columns`, or use "
        "on_error='skip'",
        file, line, name,
    )  # fmt: skip


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
