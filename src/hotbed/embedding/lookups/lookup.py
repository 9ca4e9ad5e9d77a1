# SPDX-License-Identifier: Apache-2.0
"""Lookup: who performs the four verbs of a batch, which are map, pool, sum gradients and update.

A batch may be looked up by grains, its runs of samples: `divide` cuts what was mapped, `join` adds
what was summed.

`module.lookup` is one of these values. `LocalLookup` is the default; rows on other processes or
devices have lookups of their own. How results enter the graph of torch is a matter of
`modules.flow`: no verb here knows of autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import MapQueue

from .layout import FeatureLayout, Group
from .mapped import MappedIds, Sums, with_empty_sums
from .plan import Plan

Pooled = tuple[Tensor, list[Tensor]]
"""The pooled features side by side [n, output_dim], and the rows [m, dim] of each sequence."""


class Lookup(ABC):
    """Performs the lookups of layouts, and the updates of the rows that were looked up.

    Attributes:
        spans_ranks: whether the rows are those of several processes.
    """

    spans_ranks = False

    @abstractmethod
    def map(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        *,
        training: bool,
        queue: MapQueue | None = None,
        grain_ends: Sequence[int] = (),
    ) -> Plan:
        """Map the ids of each feature to rows, ahead of `pool`.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            training: whether tables may change: new ids are inserted, ids counted and timed.
            queue: maps the ids later, on its thread; wait for the plan. None = they are mapped now.
            grain_ends: the samples before which the grains of the batch end, as many as a power of
                two. Ids then come in the order grain, feature, sample, and the plan is for
                `divide`, not for `pool`. () = the batch is not divided.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
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
    def divide(
        self, layout: FeatureLayout, plan: Plan, grains: Sequence[Sequence[Ids] | None]
    ) -> list[Plan | None]:
        """Return the plans of the grains of a batch, which are pooled in place of `plan`.

        The tables do not change: the map of the whole batch has counted its samples.

        Args:
            layout: the features and tables.
            plan: of the whole batch, which was waited for.
            grains: of each grain, the ids of each feature; together they are those of the batch.
                None is a grain that is not pooled; its plan is None, too.
        """

    @abstractmethod
    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, MappedIds]:
        """Return the results of the features, from rows as they are now, and the mapped ids.

        Args:
            layout: the features and tables.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: `map(layout, inputs, time)`, if the ids were mapped ahead; then `time` and
                `training` have had their effect.
            training: as in `map`, for ids that are mapped now.
            keeps: whether gradients will be summed for the mapped ids; else they end with the call.

        Raises:
            RowShapeError: the ids of a feature have a wrong shape.
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

        The sums of an id are added by halves, as in (0 + 1) + (2 + 3). A part without the id is
        left out. Ids come in the order of their first part, and in the order that they have there.
        """

    def join_grains(
        self, layout: FeatureLayout, mapped: MappedIds, parts: Sequence[Sums | None]
    ) -> Sums | None:
        """Return the sums of the grains of a batch, as `join`; None if no grain has any.

        Args:
            layout: the features and tables.
            mapped: the ids of the batch, which was divided.
            parts: of each grain; None = it has no sums.
        """
        every = with_empty_sums(layout, parts)
        return self.join(every) if every else None

    @abstractmethod
    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        """Apply one step of each table's rule to its rows that have a sum, once a row.

        Args:
            parts: of one or more layouts; sums of one id are added. A table that is in no group of
                any part is left alone: its step does not rise.
            rates: of each part, the learning rate of each group.
        """
