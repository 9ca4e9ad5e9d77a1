# SPDX-License-Identifier: Apache-2.0
"""Lookup: where the rows of a network are, and who performs what a step does with them.

A batch goes through these verbs: `ask` for the ids of all modules, `take` their plans, `pool_plan`
and `sum_gradients` in each module, `join_grains` where the batch has several, `update`. `pool` is
for ids that were not asked for. Whoever adds a place for rows, such as another process or a device,
writes one class; nothing that calls these verbs knows the place.

`module.lookup` is one of these values, which modules share whose ids are asked for together.
`LocalLookup` is the default. How results enter the graph of torch is a matter of `modules.flow`: no
verb here knows of autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.data.batch import Ids

from .layout import FeatureLayout, Group
from .mapped import MappedIds, Sums
from .plan import Asked, Plan, WantedRows

Pooled = tuple[Tensor, list[Tensor]]
"""The pooled features side by side [n, output_dim], and the rows [m, dim] of each sequence."""

RowMemory = Callable[[Sequence[tuple[int, int]]], list[Tensor]]
"""Returns float32 tensors of the host of some shapes, in which a lookup writes its results."""


def new_rows(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return tensors in memory of their own."""
    return [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]


class Lookup(ABC):
    """Performs the lookups of layouts, and the updates of the rows that were looked up.

    Attributes:
        spans_ranks: whether the rows are those of several processes.
    """

    spans_ranks = False

    @abstractmethod
    def ask(self, wanted: WantedRows) -> Asked:
        """Ask for the rows of a batch: map its ids, now or on a thread.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
        """

    @abstractmethod
    def take(
        self, asked: Asked, grains: Sequence[Sequence[Sequence[Ids]] | None]
    ) -> list[list[Plan | None]]:
        """Return the plans of a batch whose turn has come, [module][grain].

        The tables do not change: the map of the whole batch has counted its samples.

        Args:
            asked: from `ask`; of a batch with grains, it was waited for.
            grains: of each grain, the ids of each feature of each module; together they are those
                of the batch. A batch that is not divided is one grain. None is a grain that is not
                pooled here; its plan is None, too.
        """

    @abstractmethod
    def fetch(self, layout: FeatureLayout, inputs: Sequence[Ids]) -> None:
        """Begin to read the rows of these ids that lie on a disk; a later `map` waits for them.

        Nothing that anybody sees changes, and no id is inserted. It may be called on any thread,
        beside all other verbs. A lookup whose rows lie elsewhere does nothing.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature, of a batch that comes later.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
        """

    @abstractmethod
    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        memory: RowMemory = new_rows,
        *,
        training: bool,
        keep: bool,
    ) -> tuple[Pooled, MappedIds]:
        """Map ids that were not asked for; return the results of the features, and the mapped ids.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            memory: for the results.
            training: as in `ask`.
            keep: whether gradients will be summed for the mapped ids; else they end with the call.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
        """

    @abstractmethod
    def pool_plan(
        self, layout: FeatureLayout, inputs: Sequence[Ids], plan: Plan, memory: RowMemory = new_rows
    ) -> tuple[Pooled, MappedIds]:
        """Return what `pool` does for ids that were asked for, from rows as they are now.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature.
            plan: from `take`, of these inputs, which may have other weights.
            memory: for the results.
        """

    @abstractmethod
    def sum_gradients(
        self,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        groups: Sequence[Group],
    ) -> Sums:
        """Return the gradients of results, summed by distinct id.

        Rows of a frozen table get sums of zero, so that gradient clipping ignores them.

        Args:
            layout: the features and tables.
            mapped: from `pool`.
            flat: the gradient of the pooled features side by side, or None.
            sequences: the gradient of each sequence, or None.
            groups: how the sums lie; each table in one of them.
        """

    @abstractmethod
    def join(self, parts: Sequence[Sums]) -> Sums:
        """Return the sums of parts of a step, in the same groups, as those of all their ids.

        The sums of an id are added one after another. Ids come in the order of their first part,
        and in the order that they have there.
        """

    @abstractmethod
    def join_grains(
        self, asked: Asked, parts: Sequence[Sequence[Sums | None]]
    ) -> Callable[[], list[Sums | None]]:
        """Begin to join the sums of the grains of a batch; return what waits for them.

        It returns the sums of each module; None where no grain has any. The sums of an id are added
        by halves, as in (0 + 1) + (2 + 3). A grain without the id is left out, and an id of no
        grain with sums takes no gradient.

        Args:
            asked: of the batch, whose plans were taken.
            parts: the sums of each grain, [module][grain], with the ids that `take` gave it; None =
                it has none.
        """

    @abstractmethod
    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        """Apply one step of each table's rule to its rows that have a sum, once a row.

        Args:
            parts: of one or more layouts; sums of one id are added. A table that is in no group of
                any part is left alone: its step does not rise.
            rates: of each part, the learning rate of each group.
        """


def update_parts(parts: Iterable[tuple[Lookup, Sums, Sequence[float]]]) -> None:
    """Let each lookup update the rows of its parts together; see `Lookup.update`.

    `parts`: the lookup, the sums and the rates of each.
    """
    parts_of: dict[Lookup, tuple[list[Sums], list[Sequence[float]]]] = {}
    for lookup, sums, rates in parts:
        every_sums, every_rates = parts_of.setdefault(lookup, ([], []))
        every_sums.append(sums)
        every_rates.append(rates)
    for lookup, (every_sums, every_rates) in parts_of.items():
        lookup.update(every_sums, every_rates)
