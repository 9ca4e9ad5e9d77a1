# SPDX-License-Identifier: Apache-2.0
"""Samples with a planted signal: the probability that each label was drawn from is known.

The AUC of these probabilities, the oracle's AUC, is the best that any model can reach. Each
generator plants its signal where one kind of network must find it. Effects of ids are centered:
a column alone tells nothing where the docstring says that the signal lies in products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import hotbed as hb

Array = np.ndarray[Any, Any]
TRAINED_SHARE = 0.8
FIELDS = ("user", "item", "category", "brand", "site", "device")
NUMBERS = ("price", "age", "visits")
HISTORY = 8
NUM_ITEMS = 60
NUM_CATEGORIES = 10


@dataclass(frozen=True)
class Planted:
    """Samples in raw columns, and the probability of each label."""

    schema: hb.Schema
    columns: Mapping[str, Any]
    chances: Mapping[str, Array]

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(next(iter(self.chances.values())))

    @property
    def trained(self) -> hb.sources.Source:
        """The samples to train on."""
        return hb.sources.Memory(self.columns).slice(0.0, TRAINED_SHARE)

    @property
    def held_out(self) -> hb.sources.Source:
        """The samples to measure on."""
        return hb.sources.Memory(self.columns).slice(TRAINED_SHARE, 1.0)

    def auc(self, label: str, scores: Array) -> float:
        """Return the AUC of `scores` of the held-out samples."""
        auc = hb.metrics.AUC()
        auc.update(scores, self.columns[label][-len(scores) :])
        return float(auc.eval())

    def share(self, label: str, scores: Array) -> float:
        """Return (AUC - 0.5) / (the oracle's AUC - 0.5) over the held-out samples."""
        oracle = self.auc(label, self.chances[label][-len(scores) :])
        return (self.auc(label, scores) - 0.5) / (oracle - 0.5)

    def with_histories_of_others(self) -> Planted:
        """Return the samples, each with the history of another one."""
        order = np.random.default_rng(0).permutation(self.num_samples)
        return self._with_histories(lambda rows: [rows[place] for place in order])

    def with_histories_in_random_order(self) -> Planted:
        """Return the samples, each with its own history in a random order."""
        draw = np.random.default_rng(0)
        orders = [draw.permutation(len(row)) for row in self.columns["items"]]

        def in_order(rows: list[list[int]]) -> list[list[int]]:
            pairs = zip(rows, orders, strict=True)
            return [[row[place] for place in order] for row, order in pairs]

        return self._with_histories(in_order)

    def _with_histories(self, change: Callable[[list[list[int]]], list[list[int]]]) -> Planted:
        histories = {name: change(self.columns[name]) for name in ("items", "categories")}
        return replace(self, columns={**self.columns, **histories})


def dcn(num_samples: int, seed: int) -> Planted:
    """Plant the product of two sums, each over half of the columns."""
    draw = np.random.default_rng(seed)
    ids = _ids(draw, num_samples, FIELDS, 20)
    numbers = _numbers(draw, num_samples)
    own = _effects(draw, ids, 20)
    left = own[:, 0::2].sum(axis=1) + numbers[:, 0]
    right = own[:, 1::2].sum(axis=1) + numbers[:, 1] - numbers[:, 2]
    return _clicked(draw, ids, numbers, 0.75 * left * right)


def deepfm(num_samples: int, seed: int) -> Planted:
    """Plant the inner products of all pairs of columns, and a small effect of each id."""
    draw = np.random.default_rng(seed)
    ids = _ids(draw, num_samples, FIELDS, 20)
    numbers = _numbers(draw, num_samples)
    factors = np.concatenate(
        [_factors(draw, ids, 20, 4), numbers[:, :, None] * draw.normal(size=(len(NUMBERS), 4))],
        axis=1,
    )
    pairs = factors.sum(axis=1) ** 2 - (factors**2).sum(axis=1)
    own = _effects(draw, ids, 20).sum(axis=1)
    return _clicked(draw, ids, numbers, 0.15 * pairs.sum(axis=1) + 0.2 * own)


def dlrm(num_samples: int, seed: int) -> Planted:
    """Plant inner products of pairs of fields, and of a field with a map of the numbers."""
    draw = np.random.default_rng(seed)
    ids = _ids(draw, num_samples, FIELDS, 20)
    numbers = _numbers(draw, num_samples)
    factors = _factors(draw, ids, 20, 3)
    mapped = numbers @ draw.normal(size=(len(NUMBERS), 3)) / 2
    pairs = factors[:, 0] * factors[:, 1] + factors[:, 2] * factors[:, 3] + factors[:, 4] * mapped
    return _clicked(draw, ids, numbers, pairs.sum(axis=1))


def wide_deep(num_samples: int, seed: int) -> Planted:
    """Plant an effect of each of 400 pairs, to be memorized, and waves over two numbers."""
    draw = np.random.default_rng(seed)
    ids = _ids(draw, num_samples, FIELDS, 20)
    numbers = _numbers(draw, num_samples)
    memorized = _centered(draw, 400)[ids[:, 0] * 20 + ids[:, 1]]
    own = _effects(draw, ids, 20)
    smooth = np.sin(2 * numbers[:, 0]) * own[:, 2] + np.abs(numbers[:, 1])
    samples = _clicked(draw, ids, numbers, 1.5 * memorized + 1.5 * smooth - 1.0)
    cross = hb.transforms.Cross(["item"])
    pair = hb.Id("user_item", column="user", transforms=[cross])
    return replace(samples, schema=hb.Schema([*samples.schema.columns, pair]))


def ncf(num_samples: int, seed: int) -> Planted:
    """Plant the inner product of a user and an item, beside an effect of each item."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, 200, num_samples), draw.integers(0, 100, num_samples)
    products = _centered(draw, 200, 4)[user] * _centered(draw, 100, 4)[item]
    logits = products.sum(axis=1) + 0.5 * _centered(draw, 100)[item]
    schema = hb.Schema([hb.Label("liked"), hb.Id("user"), hb.Id("item")])
    return _drawn(draw, schema, {"user": user, "item": item}, {"liked": logits})


def mmoe(num_samples: int, seed: int) -> Planted:
    """Plant a product that two labels share, and a product and an effect that each has alone."""
    draw = np.random.default_rng(seed)
    ids = _ids(draw, num_samples, FIELDS, 20)
    own = _effects(draw, ids, 20)
    shared = own[:, 0] * own[:, 1]
    logits = {
        "clicked": 1.5 * (shared + own[:, 2] * own[:, 3]) + 0.75 * own[:, 4],
        "bought": 1.5 * (shared - own[:, 4] * own[:, 5]) + 0.75 * own[:, 2],
    }
    columns = _columns(ids)
    labels = [hb.Label(name) for name in logits]
    schema = hb.Schema([*labels, *(hb.Id(name) for name in columns)])
    return _drawn(draw, schema, columns, logits)


def din(num_samples: int, seed: int) -> Planted:
    """Plant whether the category of the item occurs in the history."""
    draw = np.random.default_rng(seed)
    items = draw.integers(0, NUM_ITEMS, (num_samples, HISTORY))
    target = draw.integers(0, NUM_ITEMS, num_samples)
    lengths = draw.integers(3, HISTORY + 1, num_samples)
    # All items of a history are of other categories; then every second one gets one of the same.
    shifts = draw.integers(1, NUM_CATEGORIES, items.shape)
    items = items - items % NUM_CATEGORIES + (target[:, None] + shifts) % NUM_CATEGORIES
    same = draw.integers(0, NUM_ITEMS, num_samples)
    same = same - same % NUM_CATEGORIES + target % NUM_CATEGORIES
    occurs = draw.random(num_samples) < 0.5
    rows = np.flatnonzero(occurs)
    places = draw.integers(0, lengths)
    items[rows, places[rows]] = same[rows]
    logits = np.where(occurs, 2.0, -2.0)
    return _after(draw, target, items, lengths, logits)


def bst(num_samples: int, seed: int) -> Planted:
    """Plant the trend of the history: the values of its late items less those of its early ones."""
    draw = np.random.default_rng(seed)
    value = _centered(draw, NUM_ITEMS)
    target = draw.integers(0, NUM_ITEMS, num_samples)
    items = draw.integers(0, NUM_ITEMS, (num_samples, HISTORY))
    late = value[items[:, HISTORY // 2 :]].mean(axis=1)
    early = value[items[:, : HISTORY // 2]].mean(axis=1)
    lengths = np.full(num_samples, HISTORY)
    return _after(draw, target, items, lengths, 3.0 * (late - early))


GENERATORS: Mapping[str, Callable[[int, int], Planted]] = {
    "dcn": dcn,
    "deepfm": deepfm,
    "dlrm": dlrm,
    "wide_deep": wide_deep,
    "ncf": ncf,
    "mmoe": mmoe,
    "din": din,
    "bst": bst,
}


def _centered(draw: np.random.Generator, *shape: int) -> Array:
    """Draw values whose mean over the first axis is 0 and whose deviation is 1."""
    values = draw.normal(size=shape)
    values -= values.mean(axis=0)
    values /= values.std(axis=0)
    return values


def _ids(draw: np.random.Generator, num_samples: int, names: Sequence[str], num_ids: int) -> Array:
    return draw.integers(0, num_ids, (num_samples, len(names)))


def _effects(draw: np.random.Generator, ids: Array, num_ids: int) -> Array:
    """Draw a number for each id of each field; return those of the samples, [n, fields]."""
    return np.take_along_axis(_centered(draw, num_ids, ids.shape[1]), ids, axis=0)


def _factors(draw: np.random.Generator, ids: Array, num_ids: int, dim: int) -> Array:
    """Draw a vector for each id of each field; return those of the samples, [n, fields, dim]."""
    num_fields = ids.shape[1]
    vectors = _centered(draw, num_ids, num_fields, dim)
    chosen: Array = vectors[ids, np.arange(num_fields)]
    return chosen


def _numbers(draw: np.random.Generator, num_samples: int) -> Array:
    return draw.normal(size=(num_samples, len(NUMBERS))).astype(np.float32)


def _columns(ids: Array) -> dict[str, Array]:
    return dict(zip(FIELDS, ids.T, strict=True))


def _clicked(draw: np.random.Generator, ids: Array, numbers: Array, logits: Array) -> Planted:
    """Return samples of an ad log."""
    columns = _columns(ids) | dict(zip(NUMBERS, numbers.T, strict=True))
    fields = [hb.Id(name) for name in FIELDS]
    dense = [hb.Dense(name) for name in NUMBERS]
    schema = hb.Schema([hb.Label("clicked"), *fields, *dense])
    return _drawn(draw, schema, columns, {"clicked": logits})


def _after(
    draw: np.random.Generator, target: Array, items: Array, lengths: Array, logits: Array
) -> Planted:
    """Return samples of an item after a history; the category of an item is a function of it."""
    rows = zip(items.tolist(), lengths.tolist(), strict=True)
    history = [row[:length] for row, length in rows]
    categories = [[item % NUM_CATEGORIES for item in row] for row in history]
    columns = {
        "user": draw.integers(0, 50, len(target)),
        "item": target,
        "category": target % NUM_CATEGORIES,
        "items": history,
        "categories": categories,
    }
    schema = hb.Schema(
        [
            hb.Label("clicked"),
            hb.Id("user"),
            hb.Id("item"),
            hb.Id("category"),
            hb.Id("items", table="item", pooling="none", max_length=HISTORY),
            hb.Id("categories", table="category", pooling="none", max_length=HISTORY),
        ]
    )
    return _drawn(draw, schema, columns, {"clicked": logits})


def _drawn(
    draw: np.random.Generator,
    schema: hb.Schema,
    columns: Mapping[str, Any],
    logits: Mapping[str, Array],
) -> Planted:
    """Draw the labels."""
    chances = {label: 1 / (1 + np.exp(-values)) for label, values in logits.items()}
    labels = {
        label: (draw.random(len(chance)) < chance).astype(np.float32)
        for label, chance in chances.items()
    }
    return Planted(schema, {**columns, **labels}, chances)
