# SPDX-License-Identifier: Apache-2.0
"""The torch faces give what nn.EmbeddingBag and nn.Embedding give on the same rows, forward and
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules import Feature

pytestmark = pytest.mark.torch_core

EXTREMES = [-1, -2, 0, -(2**63), 2**63 - 1]


def tensor(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Twin:
    """Dense rows in torch for the ids of a table, as they are now."""

    def __init__(self, table: hb.Table, ids: Tensor) -> None:
        self.table, (self.ids, self.index) = table, np.unique(ids.numpy(), return_inverse=True)
        self.rows = nn.Parameter(torch.from_numpy(table.lookup(self.ids)))

    def indices(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(np.searchsorted(self.ids, ids.numpy()))

    def bag(self, ids: Tensor, offsets: Tensor, mode: str, weights: Tensor | None = None) -> Tensor:
        return nn.functional.embedding_bag(
            self.indices(ids),
            self.rows,
            offsets,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def check_step(self, lr: float, **tolerance: float) -> None:
        """After an Sgd step of both, the rows agree."""
        assert self.rows.grad is not None
        torch.testing.assert_close(
            torch.from_numpy(self.table.lookup(self.ids)),
            self.rows.detach() - lr * self.rows.grad,
            **tolerance,
        )


def jagged(random: np.random.Generator, n: int, longest: int, pool: int) -> tuple[Tensor, Tensor]:
    lengths = random.integers(0, longest + 1, n)  # some bags are empty
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate(
        [random.integers(-pool, pool, int(offsets[-1])), np.zeros(0, np.int64)]
    ).astype(np.int64)
    ids[::7] = random.choice(EXTREMES, len(ids[::7]))
    return torch.from_numpy(ids), torch.from_numpy(offsets)


def check_bags(
    dim: int, pooling: str, ids: Tensor, offsets: Tensor, weights: Tensor | None, **tol: float
) -> None:
    table = hb.Table("user", dim=dim, rule=hb.Sgd(lr=0.5), init=hb.Normal(1.0))
    bag, twin = hb.EmbeddingBag(table, pooling=pooling), Twin(table, ids)
    out = bag(ids, offsets, weights)
    expected = twin.bag(ids, offsets, pooling, weights)
    torch.testing.assert_close(out.detach(), expected.detach(), **tol)
    assert out.shape == (len(offsets) - 1, dim)
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    hb.SparseOptimizer(bag).step()
    twin.check_step(0.5, **tol)


@pytest.mark.parametrize("dim", [1, 16, 21, 1000])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_pooling_equals_torch(pooling: str, dim: int) -> None:
    ids, offsets = jagged(np.random.default_rng(0), 40, 6, 30)
    check_bags(dim, pooling, ids, offsets, None, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 16, 1000])
def test_weighted_sums_equal_torch(dim: int) -> None:
    ids, offsets = jagged(np.random.default_rng(1), 40, 6, 30)
    check_bags(dim, "sum", ids, offsets, torch.randn(len(ids)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("lengths", [[0], [1], [5], [0, 0, 0], []], ids=str)
def test_tiny_batches_equal_torch(lengths: list[int], pooling: str) -> None:
    offsets = tensor([0, *np.cumsum(lengths).tolist()])
    check_bags(4, pooling, tensor((EXTREMES * 2)[: sum(lengths)]), offsets, None)


@pytest.mark.parametrize(
    "pooling",
    [
        "sum",
        pytest.param("mean", marks=pytest.mark.soak),
        pytest.param("max", marks=pytest.mark.soak),
    ],
)
def test_a_bag_of_a_million_ids_equals_torch(pooling: str) -> None:
    random = np.random.default_rng(2)
    ids = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, 1_000_000))
    check_bags(
        2,
        pooling,
        ids,
        tensor([0, 3, 1_000_000]),
        None,
        rtol=1e-3,
        atol=2e-2 if pooling == "sum" else 1e-5,
    )


def test_a_bag_that_holds_one_id_a_million_times_sums_it() -> None:
    table = hb.Table("user", dim=1, rule=hb.Sgd(lr=1.0), init=hb.Constant(0.5))
    bag = hb.EmbeddingBag(table)
    out = bag(torch.full((1_000_000,), 7), tensor([0, 1_000_000]))
    assert out.item() == 500_000
    out.backward(torch.ones_like(out))
    hb.SparseOptimizer(bag).step()
    assert table.lookup([7]).item() == 0.5 - 1_000_000


def test_an_id_twice_in_a_bag_counts_twice() -> None:
    ids, offsets = tensor([3, 3, 3, 4, 3]), tensor([0, 3, 5])
    for pooling in ("sum", "mean", "max"):
        check_bags(3, pooling, ids, offsets, None)


def test_two_dimensional_ids_are_bags_of_one_length() -> None:
    table = hb.Table("user", dim=3)
    bag, ids = hb.EmbeddingBag(table).eval(), torch.arange(12).view(4, 3)
    assert torch.equal(bag(ids), bag(ids.reshape(-1), torch.arange(0, 13, 3)))
    assert bag(torch.zeros((0, 3), dtype=torch.int64)).shape == (0, 3)
    assert torch.equal(bag(torch.zeros((2, 0), dtype=torch.int64)), torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 0), (0,), ()], ids=str)
def test_embedding_equals_torch(shape: tuple[int, ...]) -> None:
    table = hb.Table("user", dim=5, rule=hb.Sgd(lr=0.5))
    embedding = hb.Embedding(table)
    ids = torch.from_numpy(np.random.default_rng(3).choice(EXTREMES, shape)).reshape(shape)
    twin = Twin(table, ids.reshape(-1))
    out, expected = (
        embedding(ids),
        nn.functional.embedding(twin.indices(ids.reshape(-1)).view(shape), twin.rows),
    )
    assert torch.equal(out, expected)
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    hb.SparseOptimizer(embedding).step()
    twin.check_step(0.5)


def test_a_sequence_lookup_gives_the_rows_of_all_ids() -> None:
    table = hb.Table("user", dim=5)
    ids = hb.Ids(tensor([5, 6, 5]), tensor([0, 2, 2, 3]))
    rows = hb.Embedding(table).eval()(ids)
    assert torch.equal(rows, torch.from_numpy(table.lookup([5, 6, 5])))


def features(names: dict[str, tuple[str, str]]) -> list[Feature]:
    return [Feature(name, table, pooling) for name, (table, pooling) in names.items()]


def test_features_that_share_a_table_sum_their_gradients_once_an_id() -> None:
    """With Adagrad, one step of the sum differs from a step a feature."""
    table = hb.Table("genre", dim=4, rule=hb.Adagrad(lr=0.5))
    shared = {
        "watched": ("genre", "mean"),
        "liked": ("genre", "max"),
        "first": ("genre", "sum"),
        "all": ("genre", "none"),
    }
    collection = hb.EmbeddingCollection(features(shared), {"genre": table})
    random = np.random.default_rng(4)
    batch = {name: hb.Ids(*jagged(random, 9, 4, 5)) for name in shared}
    everything = torch.cat([ids.values for ids in batch.values()])
    twin = Twin(table, everything)
    out = collection(batch)
    expected = {
        name: twin.rows[twin.indices(batch[name].values)]
        if pooling == "none"
        else twin.bag(batch[name].values, batch[name].offsets, pooling)
        for name, (_, pooling) in shared.items()
    }
    for name in shared:
        torch.testing.assert_close(out[name], expected[name])
    sum((out[name] ** 2).sum() * (k + 1) for k, name in enumerate(shared)).backward()
    sum((expected[name] ** 2).sum() * (k + 1) for k, name in enumerate(shared)).backward()
    hb.SparseOptimizer(collection).step()
    torch.optim.Adagrad([twin.rows], lr=0.5).step()
    torch.testing.assert_close(torch.from_numpy(table.lookup(twin.ids)), twin.rows.detach())
    assert table.step == 1


@pytest.mark.parametrize("num_tables", [2, 7])
def test_tables_of_a_group_that_hold_the_same_ids_stay_apart(num_tables: int) -> None:
    """Every table, on the very same extreme ids, goes exactly as it goes alone."""

    def make(t: int, dim: int) -> hb.Table:
        return hb.Table(f"table{t}", dim=dim, rule=hb.Adam(lr=0.1))

    dims = [3 if t % 3 else 8 for t in range(num_tables)]
    tables = {f"table{t}": make(t, dim) for t, dim in enumerate(dims)}
    names = {f"feature{t}": (f"table{t}", "sum") for t in range(num_tables)}
    collection = hb.EmbeddingCollection(features(names), tables)
    alone = [hb.EmbeddingBag(make(t, dim)) for t, dim in enumerate(dims)]
    ids = hb.Ids(tensor([*EXTREMES, -1, 5]), tensor([0, 2, 2, 5, 7]))
    optimizers = [hb.SparseOptimizer(module) for module in (collection, *alone)]
    for step in range(5):
        out = collection.flat(dict.fromkeys(names, ids))
        single = torch.cat([bag(ids) for bag in alone], dim=1)
        assert torch.equal(out, single)
        grad = torch.randn(out.shape) * (step + 1)
        out.backward(grad)
        single.backward(grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for bag in alone:
        (table,) = bag.tables
        assert list(tables[table.name].export()) == list(table.export())
        assert len(table) == 6


def test_a_collection_gives_names_and_one_flat_buffer_in_the_order_of_the_schema() -> None:
    tables = {name: hb.Table(name, dim=dim) for name, dim in {"a": 2, "b": 3}.items()}
    names = {"one": ("b", "sum"), "two": ("a", "none"), "three": ("a", "mean")}
    collection = hb.EmbeddingCollection(features(names), tables).eval()
    batch = {name: hb.Ids(tensor([1, 2, 3]), tensor([0, 1, 3])) for name in names}
    out = collection(batch)
    assert {name: tuple(rows.shape) for name, rows in out.items()} == {
        "one": (2, 3),
        "two": (3, 2),
        "three": (2, 2),
    }
    assert torch.equal(collection.flat(batch), torch.cat([out["one"], out["three"]], dim=1))
    assert collection.output_dim == 5


def test_evaluation_inserts_counts_and_touches_nothing() -> None:
    table = hb.Table("user", dim=2, admit=hb.MinCount(2), evict=hb.Lru(2048))
    bag = hb.EmbeddingBag(table)
    bag.eval()
    for _ in range(3):
        assert not bag(tensor([[1, 2]])).any()
    assert len(table) == 0
    bag.train()
    bag(tensor([[1, 2]]))
    assert len(table) == 0
    assert next(iter(table.candidates()))["count"].to_pylist() == [1]


def test_refused_ids_read_the_default_and_get_no_gradient() -> None:
    table = hb.Table(
        "user", dim=2, admit=hb.MinCount(2), default=0.5, rule=hb.Sgd(lr=1.0), init=hb.Zeros()
    )
    bag = hb.EmbeddingBag(table)
    out = bag(tensor([[1, 2, 2]]))
    assert torch.equal(out, torch.full((1, 2), 0.5))
    out.sum().backward()
    hb.SparseOptimizer(bag).step()
    assert table.lookup([1, 2]).tolist() == [[0.5, 0.5], [-2.0, -2.0]]


def test_micro_batches_are_summed_before_one_step_of_the_rule() -> None:
    whole, parts = (
        hb.EmbeddingBag(hb.Table("user", dim=3, rule=hb.Adagrad(lr=0.5))) for _ in range(2)
    )
    ids, offsets = jagged(np.random.default_rng(6), 12, 4, 9)
    (whole(ids, offsets) ** 2).sum().backward()
    for start in range(0, 12, 4):
        part = hb.Ids(ids, offsets)[start : start + 4]
        (parts(part) ** 2).sum().backward()
    for bag in (whole, parts):
        hb.SparseOptimizer(bag).step()
    rows: list[Any] = [
        torch.from_numpy(bag.tables[0].lookup(np.unique(ids.numpy()))) for bag in (whole, parts)
    ]
    torch.testing.assert_close(*rows)
    assert parts.tables[0].step == 1
