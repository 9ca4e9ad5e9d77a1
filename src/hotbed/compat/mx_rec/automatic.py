# SPDX-License-Identifier: Apache-2.0
"""Automatic: the lookups of a model in automatic mode, from step 8 on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotbed.compat.mx_rec.columns import Column, Reader
from hotbed.compat.mx_rec.errors import CallError
from hotbed.data.batch import Batch, Ids
from hotbed.errors import ConfigError
from hotbed.training.auto.foreseen import IdFeatures, LookupEntry
from hotbed.training.step.example import seconds_as_times
from hotbed.training.step.turns import Turns, ids_of_samples

if TYPE_CHECKING:
    from hotbed.compat.mx_rec.pipeline import Current, Pipeline


class IdReader(Reader):
    """Reads the ids that a model looks up, before its forward pass.

    Args:
        features: compute the ids.
        entries: when the ids of each table are mapped.
        times: returns the seconds of a batch that is not a `hb.Batch`; None = it has none.
    """

    def __init__(
        self,
        features: IdFeatures,
        entries: Iterable[LookupEntry],
        times: Callable[[Any], Any] | None,
    ) -> None:
        self.is_training = True
        self.features = features
        outcomes = {entry.name: entry.outcome for entry in entries}
        columns = [Column(name, table) for name, table in features.lookups.items()]
        self.columns = tuple(each for each in columns if outcomes[each.table] == "ahead")
        self.rest = tuple(each for each in columns if outcomes[each.table] == "step")
        self.tables = {column.table for column in (*self.columns, *self.rest)}
        self._times = times

    def column(self, name: str) -> Column:
        """Return the column of a feature."""
        return Column(name, self.features.lookups[name])

    def read(self, raw: Any) -> tuple[Batch, dict[str, tuple[int, ...]]]:
        batch = self.features.compute(raw, time_of(raw, self._times), self.tables)
        return batch, {name: (len(ids.values),) for name, ids in batch.ids.items()}


class NoReader(Reader):
    """Reads no ids: those of an evaluation are looked up in its forward passes."""

    def __init__(self) -> None:
        self.columns = ()
        self.is_training = False

    def read(self, raw: Any) -> tuple[Batch, dict[str, tuple[int, ...]]]:
        return Batch(num_samples=0), {}


class Automatic:
    """The lookups of a model whose ids are computed before its forward pass.

    A lookup of a training batch takes the rows of the ids that were computed for it. Lookups of an
    evaluation, and of tables that stay in the forward pass, map their ids themselves.

    Args:
        pipeline: looks up rows.
        model: of the loop.
        reader: of the training batches.
        train: yields them.
        evaluation: yields the batches of evaluations; None = never.

    Attributes:
        newest: the batch that the loop got last, of training (True) and of evaluation (False).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        model: nn.Module,
        reader: IdReader,
        train: Iterable[Any],
        evaluation: Iterable[Any] | None,
    ) -> None:
        self._pipeline = pipeline
        self._model = model
        self._reader = reader
        self._train = train
        self._evaluation = evaluation
        self.newest: dict[bool, Any] = {}
        self._turns: Turns[Tensor] | None = None
        self._of: Current | None = None  # the batch of `_turns`
        self._hooks = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave),
        ]

    def initializer(self, is_training: bool) -> Callable[[], Iterator[Any]]:
        """Return what starts to iterate over the training or the evaluation data.

        Raises:
            CallError: step 8 got no data for evaluation.
        """
        if is_training:
            return lambda: self._iterate(self._train, self._reader)
        if self._evaluation is None:
            raise CallError(
                "get_initializer(False): evaluation needs data, got None at step 8. Give "
                "modify_graph_and_start_emb_cache(model, ..., evaluation=...)."
            )
        evaluation = self._evaluation
        return lambda: self._iterate(evaluation, NoReader())

    def _iterate(self, data: Iterable[Any], reader: Reader) -> Iterator[Any]:
        newest = None
        try:
            for batch in self._pipeline.batches(data, reader):
                newest = self._pipeline.current
                self.newest[reader.is_training] = batch
                yield batch
        finally:
            if reader.is_training and self._pipeline.current is newest:
                self._pipeline.current = None  # forward passes between the epochs only read

    def look_up(self, table: str, ids: Tensor, *, training: bool) -> Tensor:
        """Return the rows of a lookup in the forward pass, [*ids.shape, dim].

        Raises:
            CallError: the forward pass learns, and the loop has no batch.
            ConfigError: the ids are not those that were computed from the batch.
        """
        current = self._pipeline.current
        if current is None and torch.is_grad_enabled() and self._model.training and training:
            raise CallError(
                f"sparse_lookup {table!r}: a training step needs a batch, got a forward pass "
                "without one. Iterate over get_initializer(True)(), or use model.eval() or "
                "torch.no_grad() to read only."
            )
        if current is None or not current.reader.is_training:
            return self._look_up_now(table, ids, None)
        if not training:
            raise ConfigError(
                f"sparse_lookup {table!r}: is_train=False is for evaluation, got it for a batch of "
                "get_initializer(True). Leave it out, or use is_grad=False to learn nothing."
            )
        if table not in self._reader.tables:
            return self._look_up_now(table, ids, current.batch)
        if self._turns is None or self._of is not current:
            self._of = current
            self._turns = self._rows_of(current)
        return _shaped(self._turns.take(table, Ids(ids)), ids)

    def _rows_of(self, current: Current) -> Turns[Tensor]:
        def rows(name: str) -> Tensor:
            column = self._reader.column(name)
            return self._pipeline.rows(current, column, training=True)

        ids = {name: Ids(ids.values) for name, ids in current.batch.ids.items()}
        return Turns(self._reader.features.lookups, ids, rows)

    def _look_up_now(self, table: str, ids: Tensor, batch: Batch | None) -> Tensor:
        """Return the rows of ids that are mapped now; without a batch they are only read."""
        num_samples = ids.numel() if batch is None else batch.num_samples
        time = None if batch is None else batch.time
        ids_alone = Batch({table: ids_of_samples(ids, num_samples, time)}, time=time)
        columns = (Column(table, table),)
        rows = self._pipeline.look_up(columns, ids_alone, training=batch is not None)[table]
        return _shaped(rows, ids)

    def _enter(self, model: nn.Module, args: Any) -> None:
        self._turns = None

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._turns is not None:
            self._turns.check_taken()

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()


def _shaped(rows: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of ids, [*ids.shape, dim]."""
    return rows.view(*ids.shape, rows.shape[-1]).to(ids.device)


def time_of(raw: Any, times: Callable[[Any], Any] | None) -> Any:
    """Return the times of a batch in microseconds: those of its Time column, or of `times`."""
    if isinstance(raw, Batch):
        return raw.time
    if times is None:
        return None
    return seconds_as_times(times(raw))
