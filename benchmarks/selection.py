# SPDX-License-Identifier: Apache-2.0
"""Conversion rates learned from clicks alone, and over all impressions, in a planted world.

Items differ in appeal. The more appeal, the more clicks, and the more orders after a click. Most
impressions are of items without many clicks, of whose orders clicked samples tell little. For each
model it prints by how much the mean predicted rate of orders after a click, over all items, is
above the true mean; and the two means of the third of the items that are clicked least.

    python benchmarks/selection.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import hotbed as hb

SCHEMA = hb.Schema([hb.Label("click"), hb.Label("buy"), hb.Id("item")])
CLICKED = hb.Schema([hb.Label("buy"), hb.Id("item")])
HIDDEN = (32, 16)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True)
class World:
    """Impressions of items, with clicks and with orders of those who clicked.

    Attributes:
        click_rate, buy_rate: of each item; that of orders is after a click.
        columns: item, click and buy of each impression.
    """

    click_rate: np.ndarray
    buy_rate: np.ndarray
    columns: dict[str, np.ndarray]


def world(num_items: int, num_impressions: int, seed: int) -> World:
    draw = np.random.default_rng(seed)
    appeal = draw.normal(size=num_items)
    click_rate = sigmoid(-3.0 + 1.5 * appeal)
    buy_rate = sigmoid(-1.5 + 1.5 * appeal + 0.3 * draw.normal(size=num_items))
    item = draw.integers(0, num_items, num_impressions)
    click = draw.random(num_impressions) < click_rate[item]
    buy = click & (draw.random(num_impressions) < buy_rate[item])
    columns = {"item": item, "click": click.astype(np.int8), "buy": buy.astype(np.int8)}
    return World(click_rate, buy_rate, columns)


def rates_of(kind: str, planted: World, seed: int) -> np.ndarray:
    """Train a model and return its rate of orders after a click, for each item."""
    torch.manual_seed(seed)
    schema, columns = SCHEMA, planted.columns
    if kind == "DNN of clicks":
        schema = CLICKED
        columns = {name: values[columns["click"] > 0] for name, values in columns.items()}
    tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.05), seed=seed)
    make: Any = hb.models.DNN if schema is CLICKED else getattr(hb.models, kind)
    loss: Any = "bce"
    if kind == "AITM":
        losses = {label: hb.losses.BCE() for label in ("click", "buy")}
        loss = hb.losses.MultiTask(losses, order=("click", "buy"))
    model = hb.RecModel(make(schema, tables, hidden=HIDDEN), loss, hb.Adam(lr=1e-3))
    data = hb.Dataset(
        hb.sources.Memory({name: columns[name] for name in schema.raw_columns()}),
        schema,
        512,
        shuffle=100_000,
        seed=seed,
    )
    model.fit(data, epochs=3 if schema is SCHEMA else 6, progress=False)
    every = {"item": np.arange(len(planted.buy_rate))}
    scores = model.predict(hb.Dataset(hb.sources.Memory(every), schema, 4096))
    return scores["buy"] / scores["click"] if isinstance(scores, dict) else scores


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--impressions", type=int, default=200_000)
    arguments = parser.parse_args()
    for kind in ("DNN of clicks", "ESMM", "AITM"):
        excess, predicted, true = [], [], []
        for seed in range(arguments.seeds):
            planted = world(arguments.items, arguments.impressions, seed)
            rates = rates_of(kind, planted, seed)
            excess.append(rates.mean() / planted.buy_rate.mean() - 1)
            rare = np.argsort(planted.click_rate)[: arguments.items // 3]
            predicted.append(rates[rare].mean())
            true.append(planted.buy_rate[rare].mean())
        biases = ", ".join(f"{value:+.1%}" for value in excess)
        print(
            f"{kind}: bias {biases}; clicked least {np.mean(predicted):.3f}, true {np.mean(true):.3f}"
        )


if __name__ == "__main__":
    main()
