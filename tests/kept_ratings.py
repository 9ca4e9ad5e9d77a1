# SPDX-License-Identifier: Apache-2.0
"""Real ratings, a model that keeps a history and a count of them, and a dict that replays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from hotbed.testing import ReplayedCount, ReplayedHistory

LENGTH = 20
WINDOWS = (3600, 86400)
EVERY = 600

KEPT_JOB = """
schema:
  columns:
    - {kind: label, name: liked, column: rating, threshold: 4}
    - {kind: time, name: at, column: timestamp, unit: s}
    - {kind: id, name: user, column: userId}
    - {kind: id, name: movie, column: movieId}
    - {kind: history, name: before, of: [movie], by: user, where: {liked: 1}, length: 20}
    - {kind: count, name: likes, by: movie, where: {liked: 1}, windows: [86400], every: 600}
model: {kind: din, histories: {before: movie}, hidden: [8]}
tables: {dim: 4}
fit: {batch_size: 512}
grains: 4
baselines: false
"""
"""A job that keeps both, without its data."""


def read_ratings(root: Path, num_rows: int) -> pl.DataFrame:
    """Return the first ratings in the order of their times; `root`: of the repository."""
    path = root / "data" / "ml_latest_small" / "ratings.csv"
    return pl.read_csv(path).sort("timestamp").head(num_rows)


SCHEMA = hb.Schema(
    [
        hb.Label("liked", column="rating", threshold=4),
        hb.Time("at", column="timestamp"),
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
        hb.History("before", of=["movie"], by="user", where={"liked": 1}, length=LENGTH),
        hb.Count("likes", by="movie", where={"liked": 1}, windows=WINDOWS, every=EVERY),
    ]
)


def make_network(tables: dict[str, hb.Table]) -> hb.models.DIN:
    histories = {"before": "movie"}
    return hb.models.DIN(SCHEMA, tables, histories=histories, hidden=(8,), attention_hidden=(4,))


def make_model(grains: int = 1, tier: hb.Ram | hb.Ssd | None = None) -> hb.RecModel:
    network = make_network(hb.make_tables(SCHEMA, dim=4, tier=tier))
    return hb.RecModel(network, "bce", "adam", grains=grains)


def dataset_of(ratings: pl.DataFrame, model: hb.RecModel) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(ratings), model.schema, batch_size=64)


class Replay:
    """The ratings that were learned, as a dict keeps them."""

    def __init__(self) -> None:
        self._history = ReplayedHistory(LENGTH)
        self._count = ReplayedCount(EVERY, max(WINDOWS))

    def see(self, row: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return what a rating sees: movies, and numbers."""
        time = row["timestamp"]
        movies = [movie for _, movie in self._history.see(row["userId"], time)]
        numbers: list[float] = []
        for window in WINDOWS:
            matches, shown = self._count.see(row["movieId"], time, window)
            numbers += [np.log1p(matches), np.log1p(shown), matches / (shown + 10)]
        return movies, numbers

    def leave(self, row: dict[str, Any]) -> None:
        time = row["timestamp"]
        liked = int(row["rating"] >= 4)
        if liked:
            self._history.leave(row["userId"], time, time, row["movieId"])
        self._count.leave(row["movieId"], time, time, liked)


def check_seen(ids: hb.Ids, numbers: Any, expected: list[tuple[list[int], list[float]]]) -> None:
    """Check what rows see against what the dict says."""
    offsets = np.asarray(ids.offsets)
    values = np.asarray(ids.values)
    assert len(ids) == len(expected)
    for place, (movies, counts) in enumerate(expected):
        assert values[offsets[place] : offsets[place + 1]].tolist() == movies
        assert np.asarray(numbers)[place].tolist() == pytest.approx(counts, rel=1e-6)
