# SPDX-License-Identifier: Apache-2.0
"""The ranks of a program: the processes that a launcher such as torchrun started."""

from __future__ import annotations

from hotbed.parallel.world import local_rank, local_world_size, rank, trains_together, world_size

__all__ = ["get_device_id", "get_local_rank_size", "get_rank_id", "get_rank_size"]


def get_rank_id() -> int:
    """Return the number of this process; 0 where one trains alone."""
    return rank() if trains_together() else 0


def get_rank_size() -> int:
    """Return the number of processes that train together."""
    return world_size() if trains_together() else 1


def get_local_rank_size() -> int:
    """Return the number of these on this machine."""
    return local_world_size() if trains_together() else 1


def get_device_id() -> int:
    """Return the number of this process on its machine; 0 where one trains alone."""
    return local_rank() if trains_together() else 0
