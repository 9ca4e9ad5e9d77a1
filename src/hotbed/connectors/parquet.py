# SPDX-License-Identifier: Apache-2.0
"""Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, groupby
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.files import Endings, FileSource, Rows, Section, first_line, one_path
from hotbed.connectors.paths import Paths, open_bytes, state_of
from hotbed.connectors.read_plan import READ_ROWS, ReadPlan
from hotbed.connectors.row_groups import RowGroup, RowGroups
from hotbed.connectors.source import Source, not_endless
from hotbed.connectors.types import completed, conform_all, has_open, usual, usual_types, widened
from hotbed.errors import DecodeError, SchemaError
from hotbed.files import new_file
from hotbed.objects import Identity, ObjectFile, each, is_url

_MOST_FOOTERS = 4096
_MOST_GROUPS = 8
_AHEAD_BYTES = 32 << 20
_FOOTERS: dict[tuple[str, Identity], pq.FileMetaData] = {}
"""Footers of objects that were read."""


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files.

    Only the columns that a schema needs are read. A column has the type that holds the values of
    all files.

    Args:
        path: a file, a glob or a list of both.

    Raises:
        DecodeError: a file is torn (file).
        SchemaError: a file lacks a column of the first one, or has a type that does not widen to
            the column's (file, column, both types).

    Example: `hb.sources.Parquet("events/day=*/part-*.parquet")`
    """

    endings: ClassVar[Endings] = {".parquet": {}, ".pq": {}}
    path: Paths

    def infer(self) -> pa.Schema:
        """Return the columns of the first file with rows, with types that hold those of all."""
        whole = list(map(_types_of, self._readable()))
        with_rows = [types for types, num_rows in whole if num_rows]
        if not with_rows:
            return whole[0][0]
        return reduce(widened, with_rows)

    @cached_property
    def _schema(self) -> pa.Schema:
        schema = self.inferred
        if has_open(schema):  # all files have only nulls there
            schema = completed(schema, usual_types(next(self._readable()).schema_arrow))
        return schema

    def _readable(self) -> Iterator[pq.ParquetFile]:
        """Yield the files that are whole; reading rows reports the others.

        Raises:
            DecodeError: no file is whole.
        """
        torn: DecodeError | None = None
        num_whole = 0
        files = self.files()
        _fetch_footers(files)
        for file in files:
            try:
                parquet = _open(file)
            except DecodeError as error:
                torn = torn or error
                continue
            num_whole += 1
            yield parquet
        if torn is not None and not num_whole:
            raise torn

    def num_rows(self) -> int:
        files = self.files()
        _fetch_footers(files)
        return sum(_open(file).metadata.num_rows for file in files)

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        return Section(file, rows=begin, num_rows=end - begin)

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        file = section.file
        wanted = _with_dictionaries(self.schema(), plan)
        opened = _source_of(file)
        if opened is not None and plan.row_groups is not None:
            opened.require(plan.row_groups.identities.setdefault(file, opened.identity))
        parquet = _open(file, (), opened, plan.row_groups)
        if not parquet.metadata.num_rows:
            return
        words = sorted(_text_columns(parquet.schema_arrow) & _dictionaries(wanted))
        if words:
            parquet = _open(file, words, opened, plan.row_groups)
        first = section.rows + skip_rows
        last = parquet.metadata.num_rows
        if section.num_rows is not None:
            last = section.rows + section.num_rows
        groups, done = _groups_with(parquet.metadata, first, last)
        parts: set[int] = set()
        if plan.row_groups is not None:
            parts = _partial(parquet.metadata, groups, section.rows, last)

        def alone(numbers: list[int], rows: int = batch_rows) -> Iterator[pa.RecordBatch]:
            return _batches(parquet, rows, numbers, wanted.names, opened)

        def shared(number: int) -> Iterator[pa.RecordBatch]:
            assert plan.row_groups is not None
            group = RowGroup(file, number, tuple(wanted.names), tuple(words))
            decoded = plan.row_groups.decoded(group, alone([number], READ_ROWS))
            return alone([number]) if decoded is None else decoded.cut(batch_rows)

        try:
            with opened or nullcontext():
                for batch in _rows_of(groups, parts, alone, shared):
                    begin = max(first, done)
                    end = min(last, done + batch.num_rows)
                    if begin < end:
                        rows = batch.slice(begin - done, end - begin)
                        numbers = np.arange(begin, end) + 1
                        yield conform_all(rows, wanted, file, plan.types), numbers
                    done += batch.num_rows
                    if done >= last:
                        break  # the rest of the group belongs to others
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(
                f"{file}: columns {wanted.names} cannot be read, got {first_line(error)}. Write "
                "them with plain types."
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise DecodeError(
                f"{file}: torn or damaged parquet after row {done}, got {first_line(error)}. Write "
                "the file again or leave it out.",
                file,
                done + 1,
            ) from error

    def write(self, rows: Source) -> int:
        """Write the rows of another source as one file, and return their number.

        Raises:
            ConfigError: `path` is more than one file, or the source is endless.
        """
        path = one_path("parquet.path", self.path)
        not_endless(rows, "a file to write")
        num_rows = 0
        with new_file(Path(path)) as file, pq.ParquetWriter(file, rows.schema()) as writer:
            for batch, _ in rows.read():
                writer.write_batch(batch)
                num_rows += batch.num_rows
        return num_rows


def _groups_with(metadata: pq.FileMetaData, first: int, last: int) -> tuple[list[int], int]:
    """Return the row groups with rows from `first` up to `last`, and the rows before them."""
    groups: list[int] = []
    rows_before = 0
    end = 0
    for group in range(metadata.num_row_groups):
        begin = end
        end += metadata.row_group(group).num_rows
        if end <= first:
            rows_before = end
        elif begin < last:
            groups.append(group)
    return groups, rows_before


def _partial(metadata: pq.FileMetaData, groups: list[int], first: int, last: int) -> set[int]:
    """Return those row groups of which rows lie outside of `first` to `last`."""
    ends = list(accumulate(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))
    begins = [0, *ends]
    return {group for group in groups if begins[group] < first or ends[group] > last}


def _with_dictionaries(schema: pa.Schema, plan: ReadPlan) -> pa.Schema:
    """Return the fields to read, with dictionaries for the text that `plan` takes so."""
    fields: list[pa.Field] = []
    for name in plan.wanted(schema.names):
        field = schema.field(name)
        if name in plan.words and pa.types.is_string(field.type):
            field = field.with_type(pa.dictionary(pa.int32(), field.type))
        fields.append(field)
    return pa.schema(fields)


def _dictionaries(schema: pa.Schema) -> set[str]:
    return {column.name for column in schema if pa.types.is_dictionary(column.type)}


def _text_columns(schema: pa.Schema) -> set[str]:
    return {column.name for column in schema if pa.types.is_string(column.type)}


def _batches(
    parquet: pq.ParquetFile,
    batch_rows: int,
    groups: list[int],
    names: list[str],
    opened: ObjectFile | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups; those with dictionaries inside lists a group at a time.

    Arrow does not join these dictionaries. While a group of an object is decoded, the next ones
    are fetched.
    """
    if opened is not None:
        for place, group in enumerate(groups):
            opened.will_read(*_coming(parquet.metadata, groups[place:], names))
            yield from parquet.iter_batches(batch_rows, row_groups=[group], columns=names)
        return
    at_once = [groups]
    kinds = [column.type for column in parquet.schema_arrow if column.name in names]
    if any(pa.types.is_nested(kind) and not usual(kind).equals(kind) for kind in kinds):
        at_once = [[group] for group in groups]
    for some in at_once:
        yield from parquet.iter_batches(batch_rows, row_groups=some, columns=names)


def _rows_of(
    groups: list[int],
    parts: set[int],
    alone: Callable[[list[int]], Iterator[pa.RecordBatch]],
    shared: Callable[[int], Iterator[pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups; those of `parts` from what readers share."""
    for is_part, run in groupby(groups, parts.__contains__):
        if is_part:
            for group in run:
                yield from shared(group)
        else:
            yield from alone(list(run))


def _types_of(parquet: pq.ParquetFile) -> tuple[pa.Schema, int]:
    """Return the columns of a file, null where all values are, and the number of its rows."""
    columns: list[pa.Field] = []
    places = {parquet.schema.column(i).path: i for i in range(len(parquet.schema))}
    for column in usual_types(parquet.schema_arrow):
        is_flat = not pa.types.is_nested(column.type)
        if is_flat and _is_all_null(parquet.metadata, places[column.name]):
            column = column.with_type(pa.null())
        columns.append(column)
    return pa.schema(columns), parquet.metadata.num_rows


def _is_all_null(metadata: pq.FileMetaData, place: int) -> bool:
    """Return whether the statistics say that a column holds only nulls."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(place).statistics
        if statistics is None or not statistics.has_null_count:
            return False
        if statistics.null_count != group.num_rows:
            return False
    return True


def row_groups(file: str) -> list[pq.RowGroupMetaData]:
    """Return what a file says of its row groups.

    For a damaged file it is nothing: reading its rows reports the damage.
    """
    try:
        metadata = _open(file).metadata
    except DecodeError:
        return []
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def _coming(
    metadata: pq.FileMetaData, groups: Sequence[int], names: Sequence[str]
) -> Iterator[list[tuple[int, int]]]:
    """Yield the ranges of bytes of the next row groups: of two, or of as many as are small."""
    num_bytes = 0
    for place, group in enumerate(groups[:_MOST_GROUPS]):
        ranges = list(_ranges(metadata, group, names))
        num_bytes += sum(end - begin for begin, end in ranges)
        if place > 1 and num_bytes > _AHEAD_BYTES:
            return
        yield ranges


def _ranges(
    metadata: pq.FileMetaData, group: int, names: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of the bytes of columns in a row group."""
    row_group = metadata.row_group(group)
    for place in range(row_group.num_columns):
        column = row_group.column(place)
        if column.path_in_schema.partition(".")[0] in names:
            begin = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                begin = min(begin, column.dictionary_page_offset)
            yield begin, begin + column.total_compressed_size


def _source_of(file: str) -> ObjectFile | None:
    """Return an object that is open; None for a local file."""
    return ObjectFile(file) if is_url(file) else None


def _open(
    file: str,
    dictionaries: Sequence[str] = (),
    opened: ObjectFile | None = None,
    shared: RowGroups | None = None,
) -> pq.ParquetFile:
    opened = opened or _source_of(file)
    footer = None if opened is None else _FOOTERS.get((file, opened.identity))
    state = None if shared is None else state_of(file)
    if shared is not None and state is not None:
        footer = shared.footers.get(state)
    try:
        parquet = pq.ParquetFile(
            opened or open_bytes(file), read_dictionary=list(dictionaries), metadata=footer
        )
    except (pa.ArrowException, OSError) as error:
        raise DecodeError(
            f"{file}: not a whole parquet file, got {first_line(error)}. Write the file again or "
            "leave it out.",
            file,
        ) from error
    if shared is not None and state is not None:
        shared.footers[state] = parquet.metadata
    if opened is not None and footer is None:
        while len(_FOOTERS) >= _MOST_FOOTERS:
            _FOOTERS.pop(next(iter(_FOOTERS)), None)
        _FOOTERS[file, opened.identity] = parquet.metadata
    return parquet


def _fetch_footers(files: Sequence[str]) -> None:
    """Read the footers of several objects at a time; damaged ones are reported later."""

    def fetch(file: str) -> None:
        with suppress(DecodeError):
            _open(file)

    urls = [file for file in files if is_url(file)]
    if len(urls) > 1:
        each(fetch, urls)
