# SPDX-License-Identifier: Apache-2.0
"""OwnBatchLookup: the verbs of a lookup for ranks that each have a batch of their own."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import CountedTimes, Ids
from hotbed.embedding.lookups import (
    Asked,
    Buckets,
    FeatureLayout,
    Group,
    HostIds,
    LocalIds,
    MappedIds,
    NativeIds,
    NativeLookup,
    Plan,
    Pooled,
    RowMemory,
    Statistics,
    Sums,
    WantedRows,
    native_ids,
    new_rows,
    step_without_ids,
)
from hotbed.errors import ConfigError

from .calls import at
from .dense import joined
from .exchange import TableExchange
from .ids import AskedIds
from .placement import Placement
from .ranks import Ranks
from .shards import edits_of


@dataclass(frozen=True, eq=False, kw_only=True)
class TakenIds(NativeIds):
    """The distinct ids of the batch of this rank, whose rows the owners sent.

    A rank does not know where others keep their rows: the slot of an id is its number here.

    Attributes:
        layout: of the lookup.
        asked: the ids of the batches of all ranks.
        exchange: which fetched the rows.
        ranks: of the job.
    """

    layout: FeatureLayout
    asked: AskedIds
    exchange: TableExchange
    ranks: Ranks

    def read(self, number: int, rows: Tensor, slots: Tensor) -> None:
        super().read(number, rows, slots)
        num_uniques = self.num_uniques()[number]
        torch.arange(num_uniques, out=slots[:num_uniques])

    def let_go(self) -> None:
        super().let_go()
        self.asked.answer.let_go()

    def find_nonfinite(self, sums: Sums) -> tuple[int, int] | None:
        places = self.ranks.gather_objects(super().find_nonfinite(sums))
        return next((place for place in places if place is not None), None)

    def without_ids(self) -> MappedIds:
        return LocalIds(self.tables, step_without_ids(self.tables))


class OwnBatches:
    """Fetches the rows of batches, of which each rank has one: it is the first of its grains.

    Every rank makes the same calls in the same order.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
    """

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._first = placement.grains_of(ranks.rank).start
        self._placement = placement
        self._exchanges: dict[FeatureLayout, TableExchange] = {}

    def plan_of(
        self, layout: FeatureLayout, inputs: Sequence[Ids], time: Any, *, training: bool
    ) -> Plan:
        """Return the plan of the batch of this rank, whose ids are `TakenIds`.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            training: whether tables may change.

        Raises:
            ConfigError: on every rank: they do not.
        """
        if isinstance(time, CountedTimes):
            raise ConfigError(
                "ranks: each process brings its own batches, got a join that makes several samples "
                "of an impression, of which one counts. Train with model.online_train."
            )
        exchange = self._exchanges.get(layout)
        if exchange is None:
            exchange = TableExchange(self._ranks, self._placement, [layout])
            self._exchanges[layout] = exchange
        num_samples = HostIds(layout.features, inputs).num_samples
        ends = [0] * self._first + [num_samples] * (self._placement.grains - self._first)
        values = edits_of(layout.tables)
        with self._ranks.undivided():
            asked = exchange.ask(inputs, time, ends, training=training, values=values)
            plan = exchange.take_whole(asked, inputs)
        local = native_ids(plan.mapped)
        fetched = TakenIds(
            local.tables,
            local.step,
            local.host,
            layout=layout,
            asked=asked,
            exchange=exchange,
            ranks=self._ranks,
        )
        return replace(plan, mapped=fetched)

    def sums_of_owner(self, part: Sums) -> Sums:
        """Return the sums of the ids that this rank owns, in the batches of all ranks.

        `part`: of the batch of this rank, with a group for each table.
        """
        mapped = _fetched(part.mapped)
        grains: list[Sums | None] = [None] * self._placement.grains
        grains[self._first] = part
        sent = mapped.exchange.sums_to_owners(mapped.asked, [grains])
        sizes = mapped.exchange.num_sums(mapped.asked)
        received = self._ranks.exchange(sent, sizes).split(sizes)
        (owned,) = mapped.exchange.sums_of_owner(mapped.asked, received)
        return owned


@dataclass(frozen=True)
class OwnAsked:
    """The ids of a batch of this rank that were asked for at once. `plans`: of each module."""

    plans: list[Plan]

    def wait(self) -> None: ...

    def take_back(self) -> None: ...

    def statistics(self) -> Statistics:
        return {}


class OwnBatchLookup(NativeLookup):
    """Performs the verbs over the rows of all ranks, for ranks that each have a batch of their own.

    The batches of all ranks are one batch, whose grains they are. Ids are mapped when they are
    looked up. Every rank makes the same calls in the same order.

    Args:
        ranks: of the job.
        placement: which of them owns which rows; each rank computes its first grain.
        averaged: names of tables whose gradients are divided by the number of ranks. Those of
            others are added.
        fixed: ids by name of the table whose rows take no update.
    """

    spans_ranks = True

    def __init__(
        self,
        ranks: Ranks,
        placement: Placement,
        averaged: Container[str] = (),
        fixed: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._ranks = ranks
        self._placement = placement
        self._batches = OwnBatches(ranks, placement)
        self._averaged = averaged
        self._fixed = {} if fixed is None else fixed

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnBatchLookup:
        """Return the lookup of a copied module: the copy has the same connections."""
        return OwnBatchLookup(self._ranks, self._placement, self._averaged, self._fixed)

    @at("lookup")
    def ask(self, wanted: WantedRows) -> Asked:
        if wanted.queue is not None or wanted.grain_ends:
            raise ConfigError(
                "ranks: ids of batches that each rank has of its own are mapped when they are "
                "looked up, got a batch to map ahead. Look it up as it is."
            )
        modules = zip(wanted.layouts, wanted.inputs, strict=True)
        time = wanted.time
        training = wanted.training
        return OwnAsked([self._batches.plan_of(*m, time, training=training) for m in modules])

    def take(
        self, asked: Asked, grains: Sequence[Sequence[Sequence[Ids]] | None]
    ) -> list[list[Plan | None]]:
        assert isinstance(asked, OwnAsked), "this lookup was asked"
        return [[plan] for plan in asked.plans]

    def join_grains(
        self, asked: Asked, parts: Sequence[Sequence[Sums | None]]
    ) -> Callable[[], list[Sums | None]]:
        return lambda: [part for (part,) in parts]

    @at("lookup")
    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        memory: RowMemory = new_rows,
        *,
        training: bool,
        keep: bool,
    ) -> tuple[Pooled, MappedIds]:
        plan = self._batches.plan_of(layout, inputs, time, training=training)
        return self.pool_plan(layout, inputs, plan, memory)

    @at("update")
    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        """Apply the sums of all ranks, as `Lookup.update`.

        Raises:
            ConfigError: on every rank: they have sums of other tables, or other rates.
        """
        owned = []
        owned_rates = []
        for part, group_rates in zip(parts, rates, strict=True):
            rate_of = {}
            for group, rate in zip(part.groups, group_rates, strict=True):
                rate_of.update(dict.fromkeys(group.tables, rate))
            self._check_rates(part, rate_of)
            if rate_of:
                with self._ranks.undivided():
                    sums = self._batches.sums_of_owner(_of_all_tables(part))
                owned.append(self._owned(sums, rate_of))
                owned_rates.append([rate_of[group.tables[0]] for group in owned[-1].groups])
        if owned:
            super().update(owned, owned_rates)

    def _check_rates(self, part: Sums, rate_of: Mapping[int, float]) -> None:
        names = [table.name for table in _fetched(part.mapped).layout.tables]
        rates = {name: rate_of[n] for n, name in enumerate(names) if n in rate_of}
        every = self._ranks.gather_objects(rates)
        if any(of_rank.keys() != rates.keys() for of_rank in every):
            updated = [list(of_rank) for of_rank in every]
            raise ConfigError(
                "ranks: all ranks must give gradients of the same tables, got those of "
                f"{updated} on ranks 0 to {self._ranks.size - 1}. Give zeros where a rank has none."
            )
        if any(of_rank != rates for of_rank in every):
            raise ConfigError(
                f"ranks: all ranks must update tables at the same rates, got {every} on ranks 0 to "
                f"{self._ranks.size - 1}. Set the learning rate alike on each rank."
            )

    def _owned(self, sums: Sums, updated: Container[int]) -> Sums:
        """Return what the tables of this rank take of these sums, a group a table."""
        tables = sums.mapped.tables
        uniques = sums.mapped.num_uniques()
        groups = []
        grads = []
        for group, grad in zip(sums.groups, sums.grads, strict=True):
            parts = grad.split([uniques[number] for number in group.tables])
            for number, of_table in zip(group.tables, parts, strict=True):
                if number not in updated:
                    continue
                name = tables[number].name
                if name in self._averaged:
                    of_table = of_table / self._ranks.size
                if name in self._fixed:
                    is_fixed = np.isin(sums.mapped.unique_ids(number), self._fixed[name])
                    sums.mapped.leave_out(number, np.flatnonzero(is_fixed))
                groups.append(Group(group.dim, (number,), repr(name), Buckets(())))
                grads.append(of_table)
        return replace(sums, groups=groups, grads=grads)


def reduced(ranks: Ranks, placement: Placement, tensor: Tensor, reduction: str) -> Tensor:
    """Return a tensor of all ranks, reduced lane by lane: "sum", "prod", "max" or "min".

    A sum is added in the tree in which gradients of rows are.
    """
    every = torch.stack(ranks.gather_objects(tensor.detach().cpu().reshape(-1)))
    if reduction == "max":
        out = every.amax(0)
    elif reduction == "min":
        out = every.amin(0)
    elif reduction == "prod":
        out = every.prod(0)
    else:
        out = _sum(every, placement)
    return out.view(tensor.shape).to(tensor.device)


def _sum(every: Tensor, placement: Placement) -> Tensor:
    """Return the sum of the parts of all ranks, [n]."""
    grains: list[Tensor | None] = [None] * placement.grains
    for rank, of_rank in enumerate(every):
        grains[placement.grains_of(rank).start] = of_rank
    total = joined(grains)
    assert total is not None, "each rank has a part"
    return total


def _fetched(mapped: MappedIds) -> TakenIds:
    if not isinstance(mapped, TakenIds):
        raise ConfigError(
            f"ranks: expected ids that this rank fetched, got {type(mapped).__name__}. Set "
            "module.lookup before ids are looked up, and not between a lookup and its update."
        )
    return mapped


def _of_all_tables(part: Sums) -> Sums:
    """Return sums with a group for each table, with zeros for those that have none."""
    mapped = _fetched(part.mapped)
    uniques = mapped.num_uniques()
    grads: dict[int, Tensor] = {}
    for group, grad in zip(part.groups, part.grads, strict=True):
        sizes = [uniques[number] for number in group.tables]
        grads.update(zip(group.tables, grad[: sum(sizes)].split(sizes), strict=True))
    groups = []
    for number, table in enumerate(mapped.layout.tables):
        groups.append(Group(table.dim, (number,), repr(table.name), Buckets(())))
        grads.setdefault(number, torch.zeros(uniques[number], table.dim))
    return Sums(mapped, groups, [grads[number] for number in range(len(groups))])
