# SPDX-License-Identifier: Apache-2.0
"""ShardedLookup: the verbs of a lookup over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import (
    FeatureLayout,
    Group,
    HostIds,
    LocalIds,
    LocalLookup,
    Lookup,
    MappedIds,
    Plan,
    Pooled,
    Sums,
)
from hotbed.embedding.table import MapQueue
from hotbed.errors import ConfigError

from .exchange import TableExchange
from .ids import OwnedIds
from .placement import Placement
from .ranks import Ranks


class ShardedLookup(Lookup):
    """Performs the verbs over the rows of all ranks, for grains that a `TableExchange` mapped.

    A network in eval mode is called on every rank with the same batches.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
    """

    spans_ranks = True

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self._local = LocalLookup()
        self._exchanges: dict[FeatureLayout, TableExchange] = {}

    def map(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        *,
        training: bool,
        queue: MapQueue | None = None,
        grain_ends: Sequence[int] = (),
    ) -> Plan:
        raise ConfigError(
            "ranks: ids that several ranks share are mapped by the steps of RecModel or hb.shard, "
            "grain by grain, got a batch to map on its own. Call model.fit(), model.step(), or the "
            "backward() of hb.shard."
        )

    def divide(
        self, layout: FeatureLayout, plan: Plan, grains: Sequence[Sequence[Ids] | None]
    ) -> list[Plan | None]:
        return self._local.divide(layout, plan, grains)

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, MappedIds]:
        if plan is None:
            if training:
                raise ConfigError(
                    "ranks: tables that several ranks share learn in the steps of RecModel or "
                    "hb.shard, got a lookup in train mode that no step has mapped. Look up the ids "
                    "of a batch as they are, once, in model.fit(), model.step(), or the loss_of of "
                    "loop.backward()."
                )
            exchange = self._exchange(layout)
            asked = exchange.ask(inputs, None, self._as_one_grain(layout, inputs), training=False)
            plan = exchange.fetch_whole(asked, inputs)  # of rows that `asked` holds
        return self._local.pool(layout, inputs, time, plan, training=training, keeps=keeps)

    def sum_gradients(
        self,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        groups: Sequence[Group],
    ) -> Sums:
        return self._local.sum_gradients(layout, mapped, flat, sequences, groups)

    def join(self, parts: Sequence[Sums]) -> Sums:
        joined = self._local.join(parts)
        assert isinstance(joined.mapped, LocalIds), "the local lookup joined them"
        if not all(isinstance(part.mapped, OwnedIds) for part in parts):
            return joined
        owned = OwnedIds(joined.mapped.tables, joined.mapped.step, ranks=self._ranks)
        return replace(joined, mapped=owned)

    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        if not all(isinstance(part.mapped, OwnedIds) for part in parts):
            raise ConfigError(
                "ranks: tables that several ranks share learn in the steps of RecModel or "
                "hb.shard, got gradients of another backward pass. Call model.fit(), model.step(), "
                "or the backward() of hb.shard."
            )
        self._local.update(parts, rates)

    def _exchange(self, layout: FeatureLayout) -> TableExchange:
        if layout not in self._exchanges:
            self._exchanges[layout] = TableExchange(self._ranks, self._placement, [layout])
        return self._exchanges[layout]

    def _as_one_grain(self, layout: FeatureLayout, inputs: Sequence[Ids]) -> list[int]:
        """Return the ends of grains that make a batch the first grain of this rank."""
        num_samples = HostIds(layout.features, inputs).num_samples
        first = self._placement.grains_of(self._ranks.rank).start
        return [0] * first + [num_samples] * (self._placement.grains - first)
