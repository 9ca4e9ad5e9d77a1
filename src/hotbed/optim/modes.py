# SPDX-License-Identifier: Apache-2.0
"""Set train and eval modes of networks for a while, then restore the flag of every module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_eval_mode(*networks: Any) -> Iterator[None]:
    """Put every module of `networks` in eval mode within; ignore other callables among them.

    Only flags are set: `eval()` and `train()` of a module may do more, which could not be undone.
    """
    modules: list[nn.Module] = []
    for network in networks:
        if isinstance(network, nn.Module):
            modules += network.modules()
    yield from _with_flag(modules, training=False)


@contextmanager
def with_buffers_restored(network: nn.Module) -> Iterator[None]:
    """Restore the buffers of a network afterwards: its forward may change running statistics."""
    states: list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = []
    for module in network.modules():
        for name, buffer in module._buffers.items():
            values = None if buffer is None else buffer.detach().clone()
            states.append((module, name, buffer, values))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in states:
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                setattr(module, name, buffer)  # it may have been assigned


@contextmanager
def in_train_mode(network: nn.Module) -> Iterator[None]:
    """Put a network in train mode within, if all of its modules are in eval mode.

    If one of its modules is in train mode, the flags are the user's choice and stay.
    """
    modules = list(network.modules())
    if any(module.training for module in modules):
        modules = []
    yield from _with_flag(modules, training=True)


def _with_flag(modules: list[nn.Module], *, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in modules]
    for module, was_training in before:
        if was_training != training:
            _set_flag(module, training)
    try:
        yield
    finally:
        for module, was_training in before:  # a forward pass may have set some
            if module.training != was_training:
                _set_flag(module, was_training)


def _set_flag(module: nn.Module, training: bool) -> None:
    attributes = vars(module)
    if "training" in attributes:
        # past the __setattr__ of modules, which takes as long as a small layer
        attributes["training"] = training
    else:  # a scripted module keeps it elsewhere
        module.training = training
