# SPDX-License-Identifier: Apache-2.0
"""Insert: maps a batch right before its step, or the batches of a Dataset ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.training.step.map_stage import Barrier
from hotbed.training.step.planner import Planner

from .data import Ahead, example_of

__all__ = ["Insert"]


class Insert:
    """Maps the ids of a batch to rows: the insert function of a training loop.

    `insert(batch)` maps a batch now: new ids are inserted, counted and timed. Call it once a batch,
    right before the forward pass of the network, which then maps nothing. The first batch shows
    what the network looks up, and is mapped in its forward pass. `dataset.map(insert)` maps the
    batches of a Dataset while earlier ones train: it is `hb.Ahead(dataset, network, depth,
    barrier=barrier)`, which a `RecModel` of this network takes, too.

    Args:
        network: a network with tables, or a model that `hb.auto` converted.
        depth: how many batches of a Dataset are mapped ahead.
        barrier: as of `hb.Ahead`.

    Example:
        >>> insert = hb.Insert(network)
        >>> for batch in dataset.map(insert):
        ...     learn(batch)
        >>> for batch in loader:
        ...     learn(insert(batch))
    """

    def __init__(self, network: nn.Module, depth: int = 2, barrier: Barrier | None = None) -> None:
        checks.whole_number("Insert.depth", depth, 0)
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"Insert.network: expected a torch module with tables, got "
                f"{type(network).__name__}. Map the batches of a Dataset by "
                "dataset.map(hb.Insert(network))."
            )
        self.network = network
        self.depth = depth
        self.barrier = barrier
        self._planner = Planner.of(network)
        self._planner.begin(ahead=True)

    def __call__(self, batch: Any) -> Any:
        """Map the ids of a batch, and return the batch that the network looks up.

        Raises:
            HotbedError: the ids cannot be mapped.
        """
        return self._planner.map(example_of(batch)).arguments[0]

    def over(self, dataset: Iterable[Any]) -> Ahead:
        """Return the batches of a Dataset, mapped ahead; `Dataset.map` calls it."""
        return Ahead(dataset, self.network, self.depth, barrier=self.barrier)
