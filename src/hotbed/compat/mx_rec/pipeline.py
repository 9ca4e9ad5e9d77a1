# SPDX-License-Identifier: Apache-2.0
"""Pipeline: the batches of a program, their lookups and their updates, from step 8 on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotbed.compat.mx_rec.columns import Column, InsertFunction, Reader
from hotbed.compat.mx_rec.description import TableDescription
from hotbed.compat.mx_rec.errors import CallError, SendCountError
from hotbed.compat.mx_rec.feature_spec import FeatureSpec, Thresholds
from hotbed.compat.mx_rec.progress import Progress
from hotbed.compat.mx_rec.updates import RowOptimizer, Updates
from hotbed.data.batch import Batch
from hotbed.embedding.lookups import Lookup
from hotbed.embedding.modules import EmbeddingCollection, Feature, RowTargets, Target
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.ahead import Ahead
from hotbed.training.step.example import CPU, prepare

log = logging.getLogger("hotbed.compat.mx_rec")


@dataclass
class Current:
    """The batch that the loop works on.

    Attributes:
        raw: as the loop got it.
        batch: its ids by column, with their plans if they were mapped ahead.
        shapes: of each column's ids.
        reader: read the ids.
        is_of_data_set: whether a loop over a data set got it, not the insert function alone.
        by_table: whether each table is looked up by itself, as in the first batch of static shape:
            the sizes come with its lookups. None = not known yet.
        rows: of each column, by (columns, training, gradients enabled), once they were looked up.
    """

    raw: Any
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    reader: Reader
    is_of_data_set: bool = False
    by_table: bool | None = None
    rows: dict[tuple[tuple[Column, ...], bool, bool], dict[str, Tensor]] = field(
        default_factory=dict
    )


class Pipeline:
    """What exists from step 8 on, in both modes.

    All columns of a batch are looked up in one native call, at the first lookup of the batch; later
    lookups take their part.

    Args:
        descriptions: of the tables, by name.
        tables: by name.
        optimizers: that of each table, by its name.
        inserts: the insert functions; a program may add to them while it trains.
        progress: how far training has come.
        is_dynamic: whether shapes follow the batch; else each table has a `send_count`.
        lookup: looks up rows that several ranks own, which each ask for batches of their own; None
            = all rows are here.

    Attributes:
        tables: by name.
        targets: collects the lookups that wait for an update.
        updates: of the rows that were looked up.
        progress: how far training has come.
        current: the batch that the loop works on.
    """

    def __init__(
        self,
        descriptions: Mapping[str, TableDescription],
        tables: Mapping[str, Table],
        optimizers: Mapping[str, RowOptimizer],
        inserts: Sequence[InsertFunction],
        progress: Progress,
        *,
        is_dynamic: bool,
        lookup: Lookup | None = None,
    ) -> None:
        self.tables = dict(tables)
        self.targets = RowTargets()
        self.updates = Updates(self.targets, optimizers)
        self.progress = progress
        self.current: Current | None = None
        self._open: list[Iterator[Batch]] = []  # data that are being read
        self._latest: dict[bool, Current] = {}  # the newest batch of training, and of evaluation
        self._was_told = False  # that an evaluation may see later batches
        self._inserts = inserts
        self._is_dynamic = is_dynamic
        self._lookup = lookup
        self._collections: dict[tuple[Column, ...], EmbeddingCollection] = {}
        for name, table in descriptions.items():
            self.adopt(table)
            if table.padding:
                self.targets.fixed[name] = table.padding

    # --- data

    def batches(self, dataset: Iterable[Any], reader: Reader) -> Iterator[Any]:
        """Yield the batches of a data set as tensors.

        In training, the ids of the next ones are mapped meanwhile, up to the next barrier.
        """
        waiting: deque[Current] = deque()
        if reader.is_training:
            self.progress.begin(dataset)

        def read() -> Iterator[Batch]:
            for raw in dataset:
                current = self._read(raw, reader)
                waiting.append(current)
                yield current.batch

        batches: Iterable[Batch] = self.progress.together(read())
        if reader.is_training and reader.columns and self._lookup is None:
            batches = Ahead(
                batches,
                self.collection(reader.columns),
                barrier=self.progress.barrier,
                step=self.progress.step,
                now=self.progress.now,
                # another number would change torch's bits
                torch_threads=torch.get_num_threads(),
            )
        source = iter(batches)
        self._open.append(source)
        before = self.current
        newest = before
        try:
            for batch in source:
                newest = waiting.popleft()
                newest.batch = batch
                newest.is_of_data_set = True
                yield self._begin(newest)
        finally:
            self._open.remove(source)
            # after an evaluation inside of a training step, the batch of the step is current again
            if self.current is newest and not reader.is_training:
                self.current = before

    def insert(self, raw: Any, reader: Reader) -> Any:
        """Return one batch as tensors; its ids are mapped when they are looked up."""
        return self._begin(self._read(raw, reader))

    def _read(self, raw: Any, reader: Reader) -> Current:
        tensors = as_tensors(raw)
        batch, shapes = reader.read(tensors)
        return Current(tensors, batch, shapes, reader)

    def _begin(self, current: Current) -> Any:
        self.current = current
        self._latest[current.reader.is_training] = current
        if current.reader.is_training:
            self.progress.advance(current.raw, current.batch)
        elif self.progress.is_ahead and not self._was_told:
            self._was_told = True
            log.warning(
                "evaluation after training step %d: ids of later training batches are mapped "
                "already, so that it may see their rows and counts; give init(train_steps=N) to "
                "evaluate every N steps",
                self.progress.step,
            )
        return current.raw

    # --- saves

    @property
    def is_training(self) -> bool:
        """Whether the current batch is one of training."""
        return self.current is not None and self.current.reader.is_training

    @property
    def is_evaluating(self) -> bool:
        """Whether the loop is one over the data of an evaluation."""
        return self.current is not None and self.current.is_of_data_set and not self.is_training

    @property
    def has_trained(self) -> bool:
        """Whether the loop got a batch of training."""
        return True in self._latest

    def check_done(self, caller: str) -> None:
        """Raise CallError if the step is not done, or ids of later batches are mapped."""
        if self.targets.waiting:
            raise CallError(
                f"{caller}: a step is saved when it is done, got {len(self.targets.waiting)} "
                "lookups that wait for their update. Call it after apply_gradients() or step()."
            )
        self.progress.check_hooks(caller)
        if self.progress.is_ahead:
            raise CallError(
                f"{caller}: ids of later batches are mapped already, got step "
                f"{self.progress.step}. Give init(save_steps=N) and save after each N training "
                "steps, or use CheckpointSaverHook."
            )

    # --- lookups

    def adopt(self, table: TableDescription) -> None:
        """Use what the lookups of a table say of it: its size in static shape, and its default."""
        if table.send_count is not None:
            self.targets.sizes[table.name] = table.send_count
        rows = self.tables[table.name]
        admits_all = not (table.thresholds or Thresholds()).admits
        if table.default is not None and (rows.default, rows.always_default) != (
            table.default,
            admits_all,
        ):
            rows.set_default(table.default, always=admits_all)

    def note_lookup(self, table: TableDescription) -> None:
        """Use what a lookup says of its table, before it takes place."""
        self.adopt(table)
        self.updates.note_lookup(table.name)

    def look_up_spec(self, spec: FeatureSpec, raw: Any, *, training: bool) -> Tensor:
        """Return the rows of a feature of a batch.

        Raises:
            ConfigError: the feature is not mapped for this batch, or the batch is one of evaluation
                and the lookup one of training.
        """
        current = self._current_for(spec, raw, training=training)
        column = current.reader.column_of(spec)
        if column not in current.reader.columns:
            names = ", ".join(each.name for each in current.reader.columns)
            raise ConfigError(
                f"sparse_lookup of FeatureSpec {spec.name!r}: it is not mapped for this batch, got "
                f"a batch with {names} (table/index_key). Give it to get_asc_insert_func."
            )
        if training and not current.reader.is_training:
            raise ConfigError(
                f"sparse_lookup of FeatureSpec {spec.name!r}: the batch is one of evaluation, got "
                "is_train=True. Give is_train=False, get_asc_insert_func(is_training=True), or the "
                "training batch as batch."
            )
        return self.rows(current, column, training=training)

    def rows(self, current: Current, column: Column, *, training: bool) -> Tensor:
        """Return the rows of one column, [*ids.shape, dim]; the first call looks up all columns."""
        reader = current.reader
        columns = reader.columns if column in reader.columns else reader.rest
        if current.by_table is None:  # one way for a batch: ids are counted once
            current.by_table = not self._knows_sizes(columns)
        if current.by_table:
            columns = tuple(each for each in columns if each.table == column.table)
        mode = (columns, training, torch.is_grad_enabled())
        if mode not in current.rows:
            current.rows[mode] = self.look_up(columns, current.batch, training=training)
        rows = current.rows[mode][column.name]
        return rows.view(*current.shapes[column.name], rows.shape[-1])

    def look_up(
        self, columns: tuple[Column, ...], batch: Batch, *, training: bool
    ) -> dict[str, Tensor]:
        """Return the rows of columns by name, [m, dim], of one native call.

        Raises:
            SendCountError: a batch has more distinct ids of a table than its `send_count`.
        """
        if not training:
            self._warn_ahead(columns)
        collection = self.collection(columns)
        collection.train(training)
        try:
            rows: dict[str, Tensor] = collection(batch)
        except RowShapeError as error:
            raise SendCountError(f"sparse_lookup: {error}") from error
        finally:
            collection.train()
        return rows

    def _warn_ahead(self, columns: tuple[Column, ...]) -> None:
        """Log once that an evaluation may see rows of ids that are not learned yet."""
        if self._was_told or not self.progress.is_ahead:
            return
        tables = {column.table for column in columns}
        names = [name for name in tables if self.tables[name].min_count is not None]
        if names:
            self._was_told = True
            log.warning(
                "evaluation after step %d: ids of later batches are mapped already, and some may "
                "have got a row in %s. Give init(train_steps=N), and evaluate after each N steps",
                self.progress.step,
                ", ".join(sorted(names)),
            )

    def _knows_sizes(self, columns: tuple[Column, ...]) -> bool:
        return self._is_dynamic or all(column.table in self.targets.sizes for column in columns)

    def _current_for(self, spec: FeatureSpec, raw: Any, *, training: bool) -> Current:
        """Return what was read of a batch; one of evaluation is read anew if need be."""
        if raw is None and self.current is not None and not self._is_dynamic:
            return self.current
        for current in self._latest.values():
            if current.raw is raw:
                return current
        if training or raw is None:
            raise ConfigError(
                "sparse_lookup: batch must be the one that the data set yielded last, got "
                f"{type(raw).__name__}. Pass batch as the loop got it from dataset.map(insert)."
            )
        readers = [insert.reader for insert in self._inserts]
        readers.sort(key=lambda reader: reader.is_training)
        matches = (each for each in readers if each.column_of(spec) in each.columns)
        reader = next(matches, readers[0])
        self._latest[False] = self._read(raw, reader)
        return self._latest[False]

    def collection(self, columns: tuple[Column, ...]) -> EmbeddingCollection:
        """Return the collection of columns over their tables."""
        if columns not in self._collections:
            features = [Feature(column.name, column.table, "none") for column in columns]
            collection = EmbeddingCollection(features, self.tables)
            collection.flow = self.targets
            if self._lookup is not None:
                collection.lookup = self._lookup
            self._collections[columns] = collection
        return self._collections[columns]

    # --- updates

    def apply_gradients(
        self, optimizer: RowOptimizer, gradients: Sequence[tuple[Tensor | None, Tensor]]
    ) -> None:
        """Update the rows at addresses with their gradients, and forget these lookups."""
        pairs = [(self.updates.target_at(optimizer, address), grad) for grad, address in gradients]
        self._update(optimizer, pairs)

    def step_rows(self, optimizer: RowOptimizer) -> None:
        """Update the tables of an optimizer with the gradients of the rows in the collection."""
        targets = self.updates.waiting_for(optimizer)
        self._update(optimizer, [(target, target.rows.grad) for target in targets])

    def drop(self, optimizer: RowOptimizer) -> None:
        """Forget the lookups in the tables of an optimizer."""
        self.updates.forget(self.updates.waiting_for(optimizer))
        self._forget_rows()

    def _update(
        self, optimizer: RowOptimizer, gradients: Sequence[tuple[Target, Tensor | None]]
    ) -> None:
        self.updates.apply(optimizer, gradients)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Let the next lookup of a batch read the rows as they are now."""
        for current in self._latest.values():
            current.rows.clear()

    # --- end

    def close(self) -> None:
        """Stop reading data, and forget the lookups that wait."""
        for source in self._open:
            if isinstance(source, Generator):
                source.close()
        self.targets.waiting.clear()
        self._latest.clear()
        self.current = None


def as_tensors(raw: Any) -> Any:
    """Return an item of a data set with tensors in the place of arrays."""
    if isinstance(raw, Batch):
        return prepare(raw, CPU, labelled=False).batch
    item = tuple(raw) if isinstance(raw, list) else raw
    return prepare((item,), CPU, labelled=False).arguments[0]
