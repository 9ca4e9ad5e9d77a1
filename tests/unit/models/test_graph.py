# SPDX-License-Identifier: Apache-2.0
"""Networks from descriptions: the same JSON back, the same bits from it, every mistake with its
place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch absent")

import hotbed as hb  # noqa: E402
from hotbed.models import Graph  # noqa: E402

SCHEMA = hb.Schema(
    [
        hb.Label("clicked"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("genres", pooling="mean"),
        hb.Id("history", table="item", pooling="none"),
        hb.Dense("price"),
        hb.Dense("vector", width=3),
    ]
)
DCN: dict[str, Any] = {
    "inputs": [
        {"input": "flat", "name": "ids", "columns": ["user", "item", "genres"]},
        {"input": "dense", "name": "numbers", "columns": ["price", "vector"]},
        {
            "input": "sequence",
            "name": "past",
            "column": "history",
            "length": 4,
            "outputs": ["past", "mask"],
        },
        {
            "input": "fields",
            "name": "wide",
            "columns": ["genres", "user"],
            "suffix": "linear",
            "dim": 1,
        },
    ],
    "layers": [
        {
            "layer": "logit_head",
            "name": "logit",
            "inputs": ["deep", "crosses", "summed", "numbers", "lengths"],
        },
        {"layer": "gelu", "name": "lengths", "inputs": ["mask"]},
        {"layer": "dot_interaction", "name": "summed", "inputs": ["wide"]},
        {"layer": "mlp", "name": "deep", "inputs": ["ids"], "hidden": [8, 8], "dropout": 0.5},
        {"layer": "cross_net", "name": "crosses", "inputs": ["ids"], "num_layers": 2},
    ],
    "outputs": {"clicked": "logit"},
}


def columns(n: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    user = random.integers(0, 20, n)
    price = random.random(n)
    return {
        "clicked": (user / 20 + price > 1).astype(int),
        "user": user,
        "item": random.integers(0, 20, n),
        "genres": [random.integers(0, 5, k).tolist() for k in random.integers(0, 3, n)],
        "history": [random.integers(0, 20, k).tolist() for k in random.integers(0, 7, n)],
        "price": price,
        "vector": random.random((n, 3)).tolist(),
    }


def dataset(n: int = 256, seed: int = 0) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(columns(n, seed)), SCHEMA, batch_size=64)


def model(description: Any) -> hb.RecModel:
    torch.manual_seed(3)
    tables = hb.make_tables(SCHEMA, dim=4, rule=hb.Adagrad(lr=0.05), seed=1)
    return hb.RecModel(Graph(SCHEMA, tables, description), "bce", "adam", metrics={"auc"})


def losses(of: hb.RecModel) -> list[float]:
    history = of.fit(dataset(), epochs=2, seed=0, progress=False)
    return [point.loss for point in history.points]


def test_a_network_gives_back_its_description_and_that_learns_the_same_bits(
    tmp_path: Path,
) -> None:
    first = model(DCN)
    plain = first.network.to_json()
    assert json.dumps(plain) == json.dumps(DCN)
    file = tmp_path / "net.json"
    file.write_text(json.dumps(plain, indent=3))
    before = losses(first)
    assert before == losses(model(file))
    assert before == losses(model(file.read_text()))
    assert before[-1] < before[0]


def test_a_checkpoint_holds_the_description_not_the_path(tmp_path: Path) -> None:
    file = tmp_path / "net.json"
    file.write_text(json.dumps(DCN))
    trained = model(file)
    trained.fit(dataset(), progress=False)
    trained.save(tmp_path / "model")
    file.unlink()
    loaded = hb.load(tmp_path / "model")
    assert json.dumps(loaded.network.to_json()) == json.dumps(DCN)
    assert np.array_equal(loaded.predict(dataset()), trained.predict(dataset()))


def test_an_exported_network_scores_as_in_training(tmp_path: Path) -> None:
    trained = model(DCN)
    trained.fit(dataset(), progress=False)
    trained.export(tmp_path / "served")
    rows = columns(50, seed=5)
    del rows["clicked"]
    served = hb.InferenceSession(tmp_path / "served").predict(rows)
    expected = trained.predict(dataset(50, seed=5))
    assert np.abs(served - expected).max() <= 1e-6
