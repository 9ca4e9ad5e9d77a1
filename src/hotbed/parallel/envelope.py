# SPDX-License-Identifier: Apache-2.0
"""Envelope: messages of several parts of a step, which go to the other ranks together.

A message costs more than its bytes. So the rows and the dense values of a step share two: each
part writes a talk, a generator that yields what it sends and gets what came for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Letters:
    """The first message of a talk. It gets a list of what each rank sent here.

    Attributes:
        blocks: of each block, a tensor for each rank, [n], float32.
        sizes: how much each rank sends here.
    """

    blocks: Sequence[Sequence[Tensor]]
    sizes: Sequence[int]


Talk = Generator[Any, Any, T]
"""Yields `Letters`, then float32 [n], of which it gets those of all ranks, [ranks, n]. Then it may
exchange other messages of its own, and returns its result."""


class _Begun(Generic[T]):
    """A talk whose letters wait to be sent."""

    def __init__(self, talk: Talk[T]) -> None:
        self.talk = talk
        self.letters: Letters = next(talk)
        self.result: list[T] = []  # one, once the talk is over


class Envelope:
    """Sends what the open talks have to send, in the order in which they were begun.

    Every rank begins the same talks.

    Args:
        exchange: as `Ranks.exchange`.
        gather: as `Ranks.gather`.
    """

    def __init__(
        self,
        exchange: Callable[[Sequence[Sequence[Tensor]], Sequence[int]], Tensor],
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self._exchange = exchange
        self._gather = gather
        self._open: list[_Begun[Any]] = []

    def begin(self, talk: Talk[T]) -> Callable[[], T]:
        """Begin a talk; return what holds it, and all others that were begun, and its result."""
        begun = _Begun(talk)
        self._open.append(begun)

        def result() -> T:
            if not begun.result:
                self._hold()
            return begun.result[0]

        return result

    def drop(self) -> None:
        """Forget talks that an error has left open."""
        self._open = []

    def _hold(self) -> None:
        talks = self._open
        self._open = []
        every = [begun.letters for begun in talks]
        blocks = [block for each in every for block in each.blocks]
        of_ranks = list(zip(*(each.sizes for each in every), strict=True))
        received = self._exchange(blocks, list(map(sum, of_ranks)))
        parts = received.split([size for sizes in of_ranks for size in sizes])
        answers: list[Tensor] = [
            begun.talk.send(list(parts[number :: len(talks)])) for number, begun in enumerate(talks)
        ]
        ends = accumulate(map(len, answers), initial=0)
        shares = self._gather(torch.cat(answers))
        for begun, (first, last) in zip(talks, pairwise(ends), strict=True):
            try:
                begun.talk.send(shares[:, first:last])
            except StopIteration as end:
                begun.result.append(end.value)
