# SPDX-License-Identifier: Apache-2.0
"""The id graph of a model computes the very ids of its forward pass, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotbed.training.auto import Signature, inspect

INT64 = torch.iinfo(torch.int64)
EDGES = [INT64.min, INT64.min + 1, -(2**32), -2, -1, 0, 1, 2, 2**31 - 1, 2**53 + 1, INT64.max]

Leaves = Sequence[Tensor]
Formula = Callable[[Leaves], Tensor]
"""Leaves (user [n], items [n, 3], price [n]) -> ids [n, 3] or [n, 1]."""

constants = st.sampled_from([*EDGES, 3, 7, 97, 1000, 2654435761, -97])
divisors = st.sampled_from([1, 2, 3, 97, 2**31, INT64.max, -2, -97, INT64.min])
shifts = st.integers(0, 63)


def zeroed(x: Tensor, y: Tensor) -> Tensor:
    """Return `x` after changes in place, which only its first column shows."""
    x = x.clone()
    x[:, 0] = 5
    column = x[:, :1]
    column.add_(y[:, :1])
    return x


LEAVES: list[Formula] = [
    lambda leaves: leaves[0][:, None],
    lambda leaves: leaves[1],
    lambda leaves: (leaves[2].double() * 10).long().unsqueeze(1),
    lambda leaves: torch.arange(len(leaves[0]), device=leaves[0].device)[:, None],
    lambda leaves: torch.bucketize(leaves[2], torch.tensor([-1.0, 0.0, 2.5])).view(-1, 1),
]
WITH_NUMBER: dict[str, tuple[st.SearchStrategy[int], Callable[[Tensor, int], Tensor]]] = {
    "add": (constants, lambda x, c: x + c),
    "subtract": (constants, lambda x, c: c - x),
    "multiply": (constants, lambda x, c: x * c),
    "xor": (constants, lambda x, c: x ^ c),
    "and": (constants, lambda x, c: x & c),
    "or": (constants, lambda x, c: x | c),
    "left": (shifts, lambda x, c: x << c),
    "right": (shifts, lambda x, c: x >> c),
    "modulo": (divisors, lambda x, c: x % c),
    "remainder": (divisors, torch.remainder),
    "fmod": (divisors, torch.fmod),
    "divide": (divisors, lambda x, c: x // c),
    "truncate": (divisors, lambda x, c: torch.div(x, c, rounding_mode="trunc")),
    "clamp": (constants, lambda x, c: x.clamp(min=c)),
    "choose": (constants, lambda x, c: torch.where(x > c, x, c - x)),
    "mask": (constants, lambda x, c: x.masked_fill(x == c, 7)),
    "compare": (constants, lambda x, c: (x <= c).long()),
}
ALONE: list[Callable[[Tensor], Tensor]] = [
    torch.neg,
    torch.abs,
    torch.bitwise_not,
    torch.sign,
    lambda x: x.int().long(),
    lambda x: x.flip(1),
    lambda x: x.cumsum(1),
    lambda x: x.roll(1, 1),
    lambda x: x.expand(-1, 3)[:, 1:2],
    lambda x: x.sum(1, keepdim=True),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: torch.nn.functional.pad(x, (1, 0), value=4)[:, :-1],
]
BOTH: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.bitwise_xor,
    torch.maximum,
    lambda x, y: torch.where(x < y, x, y * 31),
    lambda x, y: (x << 7) | (y & 127),
    lambda x, y: torch.cat([x[:, :1], y[:, :1], x[:, -1:]], dim=1),
    lambda x, y: torch.stack([x.sum(1), y.sum(1), y[:, 0]], dim=1),
    zeroed,
]


def with_number(name: str, number: int, inner: Formula) -> Formula:
    function = WITH_NUMBER[name][1]
    return lambda leaves: function(inner(leaves), number)


def joined(
    function: Callable[[Tensor, Tensor], Tensor], first: Formula, second: Formula
) -> Formula:
    def formula(leaves: Leaves) -> Tensor:
        x, y = torch.broadcast_tensors(first(leaves), second(leaves))
        return function(x, y)

    return formula


def deeper(inner: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    numbered = st.sampled_from(sorted(WITH_NUMBER)).flatmap(
        lambda name: st.builds(with_number, st.just(name), WITH_NUMBER[name][0], inner)
    )
    alone = st.builds(lambda f, x: lambda leaves: f(x(leaves)), st.sampled_from(ALONE), inner)
    both = st.builds(joined, st.sampled_from(BOTH), inner, inner)
    return numbered | alone | both


formulas = st.recursive(st.sampled_from(LEAVES), deeper, max_leaves=6)


class Computed(nn.Module):
    """Looks up the ids of each formula in an embedding of its own."""

    def __init__(self, formulas: Sequence[Formula], *, is_followed: bool) -> None:
        super().__init__()
        self.formulas = formulas
        self.tables = nn.ModuleList(nn.Embedding(1, 1) for _ in formulas)
        self.is_followed = is_followed

    def forward(self, user: Tensor, items: Tensor, price: Tensor) -> Tensor:
        ids = [formula([user, items, price]) for formula in self.formulas]
        rows = [table(values) for table, values in zip(self.tables, ids, strict=True)]
        total = sum(own.sum() for own in rows)
        if not self.is_followed and total > 0:  # torch.export stops here, torch.fx does not
            total = -total
        return total


def batch(n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor(EDGES)
    picks = torch.randint(0, len(EDGES), (n, 4), generator=generator)
    ids = edges[picks] + torch.randint(-3, 4, (n, 4), generator=generator)
    price = torch.randn(n, generator=generator) * 3
    return [ids[:, 0].contiguous(), ids[:, 1:].contiguous(), price]


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(formulas, min_size=8, max_size=8), st.booleans())
def test_the_id_graph_equals_the_forward_pass(chosen: list[Formula], is_followed: bool) -> None:
    model = Computed(chosen, is_followed=is_followed)
    first = batch(5, 0)
    paths = [f"tables.{number}" for number in range(len(chosen))]
    found = inspect(model, paths, Signature.of(model, first, {}))
    assert found.graph is not None, found.problem
    hidden = set(found.obstacles)
    assert not hidden
    for n in (5, 64, 1, 0):
        leaves = batch(n, n)
        copies = [leaf.clone() for leaf in leaves]
        computed = dict(found.graph(leaves))
        for path, formula in zip(paths, chosen, strict=True):
            expected = formula(copies)
            assert computed[path].values.dtype == expected.dtype
            assert torch.equal(computed[path].values, expected), (path, n)
