# SPDX-License-Identifier: Apache-2.0
"""Lookup: who performs the lookups of a TableModule.

`module.lookup` is one of these values. `LocalLookup` is the default; an exporter replaces it by one
that records which features are looked up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import Table

from .compiled import CompiledModule, pool_compiled
from .gradients import Weighted, takes_gradient
from .inputs import Buckets
from .plan import Plan, Pooled
from .transforms import check_transforms


class LookedUpModule(CompiledModule, Protocol):
    """What a lookup knows of a table module."""

    lookup: Lookup
    buckets: Buckets

    def pool(self, inputs: Sequence[Ids], time: Any = None) -> Pooled: ...
    def split(
        self, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]: ...
    def table_of(self, number: int) -> Table: ...


class Lookup(ABC):
    """Performs the lookups of table modules."""

    @abstractmethod
    def pool(
        self, module: LookedUpModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        """Return the results of `module` for the ids of each of its features.

        Args:
            module: the module that is called.
            inputs: the ids of each feature.
            time: int64 microseconds, or None.
            plan: `module.map(inputs, time)`, if the ids were mapped ahead.
        """


class LocalLookup(Lookup):
    """Looks up rows in the tables of this process, and lets gradients through to them."""

    def pool(
        self, module: LookedUpModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        check_transforms([table.name for table in module.tables], inputs[0].values)
        weights = [ids.weights if takes_gradient(ids.weights) else None for ids in inputs]
        weighted = any(weight is not None for weight in weights)
        if torch.compiler.is_compiling():
            if weighted or module.buckets.sizes:
                pooled: Pooled = _pool_eagerly(module, inputs, time)
                return pooled
            return pool_compiled(module, inputs, time)
        if torch.is_grad_enabled() and (weighted or module.learns):
            anchor = module.anchor if module.learns else module.anchor.detach()
            flat, *sequences = _Pool.apply(  # type: ignore[no-untyped-call]  # torch has no types
                anchor, module, inputs, time, plan, *weights
            )
            return flat, sequences
        results, _ = module.map_and_pool(inputs, time, plan, training=module.training, keeps=False)
        return results


@contextmanager
def performed_by(lookup: Lookup, modules: Iterable[LookedUpModule]) -> Iterator[None]:
    """Let `lookup` perform the lookups of `modules`; give each its own back at the end."""
    own = [(module, module.lookup) for module in modules]
    for module, _ in own:
        module.lookup = lookup
    try:
        yield
    finally:
        for module, before in own:
            module.lookup = before


class _Pool(torch.autograd.Function):
    """The lookup as an autograd function.

    `weights`: those of each feature if they require a gradient, else None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: LookedUpModule,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        *weights: Tensor | None,
    ) -> Any:
        results, step = module.map_and_pool(
            inputs, time, plan, training=module.training, keeps=True
        )
        ctx.step = step
        ctx.module = module
        ctx.num_weights = len(weights)
        ctx.weighted = {}
        for number, weight in enumerate(weights):
            if weight is not None:
                feature = module.features[number]
                ctx.weighted[number] = Weighted.of(
                    module.table_of(number), feature.name, feature.pooling, inputs[number]
                )
        ctx.set_materialize_grads(False)
        flat, sequences = results
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        module: LookedUpModule = ctx.module
        if module.learns and any(grad is not None for grad in grads):
            module.receive(ctx.step, grads[0], grads[1:])
        of_weights: list[Tensor | None] = [None] * ctx.num_weights
        if ctx.weighted:
            parts = list(module.split(grads[0], grads[1:]))
            for number, weighted in ctx.weighted.items():
                grad = parts[number]
                if grad is not None:
                    of_weights[number] = weighted.gradient(grad)
        return None, None, None, None, None, *of_weights


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
def _pool_eagerly(module: LookedUpModule, inputs: Sequence[Ids], time: Any) -> Pooled:
    return module.pool(inputs, time)
