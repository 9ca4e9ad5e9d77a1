# SPDX-License-Identifier: Apache-2.0
"""Tables into and out of a checkpoint, and rows of another job into tables of this one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import describe
from hotbed.data.schema import Schema
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, PersistError
from hotbed.persist.format import CheckpointWriter, Link, Reader, partition_ranges
from hotbed.persist.manifest import CandidatesEntry, PartEntry, Scalars, SketchEntry, TableEntry
from hotbed.persist.row_files import OwnedPartitions, every_partition, owned_rows
from hotbed.persist.store import ADVICE
from hotbed.persist.words import Translation, left_out, translation_of

if TYPE_CHECKING:
    from hotbed.parallel import Shard

log = logging.getLogger("hotbed.persist")

BATCH_ROWS = 4096
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

    `total`: its rows at that moment; `rows`: all of them, or those that changed.
    """

    name: str
    config: Mapping[str, Any]
    total: int
    rows: CapturedRows


class LiveRows:
    """A table itself in the place of a snapshot, for a save while nothing else runs."""

    def __init__(self, table: Table) -> None:
        self.num_rows = len(table)
        self.changes = False
        self.scalars = table.scalars()
        self.read_bytes = 0  # an export does not count what it reads
        self.rows = table.export
        self.candidates = table.candidates
        self.sketch = table.sketch

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


def joined_scalars(name: str, every: Sequence[Mapping[str, Any]]) -> Scalars:
    """Return the scalars of a table of which each process holds a part.

    Raises:
        PersistError: they differ in more than the counters of rows.
    """
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
    spans = partition_ranges(entry.rows)
    merged = reader.spans(name, spans)

    def next_span(span: range) -> Iterator[pa.RecordBatch]:
        batch = next(merged)
        if batch is not None:
            yield batch if columns is None else with_columns(batch, columns)

    folder = table_folder(number, name)
    parts = _write_parts(writer, f"{folder}/rows", spans, next_span)
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

    One process goes on counting from the counts of all.
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
        table.remove(batch.column("id"))
    batches = link.parts(name, owned)
    if table.clock == "steps":
        # rows of a table that kept no ages count as seen now: else all of them would expire at once
        step = int(link.entry(name).scalars["step"])
        batches = (_seen(batch, step) for batch in batches)
    table.load(batches)


def _seen(batch: pa.RecordBatch, moment: int) -> pa.RecordBatch:
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


# --- rows of another job ------------------------------------------------------------------------

Renames = Mapping[str, str] | Sequence[tuple[str, str]]
"""Names there to names here, or pairs of a pattern and its replacement."""


def warm_start(
    tables: Mapping[str, Table],
    checkpoint: Reader,
    rename: Renames = (),
    *,
    optimizer_state: bool = False,
    now: int | None = None,
    schema: Schema | None = None,
    computed: Collection[str] = (),
) -> dict[str, str]:
    """Load rows of another job's checkpoint into tables of this one.

    Tables without a counterpart, here or there, are left alone and logged. Counts and times are
    loaded where the table here keeps them. Where both schemas map a feature by a vocabulary, a row
    gets the id that its word has here, and rows of words that are not known here are left out.

    Args:
        tables: the tables of this job by name.
        checkpoint: the state of the other job.
        rename: names there to names here, or pairs of a regular expression that matches the whole
            name there and its replacement; the first pair that matches counts.
        optimizer_state: also load optimizer state and the step that bias correction counts. Both
            tables then need the same rule.
        now: Int64 microseconds at which rows without a time count as seen; rows of a table that
            counted steps have none. In a table here that counts steps, all rows count as seen at
            its step, unless they bring steps and the step with `optimizer_state`.
        schema: the columns of the data here. It is compared with the schema of the checkpoint, and
            may be None only if that has none.
        computed: tables whose ids the model computes from its features, as those of `hb.auto`.
            Their rows follow no words, and another vocabulary is refused.

    Returns:
        Table here -> table there, for each table that was loaded.

    Raises:
        PersistError: two tables get one name, dims or rules differ, no table has a counterpart, or
            an id means another value here, by a transform that differs; nothing has changed.
        FormatError: a file is bad; the message names it, and nothing has changed.

    Example: `warm_start({"item": table}, open_checkpoint("old"), rename=[(r"v1_(.*)", r"\\1")])`
    """
    sources = _sources(checkpoint, rename)
    matches = {here: there for here, there in sources.items() if here in tables}
    _check_matches(tables, checkpoint, sources, matches)
    for here, there in matches.items():
        _check_alike(tables[here], checkpoint, there, optimizer_state=optimizer_state)
        if now is None:
            _check_times(tables[here], checkpoint, there)
    checkpoint.verify()
    translations = [
        _translation(checkpoint, there, schema, here, is_computed=here in computed)
        for here, there in matches.items()
    ]
    for (here, there), translation in zip(matches.items(), translations, strict=True):
        rows: Iterable[pa.RecordBatch] = checkpoint.rows(there)
        if translation is not None:
            rows = (_translated(batch, translation) for batch in rows)
        scalars = checkpoint.entry(there).scalars
        _load_rows(tables[here], rows, scalars, optimizer_state=optimizer_state, now=now)
    return matches


def _check_matches(
    tables: Mapping[str, Table],
    checkpoint: Reader,
    sources: Mapping[str, str],
    matches: Mapping[str, str],
) -> None:
    """Log the tables without a counterpart; raise PersistError if none has one."""
    others = [name for name in tables if name not in matches]
    left = [there for here, there in sources.items() if here not in matches]
    if tables and sources and not matches:
        advice = "No two of them have the same dim, so that no row fits. Begin without them."
        for there in left:
            alike = [n for n in others if tables[n].dim == checkpoint.entry(there).config["dim"]]
            if alike:
                advice = (
                    f"Name those that belong together, as in rename={{{there!r}: {alike[0]!r}}}."
                )
                break
        raise PersistError(
            f"warm start: no table has a counterpart of its name, got {sorted(left)} there for "
            f"{sorted(others)} here. {advice}"
        )
    if others:
        log.info("warm start: tables %s have no counterpart there and begin anew", sorted(others))
    if left:
        log.info("warm start: tables %s there have no counterpart here", sorted(left))


def _translation(
    checkpoint: Reader, there: str, schema: Schema | None, here: str, *, is_computed: bool
) -> Translation | None:
    """Return how the ids of a table become ids here, checked with all of them; None: unchanged."""
    translation = translation_of(checkpoint.schema, there, schema, here, is_computed=is_computed)
    if translation is None:
        return None
    ids = [batch.column("id").to_numpy() for batch in checkpoint.rows(there)]
    num_taken = translation.check(np.concatenate([np.zeros(0, np.int64), *ids]))
    log.info(
        "warm start: table %r has another vocabulary here; %d of its %d rows have a word that is "
        "known here, and follow it",
        there,
        num_taken,
        checkpoint.entry(there).rows,
    )
    return translation


def _translated(batch: pa.RecordBatch, translation: Translation) -> pa.RecordBatch:
    """Return the rows whose words are known here, with the ids of these words."""
    ids, is_taken = translation.apply(batch.column("id").to_numpy())
    place = batch.schema.get_field_index("id")
    renumbered = batch.set_column(place, batch.schema.field(place), pa.array(ids))
    return renumbered.filter(pa.array(is_taken))


def _sources(checkpoint: Reader, rename: Renames) -> dict[str, str]:
    """Return name here -> name there for every table of a checkpoint."""
    sources: dict[str, str] = {}
    for there in checkpoint.table_names:
        here = _renamed(there, rename)
        if here in sources:
            raise PersistError(
                f"warm start: two tables become {here!r}, got {sources[here]!r} and {there!r}. "
                "Rename one of them."
            )
        sources[here] = there
    return sources


def _renamed(name: str, rename: Renames) -> str:
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    for pattern, replacement in rename:
        try:
            match = re.fullmatch(pattern, name)
            if match is not None:
                return match.expand(replacement)
        except (re.error, IndexError) as error:
            raise PersistError(
                f"warm start: not a rule to rename by, got {(pattern, replacement)!r}: {error}. "
                "Give a regular expression and its replacement."
            ) from error
    return name


def _check_alike(table: Table, checkpoint: Reader, there: str, *, optimizer_state: bool) -> None:
    config = checkpoint.entry(there).config
    if config["dim"] != table.dim:
        raise PersistError(
            f"warm start: table {table.name!r} has dim {table.dim}, got dim {config['dim']} in "
            f"{there!r}. Build it with dim={config['dim']}, or leave its rows out: "
            f"rename={{{there!r}: {left_out(there)!r}}}."
        )
    rule = describe(table.rule)
    if optimizer_state and rule["kind"] != config["rule"]["kind"]:
        raise PersistError(
            f"warm start: table {table.name!r} has the rule {rule['kind']}, got the state of "
            f"{config['rule']['kind']} in {there!r}. Use optimizer_state=False."
        )


def _check_times(table: Table, checkpoint: Reader, there: str) -> None:
    first = next(checkpoint.links[0].parts(there), None)
    has_times = first is None or "last_seen" in first.schema.names
    if "watermark_step" in checkpoint.entry(there).scalars:
        has_times = False
    if table.needs_times and not has_times:
        raise PersistError(
            f"warm start: table {table.name!r} needs times, got none in {there!r}. "
            "Give now=, the time at which its rows count as seen."
        )


def _load_rows(
    table: Table,
    batches: Iterable[pa.RecordBatch],
    scalars: Scalars,
    *,
    optimizer_state: bool,
    now: int | None,
) -> None:
    left_out = {"partition", "updated"} if optimizer_state else {"partition", "updated", "state"}
    moment = now
    if table.clock == "steps":
        moment = scalars["step"] if optimizer_state else table.step
    clock = "steps" if "watermark_step" in scalars else "time"
    same_step = clock == "steps" and optimizer_state
    if "steps" in (clock, table.clock) and not (same_step and table.clock == "steps"):
        left_out.add("last_seen")  # by another clock, or in steps of the other job
    for batch in batches:
        rows = batch.select([name for name in batch.schema.names if name not in left_out])
        table.load([rows if moment is None else _seen(rows, moment)])
    if optimizer_state:
        step = {"step": scalars["step"], "rates": scalars["rates"]}
        table.load_scalars({**table.scalars(), **step})
