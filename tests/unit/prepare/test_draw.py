# SPDX-License-Identifier: Apache-2.0
"""Items that a row may have are drawn exactly as their weights say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.embedding.hashing import mix64
from hotbed.prepare.sampling.draw import TOTAL, Drawable, KnownItems, Weights, draw

pytestmark = pytest.mark.core

Pairs = list[tuple[int, int]]


def all_but(weights: Weights, users: np.ndarray, items: np.ndarray) -> Drawable:
    """Return for users 0, 1, ... all items but those of their pairs."""
    num_users = int(users.max()) + 1
    rows = np.arange(num_users)
    known = KnownItems.of(users, items, num_users)
    last = np.full(num_users, len(weights.ends) - 1)
    return Drawable(weights, known, rows, 0 * rows, last, rows >= 0)


@settings(deadline=None, max_examples=200)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=30),
)
def test_each_place_of_the_unknown_weights_gives_the_item_there(
    counts: list[int], pairs: Pairs
) -> None:
    pairs = [(user, item % len(counts)) for user, item in pairs]
    users, items = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    weights = Weights(np.concatenate([[0], np.cumsum(counts)]))
    candidates = all_but(weights, users, items)
    for user in set(users.tolist()):
        line = []  # each unknown item as often as its weight
        for item, count in enumerate(counts):
            line += [] if (user, item) in pairs else [item] * count
        places = np.tile(np.arange(max(len(line), 1), dtype=np.uint64), (user + 1, 1))
        assert draw([candidates], np.array([user]), places).tolist() == [line or [-1]]


def test_groups_that_are_not_there_know_nothing() -> None:
    known = KnownItems.of(np.array([2, 2]), np.array([1, 1]), 4)
    assert known.items.tolist() == [1]
    assert known.starts.tolist() == [0, 0, 0, 1, 1]


def test_popularity_weights_follow_the_power_of_the_counts() -> None:
    counts = np.array([0, 1, 16, 10_000, 0])
    weights = Weights.of(counts, 0.75)
    shares = weights[np.arange(5)] / TOTAL
    powers = counts**0.75
    np.testing.assert_allclose(shares, powers / powers.sum(), atol=1e-11)
    assert weights.ends[-1] <= TOTAL


def test_equal_weights_are_ones() -> None:
    assert Weights.of(np.array([3, 0, 7, 1]), 0)[np.arange(4)].tolist() == [1, 0, 1, 1]


def test_an_item_is_drawn_however_rare_it_is() -> None:
    weights = Weights.of(np.array([1, 10**15]), 1.0)
    assert weights[np.array([0])].tolist() == [1]


@pytest.mark.parametrize("power", [0.0, 0.75])
def test_frequencies_are_those_of_the_weights(power: float) -> None:
    counts = np.array([5, 0, 50, 500, 1, 20])
    users = np.arange(4000)
    known = np.tile([3, 4], len(users))
    candidates = all_but(Weights.of(counts, power), np.repeat(users, 2), known)
    drawn = draw([candidates], users, mix64(np.arange(400_000)).reshape(len(users), 100))
    shares = np.bincount(drawn.ravel(), minlength=6) / drawn.size
    expected = np.where(np.isin(np.arange(6), [1, 3, 4]), 0, counts.astype(float) ** power)
    # five standard deviations of a share of 400,000 draws are at most 0.004
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.004)
