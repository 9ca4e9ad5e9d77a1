# SPDX-License-Identifier: Apache-2.0
"""The devices of this machine by name, and a network's way to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hotbed.errors import ConfigError
from hotbed.parallel.world import local_rank, trains_together
from hotbed.training.arguments import listed


def find_device(where: str, name: str | torch.device) -> torch.device:
    """Return a device of this machine, with its number.

    Several ranks that train together share out the devices of a machine: a name without a number,
    such as "cuda", means the device `local rank % number of devices`.

    Args:
        where: the argument or key, for messages.
        name: as torch spells it, such as "cpu", "cuda" or "cuda:1".

    Raises:
        ConfigError: this machine does not have it; the message names those that it has.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise _absent(where, name) from None
    num_devices = _num_devices(device.type)
    if (device.index or 0) >= num_devices:
        raise _absent(where, name)
    if device.type == "cpu":
        return torch.device("cpu")
    if str(device) != device.type:
        return device
    number = local_rank() % num_devices if trains_together() else _current(device.type)
    return torch.device(device.type, number)


def devices_here() -> list[str]:
    """Return the names of the devices of this machine, the CPU first."""
    names = ["cpu"]
    accelerator: torch.device | None = torch.accelerator.current_accelerator()
    if accelerator is not None:
        kind = accelerator.type
        names += [f"{kind}:{number}" for number in range(_num_devices(kind))]
    return names


def move(device: torch.device, modules: Iterable[Any], optimizer: Any) -> None:
    """Move the dense parts of modules to a device; rows of tables stay where they are.

    Args:
        device: of this machine.
        modules: those to move; values that are no modules stay as they are.
        optimizer: as `RecModel` takes it, of one of the modules.

    Raises:
        ConfigError: the optimizer was made before, and it would not follow.
    """
    optimizers = [part for part in listed(optimizer) if isinstance(part, torch.optim.Optimizer)]
    for module in modules:
        if isinstance(module, nn.Module):
            before = {id(parameter) for parameter in module.parameters()}
            module.to(device)
            after = {id(parameter) for parameter in module.parameters()}
            for part in optimizers:
                _check_follows(part, device, before - after)


def _check_follows(
    optimizer: torch.optim.Optimizer, device: torch.device, replaced: set[int]
) -> None:
    """Raise ConfigError if an optimizer has state elsewhere, or parameters that were replaced."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    follows = not any(id(parameter) in replaced for parameter in parameters)
    for values in optimizer.state.values():
        state = values.values() if isinstance(values, Mapping) else ()
        for value in state:
            # numbers such as the count of steps stay on the CPU
            if torch.is_tensor(value) and value.dim() and value.device.type != device.type:
                follows = False
    if not follows:
        name = type(optimizer).__name__
        raise ConfigError(
            f"device: an optimizer that was made before does not follow a network to {device}, got "
            f"{name}. Move the network first, network.to({str(device)!r}), then make {name}; or "
            "give a name or a rule, such as hb.Adam(lr=1e-3)."
        )


def _num_devices(kind: str) -> int:
    """Return how many devices of a kind this machine has; 0 if torch cannot use it."""
    device_module = getattr(torch, kind, None)
    if kind == "meta" or device_module is None:
        return 0
    count = getattr(device_module, "device_count", None)
    return int(count()) if callable(count) else 0


def _current(kind: str) -> int:
    """Return the number of the device of a kind that torch uses where none is said."""
    current = getattr(getattr(torch, kind), "current_device", None)
    return int(current()) if callable(current) else 0


def _absent(where: str, name: Any) -> ConfigError:
    here = devices_here()
    advice = f"Give one of {here}." if len(here) > 1 else "Leave it out: torch finds only the CPU."
    return ConfigError(f"{where}: this machine has no such device, got {str(name)!r}. {advice}")
