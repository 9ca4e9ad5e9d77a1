# SPDX-License-Identifier: Apache-2.0
"""DeviceLink: moves tensors between the host and a device, beside what the device computes.

Four lines wait, and each is needed: without any one of them, there is an order of the device's
streams in which a training has other bits.

1. Before the host uses memory again, it waits until the last copy has read or written it.
2. The device waits for the copy up before it computes with the values.
3. The copy down waits until the values are computed.
4. The host waits for the copy down before it reads the values.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from .streams import (
    Event,
    current_stream,
    keep_for,
    new_event,
    new_stream,
    on_stream,
    pinned_bytes,
    seconds_between,
)
from .times import LinkTimes

K = TypeVar("K")
T = TypeVar("T")

SLOTS_UP = 2
"""The host writes one while the device reads the other."""
ALIGNMENT = 64
"""Bytes. The bits of some products depend on it, and torch's own memory on the host has it."""

NOT_COUNTED = nullcontext()

Layout = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each tensor."""


class Slot:
    """Pinned memory of the host.

    `begun`, `copied`: begin and end of the last copy that reads or writes it.
    """

    def __init__(self, device: torch.device) -> None:
        self.begun = new_event(device)
        self.copied = new_event(device)
        self._bytes = pinned_bytes(0)

    @property
    def size(self) -> int:
        """Return the bytes of this memory."""
        return len(self._bytes)

    def rows(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return float32 tensors of these shapes in this memory."""
        return self.tensors([(shape, torch.float32) for shape in shapes])

    def tensors(self, layout: Layout) -> list[Tensor]:
        """Return tensors in this memory, whose values are not set."""
        size = _size(layout)
        if len(self._bytes) < size:
            self._bytes = pinned_bytes(max(size, 2 * len(self._bytes)))
        return _tensors_in(self._bytes, layout)


class DeviceLink:
    """Moves tensors between the host and a device on streams of its own, one for each way.

    Memory of the host is used again, and nobody else sees it. Memory of the device is new for each
    copy, because a network may keep what it was given. All methods may be called on any thread, and
    return values for the stream on which that thread computes.

    Use `link_to`: a process has one for each device.

    `times`: where the time of steps has gone so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.times = LinkTimes()
        self._device = device
        # since the last values went up or came down, the device can compute
        self._since = new_event(device)
        self._up = new_stream(device)
        self._down = new_stream(device)
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._slots_up = deque(self._new_slot() for _ in range(SLOTS_UP))
        self._slots_down: deque[Slot] = deque()

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of the host's memory that are pinned for copies."""
        return sum(slot.size for slot in self._slots)

    def slot(self) -> Slot:
        """Return memory of the host for `send`."""
        slot = self._taken(self._slots_up)
        self.times.copies += seconds_between(slot.begun, slot.copied)
        return slot

    def send(self, slot: Slot, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors up, one copy each; return those of the device.

        `slot`: holds the tensors, and was not sent before.
        """
        with on_stream(self._up):
            slot.begun.record(self._up)
            results = [part.to(self._device, non_blocking=True) for part in values]
            slot.copied.record(self._up)
        self._receive(slot, results)
        return results

    def send_together(self, values: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy tensors of the host up by one copy; return those of the device by key."""
        layout = [(part.shape, part.dtype) for part in values.values()]
        slot = self.slot()
        for target, part in zip(slot.tensors(layout), values.values(), strict=True):
            target.copy_(part)
        (source,) = slot.tensors([((_size(layout),), torch.uint8)])
        with on_stream(self._up):
            slot.begun.record(self._up)
            together = source.to(self._device, non_blocking=True)
            slot.copied.record(self._up)
        self._receive(slot, [together])
        # `data` counts its own versions: a network may write to one of them in place
        parts = [part.data for part in _tensors_in(together, layout)]
        return dict(zip(values, parts, strict=True))

    def bring(self, values: Sequence[Tensor | None]) -> Arrival:
        """Begin to copy tensors down, one copy each."""
        present = [part.detach() for part in values if part is not None]
        slot = self._taken(self._slots_down)
        targets = slot.tensors([(part.shape, part.dtype) for part in present])
        computed = new_event(self._device)
        computed.record(current_stream(self._device))
        computed.wait(self._down)  # 3
        with on_stream(self._down):
            slot.begun.record(self._down)
            for target, part in zip(targets, present, strict=True):
                target.copy_(part, non_blocking=True)
            slot.copied.record(self._down)
        rest = iter(targets)
        arrived = [None if part is None else next(rest) for part in values]
        computing = (self._since, computed)
        self._since = computed
        return Arrival(self, slot, arrived, present, computing)

    def count(self, slot: Slot, computing: tuple[Event, Event]) -> None:
        """Count a copy down that is over, and the time in which its values were computed."""
        self.times.copies += seconds_between(slot.begun, slot.copied)
        self.times.device += seconds_between(*computing)

    def give_back(self, slot: Slot) -> None:
        """Take back memory of a copy down."""
        self._slots_down.append(slot)

    def _receive(self, slot: Slot, results: Sequence[Tensor]) -> None:
        """Let the stream of this thread use results of a copy from a slot."""
        current = current_stream(self._device)
        slot.copied.wait(current)  # 2
        self._since = new_event(self._device)
        self._since.record(current)
        for values in results:
            keep_for(values, current)
        self._slots_up.append(slot)

    def _taken(self, slots: deque[Slot]) -> Slot:
        """Return the slot that has waited longest, or a new one; its memory may be written."""
        slot = slots.popleft() if slots else self._new_slot()
        slot.copied.synchronize()  # 1
        return slot

    def _new_slot(self) -> Slot:
        slot = Slot(self._device)
        self._slots.add(slot)
        return slot


class Arrival:
    """Tensors on their way to the host.

    It holds those of the device until they have arrived, so that their memory has no other use.

    Args:
        link: whose slot it is.
        slot: where they arrive.
        arriving: in that slot; None = there is no tensor.
        sources: on the device.
        computing: begin and end of what computed them.
    """

    def __init__(
        self,
        link: DeviceLink,
        slot: Slot,
        arriving: Sequence[Tensor | None],
        sources: Sequence[Tensor],
        computing: tuple[Event, Event],
    ) -> None:
        self._link = link
        self._computing = computing
        self._slot = slot
        self._arriving = arriving
        self._sources = sources

    def read(self, use: Callable[[Sequence[Tensor | None]], T]) -> T:
        """Wait for the tensors, and return what `use` makes of them; it may not keep them."""
        self._slot.copied.synchronize()  # 4
        self._link.count(self._slot, self._computing)
        try:
            return use(self._arriving)
        finally:
            self.drop()

    def drop(self) -> None:
        """Leave the tensors unread."""
        self._sources = ()
        self._link.give_back(self._slot)


_links: dict[torch.device, DeviceLink] = {}


def link_to(device: torch.device) -> DeviceLink:
    """Return the link of this process to a device."""
    link = _links.get(device)
    if link is None:
        link = _links.setdefault(device, DeviceLink(device))
    return link


def pinned_for(device: torch.device) -> int:
    """Return the bytes of the host's memory that are pinned for copies to and from a device."""
    link = _links.get(device)
    return 0 if link is None else link.pinned_bytes


def counted_as_rows(device: torch.device) -> AbstractContextManager[None]:
    """Return a block whose time counts as work on rows of steps on `device`; not on the CPU."""
    return NOT_COUNTED if device.type == "cpu" else link_to(device).times.in_rows()


def _places(layout: Layout) -> list[slice]:
    """Return the bytes of each tensor in memory that holds them one after another."""
    places = []
    begin = 0
    for shape, dtype in layout:
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(slice(begin, end))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return places


def _size(layout: Layout) -> int:
    """Return the bytes of memory that holds these tensors."""
    return max((place.stop for place in _places(layout)), default=0)


def _tensors_in(memory: Tensor, layout: Layout) -> list[Tensor]:
    """Return the tensors that lie in memory, uint8 [bytes]."""
    return [
        memory[place].view(dtype).view(tuple(shape))
        for place, (shape, dtype) in zip(_places(layout), layout, strict=True)
    ]
