# SPDX-License-Identifier: Apache-2.0
"""The bits of steps by grains: where and in which order grains are computed does not change them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.lookups import Feature, LocalLookup, local
from hotbed.persist import content_digest
from hotbed.training.stages import grains
from hotbed.training.stages.grains import GrainLearner

GRAINS = 8
FEATURES = {"user": "user", "item": "item", "clicked": "item"}  # by feature, its table
SKETCH: dict[str, Any] = {"admit": hb.MinCount(2, sketch_bytes=1 << 16)}
POLICIES: dict[str, dict[str, Any]] = {
    "sketch, Ttl": {**SKETCH, "rule": hb.Adagrad(lr=0.1), "evict": hb.Ttl(seconds=3)},
    "halving, Lru": {
        "admit": hb.MinCount(3, max_candidates=4096),
        "rule": hb.RowwiseAdagrad(lr=0.1),
        "evict": hb.Lru(8192),
    },
    "probability, Lfu, bfloat16": {
        "admit": hb.Probability(0.5),
        "rule": hb.Adam(lr=0.1),
        "evict": hb.Lfu(8192, half_life_seconds=3),
        "dtype": "bfloat16",
    },
    "all rows": {"rule": hb.Adam(lr=0.1, scope="all"), "evict": hb.Lru(8192)},
    "Ftrl": {**SKETCH, "rule": hb.Ftrl(lr=0.1)},
    "momentum, bfloat16": {"rule": hb.Momentum(lr=0.1), "dtype": "bfloat16"},
}


class Network(nn.Module):
    """Two single ids, a bag that shares a table, batch norm and dropout."""

    looks_up_once = True

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        tables = [hb.Table(name, 4, **settings) for name in ("user", "item")]
        self.tables = hb.EmbeddingCollection(
            [Feature(*names) for names in FEATURES.items()], tables
        )
        hidden = [nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)]
        self.head = nn.Sequential(*hidden, nn.Linear(16, 1))

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(self.tables.flat(batch)).squeeze(1)
        return scores


def batches(steps: int) -> Iterator[hb.Batch]:
    draw = np.random.default_rng(7)
    for step in range(steps):
        samples = int(draw.integers(200, 300))  # grains are uneven
        offsets = np.concatenate([[0], draw.integers(0, 20, samples).cumsum()])
        ids = {
            "user": hb.Ids(draw.zipf(1.3, samples)),
            "item": hb.Ids(draw.zipf(1.3, samples)),
            "clicked": hb.Ids(draw.integers(0, 30_000, offsets[-1]), offsets),
        }
        labels = draw.integers(0, 2, samples).astype(np.float32)
        yield hb.Batch(ids, {}, {"y": labels}, time=step * 200_000 + np.arange(samples))


def digest(policies: str, steps: int = 12) -> tuple[str, ...]:
    """Train, and return what tables, network, optimizer and metrics hold."""
    torch.manual_seed(5)
    network = Network(POLICIES[policies])
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=GRAINS)
    history = model.fit(list(batches(steps)), progress=False)
    for table in network.tables.tables:
        table.evict(steps * 200_000)
    dense = [value.numpy().tobytes() for value in network.head.state_dict().values()]
    dense.append(torch.get_rng_state().numpy().tobytes())
    metrics = model.evaluate(list(batches(2)))
    return (
        content_digest(dict(model.tables)),
        repr(dense),
        repr((history.epochs[0]["loss"], metrics)),
    )


Join = Callable[[Sequence[Any]], Any]


def joined_in_ranks(values: Sequence[Any], join: Join, ranks: int) -> Any:
    """Join the values of grains as processes do that compute some each, one after another.

    A process joins the greatest blocks of its grains that are parts of the tree; then these are
    joined.
    """
    blocks: dict[tuple[int, int], Any] = {}
    for rank in range(ranks):
        first, last = (len(values) * number // ranks for number in (rank, rank + 1))
        while first < last:
            size = first & -first or len(values)
            while size > last - first:
                size //= 2
            blocks[first, size] = join(values[first : first + size])
            first += size

    def block(first: int, size: int) -> Any:
        if (first, size) in blocks:
            return blocks[first, size]
        half = size // 2
        return join([block(first, half), block(first + half, half)])

    return block(0, len(values))


def compute_in_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Let steps compute their grains from the last to the first, and join them as `ranks` do."""

    class InRanks(GrainLearner):
        def _run(self, every: Sequence[Any], seed: int) -> Any:
            num_samples = sum(grain.num_samples for grain in every if grain is not None)
            results = [None] * len(every)
            for number in reversed(range(len(every))):
                torch.default_generator.manual_seed(seed + number)
                results[number] = self._run_one(every[number], num_samples)
            return results

    join_values, join_sums = grains.joined, LocalLookup.join
    monkeypatch.setattr("hotbed.training.model.GrainLearner", InRanks)
    monkeypatch.setattr(
        grains, "joined", lambda values: joined_in_ranks(values, join_values, ranks)
    )
    monkeypatch.setattr(
        LocalLookup,
        "join",
        lambda self, sums: joined_in_ranks(sums, lambda part: join_sums(self, part), ranks),
    )


@functools.cache
def plain(policies: str) -> tuple[str, ...]:
    return digest(policies)


@pytest.mark.parametrize("policies", POLICIES)
def test_threads_of_the_core_change_no_bit(policies: str) -> None:
    hb.set_num_threads(1)
    try:
        assert digest(policies) == plain(policies)
    finally:
        hb.set_num_threads(2)
    assert digest(policies) == plain(policies)


@pytest.mark.soak
@pytest.mark.parametrize("policies", POLICIES)
def test_threads_of_the_core_change_no_bit_over_300_steps(policies: str) -> None:
    hb.set_num_threads(1)
    try:
        one = digest(policies, 300)
    finally:
        hb.set_num_threads(2)
    assert one == digest(policies, 300) == digest(policies, 300)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_grains_may_be_computed_in_any_order_and_by_any_number_of_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain("sketch, Ttl")
    compute_in_ranks(monkeypatch, ranks)
    assert digest("sketch, Ttl") == expected


def test_a_flat_sum_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain("sketch, Ttl")
    merged = local._merged
    monkeypatch.setattr(local, "_merged", lambda parts, order: merged(parts, "flat"))
    of_rows = digest("sketch, Ttl")
    monkeypatch.undo()
    monkeypatch.setattr(grains, "joined", lambda values: functools.reduce(operator.add, values))
    of_network = digest("sketch, Ttl")
    assert of_rows[0] != expected[0]
    assert of_network[1] != expected[1]


def test_ids_in_the_order_of_features_are_other_rows() -> None:
    """Features share a table, and the ids that wait are counted in a sketch."""

    def ids(ends: bool) -> list[list[int]]:
        tables = Network(POLICIES["sketch, Ttl"]).tables
        for batch in batches(12):
            samples = len(batch)
            each = [samples * grain // GRAINS for grain in range(1, GRAINS + 1)]
            inputs = tables.inputs_of(batch.map_arrays(torch.as_tensor))
            grain_ends = tuple(each) if ends else ()
            tables.map(inputs, batch.time, training=True, grain_ends=grain_ends)
        return [
            [id for rows in table.export() for id in rows["id"].to_pylist()]
            for table in tables.tables
        ]

    assert ids(ends=True) == ids(ends=True)
    assert ids(ends=True) != ids(ends=False)
