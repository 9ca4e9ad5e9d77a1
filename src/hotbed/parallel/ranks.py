# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes of a job, and what they send each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hotbed.errors import ConfigError

TIMEOUT = timedelta(seconds=60)
"""How long a call waits for the other ranks."""


class Ranks:
    """The processes that train one job, connected by torch.distributed over gloo.

    Every rank makes the same calls in the same order; a call returns when all have made it.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def of_job(cls) -> Ranks:
        """Return the ranks that the launcher started, such as torchrun.

        A process group that exists is used; gloo carries its tensors in any case.
        """
        if not dist.is_initialized():
            store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
            # processes that torchrun starts again meet in the same store: keys of the dead remain
            started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"hotbed/{started}", store),
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )
        if dist.get_backend() == "gloo":
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=TIMEOUT))

    def exchange(self, parts: Sequence[Sequence[Tensor]], received: Sequence[int]) -> Tensor:
        """Send each rank its parts; return what all ranks sent here, [m], in their order.

        Args:
            parts: of each of my blocks, a tensor for each rank, [n], all of one dtype.
            received: how much comes from each rank.
        """
        by_rank = list(zip(*parts, strict=True))
        sizes = [sum(map(len, of_rank)) for of_rank in by_rank]
        sent = torch.cat([part for of_rank in by_rank for part in of_rank])
        return self.send(sent, sizes, received)

    def send(self, values: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its part of the values, [n]; return what all sent here, in their order.

        Args:
            values: one rank's part after the other.
            sizes: how much each rank gets.
            received: how much comes from each rank.
        """
        out = torch.empty(sum(received), dtype=values.dtype)
        dist.all_to_all_single(out, values, list(received), list(sizes), group=self._group)
        return out

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, [ranks, n]; `values` is [n] on each of them."""
        out = torch.empty(self.size, values.numel(), dtype=values.dtype)
        dist.all_gather(list(out.unbind()), values.contiguous(), group=self._group)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of each rank; it is pickled on its way."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError, on every rank, if a setting is not the same on all of them."""
        every = self.gather_objects(dict(settings))
        for name in settings:
            values = [of_rank[name] for of_rank in every]
            if any(value != values[0] for value in values):
                raise ConfigError(
                    f"ranks: all ranks must train the same model with the same settings, got "
                    f"{name} {values} on ranks 0 to {self.size - 1}. Start the same program with "
                    "the same seed on each rank."
                )
