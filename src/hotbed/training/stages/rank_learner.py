# SPDX-License-Identifier: Apache-2.0
"""RankLearner: a step by grains that several ranks compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids, times_of
from hotbed.embedding.lookups import Plan, Sums
from hotbed.embedding.modules import TableModule, table_modules
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.parallel import (
    AskedIds,
    Counters,
    DenseExchange,
    Placement,
    Ranks,
    RankShard,
    RankWork,
    ShardedLookup,
    TableExchange,
    Traffic,
    sum_counters,
)
from hotbed.parallel.world import trains_together, world_size
from hotbed.persist.state.spread import keep_own_rows
from hotbed.training.stages.agreement import (
    settings_of_learning,
    settings_of_network,
    settings_of_tables,
    values_of_rates,
    values_of_step,
)
from hotbed.training.stages.example import Example
from hotbed.training.stages.grains import GrainLearner, GrainResult, Joined, all_rows, check_agree
from hotbed.training.stages.rank_mapper import Question, RankMapper


class RankLearner(GrainLearner):
    """Learns as `GrainLearner`; each rank computes some of the grains.

    All ranks get the same batches. They hold the dense part of the network, equal on all of them,
    and each holds a part of the rows of each table. The results have the bits of one process.

    Arguments and errors are those of `GrainLearner`, and it raises ConfigError if there are more
    ranks than grains.
    """

    _max_norm = 0.0  # that gradients were clipped to last
    _own_outputs: list[Any] | None  # of the grains of this rank; None = `outputs` is there

    def _connect(self) -> None:
        _check_network(self.network)
        self._ranks = Ranks.of_job()

    def keep_whole(self, tables: frozenset[str]) -> None:
        """Let each of these tables lie on one rank, and the rows of others on all of them.

        Call it once, before anything is learned. Tables that hold rows hold the same ones on all
        ranks; each rank keeps those that it owns.

        Raises:
            ConfigError: they differ.
        """
        self._placement = Placement(world_size(), self.grains, tables)
        self.shard = RankShard(self._ranks, self._placement)
        for module in table_modules(self.network):
            module.lookup = ShardedLookup(self._ranks, self._placement)
        keep_own_rows({table.name: table for table in self._tables}, self.shard)
        self._asked: AskedIds | None = None
        self._mapper = RankMapper(
            self._ranks, self._placement, self._lookups, partial(self._ask, logs=True), self._values
        )
        self.planner = self._mapper
        self._count_anew()

    def begin(self) -> None:
        super().begin()
        like = [torch.zeros(()), *self._dense_parameters, *self._buffers]
        dtypes = {tensor.dtype for tensor in like if tensor.is_floating_point()}
        self._dense = DenseExchange(self._ranks, self._placement, like, torch.float32)
        self._other_dense = [
            DenseExchange(self._ranks, self._placement, like, dtype)
            for dtype in sorted(dtypes - {torch.float32}, key=str)
        ]
        self._ranks.check_equal(self.settings)
        self._count_anew()

    @property
    def settings(self) -> dict[str, Any]:
        weights = [*self._dense_parameters, *self._buffers]
        return {
            **settings_of_tables(self._tables, self._placement),
            **settings_of_network(self.network, weights),
            **settings_of_learning(self.criterion, self.precision, [self.dense, self.sparse]),
        }

    def clip_gradients(self, max_norm: float) -> Tensor:
        self._max_norm = max_norm
        return super().clip_gradients(max_norm)

    def end(self) -> list[RankWork]:
        super().end()
        self.shard.enter("end")
        tables = self._tables
        here = RankWork(
            self._ranks.rank,
            self._steps,
            self._samples,
            sum(table.stats["rows"] for table in tables),
            self._traffic.sent_bytes + self._mapper.sent_bytes,
            self._traffic.wait_seconds,
        )
        return self._ranks.gather_objects(here)

    def _count_anew(self) -> None:
        self._steps = 0
        self._samples = 0
        self._traffic = Traffic()  # of steps, not of evaluations between them
        self._mapper.sent_bytes = 0

    def forward(self, example: Example) -> Tensor:
        self._ranks.traffic = self._traffic
        with self._ranks.undivided():
            return super().forward(example)

    def step(self) -> None:
        self.shard.enter("update")
        super().step()
        self._steps += 1
        self._ranks.traffic = Traffic()

    def _run_one(self, grain: Example, num_samples: int) -> GrainResult:
        self._samples += grain.num_samples
        return super()._run_one(grain, num_samples)

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        totals = sum_counters(self._ranks, moments)
        if totals:
            self._watch_capacity(totals[-1])
        return totals

    def _watch_capacity(self, counters: Counters) -> None:
        for table in self._tables:
            table.watch_capacity(counters.get(table.name, {}).get("rows", 0))

    @cached_property
    def _exchange(self) -> TableExchange:
        """Of the collections, which some networks have after the first batch alone."""
        layouts = [module.layout for module in self._collections]
        return TableExchange(self._ranks, self._placement, layouts)

    @cached_property
    def _tables(self) -> list[Table]:
        """The tables of the network, each once."""
        tables = [table for module in table_modules(self.network) for table in module.tables]
        return list(dict.fromkeys(tables))

    @property
    def outputs(self) -> Any:
        """The outputs of the last training forward; they come from all ranks when they are read."""
        if self._own_outputs is not None:
            every = self._ranks.gather_objects(self._own_outputs)
            self._outputs = all_rows([outputs for of_rank in every for outputs in of_rank])
            self._own_outputs = None
        return self._outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._own_outputs = None
        self._outputs = outputs

    def _keep_outputs(self, grains: Sequence[Any]) -> None:
        self._own_outputs = list(grains)

    def _shares(self, example: Example, grains: Sequence[Batch | None]) -> list[list[Plan | None]]:
        batch = example.looked_up
        question: Question | None = batch.plans
        if question is not None:
            self._asked = question.asked
        else:
            assert example.batch is not None, "the loop divides batches"
            self._asked = self._ask(self._exchange, batch, self._values(example.batch))
        of_grains: list[list[list[Ids]] | None] = [None] * len(grains)
        for number, grain in enumerate(grains):
            if grain is not None:
                of_grains[number] = [module.inputs_of(grain) for module in self._collections]
        plans = self._exchange.take(self._asked, of_grains)
        self._mapper.go_on()
        return plans

    def _values(self, batch: Batch) -> Mapping[str, Any]:
        """Return what all ranks must have alike in the step of a batch."""
        of_step = values_of_step(batch, self._dense_parameters, self._tables)
        rates = values_of_rates([self.dense, self.sparse])
        return {**of_step, **rates, "clip_gradients.max_norm": self._max_norm}

    def _ask(
        self, tables: TableExchange, batch: Batch, values: Mapping[str, Any], *, logs: bool = False
    ) -> AskedIds:
        for module in self._collections:
            if not module.training:
                raise ConfigError(
                    f"ranks: all ranks look up each step together, got tables "
                    f"{[table.name for table in module.tables]} in eval mode. Set "
                    'table.frozen = "all" instead.'
                )
        return tables.ask(
            [ids for module in self._collections for ids in module.inputs_of(batch)],
            times_of(batch),
            batch.grain_ends,
            training=True,
            values=values,
            logs=logs,
        )

    def _grains(self, example: Example) -> list[Example | None]:
        return example.grains_of(self._placement.grains_of(self._ranks.rank))

    def _join(self, grains: Sequence[GrainResult | None]) -> Joined:
        """Join what the grains of all ranks leave, in two exchanges.

        First each rank gets the gradients of the rows that it owns, and its share of the dense
        values. Then it sends the sums of its share to all, and whether those of its rows are
        finite.
        """
        self.shard.enter("exchange")
        asked = self._asked
        assert asked is not None, "the ids of the step are mapped"
        self._asked = None
        rows = [
            [None if grain is None else grain.sums[number] for grain in grains]
            for number in range(len(self._collections))
        ]
        buffers = [self._changed(grains, number) for number in range(len(self._buffers))]
        dense = [*self._losses_and_gradients(grains), *buffers]
        counts, row_parts, dense_parts = self._to_owners(asked, rows, dense)
        num_rows, num_dense = counts.split([len(rows), len(dense)])
        owned = self._exchange.sums_of_owner(asked, row_parts)
        faults = torch.tensor([float(not sums.finite) for sums in owned])

        shares = self._ranks.gather(torch.cat([faults, self._dense.share(dense_parts)]))
        is_faulty = shares[:, : len(owned)].any(0).tolist()
        sums = [
            replace(of_module, finite=not faulty) if number else None
            for of_module, faulty, number in zip(owned, is_faulty, num_rows.tolist(), strict=True)
        ]
        totals = self._dense.totals(shares[:, len(owned) :])
        for others in self._other_dense:
            totals |= others.totals_of(dense)
        joined = [
            totals.get(number) if count else None for number, count in enumerate(num_dense.tolist())
        ]
        loss = joined[0]
        assert loss is not None, "a grain has run"
        first = 1 + len(self._dense_parameters)
        means = self._means(joined[first:], num_dense[first:].tolist(), buffers)
        outputs = [grain.outputs for grain in grains if grain is not None]
        weights = self._weight_gradients(grains)
        return Joined(loss, outputs, joined[1:first], sums, means, weights)

    def _to_owners(
        self,
        asked: AskedIds,
        rows: Sequence[Sequence[Sums | None]],
        dense: Sequence[Sequence[Tensor | None]],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Send gradients of rows to their owners, and each rank its share of the dense values.

        Args:
            asked: the ids of the step.
            rows: sums of the rows of each module, [module][grain].
            dense: losses, gradients and buffers, [value][grain].

        Returns:
            How many grains of all ranks have each value, [modules + values]; what each rank sent
            for the rows that this one owns; and what each sent for its share.
        """
        every_value: list[Sequence[Any]] = [*rows, *dense]
        here = [sum(value is not None for value in of_grains) for of_grains in every_value]
        counts = torch.tensor(here).view(torch.float32)  # the bits, on their way
        num_sums = self._exchange.num_sums(asked)
        num_values = self._dense.num_values()
        sizes = [
            size
            for rank in range(self._ranks.size)
            for size in (counts.numel(), num_sums[rank], num_values[rank])
        ]
        received = self._ranks.exchange(
            [
                [counts] * self._ranks.size,
                *self._exchange.sums_to_owners(asked, rows),
                *self._dense.to_owners(dense),
            ],
            [sum(sizes[first : first + 3]) for first in range(0, len(sizes), 3)],
        ).split(sizes)
        every = torch.stack([of_rank.clone().view(torch.int64) for of_rank in received[0::3]])
        return every.sum(0), list(received[1::3]), list(received[2::3])

    def _weight_gradients(self, grains: Sequence[GrainResult | None]) -> dict[str, Tensor]:
        here = super()._weight_gradients(grains)
        if not here:
            return {}
        lengths = [len(gradient) for gradient in here.values()]
        every = self._ranks.gather(torch.cat(list(here.values()))).split(lengths, dim=1)
        gradients = {}
        for name, of_ranks in zip(here, every, strict=True):
            ends = [0, *self._weights.ends[name]]
            parts = []
            for rank, of_rank in enumerate(of_ranks):
                run = self._placement.grains_of(rank)
                parts.append(of_rank[ends[run.start] : ends[run.stop]])
            gradients[name] = torch.cat(parts)
        return gradients

    def _losses_and_gradients(
        self, grains: Sequence[GrainResult | None]
    ) -> list[list[Tensor | None]]:
        """Return the losses, then the gradients of each dense parameter, [value][grain]."""
        gradients = [
            [None if grain is None else grain.gradients[number] for grain in grains]
            for number in range(len(self._dense_parameters))
        ]
        return [[None if grain is None else grain.loss for grain in grains], *gradients]

    def _means(
        self,
        totals: Sequence[Tensor | None],
        counts: Sequence[int],
        left: Sequence[Sequence[Tensor | None]],
    ) -> list[Tensor | None]:
        """Return each buffer of the step: the mean of floats; integers, which agree.

        Args:
            totals: of buffers of floats.
            counts: how many grains changed each buffer, on all ranks.
            left: each buffer as the grains of this rank changed it.
        """
        means = [
            None if total is None else total / count
            for total, count in zip(totals, counts, strict=True)
        ]
        integers = [n for n, buffer in enumerate(self._buffers) if not buffer.is_floating_point()]
        if not integers:
            return means
        here = [[value for value in left[n] if value is not None] for n in integers]
        every = self._ranks.gather_objects(here)
        for number, of_ranks in zip(integers, zip(*every, strict=True), strict=True):
            values = [value for of_rank in of_ranks for value in of_rank]
            if values:
                check_agree(values)
                means[number] = values[0]
        return means


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
    """Raise ConfigError if a network has no table, or an embedding with sparse gradients."""
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
