# SPDX-License-Identifier: Apache-2.0
"""The ranks of a program: there is one."""

from __future__ import annotations

__all__ = ["get_device_id", "get_local_rank_size", "get_rank_id", "get_rank_size"]


def get_rank_id() -> int:
    """Return the number of this process: 0."""
    return 0


def get_rank_size() -> int:
    """Return the number of processes: 1."""
    return 1


def get_local_rank_size() -> int:
    """Return the number of processes on this machine: 1."""
    return 1


def get_device_id() -> int:
    """Return the number of the device: 0."""
    return 0
