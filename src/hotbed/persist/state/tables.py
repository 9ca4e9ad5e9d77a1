# SPDX-License-Identifier: Apache-2.0
"""Tables into and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.snapshot import joined_partitions, with_dtype
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, PersistError
from hotbed.persist.container.format import CheckpointWriter, Link, Reader
from hotbed.persist.container.manifest import (
    CandidatesEntry,
    PartEntry,
    Scalars,
    SketchEntry,
    TableEntry,
)
from hotbed.persist.container.row_files import OwnedPartitions, every_partition, owned_rows
from hotbed.persist.container.row_order import partition_ranges
from hotbed.persist.container.store import ADVICE

if TYPE_CHECKING:
    from hotbed.parallel import Shard

BATCH_ROWS = 4096
_MERGED_ROWS = 1 << 16  # that lie in memory at once, more than once, while files are merged
_COUNTED = ("admitted", "refused", "evicted", "evicted_by")  # scalars that count rows


class CapturedRows(Protocol):
    """The rows of a table at one moment: what `Table.snapshot` returns."""

    num_rows: int
    changes: bool
    scalars: dict[str, Any]
    read_bytes: int

    def rows(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def candidates(self) -> Iterator[pa.RecordBatch]: ...
    def sketch(self) -> Iterator[pa.RecordBatch]: ...
    def close(self, saved: bool) -> None: ...


@dataclass(frozen=True)
class CapturedTable:
    """One table in a capture.

    `total`: its rows at that moment; `rows`: all of them, or those that changed; `edits`:
    `Table.edits`.
    """

    name: str
    config: Mapping[str, Any]
    total: int
    rows: CapturedRows
    edits: str


class LiveRows:
    """A table itself in the place of a snapshot, for a save while nothing else runs."""

    def __init__(self, table: Table) -> None:
        self.num_rows = len(table)
        self.changes = False
        self.scalars = table.scalars()
        self.read_bytes = 0  # an export does not count what it reads
        self.candidates = table.candidates
        self.sketch = table.sketch
        self._table = table

    def rows(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]:
        table = self._table
        return joined_partitions(self._read, partitions, table.native, table.state_width)

    def _read(self, partitions: list[int]) -> dict[str, Any]:
        return with_dtype(self._table.native.export_rows(partitions), self._table.dtype)

    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def close(self, saved: bool) -> None: ...


# --- writing ------------------------------------------------------------------------------------


def write_rows(
    writer: CheckpointWriter, number: int, table: CapturedTable, shard: Shard
) -> tuple[tuple[PartEntry, ...], tuple[PartEntry, ...]]:
    """Write the rows of a captured table that this process holds; return their parts.

    The second value: the parts of removed ids, where the capture holds only what changed.
    """
    folder = table_folder(number, table.name)
    rows = table.rows
    # every part before the removed ids: a part's file is written in one go, and removals are few
    spans = shard.spans(table.name, partition_ranges(rows.num_rows * shard.size))
    parts = _write_parts(writer, f"{folder}/rows", spans, rows.rows)
    removed: tuple[PartEntry, ...] = ()
    if rows.changes:
        spans = shard.spans(table.name, partition_ranges(0))
        removed = _write_parts(writer, f"{folder}/removed", spans, rows.removed)
    return parts, removed


def write_waiting(
    writer: CheckpointWriter, number: int, table: CapturedTable, shard: Shard
) -> tuple[CandidatesEntry | None, SketchEntry | None]:
    """Write the counts of the ids of all processes that wait for admission, in the first one."""
    folder = table_folder(number, table.name)
    owned = shard.owned(table.name)
    candidates = None
    sketch = None
    waiting = shard.collected(owned_rows(table.rows.candidates(), owned))
    sketches = shard.collected(owned_rows(table.rows.sketch(), owned))
    with shard.together():
        file = f"{folder}/candidates.arrow"
        if num_candidates := writer.write_batches(file, waiting):
            candidates = CandidatesEntry(file=file, rows=num_candidates)
        file = f"{folder}/sketch.arrow"
        if num_generations := writer.write_batches(file, sketches):
            sketch = SketchEntry(file=file, rows=num_generations)
    return candidates, sketch


def joined_scalars(name: str, every: Sequence[Mapping[str, Any]], edits: Sequence[str]) -> Scalars:
    """Return the scalars of a table of which each process holds a part.

    `edits`: its `Table.edits` in each process.

    Raises:
        PersistError: they differ in more than the counters of rows, or rows were changed otherwise.
    """
    if len(set(edits)) > 1:
        raise PersistError(
            f"table {name!r}: all ranks must make the calls that change its rows, got the last "
            f"ones {list(edits)} on ranks 0 to {len(edits) - 1}. Resume from the newest checkpoint."
        )
    joined = dict(every[0])
    for counter in ("admitted", "refused", "evicted"):
        joined[counter] = sum(scalars[counter] for scalars in every)
    reasons = [scalars["evicted_by"] for scalars in every]
    joined["evicted_by"] = {reason: sum(of[reason] for of in reasons) for reason in reasons[0]}
    for number, scalars in enumerate(every):
        differ = [key for key in joined if key not in _COUNTED and joined[key] != scalars.get(key)]
        if differ:
            raise PersistError(
                f"table {name!r}: all ranks must have learned the same steps, got "
                f"{differ[0]} {joined[differ[0]]} on rank 0 and {scalars.get(differ[0])} on rank "
                f"{number}. Resume from the newest checkpoint."
            )
    return cast(Scalars, joined)


def write_merged(
    writer: CheckpointWriter,
    number: int,
    reader: Reader,
    name: str,
    columns: tuple[str, ...] | None = None,
) -> TableEntry:
    """Write all rows of a table of a chain as parts of a full; return its entry in the manifest.

    `columns`: write only these, as far as the table has them; None: all.
    """
    entry = reader.entry(name)
    pieces = partition_ranges(entry.rows, _MERGED_ROWS)
    merged = zip(pieces, reader.spans(name, pieces), strict=True)

    def rows_of(span: range) -> Iterator[pa.RecordBatch]:
        for piece, batch in merged:
            if batch is not None:
                yield batch if columns is None else with_columns(batch, columns)
            if piece.stop == span.stop:
                return

    folder = table_folder(number, name)
    parts = _write_parts(writer, f"{folder}/rows", partition_ranges(entry.rows), rows_of)
    return replace(entry, parts=parts, removed=())


def _write_parts(
    writer: CheckpointWriter,
    name: str,
    spans: list[range],
    batches_of: Callable[[range], Iterable[pa.RecordBatch]],
) -> tuple[PartEntry, ...]:
    """Write one file for each span of partitions that has rows."""
    parts = []
    for span in spans:
        first = span.start
        last = span.stop - 1
        file = f"{name}-{first:03d}-{last:03d}.arrow"
        rows = writer.write_batches(file, _gathered(batches_of(span)))
        if rows:
            parts.append(PartEntry(file=file, first=first, last=last, rows=rows))
    return tuple(parts)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at least BATCH_ROWS; only the last may be smaller."""
    waiting: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in batches:
        waiting.append(batch)
        num_rows += batch.num_rows
        if num_rows >= BATCH_ROWS:
            yield _joined(waiting)
            waiting = []
            num_rows = 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def table_folder(number: int, name: str) -> str:
    """Return the folder of a table: its number and its name, made safe for any file system.

    >>> table_folder(3, "item/colour")
    'tables/003-item%2Fcolour'
    """
    return f"tables/{number:03d}-{quote(name, safe='')[:100]}"


def with_columns(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    """Return those of the named columns that the batch has."""
    return batch.select([name for name in columns if name in batch.schema.names])


def flat(column: pa.Array) -> NDArray[Any]:
    """Return a column's values as one flat array, without a copy where Arrow allows that."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    values: NDArray[Any] = column.to_numpy()
    return values


# --- loading ------------------------------------------------------------------------------------


def load_table(reader: Reader, name: str, table: Table, shard: Shard) -> None:
    """Load what this process holds of a table of a checkpoint, its chain in order.

    It takes the place of all that `table` holds.
    """
    if len(table) or table.step:
        table.clear()
    for link in reader.links:
        load_changes(link, name, table, shard.owned)
    table.load_scalars(own_scalars(link.entry(name).scalars, shard))
    waiting = reader.waiting(name)
    owned = shard.owned(name)
    table.load_candidates(owned_rows(waiting.candidates, owned))
    table.load_sketch(owned_rows(waiting.sketch, owned))


def own_scalars(scalars: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return the scalars of a table as this process holds them.

    The first process continues the counts of all; the others begin at 0.
    """
    if shard.is_first:
        return dict(scalars)
    without_counts = {counter: 0 for counter in _COUNTED if counter in scalars}
    return {**scalars, **without_counts, "evicted_by": {}}


def load_changes(
    link: Link, name: str, table: Table, owned: OwnedPartitions = every_partition
) -> None:
    """Load the rows of one link into a table that holds the state before it."""
    for batch in link.removed(name, owned):
        table.discard(batch.column("id"))
    batches = link.parts(name, owned)
    if table.clock == "steps":
        # rows of a table that kept no ages count as seen now: else all of them would expire at once
        step = int(link.entry(name).scalars["step"])
        batches = (seen_at(batch, step) for batch in batches)
    table.load(batches)


def seen_at(batch: pa.RecordBatch, moment: int) -> pa.RecordBatch:
    """Return rows that count as seen at `moment`, unless they have a time of their own."""
    if "last_seen" in batch.schema.names:
        return batch
    times = np.full(batch.num_rows, moment, np.int64)
    return batch.append_column("last_seen", pa.array(times))


def check_rows(link: Link, name: str, num_rows: int) -> None:
    """Raise FormatError unless a table that was loaded has the rows that the manifest says."""
    entry = link.entry(name)
    if num_rows != entry.rows:
        raise FormatError(
            f"{link.store.place(link.folder)}: table {name!r} has other rows than the manifest "
            f"says, got {num_rows} instead of {entry.rows}. {ADVICE}"
        )
