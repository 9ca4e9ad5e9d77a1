# SPDX-License-Identifier: Apache-2.0
"""Flow: how the results of a lookup enter the graph of torch, and where their gradients go.

`module.flow` is one of these values. `TableFlow` is the default: gradients wait for an update of
the tables. `RowTargets` lets them flow to tensors, and an exporter makes results the inputs of its
graph. `lookups` says which code performs the lookup.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.device import counted_as_rows, link_to
from hotbed.embedding.lookups import FeatureLayout, Lookup, MappedIds, Plan, Pooled, new_rows

from .gradients import RowGradients


class FlowModule(Protocol):
    """What a flow knows of a table module."""

    training: bool
    layout: FeatureLayout
    lookup: Lookup
    flow: Flow
    gradients: RowGradients
    anchor: Tensor
    number: int

    @property
    def learns(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...


class Flow(ABC):
    """Connects the lookups of table modules with the graph of torch."""

    @abstractmethod
    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        """Return the results of `module` for the ids of each of its features.

        Args:
            module: the module that is called.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: from `Plans.take`, if the ids were mapped before.
        """


@contextmanager
def with_flow(flow: Flow, modules: Iterable[FlowModule]) -> Iterator[None]:
    """Connect the lookups of `modules` by `flow`; give each its flow back at the end."""
    before = [(module, module.flow) for module in modules]
    for module, _ in before:
        module.flow = flow
    try:
        yield
    finally:
        for module, earlier in before:
            module.flow = earlier


def look_up(
    module: FlowModule,
    inputs: Sequence[Ids],
    time: Any,
    plan: Plan | None = None,
    *,
    training: bool,
    keeps: bool,
) -> tuple[Pooled, MappedIds]:
    """Return what the lookup of `module` returns, on the device of the module."""
    lookup = module.lookup
    if plan is None:
        pool = partial(lookup.pool, module.layout, inputs, time, training=training, keep=keeps)
    else:
        pool = partial(lookup.pool_plan, module.layout, inputs, plan)
    if module.device.type == "cpu":
        results, mapped = pool(new_rows)
    else:
        link = link_to(module.device)
        slot = link.slot()
        with counted_as_rows(module.device):
            (flat, sequences), mapped = pool(slot.rows)
        flat, *sequences = link.send(slot, [flat, *sequences])
        results = flat, sequences
    if keeps:
        module.gradients.watch(mapped)
    return results, mapped
