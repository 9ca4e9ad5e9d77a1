# SPDX-License-Identifier: Apache-2.0
"""The embedding cache: what a hit costs beside the mapped lookup, and how many there are under a
power law.

Prints JSON lines. `lookup`: CPU microseconds of a request of 26 features x 100 ids of dim 16, all
of them held, and of the same requests against the mapped files. `rates`: share of hits, of distinct
ids of requests of 50, for a cache that holds a share of the rows; `exact_lru` of as many rows;
`best`: what no cache can beat that knows every frequency beforehand and does not follow the draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotbed as hb
from hotbed.config import describe
from hotbed.frozen import FrozenRows, write_rows
from hotbed.serving.cache import POLICIES, Policy
from hotbed.serving.rows import FrozenLookup, ServedTable
from hotbed.testing import FakeStore

FEATURES, SAMPLES, DIM, REQUEST = 26, 100, 16, 50


class MappedStore(FakeStore):
    """A store whose versions read mapped tables."""

    def __init__(self, tables: dict[str, ServedTable]) -> None:
        super().__init__(
            {name: dict[str, Any](describe(hb.Table(name, DIM).config)) for name in tables}
        )
        version = self.publish({name: {} for name in tables})
        object.__setattr__(
            version,
            "find",
            lambda wanted, _=None: {n: tables[n].find(ids)[0] for n, ids in wanted.items()},
        )


def power_law(
    rows: int, exponent: float, draws: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    weights = np.cumsum(1 / np.arange(1, rows + 1) ** exponent)
    return rng.permutation(rows)[np.searchsorted(weights / weights[-1], rng.random(draws))].astype(
        np.int64
    )


def microseconds(ask: Callable[..., Any], requests: list[Any], repeats: int) -> float:
    best = np.inf
    for _ in range(repeats):
        began = time.process_time()
        for request in requests:
            ask(request, SAMPLES)
        best = min(best, time.process_time() - began)
    return round(best / len(requests) * 1e6, 1)


def lookup_cost(rows: int, folder: Path) -> dict[str, float]:
    table = hb.Table("all", DIM)
    table.find_or_insert(np.arange(rows))
    tables = {}
    for number in range(FEATURES):
        write_rows(folder / f"{number}.rows", DIM, table.export())
        tables[f"t{number:02}"] = ServedTable(
            describe(table.config), [FrozenRows(folder / f"{number}.rows")]
        )
    features = [(f"f{number}", name, "sum") for number, name in enumerate(tables)]
    rng = np.random.default_rng(0)
    requests = [
        {name: hb.Ids(power_law(rows, 1.05, SAMPLES, rng)) for name, _, _ in features}
        for _ in range(200)
    ]
    store = MappedStore(tables)
    found = {"mapped": microseconds(FrozenLookup(features, tables), requests, 5)}
    for policy in POLICIES:
        cache = hb.EmbeddingCache(store, "fake", 1 << 29, policy)
        look = cache.lookup(store.versions[0], features)
        found[f"{policy}_misses"] = microseconds(look, requests, 1)
        found[f"{policy}_hits"] = microseconds(look, requests, 5)
    return found


def rate(requests: Iterable[list[int]], warm: int, asks: Callable[[list[int]], int]) -> float:
    """Share of hits after the first `warm` requests."""
    hits = asked = 0
    for number, one in enumerate(requests):
        found = asks(one)
        if number >= warm:
            hits, asked = hits + found, asked + len(one)
    return round(hits / asked, 3)


def exact_lru(rows: int) -> Callable[[list[int]], int]:
    held = OrderedDict[int, None]()

    def asks(ids: list[int]) -> int:
        hits = sum(one in held for one in ids)
        for one in ids:
            held[one] = None
            held.move_to_end(one)
        while len(held) > rows:
            held.popitem(last=False)
        return hits

    return asks


def cached(policy: Policy, rows: int) -> Callable[[list[int]], int]:
    table = hb.Table("t", DIM)
    store = MappedStore({"t": ServedTable(describe(table.config), ())})
    row_bytes = 4 * DIM + (24 if policy == "lru" else 32)
    cache = hb.EmbeddingCache(store, "fake", rows * row_bytes, policy, preload=0.0)
    look = cache.lookup(store.versions[0], [("x", "t", "sum")])

    def asks(ids: list[int]) -> int:
        before = cache.hits
        look({"x": hb.Ids(np.array(ids, np.int64))}, len(ids))
        return cache.hits - before

    return asks


def rates(rows: int, share: float, exponent: float, draws: int) -> dict[str, float]:
    trace = power_law(rows, exponent, draws, np.random.default_rng(1))
    requests = [
        list(dict.fromkeys(trace[at : at + REQUEST].tolist())) for at in range(0, draws, REQUEST)
    ]
    held, warm = int(rows * share), len(requests) // 2
    most = set(np.argsort(-np.bincount(trace, minlength=rows))[:held].tolist())
    found: dict[str, float] = {
        policy: rate(requests, warm, cached(policy, held)) for policy in POLICIES
    }
    best = rate(requests, warm, lambda ids: sum(one in most for one in ids))
    return {
        "exponent": exponent,
        "share": share,
        **found,
        "exact_lru": rate(requests, warm, exact_lru(held)),
        "best": best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="of each table")
    parser.add_argument("--draws", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotbed-cache-") as folder:
        print(json.dumps({"lookup": lookup_cost(given.rows, Path(folder))}), flush=True)
    for exponent in (0.8, 1.05, 1.2):
        for share in (0.01, 0.1):
            print(
                json.dumps({"rates": rates(given.rows, share, exponent, given.draws)}), flush=True
            )


if __name__ == "__main__":
    main()
