# SPDX-License-Identifier: Apache-2.0
"""Mapper: maps the ids of a network's batches before its forward pass, or ahead."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from hotbed.embedding.table import MapQueue
from hotbed.training.stages.example import Example
from hotbed.training.stages.network import NetworkAdapter, adapter_of, looks_up_once

from .planner import Planner


class Mapper(Protocol):
    """Maps the ids of batches to rows, in the order of the batches.

    Results have the same bits whether ids are mapped by `plan`, by `map` or in the forward pass.
    """

    @property
    def waits(self) -> bool:
        """Whether later examples are waited for, so that all ranks map the same ones."""

    def begin(self, *, ahead: bool, queue: MapQueue | None = None) -> None:
        """Prepare a pass over data.

        Args:
            ahead: whether batches are to be mapped before their forward pass.
            queue: maps them, while earlier batches train; None = they are mapped at once.
        """

    @property
    def foresees(self) -> bool:
        """Whether later batches may be mapped now, after the `map` of the current one."""

    def obstacle(self) -> str:
        """Return why no batch can be mapped ahead; "" if nothing is known that prevents it."""

    def map(self, example: Example) -> Example:
        """Prepare the forward pass that follows; an example that `plan` mapped keeps its plans.

        Call it once an example, in order, after everything that must see the tables as they were.

        Raises:
            HotbedError: the ids of this example cannot be mapped, now or in `plan`.
        """

    def plan(self, example: Example) -> Example:
        """Map the ids of a later example, or let the queue map them.

        An error is kept, and raised by `map` when the turn of this example comes. An example that
        is returned as it is cannot be mapped before its forward pass.
        """

    def take_back(self, example: Example) -> None:
        """Make the tables what they were before the ids of an example were mapped ahead.

        Examples that were mapped later are taken back first. An example that was looked up stays.
        """

    def statistics(self, example: Example) -> dict[str, dict[str, int]]:
        """Return the statistics of the tables by name, as they are after the map of an example."""

    def latest(self, example: Example) -> int | None:
        """Return the newest event time of an example in microseconds; None without times."""


@runtime_checkable
class MapperOwner(NetworkAdapter, Protocol):
    """The adapter of a network whose ids a mapper of its own maps."""

    def mapper(self) -> Mapper:
        """Return a new mapper of the network."""


def mapper_of(network: nn.Module) -> Mapper:
    """Return what maps the ids of a network."""
    adapter = adapter_of(network)
    if isinstance(adapter, MapperOwner):
        return adapter.mapper()
    return Planner.of(network)


def is_mapped_first(network: nn.Module) -> bool:
    """Return whether the loop may map the ids of a network before its forward pass, unasked."""
    return isinstance(adapter_of(network), MapperOwner) or looks_up_once(network)
