# SPDX-License-Identifier: Apache-2.0
"""Which rows a cache keeps: as good a choice as an exact LRU, a better one by use, fair to tables
of all widths.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

import hotbed as hb
from hotbed.serving.cache import POLICIES, Policy

from .test_cache import FEATURES, look, one_table, store_of


def power_law(n: int, draws: int, seed: int, exponent: float = 1.05) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / np.arange(1, n + 1) ** exponent)
    return rng.permutation(n)[np.searchsorted(weights / weights[-1], rng.random(draws))].astype(
        np.int64
    )


def lru_rate(trace: NDArray[np.int64], rows: int) -> float:
    """Of an exact LRU."""
    held, hits = OrderedDict[int, None](), 0
    for one in trace.tolist():
        if one in held:
            hits += 1
            held.move_to_end(one)
        else:
            held[one] = None
            if len(held) > rows:
                held.popitem(last=False)
    return hits / len(trace)


def rate_of(trace: NDArray[np.int64], policy: Policy, max_bytes: int) -> tuple[float, int]:
    store = one_table({})
    cache = hb.EmbeddingCache(store, "fake", max_bytes, policy, preload=0.0, deadline_seconds=60)
    lookup = cache.lookup(store.versions[0], FEATURES)
    for one in trace:
        lookup({"x": hb.Ids(one.reshape(1))}, 1)
    return cache.hit_rate, cache.num_rows


def test_it_chooses_as_well_as_an_exact_lru_and_lfu_better() -> None:
    trace = power_law(5_000, 40_000, 0)
    lru, rows = rate_of(trace, "lru", 500 * 32)
    assert 450 < rows <= 500
    exact = lru_rate(trace, rows)
    assert lru > exact - 0.01
    lfu, rows = rate_of(trace, "lfu", 500 * 40)
    assert lfu > exact + 0.03
    most = set(np.argsort(-np.bincount(trace))[:rows].tolist())
    best = sum(one in most for one in trace.tolist()) / len(trace)
    assert lfu > best - 0.1


def test_lfu_forgets_what_was_popular_once() -> None:
    trace = power_law(2_000, 30_000, 1)
    moved = power_law(2_000, 60_000, 2) + 10_000
    store = one_table({})
    cache = hb.EmbeddingCache(store, "fake", 200 * 40, "lfu", preload=0.0, deadline_seconds=60)
    lookup = cache.lookup(store.versions[0], FEATURES)
    for one in trace:
        lookup({"x": hb.Ids(one.reshape(1))}, 1)
    rate = cache.hit_rate
    hits, misses = cache.hits, cache.misses
    for number, one in enumerate(moved):
        if number == 30_000:
            hits, misses = cache.hits, cache.misses
        lookup({"x": hb.Ids(one.reshape(1))}, 1)
    assert (cache.hits - hits) / (cache.hits - hits + cache.misses - misses) > rate - 0.03


def test_tables_of_several_widths_share_the_bytes_by_what_is_asked_for() -> None:
    for policy in POLICIES:
        store = store_of(hb.Table("narrow", 1), hb.Table("wide", 64))
        version = store.publish({"narrow": {}, "wide": {}})
        cache = hb.EmbeddingCache(store, "fake", 100_000, policy, preload=0.0, deadline_seconds=60)
        narrow = cache.lookup(version, [("x", "narrow", "sum")])
        wide = cache.lookup(version, [("x", "wide", "sum")])
        rng = np.random.default_rng(0)
        for _ in range(300):
            look(narrow, *rng.integers(0, 2000, 50).tolist())
        many = cache.num_rows
        for _ in range(300):
            look(wide, *rng.integers(0, 300, 50).tolist())
        asked = len(store.asked)
        few = cache.num_rows
        for _ in range(20):
            look(wide, *rng.integers(0, 300, 50).tolist())
        assert many > 1900
        assert few < 1000
        assert len(store.asked) - asked < 20
        assert cache.num_bytes <= 100_000
