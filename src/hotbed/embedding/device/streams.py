# SPDX-License-Identifier: Apache-2.0
"""Streams, events and pinned memory of any device that torch knows: no other file names them.

They are looked up in torch at each call, so that tests can put those of another device there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Event = torch.Event
"""For annotations alone: `new_event` makes them."""


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def new_event(device: torch.device) -> torch.Event:
    """Return an event that also tells when it was reached, where the device can tell."""
    try:
        return torch.Event(device=device, enable_timing=True)
    except RuntimeError:
        return torch.Event(device=device)


def seconds_between(first: torch.Event, second: torch.Event) -> float:
    """Return the seconds between two events that the device has reached; 0 if it cannot tell."""
    try:
        return float(first.elapsed_time(second)) / 1e3
    except (RuntimeError, ValueError):  # the latter, if an event has no time
        return 0.0


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which the calling thread lets the device compute."""
    return torch.accelerator.current_stream(device)


def wait_for_current(device: torch.device) -> None:
    """Let the host wait for all that the calling thread has asked of the device."""
    current_stream(device).synchronize()


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Let the device do on `stream` what it is asked for in this block."""
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def pinned_bytes(size: int) -> Tensor:
    """Return memory of the host that a device reads and writes itself, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def keep_for(values: Tensor, stream: torch.Stream) -> None:
    """Let the memory of `values` have no other use before what `stream` was asked for is over."""
    values.record_stream(stream)
