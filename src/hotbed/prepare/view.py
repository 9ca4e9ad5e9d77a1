# SPDX-License-Identifier: Apache-2.0
"""View: the rows of a partition as every later stage sees them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hotbed.connectors.read_plan import ReadPlan
from hotbed.data import numbers
from hotbed.data.columns import Columns, transformed
from hotbed.data.context import BadRows
from hotbed.data.schema import Dense, DisplayPosition, Id, Label, Schema, Time, Weight
from hotbed.data.transforms import JoinGroupby, TimeOfDay, Transform
from hotbed.memory import return_free_memory
from hotbed.prepare.keyed.encodings import Encoding
from hotbed.prepare.partitions import TRAIN, VALID, Chunk, Partition
from hotbed.prepare.places import Purpose, hash_copies
from hotbed.prepare.sampling.catalogue import Catalogue
from hotbed.prepare.sampling.down_sample import DownSample
from hotbed.prepare.sampling.negatives import Negatives, expand, label_of, with_label
from hotbed.prepare.sampling.order import Order
from hotbed.prepare.sampling.split import Holdout
from hotbed.prepare.shuffle import Side, SideReader

Aside = Callable[[Chunk, str], None]
"""Takes rows that are left out, and a message."""


@dataclass(frozen=True)
class DrawnRows:
    """Negatives that were drawn: `side` has the places of their items in the catalogue.

    `order`: of the rows of users and items.
    """

    negatives: Negatives
    order: Order
    catalogue: Path
    side: Side


@dataclass(frozen=True)
class View:
    """Reads a partition: raw columns, derived columns, and the part of each row.

    It can be pickled: a task takes it to where the task runs. Each stage adds what it found, and
    the stages behind it see the rows so.

    Args:
        plan: the raw columns to read, and their types.
        schema: has label, time and weight.
        seed: of the preparation.
        memory: bytes of the preparation: above half of them, free memory goes back to the system
            after each chunk.
        skip_bad: leave out rows whose label, weight, time or features cannot be used.
        derived: columns by the rows of each chunk of the source.
        split: which rows are for validation; it has learned.
        drawn: the negatives to add.
        down_sample: which negatives of the training rows are left out.
        encoded: target encodings of training rows.
        all_positive: rows of a source without the label's column are positives.
    """

    plan: ReadPlan
    schema: Schema
    seed: int = 0
    skip_bad: bool = False
    memory: int = 0
    derived: Sequence[Side] = ()
    split: Holdout | None = None
    drawn: DrawnRows | None = None
    down_sample: DownSample | None = None
    encoded: Sequence[Encoding] = ()
    all_positive: bool = False

    def chunks(self, partition: Partition, aside: Aside | None = None) -> Iterator[Chunk]:
        """Yield the rows of each chunk of a partition; a chunk may be without rows.

        Args:
            partition: of the source.
            aside: takes rows that are left out because they cannot be used, and why.

        Raises:
            DecodeError: a row cannot be used, and bad rows are not skipped.
        """
        derived = [side.reader(partition.number) for side in self.derived]
        encoded = [(encoding.name, encoding.values(partition)) for encoding in self.encoded]
        adding = None
        if self.drawn is not None:
            adding = _Adding(self.drawn, partition, self.schema)
        number = 0
        for raw in partition.chunks(self.plan):
            chunk = _with_sides(raw, derived)
            if self.skip_bad:
                chunk = self._good(chunk, aside)
            try:
                for piece in self._arranged(chunk, adding):
                    arranged = replace(piece, number=number)
                    for name, values in encoded:
                        arranged = arranged.with_columns({name: values(arranged)})
                    yield arranged
                    number += 1
            except BadRows as bad:
                row = int(np.flatnonzero(bad.mask)[0])
                raise chunk.located(row, bad.message, bad.column) from None
            return_free_memory(above=self.memory // 2)

    def _good(self, chunk: Chunk, aside: Aside | None) -> Chunk:
        """Return the rows whose label, weight, time and features can be used."""
        while True:
            try:
                self._check(chunk)
                return chunk
            except BadRows as bad:
                if aside is not None:
                    aside(chunk.take(np.flatnonzero(bad.mask)), bad.message)
                chunk = chunk.take(np.flatnonzero(~bad.mask))

    def _check(self, chunk: Chunk) -> None:
        """Raise BadRows if there are rows whose label, weight, time or features cannot be used."""
        context = Columns(chunk.rows)
        for column in self.schema.columns:
            if column.source not in chunk.rows.schema.names:
                continue  # a label that negatives bring
            raw = context.column(column.source)
            if isinstance(column, Label):
                numbers.label(column, raw)
            elif isinstance(column, Weight):
                numbers.weight(column, raw)
            elif isinstance(column, Time):
                numbers.time(column, raw)
            elif isinstance(column, DisplayPosition):
                numbers.display_position(column, raw)
            elif isinstance(column, (Dense, Id)):
                _check_feature(column, context)

    def _arranged(self, chunk: Chunk, adding: _Adding | None) -> Iterator[Chunk]:
        """Yield the rows with parts and negatives, without those that are sampled away."""
        if self.split is not None:
            is_valid = self.split.valid_rows(chunk, self.schema, self.seed)
            part = np.where(is_valid, VALID, TRAIN).astype(np.uint8)
            chunk = replace(chunk, part=part)
        if self.all_positive:
            labelled = with_label(chunk.rows, label_of(self.schema))
            chunk = replace(chunk, rows=labelled)
        pieces = iter([chunk])
        if adding is not None:
            pieces = adding.expanded(chunk)
        for piece in pieces:
            if self.down_sample is None:
                yield piece
            else:
                yield self._sampled(piece, self.down_sample)

    def _sampled(self, chunk: Chunk, sample: DownSample) -> Chunk:
        """Return the rows that are kept, with their weights."""
        label = self.schema[sample.label]
        assert isinstance(label, Label)
        context = Columns(chunk.rows)
        values = numbers.label(label, context.column(label.source))
        is_train = chunk.part == TRAIN
        hashes = hash_copies(chunk.hashes(self.seed, Purpose.DOWN_SAMPLE), chunk.copies)
        is_kept = ~is_train | sample.kept_rows(values, hashes)
        if sample.weight is not None:
            weights = np.where(is_train, sample.weights(values), np.float32(1))
            weight = self.schema.weight
            if weight is not None:
                weights = weights * numbers.weight(weight, context.column(weight.source))
            chunk = chunk.with_columns({sample.weight_column: pa.array(weights)})
        return chunk.take(np.flatnonzero(is_kept))


class _Adding:
    """Adds the negatives of one partition."""

    def __init__(self, drawn: DrawnRows, partition: Partition, schema: Schema) -> None:
        self._negatives = drawn.negatives
        self._order = drawn.order
        self._catalogue = Catalogue.open(drawn.catalogue)
        self._items = drawn.side.reader(partition.number)
        self._label = label_of(schema)

    def expanded(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the rows with their negatives, in pieces that are not larger than a chunk."""
        drawn = self._items.read(chunk.number, len(chunk)).column("items").combine_chunks()
        labelled = with_label(chunk.rows, self._label)
        size = max(1, chunk.partition.chunk_rows // (1 + self._negatives.per_positive))
        for begin in range(0, max(1, len(chunk)), size):
            expanded = expand(
                self._negatives,
                labelled.slice(begin, size),
                self._label,
                self._order,
                self._catalogue,
                drawn.slice(begin, size),
            )
            origins = begin + expanded.origins
            yield replace(
                chunk,
                rows=expanded.rows,
                places=chunk.places[origins],
                part=chunk.part[origins],
                copies=expanded.copies,
            )


def _check_feature(column: Dense | Id, context: Columns) -> None:
    """Raise BadRows if there are rows that transforms cannot read, or cannot learn from."""
    before_learning: list[Transform] = []
    for transform in column.transforms:
        if isinstance(transform, JoinGroupby):
            numbers.parsed(transform.column, context.column(transform.column))
        if transform.learner() is not None:
            break
        before_learning.append(transform)
    if any(isinstance(transform, TimeOfDay) for transform in before_learning):
        transformed(column.source, before_learning, context)


def _with_sides(chunk: Chunk, sides: Sequence[SideReader]) -> Chunk:
    """Return the rows with the columns of sides that are aligned with them."""
    columns: dict[str, pa.Array] = {}
    for side in sides:
        table = side.read(chunk.number, len(chunk))
        columns |= {name: _one_chunk(table.column(name)) for name in table.column_names}
    return chunk.with_columns(columns)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()
