# SPDX-License-Identifier: Apache-2.0
"""The bits of steps by grains: neither threads, nor the order in which grains are computed, nor how
many ranks compute them changes one.

One network has a table for each rule and admission, so that any two of rule, admission, eviction
and format meet in a table. Two features share each of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.lookups import Feature, LocalLookup
from hotbed.embedding.native import num_threads
from hotbed.models.layers import BatchNorm
from hotbed.parallel import dense
from hotbed.persist import content_digest
from hotbed.training.callbacks import ClipGradients
from hotbed.training.step.grains import Grains

GRAINS = 8
STEPS = 10
DIM = 2
RULES = [
    hb.Momentum(lr=0.1),
    hb.Adagrad(lr=0.1),
    hb.RowwiseAdagrad(lr=0.1),
    hb.Adam(lr=0.1),
    hb.Adam(lr=0.1, scope="all"),
    hb.Ftrl(lr=0.1),
]
ADMISSIONS: dict[str, Any] = {
    "all": None,
    "sketch": hb.MinCount(2, sketch_bytes=1 << 16),
    "halving": hb.MinCount(3, max_candidates=512),
    "probability": hb.Probability(0.5),
}
EVICTIONS: dict[str, Any] = {
    "none": None,
    "Ttl": hb.Ttl(seconds=3),
    "Lru": hb.Lru(2048),
    "Lfu": hb.Lfu(2048, half_life_seconds=3),
}
DTYPES = ["float32", "bfloat16"]


def tables() -> list[hb.Table]:
    every = []
    for i, rule in enumerate(RULES):
        for j, (admission, admit) in enumerate(ADMISSIONS.items()):
            eviction = list(EVICTIONS)[(i + j) % len(EVICTIONS)]
            dtype = DTYPES[(i + j // 2) % len(DTYPES)]
            name = f"{i} {type(rule).__name__}, {admission}, {eviction}, {dtype}"
            policies: dict[str, Any] = {"admit": admit, "evict": EVICTIONS[eviction]}
            every.append(hb.Table(name, DIM, rule=rule, dtype=dtype, **policies))
    return every


class Network(nn.Module):
    """A single id and a bag of each table, batch norm and dropout."""

    looks_up_once = True

    def __init__(self) -> None:
        super().__init__()
        every = tables()
        features = [
            Feature(f"{kind} of {table.name}", table.name)
            for kind in ("id", "bag")
            for table in every
        ]
        self.tables = hb.EmbeddingCollection(features, every)
        width = DIM * len(features)
        hidden = [nn.Linear(width, 16), BatchNorm(16), nn.ReLU(), nn.Dropout(0.3)]
        self.head = nn.Sequential(*hidden, nn.Linear(16, 1))

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(self.tables.flat(batch)).squeeze(1)
        return scores


def batches(steps: int) -> Iterator[hb.Batch]:
    """Yield batches of uneven grains.

    Two in ten have grains of one sample and of none, one has ids enough that threads share a table.
    """
    draw = np.random.default_rng(7)
    names = [table.name for table in tables()]
    for step in range(steps):
        samples = {3: 5, 6: 12_000, 9: 5}.get(step % 10, int(draw.integers(200, 300)))
        offsets = np.concatenate([[0], draw.integers(0, 5, samples).cumsum()])
        first = 500 * step
        ids = hb.Ids(draw.zipf(1.2, samples) % 1500 + first)
        bag = hb.Ids(draw.integers(0, 1500, offsets[-1]) + first, offsets)
        features = dict.fromkeys([f"id of {name}" for name in names], ids)
        features |= dict.fromkeys([f"bag of {name}" for name in names], bag)
        labels = draw.integers(0, 2, samples).astype(np.float32)
        time = step * 1_000_000 + np.arange(samples)
        yield hb.Batch(features, {}, {"y": labels}, time=time)


@dataclass(frozen=True)
class Learned:
    """The digest of each table, the bits of all else that was learned or measured, and counts."""

    tables: dict[str, str]
    network: dict[str, bytes]
    metrics: dict[str, float]
    stats: dict[str, dict[str, int]]


def learn(steps: int = STEPS) -> Learned:
    torch.manual_seed(5)
    network = Network()
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=GRAINS)
    callbacks = [hb.callbacks.Evict(step_interval=3), ClipGradients(0.05)]
    history = model.fit(list(batches(steps)), callbacks=callbacks, progress=False)
    values = dict(network.head.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"{name} of {number}": value for name, value in state.items()}
    values["random"] = torch.get_rng_state()
    values["predictions"] = torch.as_tensor(model.predict(list(batches(2))))
    return Learned(
        tables={name: content_digest({name: table}) for name, table in model.tables.items()},
        network={name: value.numpy().tobytes() for name, value in values.items()},
        metrics={"loss": history.epochs[0]["loss"], **model.evaluate(list(batches(2)))},
        stats={
            name: {count: table.stats[count] for count in ("admitted", "refused", "evicted")}
            for name, table in model.tables.items()
        },
    )


@functools.cache
def plain() -> Learned:
    return learn()


def test_policies_meet_in_pairs_and_take_effect() -> None:
    choices = {name: name.split(", ") for name in plain().tables}
    for one, other in itertools.combinations(range(4), 2):
        pairs = {(choice[one], choice[other]) for choice in choices.values()}
        values = [{choice[number] for choice in choices.values()} for number in (one, other)]
        assert len(pairs) == len(values[0]) * len(values[1])
    for name, (_, admission, eviction, _) in choices.items():
        stats = plain().stats[name]
        assert (stats["refused"] > 0) == (admission != "all"), name
        assert (stats["evicted"] > 0) == (eviction != "none"), name


@pytest.fixture
def core_threads() -> Iterator[Callable[[int], None]]:
    before = num_threads()
    yield hb.set_num_threads
    hb.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_threads_of_the_core_change_no_bit(threads: int, core_threads: Any) -> None:
    expected = plain()
    core_threads(threads)
    assert learn() == expected


@pytest.mark.soak
def test_threads_of_the_core_change_no_bit_over_300_steps(core_threads: Any) -> None:
    core_threads(1)
    expected = learn(300)
    core_threads(2)
    assert learn(300) == expected
    assert learn(300) == expected


# --- a scheduler of grains: any order, any number of ranks ----------------------------------------

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


def by_pairs(lookup: LocalLookup, parts: Sequence[Any]) -> Any:
    """Join sums by halves, two at a time, each with the ids that it has itself."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    halves = [by_pairs(lookup, parts[:middle]), by_pairs(lookup, parts[middle:])]
    present = [half for half in halves if half is not None]
    return lookup.join(present) if present else None


class AnyOrder(Grains):
    """Computes the grains of a step in a random order, after others have drawn numbers."""

    order = random.Random(11)

    def _run(self, every: Sequence[Any], seed: int, num_samples: int) -> Any:
        results = [None] * len(every)
        for number in self.order.sample(range(len(every)), len(every)):
            torch.rand(number + 1)
            if every[number] is not None:
                torch.default_generator.manual_seed(seed + number)
                results[number] = self._run_one(every[number], num_samples)()
        return results


@pytest.mark.parametrize(
    "ranks", [3, *[pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 2, 4, 8)]]
)
def test_grains_may_be_computed_in_any_order_and_by_any_number_of_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain()
    join_values = dense.joined

    def join_grains(self: LocalLookup, asked: Any, parts: Sequence[Any]) -> Any:
        def join(of_module: Sequence[Any]) -> Any:
            return joined_in_ranks(of_module, lambda of_block: by_pairs(self, of_block), ranks)

        return lambda: list(map(join, parts))

    monkeypatch.setattr("hotbed.training.step.learner.Grains", AnyOrder)
    monkeypatch.setattr(dense, "joined", lambda values: joined_in_ranks(values, join_values, ranks))
    monkeypatch.setattr(LocalLookup, "join_grains", join_grains)
    assert learn() == expected


# --- negative controls ----------------------------------------------------------------------------


def test_a_flat_sum_of_row_gradients_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()

    def flat(self: LocalLookup, asked: Any, parts: Sequence[Any]) -> Any:
        return lambda: [
            self.join([part for part in of_module if part is not None]) for of_module in parts
        ]

    monkeypatch.setattr(LocalLookup, "join_grains", flat)
    assert learn().tables != expected.tables


@pytest.mark.soak  # a sum by all_reduce in test_rank_models.py is one, too
def test_a_flat_sum_of_dense_gradients_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(values: Sequence[Tensor | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        return functools.reduce(operator.add, present) if present else None

    expected = plain()
    monkeypatch.setattr(dense, "joined", flat)
    assert learn().network != expected.network


@pytest.mark.soak  # test_rank_models.py counts ids feature by feature on three ranks
@pytest.mark.parametrize("by_grains", [True, False], ids=["grains", "features"])
def test_ids_that_are_counted_feature_by_feature_are_other_rows(
    by_grains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second map, which changes no table, gives the plan of the step; the first one counts."""
    expected = plain()
    ask = LocalLookup.ask

    def counted_first(self: Any, wanted: Any) -> Any:
        ask(self, wanted if by_grains else replace(wanted, grain_ends=()))
        return ask(self, replace(wanted, training=False))

    monkeypatch.setattr(LocalLookup, "ask", counted_first)
    stats = learn().stats
    others = {name for name in stats if stats[name] != expected.stats[name]}
    if by_grains:
        assert not others
    else:
        assert {name.split(", ")[1] for name in others} >= {"sketch", "halving"}
