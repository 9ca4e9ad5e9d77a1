# SPDX-License-Identifier: Apache-2.0
"""ProgramRanks: the processes of a program, each of which reads batches of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

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
    digest_of_files,
    reduced,
    sum_counters,
)
from hotbed.training.step.agreement import settings_of_network


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
            table.spread = self.shard.spread(name)
        averaged = {name for name, table in descriptions.items() if table.averages}
        fixed = {name: table.padding for name, table in descriptions.items() if table.padding}
        return OwnBatchLookup(self.ranks, self._placement, averaged, fixed)

    def check_equal(
        self, options: Options, models: Iterable[nn.Module], tables: Mapping[str, Table]
    ) -> None:
        """Raise ConfigError, on every rank, unless all of them run the same program."""
        program = getattr(sys.modules["__main__"], "__file__", None)
        settings: dict[str, Any] = {
            "the keywords of init": str(options),
            "the tables": list(tables),
            "code of the program with the digest": digest_of_files([Path(program or "")]),
        }
        for number, model in enumerate(models):
            weights = list(dense_parameters(model))
            settings[f"network {number}"] = settings_of_network(model, weights)
        for name, table in tables.items():
            settings[f"table {name!r}"] = str(table.config)
        self.ranks.check_equal(settings)

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        """Return the counters of tables at some moments, of all ranks; each rank must ask."""
        return sum_counters(self.shard.gathered(moments))

    def reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return a tensor of all ranks, reduced lane by lane: "sum", "prod", "max" or "min"."""
        return reduced(self.ranks, self._placement, tensor, reduction)
