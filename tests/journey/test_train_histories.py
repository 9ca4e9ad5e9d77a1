# SPDX-License-Identifier: Apache-2.0
"""Models over histories of the shipped ratings: trained, resumed, run as jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from schedule import in_soak

import hotbed as hb
from hotbed.job import run
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest

SHIPPED = Path(__file__).resolve().parents[2] / "data/ml_latest_small"
KINDS = ["DIN", "DIEN", "BST"]
COLUMNS = [
    {"kind": "label", "name": "liked", "column": "rating", "threshold": 4},
    {"kind": "id", "name": "user", "column": "userId"},
    {"kind": "id", "name": "movie", "column": "movieId"},
    {"kind": "id", "name": "liked_before", "table": "movie", "pooling": "none", "max_length": 8},
]
SCHEMA = hb.Schema.from_json({"columns": COLUMNS})


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 12,000 ratings in the order of time, each with what its user liked before."""
    rows = pl.read_csv(SHIPPED / "ratings.csv").sort("timestamp").head(12_000)
    liked: dict[int, list[int]] = {}
    histories = []
    for user, movie, rating in rows["userId", "movieId", "rating"].iter_rows():
        own = liked.setdefault(user, [])
        histories.append(own[-8:])
        if rating >= 4:
            own.append(movie)
    path = tmp_path_factory.mktemp("ratings") / "ratings.parquet"
    rows.with_columns(pl.Series("liked_before", histories, dtype=pl.List(pl.Int64))).write_parquet(
        path
    )
    return path


def recmodel(kind: str) -> hb.RecModel:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, dim=8, rule=hb.Adagrad(lr=0.2), init=hb.Normal(0.05))
    network = getattr(hb.models, kind)(
        SCHEMA, tables, histories={"liked_before": "movie"}, hidden=(16,), dropout=0.1
    )
    return hb.RecModel(network, "bce", hb.Adam(lr=5e-3), metrics=["auc"])


def dataset(path: Path, start: float, stop: float) -> hb.Dataset:
    return hb.Dataset(hb.sources.Parquet(path).slice(start, stop), SCHEMA, batch_size=128)


@pytest.mark.parametrize("kind", in_soak(KINDS, quick={"DIN"}))
def test_a_model_that_was_stopped_resumes_to_the_same_bits(
    kind: str, ratings: Path, tmp_path: Path
) -> None:
    for folder, stops in (("whole", [None]), ("parts", [5, 6, None])):
        for steps in stops:
            model = recmodel(kind)
            saves = hb.callbacks.Checkpoint(tmp_path / folder, every_steps=3, wait=True)
            model.fit(
                dataset(ratings, 0.0, 0.8), callbacks=[saves], max_steps=steps, progress=False
            )
    digests = [content_digest(open_checkpoint(tmp_path / name)) for name in ("whole", "parts")]
    assert model.counters["steps"] == 75
    assert digests[0] == digests[1]
    assert model.evaluate(dataset(ratings, 0.8, 1.0))["auc"] > 0.57


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_a_kind_of_job(kind: str, ratings: Path, tmp_path: Path) -> None:
    spec: dict[str, Any] = {
        "schema": {"columns": COLUMNS},
        "train": {"kind": "parquet", "path": str(ratings)},
        "model": {"kind": kind.lower(), "histories": {"liked_before": "movie"}, "hidden": [8]},
        "tables": {"dim": 4},
        "fit": {"batch_size": 1024},
        "output": str(tmp_path / "run"),
    }
    run.train(hb.Job.from_json(spec))
    model = hb.load(tmp_path / "run")
    assert type(model.network).__name__ == kind
    assert model.network.inputs.lengths == [8]
