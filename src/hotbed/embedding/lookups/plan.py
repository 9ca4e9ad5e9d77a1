# SPDX-License-Identifier: Apache-2.0
"""Plan: the ids of a batch that were mapped to slots before a module looks them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotbed.data.batch import Ids
from hotbed.embedding.table import MapQueue

from .layout import FeatureLayout
from .mapped import MappedIds

Statistics = dict[str, dict[str, int]]
"""Of each table by name, its counters by name."""


@dataclass(frozen=True)
class WantedRows:
    """What a `Lookup` is asked for: the rows of a batch.

    Attributes:
        time: int64 microseconds, or None.
        training: whether tables may change: new ids are inserted, ids counted and timed.
        queue: of the pass over the data, whose batches are mapped on a thread, in their order. None
            = they are mapped now.
        grain_ends: the samples before which the grains of the batch end, as many as a power of two.
            Ids then come in the order grain, feature, sample. () = the batch is not divided. Where
            tables may not change, they are those of this process, of any number.
        agreed: returns plain values that must be equal on all processes that hold rows; it is
            called at once, if there are others.
        layouts: the features and tables of some modules.
        inputs: the ids of each feature of each module.
    """

    time: Any = None
    training: bool = True
    queue: MapQueue | None = None
    grain_ends: Sequence[int] = ()
    agreed: Callable[[], Mapping[str, Any]] = dict
    layouts: tuple[FeatureLayout, ...] = ()
    inputs: Sequence[Sequence[Ids]] = ()


class Asked(Protocol):
    """The ids of a batch that a `Lookup` was asked for: they are mapped to rows, or will be."""

    def wait(self) -> None:
        """Wait until the ids are mapped.

        Raises:
            HotbedError: they cannot be mapped.
        """

    def take_back(self) -> None:
        """Make the tables what they were before a queue mapped these ids.

        Ids that were looked up stay mapped. Ids that were asked for later are taken back first.
        """

    def statistics(self) -> Statistics:
        """Return the statistics of the tables as they are after this map; {} without a queue."""


@dataclass(frozen=True)
class Plan:
    """The mapped ids of one batch for one module: distinct ids, their slots, and the inverse.

    `Lookup.take` makes it.

    Attributes:
        inputs: the ids of each feature, as the caller gave them.
        mapped: their distinct ids, mapped to rows.
        asked: the ids of the module alone; None = they are those of a network, see `Plans`.
    """

    inputs: tuple[Ids, ...]
    mapped: MappedIds
    asked: Asked | None = None

    def take_back(self) -> None:
        """Make the tables what they were before; see `Asked.take_back`."""
        if self.asked is not None:
            self.asked.take_back()

    def fits(self, inputs: Sequence[Ids]) -> bool:
        """Return True if `inputs` are the ids that were mapped; they may have other weights."""
        return all(map(are_same, inputs, self.inputs))

    def is_weighted_anew(self, inputs: Sequence[Ids]) -> bool:
        """Return whether `inputs`, which fit, have other weights than the ids that were mapped."""
        return any(
            ids.weights is not mapped.weights
            for ids, mapped in zip(inputs, self.inputs, strict=True)
        )


def are_same(ids: Ids, others: Ids) -> bool:
    """Return whether ids are the same arrays, apart from their weights."""
    return ids.values is others.values and ids.offsets is others.offsets
