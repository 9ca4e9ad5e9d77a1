# SPDX-License-Identifier: Apache-2.0
"""Plans: the ids of a batch of a network, which are asked for before it looks them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotbed.data.batch import Ids, changed

from .layout import FeatureLayout
from .lookup import Lookup
from .mapped import Sums
from .plan import Asked, Plan, Statistics, WantedRows, are_same


class PlannedModule(Protocol):
    """A module, or one of its lookups, whose ids are asked for before it looks them up."""

    @property
    def lookup(self) -> Lookup: ...
    @property
    def layout(self) -> FeatureLayout: ...

    def inputs_of(self, batch: Any) -> list[Ids]:
        """Return the ids of each feature of a batch."""


@dataclass
class _Share:
    """The part of a batch that one lookup was asked for: the modules whose rows it looks up.

    Attributes:
        lookup: that was asked.
        modules: in the order of `asked`.
        inputs: the ids of each feature of each module.
        asked: what the lookup returned.
        is_taken: whether the plans were taken from it.
    """

    lookup: Lookup
    modules: list[PlannedModule]
    inputs: list[list[Ids]]
    asked: Asked
    is_taken: bool = False

    def take(self, grains: Sequence[Sequence[Sequence[Ids]] | None]) -> list[list[Plan | None]]:
        self.is_taken = True
        return self.lookup.take(self.asked, grains)


class Plans:
    """The ids of one batch of a network, and which modules looked them up.

    The modules of one lookup are asked for together. `Batch.plans` carries this value from the map
    stage to the lookups. That of a grain has the grain's share of the plans, see `divide`.

    Attributes:
        ids: those that are looked up, by feature.
        training: whether modules in train mode look them up, once; else those in eval mode, which
            may look up again what they have.
        rows_of: returns what the lookups of a forward pass take, for a network that does not call
            the modules; None = it calls them.
        error: why the ids could not be asked for; None if they were.
    """

    def __init__(
        self,
        ids: Mapping[str, Ids],
        rows_of: Callable[[Plans], Any] | None = None,
        error: Exception | None = None,
        *,
        training: bool = True,
    ) -> None:
        self.ids = ids
        self.training = training
        self.rows_of = rows_of
        self.error = error
        self._shares: list[_Share] = []
        self._whole: Plans | None = None  # of a grain; it holds the memory of the rows
        self._plans: dict[PlannedModule, Plan] = {}
        self._seen: set[PlannedModule] = set()
        self._strayed: set[PlannedModule] = set()

    def ask(self, modules: Sequence[PlannedModule], wanted: WantedRows) -> None:
        """Ask for the ids of modules, or for none; `wanted`: without their layouts and inputs."""
        of_lookups: dict[Lookup, list[PlannedModule]] = {}
        for module in modules:
            of_lookups.setdefault(module.lookup, []).append(module)
        try:
            for lookup, members in of_lookups.items():
                layouts = tuple(module.layout for module in members)
                inputs = [module.inputs_of(self) for module in members]
                asked = lookup.ask(changed(wanted, {"layouts": layouts, "inputs": inputs}))
                self._shares.append(_Share(lookup, members, inputs, asked))
        except Exception:
            self.take_back()
            raise

    def wait(self) -> None:
        """Wait until the ids are mapped; raise why they could not be."""
        if self.error is not None:
            raise self.error
        for share in self._shares:
            share.asked.wait()

    def take_back(self) -> None:
        """Take back the ids that no module took, the newest first; see `Asked.take_back`."""
        for share in reversed(self._shares):
            if not share.is_taken:
                share.asked.take_back()
            for module in reversed(share.modules):
                if module in self._plans:
                    self._plans[module].take_back()

    def statistics(self) -> Statistics:
        """Return the statistics of the tables by name, after a queue mapped this batch."""
        statistics: Statistics = {}
        for share in self._shares:
            statistics |= share.asked.statistics()
        return statistics

    def divide(self, grains: Sequence[Plans | None]) -> None:
        """Give each grain its share of the plans of this batch, which was divided.

        `grains`: with their ids and no plans; None = a grain that is not computed here.
        """
        for share in self._shares:
            inputs = [
                None if grain is None else [module.inputs_of(grain) for module in share.modules]
                for grain in grains
            ]
            plans = share.take(inputs)
            for module, of_grains in zip(share.modules, plans, strict=True):
                for grain, plan in zip(grains, of_grains, strict=True):
                    if grain is not None and plan is not None:
                        grain._plans[module] = plan
                        grain._whole = self

    def join(
        self, sums: Mapping[PlannedModule, Sequence[Sums | None]]
    ) -> Callable[[], dict[PlannedModule, Sums | None]]:
        """Begin to join the sums of the grains of this batch; return what waits for the results.

        See `Lookup.join_grains`. `sums`: of each module that was asked for, those of each grain.
        """
        joins = [
            (
                share.modules,
                share.lookup.join_grains(share.asked, [sums[module] for module in share.modules]),
            )
            for share in self._shares
        ]

        def results() -> dict[PlannedModule, Sums | None]:
            joined: dict[PlannedModule, Sums | None] = {}
            for modules, join in joins:
                joined.update(zip(modules, join(), strict=True))
            return joined

        return results

    def take(self, module: PlannedModule, inputs: Sequence[Ids]) -> Plan | None:
        """Return the plan of `module` for these inputs, or None; in train mode it is taken once."""
        if not self.training:
            standing = self._plans.get(module)
            if standing is None or not standing.fits(inputs) or standing.is_weighted_anew(inputs):
                return None  # weights that are given to its rows would stay
            return standing
        if module in self._seen or not self._owns(module, inputs):
            self._strayed.add(module)
        self._seen.add(module)
        for share in self._shares:
            if not share.is_taken and module in share.modules:
                plans = share.take([share.inputs])
                for member, (plan,) in zip(share.modules, plans, strict=True):
                    if plan is not None:
                        self._plans[member] = plan
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
        asked = [m for share in self._shares if not share.is_taken for m in share.modules]
        return [*asked, *self._plans]

    def _owns(self, module: PlannedModule, inputs: Sequence[Ids]) -> bool:
        return all(
            feature.name in self.ids and are_same(ids, self.ids[feature.name])
            for feature, ids in zip(module.layout.features, inputs, strict=True)
        )
