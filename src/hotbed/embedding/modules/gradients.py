# SPDX-License-Identifier: Apache-2.0
"""RowGradients: the gradients of rows that wait for an update, in `.grad` of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotbed.embedding.lookups import FeatureLayout, Lookup, MappedIds, Sums

from .parameter import TableRows

MOST_DEAD = 64
"""Forward passes without a step after which those whose graphs are gone are forgotten."""


class HostGradient(Tensor):
    """A gradient of rows, in host memory, of a module on another device.

    GradScaler copies its scale to the host without waiting for it, and multiplies at once. This
    tensor waits for the device before that operation; all others are those of a plain tensor.
    """

    device_of_module: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                for grad in args[0]:
                    if isinstance(grad, HostGradient):
                        torch.accelerator.current_stream(grad.device_of_module).synchronize()
            return func(*args, **(kwargs or {}))


def _on_host(sums: Sums, device: torch.device) -> Sums:
    """Return the gradients of a module on `device`, as they are if that is the host."""
    if device.type == "cpu":
        return sums
    grads: list[Tensor] = []
    for grad in sums.grads:
        waiting = grad.as_subclass(HostGradient)
        waiting.device_of_module = device
        grads.append(waiting)
    return replace(sums, grads=grads)


@dataclass(frozen=True)
class Pending:
    """Gradients that wait for an update.

    Attributes:
        sums: as the lookup left them.
        versions: those of their tensors then.
    """

    sums: Sums
    versions: list[int]

    def known_finite(self, grads: Sequence[Tensor]) -> bool:
        """Return True when the sums were finite and nothing has changed them since."""
        return self.sums.finite and self.unchanged(grads)

    def unchanged(self, grads: Sequence[Tensor]) -> bool:
        """Return True when these are the tensors that backward left, with the same values."""
        same = all(grad is sums for grad, sums in zip(grads, self.sums.grads, strict=True))
        return same and self.versions == [grad._version for grad in grads]


class RowGradients:
    """The gradients of a module's rows, from a backward pass until an update.

    They are summed by id and lie in `.grad` of the parameter of each group, where clipping and
    GradScaler find them. `zero_grad()` drops them by setting `.grad` to None. If it sets them to
    zero instead, a step without ids waits.

    Args:
        layout: of the module.
        parameters: that of each group of tables.
    """

    def __init__(self, layout: FeatureLayout, parameters: Sequence[TableRows]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._pending: Pending | None = None
        self._device = torch.device("cpu")
        # of the forward passes since the last step, as long as their graphs live
        self._mapped: list[weakref.ref[MappedIds]] = []

    def watch(self, mapped: MappedIds) -> None:
        """Let the rows of a forward pass go with the next step, however long its graph lives."""
        if len(self._mapped) >= MOST_DEAD:
            self._mapped = [reference for reference in self._mapped if reference() is not None]
        self._mapped.append(weakref.ref(mapped))

    def let_go(self) -> None:
        """Let the rows of all forward passes since the last step go."""
        for reference in self._mapped:
            mapped = reference()
            if mapped is not None:
                mapped.let_go()
        self._mapped.clear()

    def add(
        self,
        lookup: Lookup,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:
        """Sum the gradients of a lookup's results by id, and add them to those that wait.

        Args:
            lookup: which mapped the ids.
            layout: of the module that was called; it may share these gradients.
            mapped: the ids.
            flat: the gradient of the pooled features side by side, or None.
            sequences: the gradient of each sequence, or None.
            device: of the module.
        """
        self._device = device
        earlier = self._waiting()
        sums = lookup.sum_gradients(layout, mapped, flat, sequences, self._layout.groups)
        if earlier is not None and any(earlier.mapped.num_uniques()):
            sums = lookup.join([earlier, sums])
        self.put(sums)

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Scale the gradients that wait in place in this block; they stay as finite as they are."""
        pending = self._pending
        is_same = pending is not None and pending.unchanged(pending.sums.grads)
        yield
        if pending is not None and is_same:
            self.put(pending.sums)

    def check_finite(self) -> None:
        """Raise NonFiniteGradient, naming table and id, if a waiting gradient is not finite."""
        sums = self._waiting()
        if self._pending is None or sums is None or self._pending.known_finite(sums.grads):
            return
        sums.check_finite()

    def take(self, *, keeps: bool = False) -> Sums | None:
        """Return the gradients that wait, None if there are none.

        `keeps`: whether they wait on; else none wait afterwards.
        """
        sums = self._waiting()
        if not keeps:
            self._pending = None
        return sums

    def drop(self) -> None:
        """Drop the gradients that wait."""
        self._pending = None
        for parameter in self._parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Set the gradients that wait to zero: their ids are forgotten, a step without ids waits.

        A gradient of zero moves a row as no gradient does, except where a rule with momentum moves
        only the rows that have one. There torch forgets the ids of a sparse gradient, too.
        """
        if self._pending is not None:
            self.put(self._without_ids(self._pending.sums.mapped))

    def _without_ids(self, mapped: MappedIds) -> Sums:
        """Return the sums of no id, for the tables of `mapped`."""
        nothing = [0] * len(self._layout.tables)
        grads = [group.empty(nothing) for group in self._layout.groups]
        return Sums(mapped.without_ids(), self._layout.groups, grads, finite=True)

    def put(self, sums: Sums) -> None:
        """Let gradients wait in place of those that wait."""
        sums = _on_host(sums, self._device)
        for parameter, grad in zip(self._parameters, sums.grads, strict=True):
            parameter.grad = grad
        self._pending = Pending(sums, [grad._version for grad in sums.grads])

    def _waiting(self) -> Sums | None:
        """Return the gradients that wait, as they are now; None if none wait."""
        pending = self._pending
        if pending is None:
            return None
        rows = [
            parameter.grad.contiguous()
            for parameter in self._parameters
            if parameter.grad is not None
        ]
        if len(rows) < len(self._parameters):
            self._pending = None
            return None
        if pending.unchanged(rows):
            return pending.sums
        if pending.sums.mapped.has_value(rows):
            return Sums(pending.sums.mapped, pending.sums.groups, rows)
        # by nn.Module.zero_grad(set_to_none=False), which knows no tables
        nothing = self._without_ids(pending.sums.mapped)
        self.put(nothing)
        return nothing
