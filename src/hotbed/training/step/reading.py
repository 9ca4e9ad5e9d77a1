# SPDX-License-Identifier: Apache-2.0
"""What the host reads of a device: the values of a step at once, and scores a batch late."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotbed.embedding.device import link_to
from hotbed.training.step.example import CPU

T = TypeVar("T")


class StepReading(ABC):
    """Values of a step after its backward pass, on the host."""

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """Whether all gradients of dense parameters are."""

    @property
    @abstractmethod
    def loss(self) -> Tensor | None:
        """The loss; None where there is none."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """The factor of the loss; 1 without loss scaling."""

    @abstractmethod
    def norms_of(self, gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Return the norms of gradients if they came with the reading, else None.

        They are those of the gradients as they are: one that was changed since has another norm.
        """

    @staticmethod
    def of(
        device: torch.device,
        gradients: Sequence[Tensor],
        loss: Tensor | None,
        scaler: torch.amp.GradScaler | None,
        norms: Sequence[Tensor] = (),
    ) -> StepReading:
        """Begin to read.

        Args:
            device: of the network.
            gradients: of dense parameters, unscaled.
            loss: without its scale, or None.
            scaler: of the loss, or None.
            norms: of the gradients on a device, which come with the reading.
        """
        if device == CPU:
            return _OnHost(gradients, loss, scaler)
        return _FromDevice(device, gradients, loss, scaler, norms)


class _OnHost(StepReading):
    def __init__(
        self, gradients: Sequence[Tensor], loss: Tensor | None, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._gradients = gradients
        self._loss = loss
        self._scaler = scaler

    @property
    def is_finite(self) -> bool:
        return all_finite(self._gradients)

    @property
    def loss(self) -> Tensor | None:
        return self._loss

    @property
    def scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def norms_of(self, gradients: Sequence[Tensor]) -> None:
        return None


class _FromDevice(StepReading):
    """The values come down together, beside what the device computes next."""

    def __init__(
        self,
        device: torch.device,
        gradients: Sequence[Tensor],
        loss: Tensor | None,
        scaler: torch.amp.GradScaler | None,
        norms: Sequence[Tensor],
    ) -> None:
        self._gradients = [(gradient, gradient._version) for gradient in gradients]
        self._norms_dtype = norms[0].dtype if norms else None
        self._loss_dtype = None if loss is None else loss.dtype
        unit = torch.ones((), device=device)
        values = _values_of(gradients)
        greatest = _greatest(values) if values else unit
        scale = unit if scaler is None else scaler.scale(unit)
        together = [greatest, unit if loss is None else loss.detach(), scale, *norms]
        is_double = torch.float64 in (self._loss_dtype, self._norms_dtype)
        exact = torch.float64 if is_double else torch.float32
        self._arrival = link_to(device).bring([torch.stack([v.to(exact) for v in together])])
        self._arrived: Tensor | None = None

    @property
    def is_finite(self) -> bool:
        return bool(self._read()[0].isfinite())

    @property
    def loss(self) -> Tensor | None:
        return None if self._loss_dtype is None else self._read()[1].to(self._loss_dtype)

    @property
    def scale(self) -> float:
        return self._read()[2].item()

    def norms_of(self, gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        if self._norms_dtype is None or len(gradients) != len(self._gradients):
            return None
        for gradient, (earlier, version) in zip(gradients, self._gradients, strict=True):
            if gradient is not earlier or gradient._version != version:
                return None
        return list(self._read()[3:].to(self._norms_dtype))

    def _read(self) -> Tensor:
        if self._arrived is None:
            self._arrived = self._arrival.read(_copy_of_first)
        return self._arrived


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all values of some gradients are finite."""
    values = _values_of(gradients)
    if not values:
        return True
    if values[0].device != CPU:
        return math.isfinite(_greatest(values).item())
    has_infinite = torch.zeros(())
    # what GradScaler calls: one pass over all gradients, which are multiplied by 1 and stay
    torch._amp_foreach_non_finite_check_and_unscale_(values, has_infinite, torch.ones(()))
    return not has_infinite.item()


def _values_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the values of gradients that have some; those of sparse ones are dense."""
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
    return [grad for grad in values if grad.numel()]


def _greatest(values: list[Tensor]) -> Tensor:
    """Return the greatest absolute value, float32 [] of their device; NaN where one is NaN.

    The function that is fastest on a CPU is there for some dtypes of other devices alone.
    """
    norms = torch._foreach_norm(values, math.inf)
    return torch.stack([norm.float() for norm in norms]).max()


def _copy_of_first(arrived: Sequence[Tensor | None]) -> Tensor:
    (values,) = arrived
    assert values is not None, "it was sent"
    return values.clone()


def host(value: Any) -> Any:
    """Return tensors as NumPy arrays on the host, other values as they are.

    bfloat16 and float16 become float32.
    """
    if torch.is_tensor(value):
        return _as_numpy_has_it(value).cpu().numpy()
    if isinstance(value, Mapping):
        return {name: host(part) for name, part in value.items()}
    return value


def host_later(values: tuple[Any, ...], device: torch.device) -> Callable[[], tuple[Any, ...]]:
    """Begin to bring values to the host; return what waits for them, as `host` returns them.

    `device`: of their tensors; those of a device come together.
    """
    if device == CPU:
        here = tuple(map(host, values))
        return lambda: here
    every, structure = tree_flatten(values)
    coming = [_as_numpy_has_it(v) if _is_on(device, v) else None for v in every]
    arrival = link_to(device).bring(coming)

    def with_arrived(arrived: Sequence[Tensor | None]) -> tuple[Any, ...]:
        parts = [
            host(v) if a is None else a.numpy().copy() for v, a in zip(every, arrived, strict=True)
        ]
        together: tuple[Any, ...] = tree_unflatten(parts, structure)
        return together

    return lambda: arrival.read(with_arrived)


def _is_on(device: torch.device, value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == device


def _as_numpy_has_it(value: Tensor) -> Tensor:
    value = value.detach()
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class OneLate(Generic[T]):
    """Values that are read when the next one is on its way, so that a device need not wait."""

    def __init__(self) -> None:
        self._last: Callable[[], T] | None = None

    def put(self, read: Callable[[], T]) -> list[T]:
        """Return the value before; `read`: waits for this one."""
        earlier = self.rest()
        self._last = read
        return earlier

    def rest(self) -> list[T]:
        """Return the value that was not read yet."""
        read = self._last
        self._last = None
        return [] if read is None else [read()]
