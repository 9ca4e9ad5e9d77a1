# SPDX-License-Identifier: Apache-2.0
"""Ahead: the ids of coming batches are mapped to rows while earlier batches train."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from torch import nn

from hotbed import checks
from hotbed.data.batch import Batch
from hotbed.embedding.modules import Planner
from hotbed.errors import ConfigError
from hotbed.training.learner import CPU, Example, prepare

from .cores import Cores
from .stage import Barrier, MapStage

__all__ = ["Ahead"]

log = logging.getLogger("hotbed")


class Ahead:
    """Batches whose ids are mapped to rows on a thread of its own while earlier batches train.

    Results have the same bits as without it, under the same number of torch's threads. Mapping
    inserts new ids, counts and times them, and evicts where a table is full; so it passes no
    barrier: a step after which tables are read or changed in another way (evict, evaluate, save). A
    batch behind a barrier is mapped when its turn comes.

    `RecModel` takes an `Ahead` of a Dataset, finds the network itself, and asks its callbacks for
    barriers. In a loop of your own, give the network and `barrier`. The network must look up the
    ids of each batch as they are, exactly once. Its first batch shows whether it does; a network
    that does not maps ids in its forward pass. Batches are yielded as tensors. If the loop ends
    before the data, up to `depth` batches are mapped and not learned, unless the last step is a
    barrier.

    Small networks are faster with fewer threads of torch than there are cores, because threads wait
    for each other in every operation. So the threads of torch and of the native core are chosen
    from the times of the first steps, and the choice is logged. A `Checkpoint` stores it with the
    run. After the data the threads from before are back.

    Args:
        batches: a Dataset, or Batches to iterate over.
        network: the network that looks them up.
        depth: how many batches are mapped ahead; 0 = none, and threads stay as they are.
        barrier: `barrier(step, now)` returns whether tables are read or changed between this step
            and the next one. `now` is the newest event time up to this step in microseconds. None =
            never. `EvictionSchedule.barrier` is one.
        step: number of steps that were learned before.
        now: newest event time before, in microseconds.
        torch_threads: threads of torch while the data are learned; None = measured.

    Raises:
        ConfigError: a wrong `depth` or `torch_threads`; while iterating, the network is missing.

    Example:
        >>> model.fit(hb.Ahead(train), valid)
        >>> schedule = EvictionSchedule(tables, step_interval=1000)
        >>> for step, batch in enumerate(hb.Ahead(train, network, barrier=schedule.barrier), 1):
        ...     learn(batch)
        ...     schedule.step(step, now)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        network: nn.Module | None = None,
        depth: int = 2,
        *,
        barrier: Barrier | None = None,
        step: int = 0,
        now: int | None = None,
        torch_threads: int | None = None,
    ) -> None:
        checks.whole_number("Ahead.depth", depth, 0)
        if torch_threads is not None:
            checks.whole_number("Ahead.torch_threads", torch_threads, 1)
        self.batches = batches
        self.network = network
        self.depth = depth
        self.barrier = barrier
        self.torch_threads = torch_threads
        self._step = step
        self._now = now

    def __iter__(self) -> Iterator[Batch]:
        if self.network is None:
            raise ConfigError(
                "Ahead: no network whose tables the ids are mapped for, got None. Give the "
                "network, or pass this to RecModel.fit()."
            )
        planner = Planner(self.network)
        stage = MapStage(
            self._examples(),
            planner,
            depth_for(planner, self.depth),
            self.barrier or _never,
            self._step,
            self._now,
        )
        cores = self.cores()
        with closing(stage), closing(cores):
            cores.begin(self._step)
            for step, example in enumerate(stage, self._step + 1):
                assert example is not None
                assert example.batch is not None
                batch = planner.map(example.batch)
                stage.advance()
                yield batch
                cores.step(step)

    def cores(self) -> Cores:
        """Return what chooses the threads of a run over these data."""
        return Cores(self.torch_threads, measures=self.depth > 0)

    def _examples(self) -> Generator[Example | None, None, None]:
        for item in self.batches:
            if not isinstance(item, Batch):
                raise ConfigError(
                    f"Ahead: not a batch, got {type(item).__name__}. Give a hb.Dataset or hb.Batch "
                    "objects."
                )
            yield prepare(item, CPU, labelled=False)


def unwrap(data: Any, network: nn.Module) -> tuple[Any, int, list[Cores]]:
    """Return the data of an `Ahead`, its depth and what chooses threads; other data, 0, none.

    Raises:
        ConfigError: it has barriers or a network of its own, which are those of `RecModel`.
    """
    if not isinstance(data, Ahead):
        return data, 0, []
    if data.network not in (None, network) or data.barrier is not None:
        raise ConfigError(
            "Ahead: RecModel gives its own network and the barriers of its callbacks, got others. "
            "Give hb.Ahead(train, depth=…) alone."
        )
    return data.batches, data.depth, [data.cores()]


def depth_for(planner: Planner | None, depth: int) -> int:
    """Return how many batches can be mapped ahead: `depth`, or 0; the reason is logged."""
    if not depth:
        return 0
    reason = "the network is not one of hb.models, or is compiled"
    if planner is not None:
        reason = planner.obstacle()
    if reason:
        log.info("no batch is mapped ahead: %s", reason)
        return 0
    log.info("the ids of up to %d batches are mapped ahead", depth)
    return depth


def _never(step: int, now: int | None) -> bool:
    return False
