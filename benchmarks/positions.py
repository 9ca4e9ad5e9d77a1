# SPDX-License-Identifier: Apache-2.0
"""Relevance learned from clicks at known places, in a planted world with known examination.

Users are shown the items of their query in an order that some ranker made: good items stand higher,
and so do some others. A user looks at place k with probability 1 / (1 + k), and clicks an item that
is looked at with its relevance. Models learn from the clicks, with and without `DisplayPosition`,
and one from what would be clicked if each item were looked at. Each then orders the items of each
query; printed is the mean NDCG of these orders against the true relevance.

    python benchmarks/positions.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hotbed as hb

PLACES = 10
FEATURES: Sequence[Any] = (hb.Id("query"), hb.Id("item"))


def world(
    num_queries: int, num_items: int, num_shown: int, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the relevance of [queries, items], and the columns of what was shown."""
    draw = np.random.default_rng(seed)
    logits = -1.0 + draw.normal(size=num_items) + 0.5 * draw.normal(size=(num_queries, 1))
    relevance = 1 / (1 + np.exp(-logits))
    popular = draw.normal(size=num_items)  # what the ranker took for good
    query = np.repeat(draw.integers(0, num_queries, num_shown // PLACES), PLACES)
    items, places = [], []
    for _ in range(num_shown // PLACES):
        candidates = draw.permutation(num_items)[:PLACES]
        order = np.argsort(-(popular[candidates] + draw.normal(size=PLACES)))
        items.append(candidates[order])
        places.append(np.arange(PLACES))
    item, place = np.concatenate(items), np.concatenate(places)
    wanted = draw.random(len(item)) < relevance[query, item]
    looked = draw.random(len(item)) < 1.0 / (1 + place)
    columns = {"query": query, "item": item, "position": place}
    return relevance, {**columns, "click": wanted & looked, "wanted": wanted}


def order_of(label: str, roles: Sequence[Any], columns: dict[str, Any], shape: Any) -> np.ndarray:
    """Train a model on a label; return its scores [queries, items], as they are served."""
    torch.manual_seed(0)
    schema = hb.Schema([hb.Label(label), *FEATURES, *roles])
    tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.05))
    model = hb.RecModel(hb.models.DNN(schema, tables, hidden=(32, 16)), "bce", hb.Adam(lr=1e-2))
    rows = {name: columns[name] for name in schema.raw_columns()}
    model.fit(
        hb.Dataset(hb.sources.Memory(rows), schema, 256, shuffle=100_000), progress=False, epochs=2
    )
    queries, items = (each.ravel() for each in np.indices(shape))
    every = hb.Dataset(hb.sources.Memory({"query": queries, "item": items}), schema, 4096)
    return np.asarray(model.predict(every)).reshape(shape)


def ndcg(scores: np.ndarray, relevance: np.ndarray) -> float:
    """Return the mean NDCG of the first ten items of each query."""
    discount = 1 / np.log2(2 + np.arange(10))
    values = []
    for of_query, gains in zip(scores, relevance, strict=True):
        order = np.argsort(-of_query, kind="stable")[:10]
        ideal = np.sort(gains)[::-1][:10]
        values.append((gains[order] * discount).sum() / (ideal * discount).sum())
    return float(np.mean(values))


def main() -> None:
    parser = argparse.ArgumentParser(description="What the place of a click is worth.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shown", type=int, default=400_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, tuple[str, Sequence[Any]]] = {
        "unbiased labels": ("wanted", ()),
        "clicks": ("click", ()),
        "clicks, additive": ("click", [hb.DisplayPosition("position", size=PLACES)]),
        "clicks, factor": ("click", [hb.DisplayPosition("position", form="factor", size=PLACES)]),
    }
    for name, (label, roles) in runs.items():
        values = []
        for seed in range(arguments.seeds):
            relevance, columns = world(30, 60, arguments.shown, seed)
            scores = order_of(label, roles, columns, relevance.shape)
            values.append(ndcg(scores, relevance))
        print(f"{name}: NDCG@10 {', '.join(f'{value:.4f}' for value in values)}", flush=True)


if __name__ == "__main__":
    main()
