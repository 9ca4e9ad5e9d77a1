# SPDX-License-Identifier: Apache-2.0
"""What a step reads of the device of its network before it applies anything: at once, and once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.embedding.device import link_to
from hotbed.training.step.example import CPU


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

    @staticmethod
    def of(
        device: torch.device,
        gradients: Sequence[Tensor],
        loss: Tensor | None,
        scaler: torch.amp.GradScaler | None,
    ) -> StepReading:
        """Begin to read.

        Args:
            device: of the network.
            gradients: of dense parameters, unscaled.
            loss: without its scale, or None.
            scaler: of the loss, or None.
        """
        if device == CPU:
            return _OnHost(gradients, loss, scaler)
        return _FromDevice(device, gradients, loss, scaler)


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


class _FromDevice(StepReading):
    """The values come down together, beside what the device computes next."""

    def __init__(
        self,
        device: torch.device,
        gradients: Sequence[Tensor],
        loss: Tensor | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._loss_dtype = None if loss is None else loss.dtype
        unit = torch.ones((), device=device)
        values = _values_of(gradients)
        greatest = _greatest(values) if values else unit
        scale = unit if scaler is None else scaler.scale(unit)
        together = [greatest, unit if loss is None else loss.detach(), scale]
        exact = torch.float64 if self._loss_dtype is torch.float64 else torch.float32
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
