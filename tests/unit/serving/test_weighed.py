# SPDX-License-Identifier: Apache-2.0
"""A network that gives ids weights of its own is served with the scores of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import hotbed as hb

from .conftest import Running, check_logged

SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("clicked", table="item", weights="seconds", pooling="sum"),
        hb.Id("bought", table="item", weights="prices", pooling="mean"),
        hb.Id("seen", table="item", pooling="mean"),
        hb.Id("words", transforms=[hb.transforms.Split("|")], pooling="mean"),
        hb.Dense("price"),
    ]
)
LISTS = ("clicked", "seconds", "bought", "prices", "seen", "words")


class Weighing(nn.Module):
    """Weights of ids, of the weights of a request, of both, of a number, and none."""

    def __init__(self, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.embedding = hb.EmbeddingCollection(SCHEMA, tables)
        self.importance = nn.Embedding(7, 1)
        self.out = nn.Linear(24, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        ids = batch.ids
        clicked = torch.sigmoid(self.importance(ids["clicked"].values % 7).squeeze(1))
        weights = {
            "clicked": clicked * torch.log1p(torch.as_tensor(ids["clicked"].weights)),
            "bought": torch.as_tensor(ids["bought"].weights) ** 2,
            "seen": self.importance((ids["seen"].values + 1) % 7).squeeze(1),
            "item": torch.as_tensor(batch.dense["price"]),
        }
        logits: Tensor = self.out(self.embedding.flat(batch.with_weights(weights))).squeeze(1)
        return logits


def draw(n: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, n)
    bags = {name: [rng.integers(0, 40, count).tolist() for count in counts] for name in LISTS[::2]}
    numbers = {
        name: [rng.random(count).tolist() for count in counts] for name in ("seconds", "prices")
    }
    return pa.table(
        {
            "user": rng.integers(0, 30, n),
            "item": rng.integers(0, 60, n),
            **{name: pa.array(bags[name], pa.list_(pa.int64())) for name in LISTS[::2]},
            **{name: pa.array(numbers[name], pa.list_(pa.float32())) for name in numbers},
            "words": pa.array(["|".join(f"w{n}" for n in bag) for bag in bags["seen"]]),
            "price": rng.random(n).astype(np.float32),
            "y": rng.integers(0, 2, n).astype(float),
        }
    )


@pytest.fixture(scope="module")
def model() -> hb.RecModel:
    torch.manual_seed(0)
    network = Weighing(hb.make_tables(SCHEMA, dim=4, init=hb.Normal(0.5)))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.05))
    model.fit(hb.Dataset(hb.sources.Memory(draw(200, 0)), SCHEMA, 50), progress=False)
    return model


@pytest.fixture(scope="module")
def exported(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weighed") / "export"
    model.export(path)
    return path


@pytest.fixture(scope="module")
def session(exported: Path) -> hb.InferenceSession:
    return hb.InferenceSession(exported)


def scores_of(model: hb.RecModel, rows: pa.Table) -> np.ndarray:
    scores: np.ndarray = model.predict(hb.Dataset(hb.sources.Memory(rows), SCHEMA, len(rows)))
    return scores


@pytest.mark.parametrize("n", [1, 2, 90])
def test_session_gives_the_scores_of_training(
    model: hb.RecModel, session: hb.InferenceSession, n: int
) -> None:
    rows = draw(n, n)
    expected = scores_of(model, rows)
    assert session.predict(rows) == pytest.approx(expected, abs=1e-6)
    assert n < 3 or expected.std() > 0.01


def test_bags_of_the_context_are_weighed_for_every_candidate(
    model: hb.RecModel, session: hb.InferenceSession, exported: Path
) -> None:
    rows = draw(20, 7)
    once = rows.slice(3, 1)
    shared: dict[str, Any] = {name: once[name].combine_chunks() for name in (*LISTS, "user")}
    for name in shared:
        column = once[name].take(pa.array(np.zeros(20, np.int64)))
        rows = rows.set_column(rows.column_names.index(name), name, column)
    expected = scores_of(model, rows)
    candidates = {name: rows[name].to_numpy() for name in ("item", "price")}
    assert session.predict(candidates, shared) == pytest.approx(expected, abs=1e-6)
    running = Running(exported)
    with hb.Client(f"http://{running.http}") as client:
        assert client.predict("m", candidates, shared) == pytest.approx(expected, abs=1e-6)
    running.close()


def test_logged_lists_and_weights_score_again_to_the_same_bits(
    exported: Path, tmp_path: Path
) -> None:
    """Of each length, and none: a request has lists of one length."""
    columns = draw(40, 5).drop_columns(["y"])
    lengths = np.array([len(bag) for bag in columns["clicked"].to_pylist()])
    parts = [columns.filter(pa.array(lengths == length)) for length in np.unique(lengths)]
    assert len(parts) == 6
    requests = [
        ({name: rows[name].combine_chunks() for name in rows.column_names}, {}) for rows in parts
    ]
    check_logged(exported, tmp_path, requests)
