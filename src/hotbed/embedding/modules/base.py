# SPDX-License-Identifier: Apache-2.0
"""TableModule: the base of the torch modules over tables.

Each module has one parameter, a `TableRows`, for each group of tables (tables of one dim and rule).
After a backward pass its `.grad` holds the summed gradients of the batch's distinct ids,
[num unique ids, dim], so gradient clipping and GradScaler work as on any parameter; its shape
changes with every batch. `hb.SparseOptimizer` takes these parameters, `hb.dense_parameters` all
others.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Ids
from hotbed.data.schema import POOLINGS
from hotbed.embedding.table import MapQueue, Step, Table
from hotbed.errors import ConfigError

from .compiled import alive
from .gradients import Group, RowGradients, Sums, dense_rows
from .inputs import Buckets, Feature, HostIds
from .lookup import LocalLookup, Lookup
from .parameter import TableRows
from .plan import Plan, Pooled, Tickets
from .state import Carrier
from .transforms import transformed


class TableModule(Carrier, ABC):
    """Base of Embedding, EmbeddingBag and EmbeddingCollection.

    One native call looks up all features in all tables. `state_dict_limit`: the most bytes of rows
    that `state_dict()` takes from a module; above it, `state_dict()` raises PersistError.

    With `buckets`, the rows of a feature with offsets and pooling "none", and the gradients of each
    group of tables, are followed by rows of zeros up to the next bucket: shapes repeat, and values
    are the same. More rows than the largest bucket raise RowShapeError.
    """

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], buckets: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.features = tuple(features)
        numbers = {table.name: number for number, table in enumerate(self.tables)}
        if len(numbers) != len(self.tables):
            raise ConfigError(
                f"embedding: table names must differ, got {[t.name for t in self.tables]}. "
                "Rename one."
            )
        for feature in self.features:
            if feature.pooling not in POOLINGS:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown pooling, got {feature.pooling!r}. "
                    f"Use one of {', '.join(POOLINGS)}."
                )
            if feature.table not in numbers:
                raise ConfigError(
                    f"feature {feature.name!r}: unknown table {feature.table!r}, got tables "
                    f"{sorted(numbers)}. Give that table."
                )
        self._table_of = [numbers[feature.table] for feature in self.features]
        self._layout = [
            (table, f.pooling) for table, f in zip(self._table_of, self.features, strict=True)
        ]
        self._timed = any(table.needs_times or table.keeps_times for table in self.tables)
        self._admitting = [table for table in self.tables if table.native_admits]
        self.dims = [self.tables[table].dim for table in self._table_of]
        self.pooled = [feature.pooling != "none" for feature in self.features]
        self.output_dim = sum(
            dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled
        )
        self.groups = _group(self.tables)
        self.buckets = Buckets.of(f"embedding {sorted(numbers)}", buckets)
        self.lookup: Lookup = LocalLookup()
        # follows .to(device); results are moved to its device
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._begin()

    def _begin(self) -> None:
        """Set the parameters and the number that each module, also a copy, has of its own."""
        for number, group in enumerate(self.groups):
            self.register_parameter(
                f"rows_{number}", TableRows([self.tables[table] for table in group.tables])
            )
        self.gradients = RowGradients(self.tables, self.groups, self.rows, self.buckets)
        # connects the lookup to autograd; takes no gradient itself
        self.anchor = torch.zeros((), requires_grad=True)
        self.tickets = Tickets()  # of compiled lookups whose backward may still come
        self.number = id(self)  # by which torch.compile's operators find this module
        alive[self.number] = self

    def share_gradients(self, owner: TableModule) -> None:
        """Take the parameters and the waiting gradients of a module over the same tables.

        The gradients of both are then summed by id, as those of a weight that two modules share.
        """
        self.gradients = owner.gradients
        self._parameters.update(owner._parameters)

    @property
    def rows(self) -> list[TableRows]:
        """Return the parameter of each group."""
        return [rows for rows in self._parameters.values() if isinstance(rows, TableRows)]

    @property
    def learns(self) -> bool:
        """Return True if a table is not frozen."""
        return not all(table.frozen for table in self.tables)

    def extra_repr(self) -> str:
        lines = []
        for feature, number in zip(self.features, self._table_of, strict=True):
            pooling = "" if feature.pooling == "none" else f"{feature.pooling} of "
            lines.append(f"{feature.name}: {pooling}{self.tables[number]}")
        return "\n".join(lines)

    def pool(self, inputs: Sequence[Ids], time: Any = None, plan: Plan | None = None) -> Pooled:
        """Return the pooled features side by side, and the rows of each sequence feature.

        The shapes are [n, output_dim], and [m, dim] for each sequence feature. `self.lookup`
        performs the lookup.

        Args:
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: `self.map(inputs, time)`, if the ids were mapped ahead.
        """
        return self.lookup.pool(self, inputs, time, plan)

    def map(
        self,
        inputs: Sequence[Ids],
        time: Any = None,
        *,
        training: bool | None = None,
        queue: MapQueue | None = None,
    ) -> Plan:
        """Map ids to slots ahead of their lookup, and return the plan that `pool` takes.

        In training, new ids are inserted, and ids are counted and timed: now, not in `pool`. Use a
        plan once.

        Args:
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            training: whether tables may change; None = if the module is in train mode.
            queue: maps the ids later, on its thread; wait for the plan. None = they are mapped now.
        """
        if training is None:
            training = self.training
        host = HostIds(self.features, inputs)
        times = self._times(time, host.num_samples) if training else None
        step = Step(self._natives(), self._layout)
        task = None
        try:
            if queue is None:
                step.map(host.addresses, _address(times), training=training)
            else:
                task = step.map_later(
                    queue, host.addresses, _address(times), (host, times), training=training
                )
        except ValueError:
            host.check_offsets(self.features)
            raise
        self._watch_admission()
        return Plan(tuple(inputs), host, step, task)

    def map_and_pool(
        self,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None = None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, Step]:
        """Look up rows in the tables of this process, in one native call.

        Args:
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: of these inputs, if they were mapped ahead.
            training: whether tables may change: new ids are inserted, ids counted and timed.
            keeps: whether a backward pass follows.
        """
        if plan is not None:
            results = _Results(self, plan.host)
            plan.step.pool(results.addresses)
            return results.on(self._device.device), plan.step
        host = HostIds(self.features, inputs)
        times = self._times(time, host.num_samples) if training else None
        results = _Results(self, host)
        step = Step(self._natives(), self._layout)
        try:
            step.lookup(
                host.addresses, _address(times), results.addresses, training=training, keeps=keeps
            )
        except ValueError:
            host.check_offsets(self.features)
            raise
        self._watch_admission()
        return results.on(self._device.device), step

    def _watch_admission(self) -> None:
        for table in self._admitting:
            table.watch_admission()

    def _times(self, time: Any, num_samples: int) -> np.ndarray | None:
        if not self._timed:
            return None
        if isinstance(time, Tensor):
            time = time.detach().cpu().numpy()
        times = [table.check_times(time, num_samples) for table in self.tables]
        return next((checked for checked in times if checked is not None), None)

    def receive(self, step: Step, flat: Tensor | None, sequences: Sequence[Tensor | None]) -> None:
        """Sum the gradients of a lookup's results by id, as `.grad` of the group parameters.

        Rows of a frozen table get sums of zero, so that gradient clipping ignores them.
        """
        if flat is not None:
            flat = dense_rows(flat)
        # the tensors of these gradients must live until the native call has read them
        of_sequences = [None if grad is None else dense_rows(grad) for grad in sequences]
        self.gradients.add(step, self._gradient_rows(flat, of_sequences))

    def sums(
        self,
        step: Step,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """Return the gradients of a lookup's results, summed by distinct id, of each table.

        `sizes`: the rows of each table's sums, at least as many as its ids; zeros fill up the rest.
        """
        if flat is not None:
            flat = dense_rows(flat)
        of_sequences = [None if grad is None else dense_rows(grad) for grad in sequences]
        sums = [
            torch.zeros(size, table.dim, dtype=torch.float32, device="cpu")
            for table, size in zip(self.tables, sizes, strict=True)
        ]
        addresses = [rows.data_ptr() for rows in sums]
        step.sum_gradients(self._gradient_rows(flat, of_sequences), addresses)
        return sums

    def _gradient_rows(
        self, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> list[tuple[int, int]]:
        """Return the address and the stride of each feature's gradient; (0, 0) if it has none."""
        address = 0
        stride = 0
        if flat is not None:
            address = flat.data_ptr()
            stride = flat.stride(0)
        frozen = [table.frozen for table in self.tables]
        rest = iter(sequences)
        rows = []
        for table, dim, pooled in zip(self._table_of, self.dims, self.pooled, strict=True):
            row = (0, 0)
            if not pooled:
                grad = next(rest)
                if grad is not None:
                    row = (grad.data_ptr(), grad.stride(0))
            elif flat is not None:
                row = (address, stride)
                address += 4 * dim
            rows.append((0, 0) if frozen[table] else row)
        return rows

    def _natives(self) -> list[Any]:
        return [table.native for table in self.tables]

    def split(
        self, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """Yield the part of each feature of a result, or of its gradient."""
        rest = iter(sequences)
        start = 0
        for dim, pooled in zip(self.dims, self.pooled, strict=True):
            if not pooled:
                yield next(rest)
                continue
            yield None if flat is None else flat[:, start : start + dim]
            start += dim

    def __prepare_scriptable__(self) -> None:
        """Raise ConfigError: torch.jit.script calls this before it compiles a module."""
        raise transformed([table.name for table in self.tables], "torch.jit.script")

    def update(self, rates: Sequence[float], *, keeps: bool = False) -> None:
        """Apply the rule of each table to its rows whose gradients wait, once a row.

        Args:
            rates: the learning rate of each group of tables, see `groups`.
            keeps: whether the gradients wait on.
        """
        sums = self.gradients.take(rates, keeps=keeps)
        if sums is not None:
            sums.apply()

    def table_of(self, number: int) -> Table:
        """Return the table of a feature."""
        return self.tables[self._table_of[number]]


def update_tables(
    modules: Sequence[TableModule], rates: Sequence[Sequence[float]], *, keeps: bool = False
) -> None:
    """Update the tables of `modules` as `TableModule.update` does; a table in two steps once.

    Args:
        modules: the modules, which may share tables.
        rates: the rates of each module.
        keeps: whether the gradients wait on.
    """
    parts = []
    for module, own in zip(modules, rates, strict=True):
        sums = module.gradients.take(own, keeps=keeps)
        if sums is not None:
            parts.append(sums)
    if len(parts) > 1:
        parts = [Sums.merge(parts)]
    for part in parts:
        part.apply()


def table_modules(model: nn.Module) -> list[TableModule]:
    """Return the table modules inside a model, each once."""
    return [module for module in model.modules() if isinstance(module, TableModule)]


class _Results:
    """What a lookup writes: `flat` [n, output_dim], and the rows [m, dim] of each sequence.

    `addresses`: of each feature, the address of its first value and the floats between two rows.
    """

    def __init__(self, module: TableModule, host: HostIds) -> None:
        width = module.output_dim
        self.flat = torch.empty(host.num_samples, width, dtype=torch.float32, device="cpu")
        self.sequences: list[Tensor] = []
        self.addresses: list[tuple[int, int]] = []
        address = self.flat.data_ptr()
        for feature, dim, values, offsets in zip(
            module.features, module.dims, host.values, host.offsets, strict=True
        ):
            if feature.pooling != "none":
                self.addresses.append((address, width))
                address += 4 * dim
            else:
                num_ids = values.numel()
                size = num_ids
                if offsets is not None:
                    rows_of = f"table {feature.table!r}: ids of feature {feature.name!r}"
                    size = module.buckets.size_for(num_ids, rows_of)
                rows = torch.empty(size, dim, dtype=torch.float32, device="cpu")
                rows[num_ids:] = 0.0
                self.sequences.append(rows)
                self.addresses.append((rows.data_ptr(), dim))

    def on(self, device: torch.device) -> Pooled:
        if device.type == "cpu":
            return self.flat, self.sequences
        return self.flat.to(device), [rows.to(device) for rows in self.sequences]


def _address(times: np.ndarray | None) -> int:
    return 0 if times is None else times.ctypes.data


def _group(tables: Sequence[Table]) -> list[Group]:
    numbers: dict[tuple[int, Any], list[int]] = {}
    for number, table in enumerate(tables):
        numbers.setdefault((table.dim, table.rule), []).append(number)
    return [Group(dim, tuple(members)) for (dim, _), members in numbers.items()]
