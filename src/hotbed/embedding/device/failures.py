# SPDX-License-Identifier: Apache-2.0
"""Errors of a device in a step, by name."""

from __future__ import annotations

import torch

from hotbed.errors import DeviceError

from .link import pinned_for

# torch 2.6 raises a RuntimeError of any kind instead
_FAILED = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


def named_failure(error: BaseException, device: torch.device) -> DeviceError | None:
    """Return the error of Hotbed for one that torch raised of a device; None for any other."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"device {str(device)!r}: a step needs more memory than it has, got: "
            f"{_first_line(error)}. Nothing of the step was applied. {_held(device)} Take smaller "
            "batches or more grains; resume from the last checkpoint."
        )
    if isinstance(error, _FAILED):
        return DeviceError(
            f"device {str(device)!r}: it failed in a step, got: {_first_line(error)}. Rows may be "
            "a step ahead of dense weights, so no checkpoint of this step is written. "
            f"{_held(device)} Resume from the last checkpoint in a new process."
        )
    return None


def _held(device: torch.device) -> str:
    """Say what Hotbed holds beside torch: a driver also fails where no more memory is pinned."""
    return f"Hotbed has pinned {pinned_for(device):,} bytes of the host for its copies."


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
