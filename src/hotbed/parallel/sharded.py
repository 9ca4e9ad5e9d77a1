# SPDX-License-Identifier: Apache-2.0
"""ShardedLookup: the verbs of a lookup over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import FeatureLayout, LocalIds, LocalLookup, Plan, Pooled, Sums
from hotbed.embedding.table import MapQueue
from hotbed.errors import ConfigError

from .ids import OwnedIds
from .own_batches import OwnBatches
from .placement import Placement
from .ranks import Ranks


class ShardedLookup(LocalLookup):
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
        self._batches = OwnBatches(ranks, placement)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLookup:
        """Return the lookup of a copied network: the copy has the same connections."""
        return ShardedLookup(self._ranks, self._placement)

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

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, LocalIds]:
        if plan is None:
            if training:
                raise ConfigError(
                    "ranks: tables that several ranks share learn in the steps of RecModel or "
                    "hb.shard, got a lookup in train mode that no step has mapped. Look up the ids "
                    "of a batch as they are, once, in model.fit(), model.step(), or the loss_of of "
                    "loop.backward()."
                )
            plan = self._batches.plan_of(layout, inputs, None, training=False, is_shared=True)
        return super().pool(layout, inputs, time, plan, training=training, keeps=keeps)

    def join(self, parts: Sequence[Sums]) -> Sums:
        joined = super().join(parts)
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
        super().update(parts, rates)
