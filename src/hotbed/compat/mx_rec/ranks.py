# SPDX-License-Identifier: Apache-2.0
"""ProgramRanks: the processes of a program, each of which reads batches of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

import hotbed
from hotbed.compat.mx_rec.description import TableDescription
from hotbed.compat.mx_rec.options import Options
from hotbed.embedding.table import Table
from hotbed.optim.sparse import dense_parameters
from hotbed.parallel import (
    Counters,
    OwnBatchLookup,
    Placement,
    Ranks,
    RankShard,
    digest_of,
    joined,
    sum_counters,
)


class ProgramRanks:
    """The processes of a program. Each owns a part of the rows of every table.

    The batches that they learn in a step are the grains of one batch, in the order of the ranks.

    Attributes:
        ranks: of the program.
        shard: the rows that this process owns.
    """

    def __init__(self) -> None:
        self.ranks = Ranks.of_job()
        size = self.ranks.size
        self._placement = Placement(size, 1 << (size - 1).bit_length())
        self.shard = RankShard(self.ranks, self._placement)

    def lookup(
        self, descriptions: Mapping[str, TableDescription], tables: Mapping[str, Table]
    ) -> OwnBatchLookup:
        """Return what looks up in the tables of all ranks; each keeps the rows that it owns."""
        for name, table in tables.items():
            table.owned = self.shard.owned(name)
        averaged = {name for name, table in descriptions.items() if table.averages}
        fixed = {name: table.padding for name, table in descriptions.items() if table.padding}
        return OwnBatchLookup(self.ranks, self._placement, averaged, fixed)

    def check_equal(
        self, options: Options, models: Iterable[nn.Module], tables: Mapping[str, Table]
    ) -> None:
        """Raise ConfigError, on every rank, unless all of them run the same program."""
        weights = [parameter for model in models for parameter in dense_parameters(model)]
        settings = {
            "the versions of hotbed and torch": (hotbed.__version__, str(torch.__version__)),
            "the keywords of init": str(options),
            "the tables": list(tables),
            "dense weights with the digest": digest_of(weights),
        }
        for name, table in tables.items():
            settings[f"table {name!r}"] = str(table.config)
        self.ranks.check_equal(settings)

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        """Return the counters of tables at some moments, of all ranks; each rank must ask."""
        return sum_counters(self.ranks, moments)

    def reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return a tensor of all ranks, reduced lane by lane: "sum", "prod", "max" or "min"."""
        flat = tensor.detach().cpu().reshape(-1)
        every = self.ranks.gather(flat)
        if reduction == "max":
            out = every.amax(0)
        elif reduction == "min":
            out = every.amin(0)
        elif reduction == "prod":
            out = every.prod(0)
        else:
            out = self._sum(every)
        return out.view(tensor.shape).to(tensor.device)

    def _sum(self, every: Tensor) -> Tensor:
        """Return the sum over ranks, [n], in the tree in which gradients of rows are added."""
        grains: list[Tensor | None] = [None] * self._placement.grains
        for rank, of_rank in enumerate(every):
            grains[self._placement.grains_of(rank).start] = of_rank
        total = joined(grains)
        assert total is not None, "each rank has a part"
        return total
