# SPDX-License-Identifier: Apache-2.0
"""Plans: ids that were mapped to slots before the network looks them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotbed.data.batch import Ids
from hotbed.embedding.table import Table

from .layout import Feature
from .mapped import MappedIds


class LaterMap(Protocol):
    """The map of a batch that a queue performs later."""

    def wait(self) -> None: ...
    def take_back(self) -> bool: ...
    def statistics(self) -> list[dict[str, int]]:
        """Return the native statistics of each table, as they are after this map."""


class PlannedModule(Protocol):
    """The tables of a module, and its features, whose ids a plan maps."""

    tables: list[Table]
    features: tuple[Feature, ...]


@dataclass(frozen=True)
class Plan:
    """The mapped ids of one batch for one module: distinct ids, their slots, and the inverse.

    `Lookup.map` makes it.

    Attributes:
        inputs: the ids of each feature, as the caller gave them.
        mapped: their distinct ids, mapped to rows.
        task: of the queue that maps the ids; None = they are mapped.
        undo: undoes what tables have noted of the batch; see `dates.take_times`.
    """

    inputs: tuple[Ids, ...]
    mapped: MappedIds
    task: LaterMap | None = None
    undo: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the ids are mapped.

        Raises:
            HotbedError: they cannot be mapped.
        """
        if self.task is not None:
            self.task.wait()

    def take_back(self) -> None:
        """Make the tables what they were before a queue mapped these ids.

        Ids that were looked up stay mapped. Plans that were mapped later are taken back first.
        """
        if self.task is not None and self.task.take_back() and self.undo is not None:
            self.undo()

    def fits(self, inputs: Sequence[Ids]) -> bool:
        """Return True if `inputs` are the ids that were mapped; they may have other weights."""
        return all(map(_are_same, inputs, self.inputs))

    def is_weighted_anew(self, inputs: Sequence[Ids]) -> bool:
        """Return whether `inputs`, which fit, have other weights than the ids that were mapped."""
        return any(
            ids.weights is not mapped.weights
            for ids, mapped in zip(inputs, self.inputs, strict=True)
        )


class Plans:
    """The plans of one batch, one a module, and which modules looked it up.

    `Batch.plans` carries it from the map stage to the lookups.

    Attributes:
        ids: those that are looked up, by feature.
        rows_of: returns the rows of these plans for a network whose forward pass does not call the
            modules; None = it calls them.
        error: why the ids could not be mapped; None if they were.
    """

    def __init__(
        self, ids: Mapping[str, Ids], rows_of: Callable[[Plans], Any] | None = None
    ) -> None:
        self.ids = ids
        self.rows_of = rows_of
        self.error: Exception | None = None
        self._plans: dict[PlannedModule, Plan] = {}
        self._seen: set[PlannedModule] = set()
        self._strayed: set[PlannedModule] = set()
        self._tasks: list[tuple[Sequence[Table], LaterMap]] = []

    def add(self, module: PlannedModule, plan: Plan) -> None:
        self._plans[module] = plan
        if plan.task is not None:
            self._tasks.append((module.tables, plan.task))

    def wait(self) -> None:
        """Wait until the ids are mapped; raise why they could not be."""
        if self.error is not None:
            raise self.error
        for plan in self._plans.values():
            plan.wait()

    def take_back(self) -> None:
        """Take back the plans that no module took, the newest first; see `Plan.take_back`."""
        for plan in reversed(self._plans.values()):
            plan.take_back()

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return the statistics of the tables by name, after a queue mapped this batch."""
        return statistics_after(self._tasks)

    def take(self, module: PlannedModule, inputs: Sequence[Ids]) -> Plan | None:
        """Return the plan of `module` for these inputs, or None; a plan is taken once."""
        if module in self._seen or not self._owns(module.features, inputs):
            self._strayed.add(module)
        self._seen.add(module)
        plan = self._plans.get(module)
        if plan is None or not plan.fits(inputs):
            return None
        return self._plans.pop(module)

    def followed(self, module: PlannedModule) -> bool:
        """Return True if `module` looked up all ids of the batch, exactly once.

        They are as they were, but for weights that the network gave them.
        """
        return module in self._seen and module not in self._strayed

    def left(self) -> list[PlannedModule]:
        """Return the modules whose plans nobody took."""
        return list(self._plans)

    def _owns(self, features: Sequence[Feature], inputs: Sequence[Ids]) -> bool:
        return all(
            feature.name in self.ids and _are_same(ids, self.ids[feature.name])
            for feature, ids in zip(features, inputs, strict=True)
        )


def _are_same(ids: Ids, others: Ids) -> bool:
    """Return whether ids are the same arrays, apart from their weights."""
    return ids.values is others.values and ids.offsets is others.offsets


def statistics_after(
    tasks: Iterable[tuple[Sequence[Table], LaterMap]],
) -> dict[str, dict[str, int]]:
    """Return the statistics of tables by name, as they are after the last of their maps."""
    statistics = {}
    for tables, task in tasks:
        for table, counters in zip(tables, task.statistics(), strict=True):
            statistics[table.name] = table.completed(counters)
    return statistics
