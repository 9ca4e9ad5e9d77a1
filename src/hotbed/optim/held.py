# SPDX-License-Identifier: Apache-2.0
"""The optimizers and schedules that a network which updates itself holds as attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

ROOT = "network"
"""The first word of each path, which tells these optimizers from those of `RecModel`."""
SCHEDULES = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects beside the optimizers whose state decides the next step."""


def optimizers_of(network: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that modules of a network hold, by their paths.

    >>> list(optimizers_of(network))
    ['network.dense', 'network.rows']
    """
    return _held(network, (torch.optim.Optimizer,))


def schedules_of(network: nn.Module) -> dict[str, Any]:
    """Return the schedules and loss scalers that modules of a network hold, by their paths."""
    return _held(network, SCHEDULES)


def _held(network: nn.Module, kinds: tuple[type[Any], ...]) -> dict[str, Any]:
    """Return each object of these kinds once, by the first path that leads to it."""
    parts: dict[int, tuple[str, Any]] = {}
    for module_path, module in network.named_modules(prefix=ROOT):
        for path, value in _attributes(module, module_path):
            if isinstance(value, kinds):
                parts.setdefault(id(value), (path, value))
    return dict(parts.values())


def _attributes(module: nn.Module, module_path: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and what those that are containers hold, with paths."""
    for name, value in vars(module).items():
        path = f"{module_path}.{name}"
        yield path, value
        items: Mapping[Any, Any] = {}
        if isinstance(value, Mapping):
            items = value
        elif isinstance(value, (list, tuple)):
            items = dict(enumerate(value))
        for key, item in items.items():
            yield f"{path}.{key}", item
