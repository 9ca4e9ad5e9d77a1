# SPDX-License-Identifier: Apache-2.0
"""RowGradients: the gradients of rows that wait for an update, in `.grad` of parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotbed.embedding.device import Arrival, counted_as_rows, link_to, wait_for_current
from hotbed.embedding.lookups import FeatureLayout, Group, Lookup, MappedIds, Sums

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
                        wait_for_current(grad.device_of_module)
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
class Coming:
    """The gradients of a lookup's results, on their way to the host.

    Attributes:
        lookup: which mapped the ids.
        layout: of the module that was called.
        mapped: the ids.
        arrival: the gradient of the pooled features, then that of each sequence; None without one.
        device: where they come from.
    """

    lookup: Lookup
    layout: FeatureLayout
    mapped: MappedIds
    arrival: Arrival
    device: torch.device

    def summed(self, groups: Sequence[Group]) -> Sums:
        """Wait for them, and return their sums by id."""

        def summed(grads: Sequence[Tensor | None]) -> Sums:
            with counted_as_rows(self.device):
                return self.lookup.sum_gradients(
                    self.layout, self.mapped, grads[0], grads[1:], groups
                )

        return self.arrival.read(summed)


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

    Those of a module on another device are on their way when a backward pass ends. The first read
    of `.grad` waits for them, and sums them in the order of the backward passes.

    Args:
        layout: of the module.
        parameters: that of each group of tables.
    """

    def __init__(self, layout: FeatureLayout, parameters: Sequence[TableRows]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._pending: Pending | None = None
        self._device = torch.device("cpu")
        self._coming: list[Coming] = []
        # of the forward passes since the last step, as long as their graphs live
        self._mapped: list[weakref.ref[MappedIds]] = []

    def watch(self, mapped: MappedIds) -> None:
        """Let the rows of a forward pass go with the next step, however long its graph lives.

        Gradients of all earlier passes but the last one, which the device may still compute, are
        summed now, so that few travel at a time.
        """
        if len(self._coming) > 1:
            self._sum_coming(self._coming[:-1])
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
        if device.type == "cpu":
            sums = lookup.sum_gradients(layout, mapped, flat, sequences, self._layout.groups)
            self._put(_added(self._arrived(), sums, lookup))
            return
        self._device = device
        arrival = link_to(device).bring([flat, *sequences])
        self._set_coming([*self._coming, Coming(lookup, layout, mapped, arrival, device)])

    def arrive(self) -> None:
        """Wait for the gradients that are on their way, and add them to those that wait."""
        self._sum_coming(list(self._coming))

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Scale the gradients that wait in place in this block; they stay as finite as they are."""
        self.arrive()
        pending = self._pending
        is_same = pending is not None and pending.unchanged(pending.sums.grads)
        yield
        if pending is not None and is_same:
            self._put(pending.sums)

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

    def take_later(self) -> Callable[[], Sums | None]:
        """Take the gradients that wait or are on their way; return what waits for them.

        It returns what `take` would have returned.
        """
        if not self._coming:
            sums = self.take()
            return lambda: sums
        coming = self._coming
        earlier = self._arrived()
        self._pending = None
        self._set_coming([])
        return lambda: functools.reduce(self._with, coming, earlier)

    def drop(self) -> None:
        """Drop the gradients that wait."""
        self._drop_coming()
        self._pending = None
        for parameter in self._parameters:
            parameter.arrived = None

    def clear(self) -> None:
        """Set the gradients that wait to zero: their ids are forgotten, a step without ids waits.

        A gradient of zero moves a row as no gradient does, except where a rule with momentum moves
        only the rows that have one. There torch forgets the ids of a sparse gradient, too.
        """
        self.arrive()
        if self._pending is not None:
            self._put(self._without_ids(self._pending.sums.mapped))

    def put(self, sums: Sums) -> None:
        """Let gradients wait in place of those that wait."""
        self._drop_coming()
        self._put(sums)

    def _with(self, earlier: Sums | None, gradients: Coming) -> Sums:
        """Return gradients that are on their way, added to earlier ones."""
        return _added(earlier, gradients.summed(self._layout.groups), gradients.lookup)

    def _put(self, sums: Sums) -> None:
        sums = _on_host(sums, self._device)
        for parameter, grad in zip(self._parameters, sums.grads, strict=True):
            parameter.arrived = grad
        self._pending = Pending(sums, [grad._version for grad in sums.grads])

    def _sum_coming(self, coming: Sequence[Coming]) -> None:
        """Sum the first of the gradients that are on their way."""
        self._set_coming(self._coming[len(coming) :])
        for gradients in coming:
            self._put(self._with(self._arrived(), gradients))

    def _drop_coming(self) -> None:
        if self._coming:
            for gradients in self._coming:
                gradients.arrival.drop()
            self._set_coming([])

    def _set_coming(self, coming: list[Coming]) -> None:
        self._coming = coming
        for parameter in self._parameters:
            parameter.arrive = self.arrive if coming else None

    def _without_ids(self, mapped: MappedIds) -> Sums:
        """Return the sums of no id, for the tables of `mapped`."""
        nothing = [0] * len(self._layout.tables)
        grads = [group.empty(nothing) for group in self._layout.groups]
        return Sums(mapped.without_ids(), self._layout.groups, grads, finite=True)

    def _waiting(self) -> Sums | None:
        """Return the gradients that wait, as they are now; None if none wait."""
        if self._coming:
            self.arrive()
        return self._arrived()

    def _arrived(self) -> Sums | None:
        """Return what waits but for gradients that are on their way."""
        pending = self._pending
        if pending is None:
            return None
        rows = [
            parameter.arrived.contiguous()
            for parameter in self._parameters
            if parameter.arrived is not None
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
        self._put(nothing)
        return nothing


def _added(earlier: Sums | None, sums: Sums, lookup: Lookup) -> Sums:
    """Return sums of `lookup` and earlier ones as those of all their ids."""
    if earlier is None or not any(earlier.mapped.num_uniques()):
        return sums
    return lookup.join([earlier, sums])
