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
from hotbed.errors import ConfigError
from hotbed.training.ahead.cores import Cores
from hotbed.training.step.example import CPU, Example, prepare
from hotbed.training.step.map_stage import Barrier, MapStage
from hotbed.training.step.network import adapter_of
from hotbed.training.step.planner import Planner

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
    before the data, what was mapped and not looked up is taken back.

    A stream is scored before it is learned. Where the ids are mapped before, the forward pass that
    learns a batch scores it, too, if that gives the same bits: for networks of `hb.models` without
    dropout and batch norms, over float32 tables that admit every id. Others are scored by a pass of
    their own, before the batch is mapped.

    Small networks are faster with fewer threads of torch than there are cores, because threads wait
    for each other in every operation. Where torch keeps all cores busy, ids may be mapped sooner in
    their turn. So the threads of torch and of the native core, and whether ids are mapped ahead,
    are chosen from the times of the first steps, and the choice is logged. A `Checkpoint` stores it
    with the run. After the data the threads from before are back. With `RecModel(grains=…)` threads
    stay as they are.

    Args:
        batches: a Dataset, or Batches to iterate over.
        network: the network that looks them up.
        depth: how many batches are mapped ahead; 0 = none, and threads stay as they are.
        barrier: `barrier(step, now)` returns whether tables are read or changed between this step
            and the next one. `now` is the newest event time up to this step in microseconds. None =
            never. `EvictionSchedule.barrier` is one.
        step: number of steps that were learned before.
        now: newest event time before, in microseconds.
        torch_threads: threads of torch while the data are learned, with ids mapped ahead; None =
            measured.

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

    def __iter__(self) -> Iterator[Any]:
        if self.network is None:
            raise ConfigError(
                "Ahead: no network whose tables the ids are mapped for, got None. Give the "
                "network, or pass this to RecModel.fit()."
            )
        planner = Planner.of(self.network)
        depth = depth_for(planner, self.depth)
        cores = self.cores()
        barriers: list[Barrier] = [cores.barrier]
        if self.barrier is not None:
            barriers.append(self.barrier)
        stage = MapStage(
            _examples(self.batches, self.network),
            self.batches,
            planner,
            depth,
            lambda step, now: any(barrier(step, now) for barrier in barriers),
            self._step,
            self._now,
        )
        stage.fetch_for(self.network)
        with closing(stage), closing(cores):
            cores.begin(self._step)
            for step, example in enumerate(stage, self._step + 1):
                assert example is not None
                if depth:  # else its forward pass maps it: the loop may end before
                    example = planner.map(example)
                stage.advance(example)
                yield example.arguments[0]
                cores.step(step)

    def cores(self) -> Cores:
        """Return what chooses the threads of a run over these data."""
        return Cores(self.torch_threads, measures=self.depth > 0)


def unwrap(data: Any, network: nn.Module, grains: int = 1) -> tuple[Any, int, list[Cores]]:
    """Return the data of an `Ahead`, its depth and what chooses threads; other data, 0, none.

    Nothing chooses threads for a model with several grains: they are part of the job's meaning.

    Raises:
        ConfigError: it has barriers or a network of its own, which are those of `RecModel`; or
            threads, with several grains.
    """
    if not isinstance(data, Ahead):
        return data, 0, []
    if data.network not in (None, network) or data.barrier is not None:
        raise ConfigError(
            "Ahead: RecModel gives its own network and the barriers of its callbacks, got others. "
            "Give hb.Ahead(train, depth=…) alone."
        )
    if grains == 1:
        return data.batches, data.depth, [data.cores()]
    if data.torch_threads is not None:
        raise ConfigError(
            f"Ahead.torch_threads: with grains the threads of torch stay as they are, got "
            f"{data.torch_threads} threads and {grains} grains. Leave it out, and call "
            "torch.set_num_threads() before training."
        )
    return data.batches, data.depth, []


def depth_for(planner: Planner | None, depth: int) -> int:
    """Return how many batches can be mapped ahead: `depth`, or 0; the reason is logged."""
    if not depth:
        return 0
    reason = (
        "the network is not one of hb.models, does not say looks_up_once, was not converted by "
        "hb.auto, or is compiled"
    )
    if planner is not None:
        reason = planner.obstacle()
    if reason:
        log.info("no batch is mapped ahead: %s", reason)
        return 0
    log.info("the ids of up to %d batches are mapped ahead", depth)
    return depth


def _examples(items: Iterable[Any], network: nn.Module) -> Generator[Example | None, None, None]:
    takes_batches = adapter_of(network) is None
    for item in items:
        if takes_batches and not isinstance(item, Batch):
            raise ConfigError(
                f"Ahead: not a batch, got {type(item).__name__}. Give a hb.Dataset or hb.Batch "
                "objects, or a model that hb.auto converted."
            )
        yield example_of(item)


def example_of(item: Any) -> Example:
    """Return an item of a loop's data as an example: a `Batch` of tensors, others as they are.

    A batch has no grains: the network looks it up as a whole.
    """
    if isinstance(item, Batch):
        return prepare(item, CPU, labelled=False).divided(1)
    return Example((item,), None, None, 0, None)
