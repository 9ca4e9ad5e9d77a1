# SPDX-License-Identifier: Apache-2.0
"""The number of processes that train, and whether and how they may."""

from __future__ import annotations

import os

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotbed.embedding.modules.parameter import shared_out
from hotbed.errors import ConfigError

INDEPENDENT = "HOTBED_INDEPENDENT_RANKS"
"""Environment variable: "1" lets each of several ranks train a copy of its own, for sweeps."""


def world_size() -> int:
    """Return the number of ranks.

    It is that of the process group, else of the launcher (`torchrun` sets WORLD_SIZE), else 1.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return _launched("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this process: of the process group, else of the launcher, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return _launched("RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine: as the launcher says, else that of all."""
    return _launched("LOCAL_WORLD_SIZE", world_size())


def local_rank() -> int:
    """Return the number of this process on its machine: as the launcher says, else among all."""
    return _launched("LOCAL_RANK", rank())


def _launched(variable: str, default: int) -> int:
    """Return a number that the launcher has set; raise ConfigError if it set anything else."""
    value = os.environ.get(variable) or str(default)
    if not value.isdecimal():
        raise ConfigError(
            f"ranks: {variable}: must be a whole number, got {value!r}. Launchers of several ranks "
            "set it; for one process, unset it."
        )
    return int(value)


def trains_together() -> bool:
    """Return whether several ranks train one model."""
    return world_size() > 1 and os.environ.get(INDEPENDENT) != "1"


def speaks() -> bool:
    """Return whether this process shows progress: of ranks that train together, the first does."""
    return not trains_together() or rank() == 0


def check_single_rank(where: str) -> None:
    """Raise ConfigError if several ranks train: each would train a separate copy."""
    if trains_together():
        raise ConfigError(
            f"{where}: each rank would train a separate copy of the model on all data, got a world "
            f"of {world_size()} ranks. Make RecModel with grains, such as 8, or give a loop of "
            f"your own to hb.shard, so that the ranks share them; start one process; or set "
            f"{INDEPENDENT}=1 for separate copies, as in a sweep."
        )


def check_not_wrapped(network: nn.Module, grains: int = 1, taker: str = "RecModel") -> None:
    """Raise ConfigError if torch shares out the dense part of a network with tables.

    Rows would stay on their rank. A DistributedDataParallel of one rank shares nothing, and its
    hooks count backward passes: it takes a step without grains. `taker`: what takes the network.
    """
    for name, module in network.named_modules():
        wrapper = _wrapper_of(module)
        is_alone = wrapper == DistributedDataParallel.__name__ and world_size() == grains == 1
        if wrapper and not is_alone:
            raise shared_out(wrapper, name, taker)


def _wrapper_of(module: nn.Module) -> str:
    """Return the name of a wrapper of torch that shares out dense parameters; "" for any other."""
    if isinstance(module, DistributedDataParallel):
        return DistributedDataParallel.__name__
    for base in type(module).__mro__:
        # by name: the import of torch.distributed.fsdp takes half a second
        if base.__module__.startswith("torch.distributed.fsdp"):
            is_module = base.__name__ == "FullyShardedDataParallel"
            return base.__name__ if is_module else "fully_shard"
    return ""
