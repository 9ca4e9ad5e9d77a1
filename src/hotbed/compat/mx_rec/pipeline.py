# SPDX-License-Identifier: Apache-2.0
"""Pipeline: the tables, the lookups of a batch and the updates that wait, from step 8 on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed.compat.mx_rec.columns import Column, Reader, column_of
from hotbed.compat.mx_rec.core.asc.feature_spec import FeatureSpec, Thresholds
from hotbed.compat.mx_rec.errors import CallError, SendCountError
from hotbed.connectors import Position
from hotbed.data.batch import Batch
from hotbed.embedding.modules import (
    EmbeddingCollection,
    Feature,
    RowTargets,
    Target,
    update_targets,
)
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError
from hotbed.training.ahead import Ahead
from hotbed.training.example import CPU, prepare

if TYPE_CHECKING:
    from hotbed.compat.mx_rec.core.embedding import SparseTable
    from hotbed.compat.mx_rec.framework import Framework
    from hotbed.compat.mx_rec.graph.automatic import Automatic
    from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer

log = logging.getLogger("hotbed.compat.mx_rec")

Barrier = Callable[[int, int | None], bool]


@dataclass
class Current:
    """The batch that the loop works on.

    Attributes:
        raw: as the loop got it.
        batch: its ids by column, with their plans if they were mapped ahead.
        shapes: of each column's ids.
        reader: read the ids.
        by_table: whether each table is looked up by itself, as in the first batch of static shape:
            the sizes come with its lookups. None = not known yet.
        rows: of each column, by (columns, training, gradients enabled), once they were looked up.
    """

    raw: Any
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    reader: Reader
    by_table: bool | None = None
    rows: dict[tuple[tuple[Column, ...], bool, bool], dict[str, Tensor]] = field(
        default_factory=dict
    )


class Pipeline:
    """What exists from step 8 on, in both modes.

    All columns of a batch are looked up in one native call, at the first lookup of the batch; later
    lookups take their part.

    Args:
        tables: by name.
        owners: the optimizer of each table, by name.

    Attributes:
        tables: by name.
        targets: the lookups that wait for an update.
        barriers: more barriers of `barrier`.
        step: training batches handed to the loop so far.
        now: the newest event time among them, in microseconds; None without times.
        has_begun: whether training data are being read.
        position: where the training data are after the newest batch; None if they have none.
        current: the batch that the loop works on.
        automatic: the lookups of the model in automatic mode; None in FeatureSpec mode.
    """

    def __init__(
        self,
        owner: Framework,
        tables: Mapping[str, Table],
        owners: Mapping[str, HashOptimizer],
    ) -> None:
        self.owner = owner
        self.tables = dict(tables)
        self.owners = dict(owners)
        self.targets = RowTargets()
        self.barriers: list[Barrier] = []
        self.step = 0
        self.now: int | None = None
        self.has_begun = False
        self.position: Position | None = None
        self.current: Current | None = None
        self._looked_up: list[str] = []  # tables in the order of their first lookup
        self._open: list[Iterator[Batch]] = []  # data that are being read
        self._latest: dict[bool, Current] = {}  # the newest batch of training, and of evaluation
        self._cleared = -1  # the last step that ids may be mapped beyond
        self._resume: Position | None = None
        self._was_told = False  # that an evaluation may see later batches
        self.automatic: Automatic | None = None
        self._collections: dict[tuple[Column, ...], EmbeddingCollection] = {}
        for name, table in owner.tables.items():
            self.adopt(table)
            if table.padding:
                self.targets.fixed[name] = table.padding
        for hook in owner.hooks:
            hook.begin(self.tables)

    # --- data

    def batches(self, dataset: Iterable[Any], reader: Reader) -> Iterator[Any]:
        """Yield the batches of a data set as tensors.

        In training, the ids of the next ones are mapped meanwhile, up to the next barrier.
        """
        waiting: deque[Current] = deque()
        if reader.is_training:
            self._begin_training(dataset)

        def read() -> Iterator[Batch]:
            for raw in dataset:
                current = self._read(raw, reader)
                waiting.append(current)
                yield current.batch

        batches: Iterable[Batch] = read()
        if reader.is_training and reader.columns:
            batches = Ahead(
                batches,
                self.collection(reader.columns),
                barrier=self.barrier,
                step=self.step,
                now=self.now,
                # another number would change torch's bits
                torch_threads=torch.get_num_threads(),
            )
        source = iter(batches)
        self._open.append(source)
        before = self.current
        own = before
        try:
            for batch in source:
                own = waiting.popleft()
                own.batch = batch
                yield self._begin(own)
        finally:
            self._open.remove(source)
            # after an evaluation inside of a training step, the batch of the step is current again
            if self.current is own and not reader.is_training:
                self.current = before

    def insert(self, raw: Any, reader: Reader) -> Any:
        """Return one batch as tensors; its ids are mapped when they are looked up."""
        return self._begin(self._read(raw, reader))

    def _read(self, raw: Any, reader: Reader) -> Current:
        tensors = as_tensors(raw)
        batch, shapes = reader.read(tensors)
        return Current(
            tensors,
            batch,
            shapes,
            reader,
        )

    def _begin(self, current: Current) -> Any:
        self.current = current
        self._latest[current.reader.is_training] = current
        if current.reader.is_training:
            self.step += 1
            self.position = getattr(current.raw, "position", None)
            times = [self.now, prepare(current.batch, CPU, labelled=False).latest]
            self.now = max((time for time in times if time is not None), default=None)
        elif self.is_ahead and not self._was_told:
            self._was_told = True
            log.warning(
                "evaluation after training step %d: ids of later training batches are mapped "
                "already, so that it may see their rows and counts; give init(train_steps=N) to "
                "evaluate every N steps",
                self.step,
            )
        return current.raw

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether tables are read or changed between this training step and the next one."""
        options = self.owner.options
        intervals = (options.max_steps, options.train_steps, options.save_steps)
        by_steps = any(interval > 0 and step % interval == 0 for interval in intervals)
        others = [hook.barrier(step, now) for hook in self.owner.hooks]  # each is asked
        others += [saver.barrier(step, now) for saver in self.owner.savers]
        others += [hook.barrier(step, now) for hook in self.owner.saver_hooks]
        others += [barrier(step, now) for barrier in self.barriers]
        is_barrier = by_steps or any(others)
        if not is_barrier:
            self._cleared = step
        return is_barrier

    # --- saves

    @property
    def is_training(self) -> bool:
        """Whether the current batch is one of training."""
        return self.current is not None and self.current.reader.is_training

    @property
    def is_ahead(self) -> bool:
        """Whether ids of batches after the current one may be mapped."""
        return self._cleared >= self.step

    def check_done(self, caller: str) -> None:
        """Raise CallError if the step is not done, or ids of later batches are mapped."""
        if self.targets.waiting:
            raise CallError(
                f"{caller}: a step is saved when it is done, got {len(self.targets.waiting)} "
                "lookups that wait for their update. Call it after apply_gradients() or step()."
            )
        for hook in self.owner.hooks:
            hook.check_done(caller, self.step)
        if self.is_ahead:
            raise CallError(
                f"{caller}: ids of later batches are mapped already, got step {self.step}. Give "
                "init(save_steps=N) and save after each N training steps, or use "
                "CheckpointSaverHook."
            )

    def resume(self, step: int, now: int | None, position: Position | None) -> None:
        """Continue after training step `step`, with the data after `position`."""
        self.step = step
        self.now = now
        self.position = position
        self._resume = position

    def _begin_training(self, dataset: Any) -> None:
        """Begin to read training data, after the position of a state that was restored."""
        if self.owner.options.if_load and not self.owner.restored:
            raise CallError(
                "dataset: init(if_load=True) loads a state before the first batch, got none. Call "
                "Saver.restore(path) after step 8, or leave if_load out."
            )
        is_first = not self.has_begun
        self.has_begun = True
        for saver in self.owner.savers:
            saver.begin()
        position = self._resume
        self._resume = None
        if position is not None:
            dataset.resume(position)
        elif is_first and self.step:
            log.warning(
                "the training data have no position: they begin anew after step %d; give a "
                "hb.Dataset, or leave out what was learned",
                self.step,
            )

    # --- lookups

    def adopt(self, table: SparseTable) -> None:
        """Use what the lookups of a table say of it: its size in static shape, and its default."""
        if table.send_count is not None:
            self.targets.sizes[table.name] = table.send_count
        own = self.tables[table.name]
        if table.default is not None and not (table.thresholds or Thresholds()).admits:
            raise ConfigError(
                f"sparse_lookup in {table.name!r}: serving_default_value is read for ids that were "
                f"not admitted, got {table.default} and a table that admits all. Give the feature "
                "access_threshold=0 or more, or leave it out."
            )
        if table.default is not None and own.default != table.default:
            own.set_default(table.default)

    def note_lookup(self, table: SparseTable) -> None:
        """Use what a lookup says of its table, before it takes place."""
        self.adopt(table)
        if table.name not in self._looked_up:
            self._looked_up.append(table.name)

    @property
    def waiting(self) -> list[Target]:
        """The lookups that wait for an update, by forward pass.

        Within one, they are in the order in which the tables were first looked up.
        """
        passes = list(dict.fromkeys(id(target.step) for target in self.targets.waiting))
        places = {name: number for number, name in enumerate(self._looked_up)}

        def place(target: Target) -> tuple[int, int]:
            return passes.index(id(target.step)), places.get(target.table.name, len(places))

        return sorted(self.targets.waiting, key=place)

    def look_up_spec(self, spec: FeatureSpec, raw: Any, *, training: bool) -> Tensor:
        """Return the rows of a feature of a batch.

        Raises:
            ConfigError: the feature is not mapped for this batch, or the batch is one of evaluation
                and the lookup one of training.
        """
        column = column_of(spec)
        current = self._current_for(column, raw, training=training)
        if column not in current.reader.columns:
            names = ", ".join(own.name for own in current.reader.columns)
            raise ConfigError(
                f"sparse_lookup of FeatureSpec {spec.name!r}: it is not mapped for this batch, got "
                f"a batch with {names} (table/index_key). Give it to get_asc_insert_func."
            )
        if training and not current.reader.is_training:
            raise ConfigError(
                f"sparse_lookup of FeatureSpec {spec.name!r}: the batch is one of evaluation, got "
                "is_train=True. Give is_train=False, or get_asc_insert_func(is_training=True)."
            )
        return self.rows(current, column, training=training)

    def look_up_ids(self, table: Any, ids: Tensor, *, training: bool) -> Tensor:
        """Return the rows of ids that a model computed, in automatic mode."""
        if self.automatic is not None:
            return self.automatic.look_up(table.name, ids, training=training)
        raise CallError(
            "sparse_lookup: ids of a model need modify_graph_and_start_emb_cache(model, ...), got "
            "a pipeline that start_asc_pipeline started. Give a FeatureSpec."
        )

    def rows(self, current: Current, column: Column, *, training: bool) -> Tensor:
        """Return the rows of one column, [*ids.shape, dim]; the first call looks up all columns."""
        reader = current.reader
        columns = reader.columns if column in reader.columns else reader.rest
        if current.by_table is None:  # one way for a batch: ids are counted once
            current.by_table = not self._knows_sizes(columns)
        if current.by_table:
            columns = tuple(own for own in columns if own.table == column.table)
        mode = (columns, training, torch.is_grad_enabled())
        if mode not in current.rows:
            current.rows[mode] = self.look_up(columns, current.batch, training=training)
        rows = current.rows[mode][column.name]
        return rows.view(*current.shapes[column.name], rows.shape[-1])

    def look_up(
        self,
        columns: tuple[Column, ...],
        batch: Batch,
        *,
        training: bool,
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
        if self._was_told or not self.is_ahead:
            return
        names = {own.table for own in columns if self.tables[own.table].min_count is not None}
        if names:
            self._was_told = True
            log.warning(
                "evaluation after step %d: ids of later batches are mapped already, and some may "
                "have got a row in %s. Give init(train_steps=N), and evaluate after each N steps",
                self.step,
                ", ".join(sorted(names)),
            )

    def _knows_sizes(self, columns: tuple[Column, ...]) -> bool:
        if self.owner.options.use_dynamic:
            return True
        return all(column.table in self.targets.sizes for column in columns)

    def _current_for(self, column: Column, raw: Any, *, training: bool) -> Current:
        """Return what was read of a batch; one of evaluation is read anew if need be."""
        if raw is None and self.current is not None and not self.owner.options.use_dynamic:
            return self.current
        for current in self._latest.values():
            if current.raw is raw:
                return current
        if training or raw is None:
            raise ConfigError(
                "sparse_lookup: batch must be the one that the data set yielded last, got "
                f"{type(raw).__name__}. Pass batch as the loop got it from dataset.map(insert)."
            )
        readers = [insert.reader for insert in self.owner.inserts]
        readers.sort(key=lambda reader: reader.is_training)
        reader = next((reader for reader in readers if column in reader.columns), readers[0])
        self._latest[False] = self._read(raw, reader)
        return self._latest[False]

    def collection(self, columns: tuple[Column, ...]) -> EmbeddingCollection:
        """Return the collection of columns over their tables."""
        if columns not in self._collections:
            features = [Feature(column.name, column.table, "none") for column in columns]
            collection = EmbeddingCollection(features, self.tables)
            collection.lookup = self.targets
            self._collections[columns] = collection
        return self._collections[columns]

    # --- updates

    def apply_gradients(
        self,
        optimizer: HashOptimizer,
        gradients: Sequence[tuple[Tensor | None, Tensor]],
    ) -> None:
        """Update the rows at addresses with their gradients, and forget these lookups."""
        pairs = [(self._target(optimizer, address), grad) for grad, address in gradients]
        self._update(optimizer, pairs)

    def step_rows(self, optimizer: HashOptimizer) -> None:
        """Update the tables of an optimizer with the gradients of the rows in the collection."""
        self._update(optimizer, [(target, target.rows.grad) for target in self._waiting(optimizer)])

    def drop(self, optimizer: HashOptimizer) -> None:
        """Forget the lookups in the tables of an optimizer."""
        self._forget(self._waiting(optimizer))

    def _update(
        self,
        optimizer: HashOptimizer,
        gradients: Sequence[tuple[Target, Tensor | None]],
    ) -> None:
        rates = {name: optimizer.learning_rate for name in self.tables}
        given = [(target, grad) for target, grad in gradients if grad is not None]
        update_targets(given, rates)
        self._forget([target for target, _ in gradients])

    def _waiting(self, optimizer: HashOptimizer) -> list[Target]:
        return [
            target for target in self.targets.waiting if self.owners[target.table.name] is optimizer
        ]

    def _target(self, optimizer: HashOptimizer, address: Tensor) -> Target:
        for target in self.targets.waiting:
            if target.slots is address:
                self._check_owner(optimizer, target.table.name)
                return target
        raise ConfigError(
            f"{optimizer.name}.apply_gradients: addresses of no lookup that waits, got a tensor of "
            f"shape {list(address.shape)}. Give the tensors of get_collection"
            '("ASCEND_SPARSE_LOOKUP_ID_OFFSET") as they are, once.'
        )

    def _check_owner(self, optimizer: HashOptimizer, table: str) -> None:
        owner = self.owners[table]
        if owner is not optimizer:
            raise ConfigError(
                f"{optimizer.name}.apply_gradients: another optimizer updates the table {table!r}, "
                f"got addresses of it. Give them to {owner.name}, or the table another one in "
                "optimizer_list."
            )

    def _forget(self, targets: Sequence[Target]) -> None:
        done = {id(target) for target in targets}
        self.targets.waiting = [target for target in self.targets.waiting if id(target) not in done]
        for current in self._latest.values():
            current.rows.clear()

    # --- automatic mode

    def initializer(self, is_training: bool) -> Callable[[], Iterator[Any]]:
        """Return what starts to iterate over the training or the evaluation data."""
        if self.automatic is not None:
            return self.automatic.initializer(is_training)
        raise CallError(
            "get_initializer: the data are those of modify_graph_and_start_emb_cache, got a "
            "pipeline that start_asc_pipeline started. Iterate over dataset.map(insert)."
        )

    def close(self) -> None:
        """Stop reading data, and forget the lookups that wait."""
        for source in self._open:
            if isinstance(source, Generator):
                source.close()
        self.targets.waiting.clear()
        self._latest.clear()
        self.current = None
        if self.automatic is not None:
            self.automatic.close()


def as_tensors(raw: Any) -> Any:
    """Return an item of a data set with tensors in the place of arrays."""
    if isinstance(raw, Batch):
        return prepare(raw, CPU, labelled=False).batch
    item = tuple(raw) if isinstance(raw, list) else raw
    return prepare((item,), CPU, labelled=False).arguments[0]
