# SPDX-License-Identifier: Apache-2.0
"""Buckets pad the results and gradients of lookups to few shapes, and change no value."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch absent")

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError, RowShapeError

RULE = hb.Adam(lr=0.1)


def collection(buckets: tuple[int, ...] = ()) -> hb.EmbeddingCollection:
    tables = [hb.Table("user", dim=3, rule=RULE), hb.Table("item", dim=3, rule=RULE)]
    features = [Feature("user", "user"), Feature("history", "item", "none")]
    return hb.EmbeddingCollection(features, tables, buckets)


def batch_of(lengths: list[int]) -> dict[str, hb.Ids]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = torch.arange(offsets[-1]) * 7 % 11
    return {
        "user": hb.Ids(torch.arange(len(lengths))),
        "history": hb.Ids(values, torch.from_numpy(offsets)),
    }


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4))
def test_values_are_the_same_bits_and_shapes_those_of_the_buckets(batches: list[list[int]]) -> None:
    plain, padded = collection(), collection((32, 8))
    for module in (plain, padded):
        optimizer = hb.SparseOptimizer(module)
        for number, lengths in enumerate(batches):
            flat, sequences = module.flat_and_sequences(batch_of(lengths))
            ((flat**2).sum() + (sequences["history"] ** 2).sum()).backward()
            if module is padded:
                num_ids = sum(lengths)
                assert len(sequences["history"]) == (8 if num_ids <= 8 else 32)
                assert not sequences["history"][num_ids:].any()
            if number % 2:  # of two micro-batches
                if module is padded:
                    (rows,) = module.rows
                    assert len(rows.grad) in (8, 32)
                torch.nn.utils.clip_grad_value_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    for own, other in zip(plain.tables, padded.tables, strict=True):
        assert list(own.export()) == list(other.export())


def test_rows_beyond_the_largest_bucket_are_rejected_by_table_and_size() -> None:
    module = collection((4, 8))
    with pytest.raises(
        RowShapeError, match=r"table 'item': ids of feature 'history'.*\[4, 8\].* 9"
    ):
        module.flat_and_sequences(batch_of([9]))
    assert [len(table) for table in module.tables] == [0, 0]
    flat = module.flat(batch_of([1] * 8))
    with pytest.raises(RowShapeError, match=r"table 'user', 'item': distinct ids.* 16\. Give"):
        flat.sum().backward()
    bag = hb.EmbeddingBag(hb.Table("tag", dim=2), buckets=(2,))
    with pytest.raises(RowShapeError, match=r"table 'tag': distinct ids.* 3\. Give a bucket of at"):
        bag(torch.tensor([[1, 2, 3]])).sum().backward()


def test_buckets_that_are_not_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"embedding \['tag'\]: buckets"):
        hb.Embedding(hb.Table("tag", dim=2), buckets=(0,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_behind_a_padded_lookup_see_few_shapes() -> None:
    shapes: set[tuple[int, ...]] = set()

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.update(tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor))
        return graph.forward

    module = collection((8, 32))
    layer = torch.nn.Linear(3, 2)

    def network(batch: dict[str, hb.Ids]) -> torch.Tensor:
        _, sequences = module.flat_and_sequences(batch)
        return layer(sequences["history"])

    compiled = torch.compile(network, backend=record, dynamic=False)
    for length in (1, 5, 8, 20, 31, 6):
        compiled(batch_of([length]))
    assert {shape for shape in shapes if shape[-1] == 3 and shape != (2, 3)} == {(8, 3), (32, 3)}


def test_converted_embeddings_take_buckets_by_path() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.EmbeddingBag(20, 3, mode="sum")

    plain, padded = model(), model()
    padded.load_state_dict(plain.state_dict())
    plain, plain_optimizer, _ = hb.auto(plain, torch.optim.Adam(plain.parameters()))
    optimizer = torch.optim.Adam(padded.parameters())
    padded, optimizer, _ = hb.auto(padded, optimizer, tables={"": {"buckets": (4, 8)}})
    for ids in ([[1, 2]], [[1, 2, 3, 4, 5]]):
        for own, stepped in ((plain, plain_optimizer), (padded, optimizer)):
            stepped.zero_grad()
            own(torch.tensor(ids)).square().sum().backward()
            stepped.step()
        (rows,) = padded.parameters()
        assert len(rows.grad) == (4 if len(ids[0]) == 2 else 8)
    (own,), (other,) = plain.tables, padded.tables
    assert list(own.export()) == list(other.export())
    untouched = model()
    with pytest.raises(ConfigError, match=r"embedding: .*buckets.*-1"):
        hb.auto(untouched, torch.optim.Adam(untouched.parameters()), {"": {"buckets": (-1,)}})
