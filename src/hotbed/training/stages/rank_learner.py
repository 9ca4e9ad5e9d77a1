# SPDX-License-Identifier: Apache-2.0
"""RankLearner: a step by grains that several ranks compute."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hotbed
from hotbed.data.batch import Batch
from hotbed.errors import ConfigError
from hotbed.optim.ranks import world_size
from hotbed.parallel import (
    Placement,
    Ranks,
    RankShard,
    RankWork,
    ShardedLookup,
    Traffic,
    joined_over_ranks,
)
from hotbed.training.stages.example import Example
from hotbed.training.stages.grains import GrainLearner, GrainResult, Joined, check_agree
from hotbed.training.stages.learner import Counters


class RankLearner(GrainLearner):
    """Learns as `GrainLearner`; each rank computes some of the grains.

    All ranks get the same batches. They hold the dense part of the network, equal on all of them,
    and each holds a part of the rows of each table. The results have the bits of one process.

    Arguments and errors are those of `GrainLearner`, and it raises ConfigError if there are more
    ranks than grains.
    """

    def _connect(self) -> None:
        num_ranks = world_size()
        if num_ranks > self.grains:
            raise ConfigError(
                f"grains: each rank computes at least one, got {self.grains} grains and a world of "
                f"{num_ranks} ranks. Give more grains, a power of two, or start fewer ranks."
            )
        self._ranks = Ranks.of_job()
        self.keep_whole(frozenset())
        self._count_anew()

    def keep_whole(self, tables: frozenset[str]) -> None:
        """Let each of these tables lie on one rank; call it before anything is learned."""
        self._placement = Placement(world_size(), self.grains, tables)
        self.shard = RankShard(self._ranks, self._placement)
        for module in self._collections:
            module.lookup = ShardedLookup(self._ranks, self._placement)

    def begin(self) -> None:
        super().begin()
        tables = [table for module in self._collections for table in module.tables]
        settings = {
            "the versions of hotbed and torch": (hotbed.__version__, str(torch.__version__)),
            "the threads of torch": torch.get_num_threads(),
            "grains": self.grains,
            "whole_tables": sorted(self._placement.whole_tables),
            "the tables": [table.name for table in tables],
        }
        for table in tables:
            settings[f"table {table.name!r}"] = f"{table.config}, frozen={table.frozen}"
        settings["weights with the digest"] = self._digest_of_weights()
        self._ranks.check_equal(settings)
        self._count_anew()

    def end(self) -> list[RankWork]:
        super().end()
        tables = [table for module in self._collections for table in module.tables]
        here = RankWork(
            self._ranks.rank,
            self._steps,
            self._samples,
            sum(table.stats["rows"] for table in tables),
            self._traffic.sent_bytes,
            self._traffic.wait_seconds,
        )
        return self._ranks.gather_objects(here)

    def _count_anew(self) -> None:
        self._steps = 0
        self._samples = 0
        self._traffic = Traffic()  # of steps, not of evaluations between them

    def forward(self, example: Example) -> Tensor:
        self._ranks.traffic = self._traffic
        return super().forward(example)

    def step(self) -> None:
        super().step()
        self._steps += 1
        self._ranks.traffic = Traffic()

    def _run_one(self, grain: Example, num_samples: int) -> GrainResult:
        self._samples += grain.num_samples
        return super()._run_one(grain, num_samples)

    def summed(self, moments: Sequence[Counters]) -> Sequence[Counters]:
        totals: list[Counters] = []
        for of_ranks in zip(*self._ranks.gather_objects(moments), strict=True):
            total: Counters = {}
            for name, counts in ((name, c) for of_rank in of_ranks for name, c in of_rank.items()):
                sums = total.setdefault(name, {})
                for key, count in counts.items():
                    # what was expected of a table is a number for all ranks
                    sums[key] = count if key == "capacity" else sums.get(key, 0) + count
            totals.append(total)
        if totals:
            self._watch_capacity(totals[-1])
        return totals

    def _watch_capacity(self, counters: Counters) -> None:
        for table in (table for module in self._collections for table in module.tables):
            table.watch_capacity(counters.get(table.name, {}).get("rows", 0))

    def _digest_of_weights(self) -> str:
        digest = hashlib.sha256()
        for tensor in [*self._dense_parameters, *self._buffers]:
            values = tensor.detach().contiguous().view(-1)
            digest.update(values.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:12]

    def _planned(self, example: Example) -> list[Example | None]:
        for module in self._collections:
            if not module.training:
                raise ConfigError(
                    f"ranks: all ranks look up each step together, got tables "
                    f"{[table.name for table in module.tables]} in eval mode. Set "
                    'table.frozen = "all" instead.'
                )
        assert example.batch is not None, "the loop divides batches"
        _check_weights(example.batch)
        self._check_same(example.batch)
        return super()._planned(example)

    def _check_same(self, batch: Batch) -> None:
        """Raise ConfigError on every rank if their ids, labels or random numbers differ."""
        digest = zlib.crc32(torch.get_rng_state().numpy().data, batch.num_samples)
        for ids in batch.ids.values():
            digest = zlib.crc32(np.ascontiguousarray(ids.values).data, digest)
        for labels in batch.labels.values():
            digest = zlib.crc32(np.ascontiguousarray(labels).data, digest)
        digests = self._ranks.gather(torch.tensor([digest])).view(-1).tolist()
        if any(other != digests[0] for other in digests):
            raise ConfigError(
                "ranks: all ranks must get the same batches and random numbers, and each computes "
                f"its grains, got digests {digests}. Give each rank the same data, order and seed, "
                "and draw no random numbers on one rank alone."
            )

    def _computes(self, grain: int) -> bool:
        return grain in self._placement.grains_of(self._ranks.rank)

    def _join(self, grains: Sequence[GrainResult | None]) -> Joined:
        left = [self._changed(grains, number) for number in range(len(self._buffers))]
        is_float = [buffer.is_floating_point() for buffer in self._buffers]
        values = []
        for number, grain in enumerate(grains):
            of_grain: list[Tensor | None] = [None] * (1 + len(self._dense_parameters))
            if grain is not None:
                of_grain = [grain.loss, *grain.gradients]
            values.append(
                [*of_grain, *(of_buffer[number] for of_buffer in compress(left, is_float))]
            )
        floats = list(compress(self._buffers, is_float))
        like = [torch.zeros(()), *self._dense_parameters, *floats]
        loss, *sums = joined_over_ranks(self._ranks, self._placement, values, like)
        assert loss is not None, "a grain has run"
        outputs, buffers = self._gathered(grains, left)
        gradients = sums[: len(self._dense_parameters)]
        totals = iter(sums[len(self._dense_parameters) :])
        means: list[Tensor | None] = []
        for of_ranks, averaged in zip(buffers, is_float, strict=True):
            mean = of_ranks[0] if of_ranks else None
            if averaged:
                total = next(totals)
                mean = None if total is None else total / len(of_ranks)
            elif of_ranks:
                check_agree(of_ranks)
            means.append(mean)
        return Joined(loss, outputs, gradients, means)

    def _gathered(
        self, grains: Sequence[GrainResult | None], left: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Return the outputs of the grains of all ranks, and each buffer that one of them changed.

        Of a buffer of floats come tensors without elements, to be counted.
        """
        changed = []
        for of_buffer in left:
            values = [value for value in of_buffer if value is not None]
            changed.append([v.new_empty(0) if v.is_floating_point() else v for v in values])
        outputs = [None if grain is None else grain.outputs for grain in grains]
        every = self._ranks.gather_objects((outputs, changed))
        all_outputs = [
            every[rank][0][number]
            for rank in range(self._ranks.size)
            for number in self._placement.grains_of(rank)
        ]
        buffers = [
            [value for _, of_rank in every for value in of_rank[number]]
            for number in range(len(left))
        ]
        return [output for output in all_outputs if output is not None], buffers


def _check_weights(batch: Batch) -> None:
    """Raise ConfigError if weights of ids learn: their gradient reads rows of other ranks."""
    for name, ids in batch.ids.items():
        if getattr(ids.weights, "requires_grad", False):
            raise ConfigError(
                f"ranks: weights of ids take no gradient on several ranks, got those of feature "
                f"{name!r}, which require one. Detach them, or start one process."
            )
