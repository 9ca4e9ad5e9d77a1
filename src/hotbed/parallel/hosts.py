# SPDX-License-Identifier: Apache-2.0
"""Hosts: which ranks are on which host, and how messages between hosts are put together.

Where several hosts have several ranks each, a rank sends one message to each other host: it holds
what all ranks of its host have for one rank of that host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor


class RankLink(Enum):
    """Which ranks exchange messages with each other.

    `ALL` of them, those of one `HOST`, or, `ALIKE`, those that have the same number on their hosts.
    """

    ALL = "all"
    HOST = "host"
    ALIKE = "alike"


Exchange = Callable[[RankLink, Tensor, Sequence[int], Sequence[int]], Tensor]
"""Sends each rank of a link its part of the values; returns what each of them sent, with the room
that the last argument has for it: for what comes from this rank, exactly its size."""
Gather = Callable[[RankLink, Tensor], Tensor]
"""Returns the values of all ranks of a link, [ranks, n]."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks, one after the other, each with as many ranks.

    Attributes:
        count: of hosts.
        ranks: of each host.
    """

    count: int
    ranks: int = 1

    @classmethod
    def of(cls, hosts: Sequence[Hashable]) -> Hosts:
        """Return the hosts; `hosts`: that of each rank.

        If there is one, or their ranks are not as many or not in order, each rank counts as a host.
        """
        runs = [len(list(run)) for _, run in groupby(hosts)]
        if len(runs) == 1 or len(set(runs)) > 1 or len(set(hosts)) < len(runs):
            return cls(len(hosts))
        return cls(len(runs), runs[0])

    def place(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and its number on this host."""
        return divmod(rank, self.ranks)

    @property
    def links(self) -> dict[RankLink, list[range]]:
        """The ranks that exchange messages over links other than that of all."""
        return {
            RankLink.HOST: [self.together_with(host * self.ranks) for host in range(self.count)],
            RankLink.ALIKE: [self.alike(number) for number in range(self.ranks)],
        }

    def together_with(self, rank: int) -> range:
        """Return the ranks of the host of a rank."""
        first = rank - rank % self.ranks
        return range(first, first + self.ranks)

    def alike(self, rank: int) -> range:
        """Return the ranks that have the same number on their hosts."""
        return range(rank % self.ranks, self.count * self.ranks, self.ranks)


class HostMail:
    """Exchanges messages between all ranks, by their hosts.

    Args:
        hosts: of the ranks.
        rank: the number of this one.
        exchange: over a link.
        gather: over a link.
    """

    def __init__(self, hosts: Hosts, rank: int, exchange: Exchange, gather: Gather) -> None:
        self._hosts = hosts
        self._rank = rank
        self._exchange = exchange
        self._gather = gather

    def exchange(self, values: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its part of the values; return what all ranks sent here, in their order.

        Args:
            values: [n], one rank's part after the other.
            sizes: how much each rank gets.
            received: how much comes from each rank.
        """
        return self._routed(values, sizes, received)[0]

    def exchange_within(
        self, values: Tensor, sizes: Sequence[int], room: Sequence[int]
    ) -> Sequence[Tensor]:
        """Do the same with room for more; return what the ranks of each host sent here.

        What they leave of the room of their host lies behind their values.
        """
        out, rooms = self._routed(values, sizes, room)
        of_hosts: Sequence[Tensor] = out.split(rooms)
        return of_hosts

    def exchange_on_host(
        self, values: Tensor, sizes: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Send each rank of this host its part; return what they sent here, in their order."""
        return self._exchange(RankLink.HOST, values, sizes, received)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, [ranks, n]."""
        hosts = self._hosts
        if hosts.ranks == 1:
            return self._gather(RankLink.ALL, values)
        of_alike = self._gather(RankLink.ALIKE, values)
        every = self._gather(RankLink.HOST, of_alike.view(-1))
        of_hosts = every.view(hosts.ranks, hosts.count, values.numel()).transpose(0, 1)
        return of_hosts.reshape(-1, values.numel())

    def _routed(
        self, values: Tensor, sizes: Sequence[int], room: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Return what all ranks sent here, and how much room what each host sent has in it."""
        ranks = self._hosts.ranks
        host, _ = self._hosts.place(self._rank)
        rooms = [sum(room[first : first + ranks]) for first in range(0, len(room), ranks)]
        link = RankLink.ALL
        if ranks > 1:
            link = RankLink.ALIKE
            blocks = self._collected(values.split(list(sizes)))
            values = torch.cat(blocks)
            sizes = [len(block) for block in blocks]
        rooms[host] = sizes[host]
        return self._exchange(link, values, sizes, rooms), rooms

    def _collected(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each host, what the ranks of this one have for its rank of this number."""
        ranks = self._hosts.ranks
        count = self._hosts.count
        for_ranks = [parts[number::ranks] for number in range(ranks)]
        lengths = torch.tensor([len(part) for of_rank in for_ranks for part in of_rank])
        each = [count] * ranks
        coming = self.exchange_on_host(lengths, each, each).view(ranks, count).tolist()
        sizes = [sum(map(len, of_rank)) for of_rank in for_ranks]
        rooms = [sum(of_rank) for of_rank in coming]
        values = torch.cat([part for of_rank in for_ranks for part in of_rank])
        received = self.exchange_on_host(values, sizes, rooms)
        of_ranks = [
            block.split(lengths)
            for block, lengths in zip(received.split(rooms), coming, strict=True)
        ]
        return [torch.cat(of_host) for of_host in zip(*of_ranks, strict=True)]
