# SPDX-License-Identifier: Apache-2.0
"""Rows of another job into tables of this one: which table fits which, and which rows fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from hotbed.config import describe
from hotbed.data.schema import Schema
from hotbed.embedding.table import Table
from hotbed.errors import PersistError
from hotbed.persist.container.format import Reader
from hotbed.persist.container.manifest import Scalars
from hotbed.persist.state.tables import seen_at
from hotbed.persist.upkeep.words import Translation, left_out, translation_of

log = logging.getLogger("hotbed.persist")

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
        now: int64 microseconds; rows without a time count as seen then. Rows of a table that
            counted steps have no time. A table here that counts steps does not use it: rows count
            as seen at its step, or with `optimizer_state` at the steps of the checkpoint.
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
    rows = (
        batch.select([name for name in batch.schema.names if name not in left_out])
        for batch in batches
    )
    table.load(rows if moment is None else (seen_at(batch, moment) for batch in rows))
    if optimizer_state:
        step = {"step": scalars["step"], "rates": scalars["rates"]}
        table.load_scalars({**table.scalars(), **step})
