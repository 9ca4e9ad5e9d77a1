# SPDX-License-Identifier: Apache-2.0
"""The number of processes that train, and whether they may."""

from __future__ import annotations

import os

import torch.distributed

from hotbed.errors import ConfigError

INDEPENDENT = "HOTBED_INDEPENDENT_RANKS"
"""Environment variable: "1" lets each of several ranks train a copy of its own, for sweeps."""


def world_size() -> int:
    """Return the number of ranks.

    It is that of the process group, else of the launcher (`torchrun` sets WORLD_SIZE), else 1.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def trains_together() -> bool:
    """Return whether several ranks train one model."""
    return world_size() > 1 and os.environ.get(INDEPENDENT) != "1"


def speaks() -> bool:
    """Return whether this process shows what is going on: of ranks that train together, the first."""
    if not trains_together():
        return True
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def check_single_rank(where: str) -> None:
    """Raise ConfigError if several ranks train: each would train a separate copy."""
    if trains_together():
        raise ConfigError(
            f"{where}: each rank would train a separate copy of the model on all data, got a world "
            f"of {world_size()} ranks. Make RecModel with grains, such as 8, so that the ranks "
            f"share them, start one process, or set {INDEPENDENT}=1 for separate copies, as in a "
            "sweep."
        )
