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
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hotbed.data.batch import Ids
from hotbed.embedding.device import counted_as_rows
from hotbed.embedding.lookups import (
    FeatureLayout,
    Group,
    LocalLookup,
    Lookup,
    Plan,
    Pooled,
    update_parts,
)

from .autograd import TableFlow
from .compiled import Tickets, alive
from .flow import Flow
from .gradients import RowGradients
from .parameter import TableRows
from .state import Carrier
from .transforms import transformed

CPU = torch.device("cpu")


class TableModule(Carrier, ABC):
    """Base of Embedding, EmbeddingBag and EmbeddingCollection.

    One native call looks up all features in all tables. `state_dict_limit`: the most bytes of rows
    that `state_dict()` takes from a module; above it, `state_dict()` raises PersistError.

    With `buckets`, the rows of a feature with offsets and pooling "none", and the gradients of each
    group of tables, are followed by rows of zeros up to the next bucket: shapes repeat, and values
    are the same. More rows than the largest bucket raise RowShapeError.
    """

    def __init__(self, layout: FeatureLayout) -> None:
        super().__init__()
        self.layout = layout
        self.tables = self.layout.tables
        self.features = self.layout.features
        self.lookup: Lookup = LocalLookup()
        self.flow: Flow = TableFlow()
        # follows .to(device); results are moved to its device
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._begin()

    @property
    def settings(self) -> dict[str, Any]:
        """How it looks up, beside its tables, as plain values by name; {} if its schema says it."""
        return {}

    def _begin(self) -> None:
        """Set the parameters and the number that each module, also a copy, has of its own."""
        for number, group in enumerate(self.groups):
            self.register_parameter(
                f"rows_{number}", TableRows([self.tables[table] for table in group.tables])
            )
        self.gradients = RowGradients(self.layout, self.rows)
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
    def groups(self) -> list[Group]:
        """Return the groups of tables of one dim and rule, which share a parameter each."""
        return self.layout.groups

    @property
    def dims(self) -> list[int]:
        """Return the lanes of each feature."""
        return self.layout.dims

    @property
    def pooled(self) -> list[bool]:
        """Return whether each feature is pooled."""
        return self.layout.pooled

    @property
    def output_dim(self) -> int:
        """Return the lanes of all pooled features side by side."""
        return self.layout.output_dim

    @property
    def device(self) -> torch.device:
        """Return the device to which results are moved."""
        return self._device.device

    @property
    def learns(self) -> bool:
        """Return True if a table is not frozen."""
        return not all(table.frozen for table in self.tables)

    def extra_repr(self) -> str:
        lines = []
        for feature, number in zip(self.features, self.layout.numbers, strict=True):
            pooling = "" if feature.pooling == "none" else f"{feature.pooling} of "
            lines.append(f"{feature.name}: {pooling}{self.tables[number]}")
        return "\n".join(lines)

    def pool(self, inputs: Sequence[Ids], time: Any = None, plan: Plan | None = None) -> Pooled:
        """Return the pooled features side by side, and the rows of each sequence feature.

        The shapes are [n, output_dim], and [m, dim] for each sequence feature. `self.lookup`
        performs the lookup, `self.flow` connects it with the graph of torch.

        Args:
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: from `Plans.take`, if the ids were mapped before.
        """
        return self.flow.pool(self, inputs, time, plan)

    def fetch(self, inputs: Sequence[Ids]) -> None:
        """Begin to read the rows of coming ids from the disk, for tables of the tier `Ssd`.

        The lookup of these ids then waits less. Nothing else changes: no id is inserted or counted.
        It may be called on any thread. `RecModel` and `hb.Ahead` do so for the batches of a
        Dataset.

        Args:
            inputs: the ids of each feature; of a batch, `collection.inputs_of(batch)`.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
        """
        self.lookup.fetch(self.layout, inputs)

    def __prepare_scriptable__(self) -> None:
        """Raise ConfigError: torch.jit.script calls this before it compiles a module."""
        raise transformed(self.tables, "torch.jit.script")

    def update(self, rates: Sequence[float], *, keeps: bool = False) -> None:
        """Apply the rule of each table to its rows whose gradients wait, once a row.

        Args:
            rates: the learning rate of each group of tables, see `groups`.
            keeps: whether the gradients wait on.
        """
        update_tables([self], [rates], keeps=keeps)


def update_tables(
    modules: Sequence[TableModule], rates: Sequence[Sequence[float]], *, keeps: bool = False
) -> None:
    """Update the tables of `modules` as `TableModule.update` does; a table of several of them once.

    Args:
        modules: the modules, which may share tables.
        rates: the rates of each module.
        keeps: whether the gradients wait on.
    """
    parts = []
    for module, group_rates in zip(modules, rates, strict=True):
        sums = module.gradients.take(keeps=keeps)
        if sums is not None:
            parts.append((module.lookup, sums, group_rates))
    with counted_as_rows(_device_of(modules)):
        update_parts(parts)
    for module in modules:
        module.gradients.let_go()


def _device_of(modules: Sequence[TableModule]) -> torch.device:
    """Return the device of modules of a network; the CPU only if all of them are there."""
    for module in modules:
        device = module.device
        if device.type != "cpu":
            return device
    return CPU


def table_modules(model: nn.Module) -> list[TableModule]:
    """Return the table modules inside a model, each once."""
    return [module for module in model.modules() if isinstance(module, TableModule)]
