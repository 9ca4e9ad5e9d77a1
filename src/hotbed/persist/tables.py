# SPDX-License-Identifier: Apache-2.0
"""Tables into and out of a checkpoint, and rows of another job into tables of this one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from hotbed.config import describe
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, PersistError
from hotbed.persist.format import CheckpointWriter, Link, Reader
from hotbed.persist.rows import partition_ranges, with_columns
from hotbed.persist.store import ADVICE

BATCH_ROWS = 4096


class TableRows(Protocol):
    """The rows of a table at one moment: what `Table.snapshot` gives."""

    num_rows: int
    changes: bool
    scalars: dict[str, Any]

    def rows(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def candidates(self) -> Iterator[pa.RecordBatch]: ...
    def close(self, saved: bool) -> None: ...


@dataclass(frozen=True)
class CapturedTable:
    """One table in a capture. `total`: its rows at that moment; `rows`: all of them, or those that
    changed.
    """

    name: str
    config: Mapping[str, Any]
    total: int
    rows: TableRows


class LiveRows:
    """A table itself in the place of a snapshot, for a save that nothing runs beside."""

    def __init__(self, table: Table) -> None:
        self.num_rows = len(table)
        self.changes = False
        self.scalars = table.scalars()
        self.rows = table.export
        self.candidates = table.candidates

    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def close(self, saved: bool) -> None: ...


def write_table(writer: CheckpointWriter, number: int, table: CapturedTable) -> dict[str, Any]:
    folder = table_folder(number, table.name)
    rows = table.rows
    spans = partition_ranges(rows.num_rows)
    # every part before the next kind: a part's file is written in one go, and tombstones are few
    parts = _parts(writer, f"{folder}/rows", spans, rows.rows)
    removed = (
        _parts(writer, f"{folder}/removed", partition_ranges(0), rows.removed)
        if rows.changes
        else []
    )
    file = f"{folder}/candidates.arrow"
    waiting = writer.write_batches(file, rows.candidates())
    return {
        "name": table.name,
        "config": table.config,
        "rows": table.total,
        "scalars": rows.scalars,
        "parts": parts,
        "removed": removed,
        "candidates": {"file": file, "rows": waiting} if waiting else None,
    }


def write_merged(
    writer: CheckpointWriter, number: int, reader: Reader, name: str, columns: tuple[str, ...] = ()
) -> dict[str, Any]:
    """All rows of a table of a chain as parts of a full; returns the table's entry. `columns`: only
    these, where they are.
    """
    entry = reader.links[-1].entry(name)
    spans = partition_ranges(entry["rows"])
    parts = []
    for span, batch in zip(spans, reader.spans(name, spans), strict=True):
        if batch is not None:
            file = f"{table_folder(number, name)}/rows-{span.start:03d}-{span.stop - 1:03d}.arrow"
            rows = writer.write_batches(file, [with_columns(batch, columns) if columns else batch])
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    return {**entry, "parts": parts, "removed": []}


def _parts(
    writer: CheckpointWriter, name: str, spans: list[range], batches: Any
) -> list[dict[str, Any]]:
    parts = []
    for span in spans:
        file = f"{name}-{span.start:03d}-{span.stop - 1:03d}.arrow"
        if rows := writer.write_batches(file, _gathered(batches(span))):
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    return parts


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least BATCH_ROWS, but for the last."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        waiting.append(batch)
        held += batch.num_rows
        if held >= BATCH_ROWS:
            yield pa.concat_batches(waiting) if len(waiting) > 1 else batch
            waiting = []
            held = 0
    if waiting:
        yield pa.concat_batches(waiting)


def table_folder(number: int, name: str) -> str:
    """Folder of a table: its number and its name, made safe for any file system.

    >>> table_folder(3, "item/colour")
    'tables/003-item%2Fcolour'
    """
    return f"tables/{number:03d}-{quote(name, safe='')[:100]}"


def load_table(reader: Reader, name: str, table: Table) -> None:
    """Load a table of a checkpoint, its chain in order, in the place of all that `table` holds."""
    if len(table) or table.step:
        table.clear()
    for link in reader.links:
        for batch in link.parts(name, "removed"):
            table.remove(batch.column("id"))
        table.load(link.parts(name))
    settle_table(table, reader.links[-1].entry(name), reader.links[-1])
    table.load_candidates(reader.candidates(name))


def settle_table(table: Table, entry: Mapping[str, Any], link: Link) -> None:
    """After the rows of a full or a delta: what belongs to the table as a whole, and a check of its
    size.
    """
    table.load_scalars(entry["scalars"])
    if len(table) != entry["rows"]:
        raise FormatError(
            f"{link.store.place(link.folder)}: table {entry['name']!r} has {len(table)} rows "
            "after loading — "
            f"received {entry['rows']} in the manifest — {ADVICE}"
        )


def warm_start(
    tables: Mapping[str, Table],
    checkpoint: Reader,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    *,
    optimizer_state: bool = False,
    now: int | None = None,
) -> dict[str, str]:
    """Rows of another job's checkpoint into tables of this one; returns table here -> table there.

    `rename`: names there to names here, or pairs of a regular expression that matches the whole
    name there and its replacement, the first that matches counts. Tables without a counterpart,
    here or there, are left alone. `optimizer_state`: also state and the step that bias correction
    counts; both tables then need the same rule. Counts and times come where the table here keeps
    them; `now`: int64 microseconds, when rows without a time count as seen. Raises PersistError for
    two tables with one name, other dims or rules, and FormatError naming a bad file, before
    anything changes.

    Example: `warm_start({"item": table}, open_checkpoint("old"), rename=[(r"v1_(.*)", r"\\1")])`
    """
    sources: dict[str, str] = {}
    for there in checkpoint.table_names:
        here = _renamed(there, rename)
        if here in sources:
            raise PersistError(
                f"warm start: two tables become {here!r} — received {sources[here]!r} and "
                f"{there!r} — "
                "rename one of them"
            )
        sources[here] = there
    found = {here: there for here, there in sources.items() if here in tables}
    for here, there in found.items():
        entry = checkpoint.links[-1].entry(there)["config"]
        _check_alike(tables[here], entry, there, optimizer_state=optimizer_state)
        timed = next(checkpoint.links[0].parts(there), None)
        if (
            now is None
            and tables[here].needs_times
            and timed is not None
            and "last_seen" not in timed.schema.names
        ):
            raise PersistError(
                f"warm start: table {here!r} needs times — received none in {there!r} — give "
                "now=, when its "
                "rows count as seen"
            )
    checkpoint.verify()
    for here, there in found.items():
        table = tables[here]
        scalars = checkpoint.links[-1].entry(there)["scalars"]
        dropped = ("partition", "updated") if optimizer_state else ("partition", "updated", "state")
        for batch in checkpoint.rows(there):
            kept = batch.select([name for name in batch.schema.names if name not in dropped])
            if now is not None and "last_seen" not in kept.schema.names:
                kept = kept.append_column(
                    "last_seen", pa.array(np.full(kept.num_rows, now, np.int64))
                )
            table.load([kept])
        if optimizer_state:
            table.load_scalars(
                {**table.scalars(), "step": scalars["step"], "rates": scalars["rates"]}
            )
    return found


def _renamed(name: str, rename: Mapping[str, str] | Sequence[tuple[str, str]]) -> str:
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    for pattern, replacement in rename:
        try:
            if (match := re.fullmatch(pattern, name)) is not None:
                return match.expand(replacement)
        except (re.error, IndexError) as error:
            raise PersistError(
                f"warm start: no rule to rename by — received {(pattern, replacement)!r}: {error} "
                "— give a "
                "regular expression and what takes its place"
            ) from error
    return name


def _check_alike(
    table: Table, config: Mapping[str, Any], there: str, *, optimizer_state: bool
) -> None:
    if config["dim"] != table.dim:
        raise PersistError(
            f"warm start: table {table.name!r} has dim {table.dim} — received {config['dim']} in "
            f"{there!r} — "
            "build it with the same dim, or rename it away"
        )
    rule = describe(table.rule)
    if optimizer_state and rule["kind"] != config["rule"]["kind"]:
        raise PersistError(
            f"warm start: table {table.name!r} has the rule {rule['kind']} — received the state of "
            f"{config['rule']['kind']} in {there!r} — use optimizer_state=False"
        )
