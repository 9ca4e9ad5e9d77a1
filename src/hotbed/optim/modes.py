# SPDX-License-Identifier: Apache-2.0
"""Set modes of networks, or the place of their values, for a while; then restore what was."""

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
def on_host(network: nn.Module) -> Iterator[None]:
    """Give a network copies of its parameters and buffers on the CPU within.

    The parameters themselves stay where they are, and so does what knows them, such as an
    optimizer.
    """
    before = []
    copies: dict[int, torch.Tensor] = {}
    for module in network.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            before.append((tensors, dict(tensors)))
            for name, tensor in before[-1][1].items():
                if tensor is not None and not tensor.is_cpu:
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _host_copy(tensor)
                    tensors[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for tensors, originals in before:
            tensors.update(originals)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().cpu()
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(values, tensor.requires_grad) if is_parameter else values


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
