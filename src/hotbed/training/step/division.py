# SPDX-License-Identifier: Apache-2.0
"""Division: in how many parts a step computes its batch, and on which processes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from hotbed.embedding.modules import TableModule, histories_of, table_modules
from hotbed.errors import ConfigError
from hotbed.parallel import (
    WHOLE,
    DensePart,
    LocalDense,
    Placement,
    RankDense,
    Ranks,
    RankShard,
    Shard,
    ShardedLookup,
)
from hotbed.parallel.world import trains_together, world_size
from hotbed.persist.state.spread import keep_own_rows


@dataclass(frozen=True)
class Division:
    """In how many grains a step computes its batch, and where their rows and dense parts are.

    Attributes:
        grains: their number, a power of two; 1 = the batch is not divided.
        shard: the rows that this process holds.
        dense: the dense part, which joins what grains leave.
        rows: looks up for all modules of a network; None = each keeps its own lookup.
    """

    grains: int = 1
    shard: Shard = WHOLE
    dense: DensePart = field(default_factory=LocalDense)
    rows: ShardedLookup | None = None

    @staticmethod
    def of_job(grains: int, whole_tables: Collection[str]) -> Division:
        """Return the division of a step: over the ranks, if several train together by grains.

        `whole_tables`: names of tables that lie on one rank each.
        """
        if grains == 1 or not trains_together():
            return Division(grains)
        ranks = Ranks.of_job()
        placement = Placement(world_size(), grains, frozenset(whole_tables))
        return Division(
            grains,
            RankShard(ranks, placement),
            RankDense(ranks, placement),
            ShardedLookup(ranks, placement),
        )

    def place(self, network: nn.Module) -> None:
        """Let the rows of a network lie where this says; nothing was learned yet.

        Tables that hold rows hold the same ones on all processes; each keeps those that it owns.

        Raises:
            ConfigError: they differ, or the network has no table, or an embedding with sparse
                gradients.
        """
        if self.rows is None:
            return
        _check_network(network)
        modules = table_modules(network)
        for module in modules:
            module.lookup = self.rows
        tables = {table.name: table for module in modules for table in module.tables}
        histories = histories_of(network)
        if histories is not None:
            histories.read_tables = self.rows.read_tables
            tables |= histories.tables
        keep_own_rows(tables, self.shard)


def connect_ranks(grains: int) -> None:
    """Connect the ranks, if several train together by grains.

    It comes before anything that one rank alone may refuse: it could not tell the others.

    Raises:
        ConfigError: there are more ranks than grains.
    """
    if grains == 1 or not trains_together():
        return
    num_ranks = world_size()
    if isinstance(grains, int) and 1 < grains < num_ranks:
        raise ConfigError(
            f"grains: each rank computes at least one, got {grains} grains and a world of "
            f"{num_ranks} ranks. Give more grains, a power of two, or start fewer ranks."
        )
    Ranks.of_job()


def _check_network(network: nn.Module) -> None:
    if not table_modules(network):
        raise ConfigError(
            "ranks: several ranks share the rows of tables, got a network without a table. Start "
            "one process, or train it with torch's DistributedDataParallel in a loop of your own."
        )
    for path, module in network.named_modules():
        is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_lookup and module.sparse and not isinstance(module, TableModule):
            raise ConfigError(
                f"ranks: gradients of dense parameters are added as dense tensors, got {path!r}, "
                "an embedding with sparse=True. Leave sparse out, or let hb.auto make a table of "
                "it."
            )
