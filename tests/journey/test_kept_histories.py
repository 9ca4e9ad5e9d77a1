# SPDX-License-Identifier: Apache-2.0
"""Histories and counts of real ratings, in training, after a kill and in a server, are those of a
dict that replays the ratings.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.persist.state.digest import content_digest
from hotbed.serving.kept import KeptColumns
from hotbed.serving.request import RequestEncoder
from hotbed.testing import ReplayedCount, ReplayedHistory

LENGTH = 20
WINDOWS = (3600, 86400)
EVERY = 600


@pytest.fixture(scope="module")
def ratings(request: pytest.FixtureRequest) -> pl.DataFrame:
    folder = request.config.rootpath / "data" / "ml_latest_small"
    return pl.read_csv(folder / "ratings.csv").sort("timestamp").head(1200)


def make_model() -> hb.RecModel:
    schema = hb.Schema(
        [
            hb.Label("liked", column="rating", threshold=4),
            hb.Time("at", column="timestamp"),
            hb.Id("user", column="userId"),
            hb.Id("movie", column="movieId"),
            hb.History("before", of=["movie"], by="user", where={"liked": 1}, length=LENGTH),
            hb.Count("likes", by="movie", where={"liked": 1}, windows=WINDOWS, every=EVERY),
        ]
    )
    tables = hb.make_tables(schema, dim=4)
    network = hb.models.DIN(
        schema, tables, histories={"before": "movie"}, hidden=(8,), attention_hidden=(4,)
    )
    return hb.RecModel(network, "bce", "adam")


def dataset_of(ratings: pl.DataFrame, model: hb.RecModel) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(ratings), model.schema, batch_size=64)


class Replay:
    """The ratings that were learned, as a dict keeps them."""

    def __init__(self) -> None:
        self._history = ReplayedHistory(LENGTH)
        self._count = ReplayedCount(EVERY)

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
        self._count.leave(row["movieId"], time, liked)


def check_seen(ids: hb.Ids, numbers: Any, expected: list[tuple[list[int], list[float]]]) -> None:
    """Check what rows see against what the dict says."""
    offsets = np.asarray(ids.offsets)
    values = np.asarray(ids.values)
    for place, (movies, counts) in enumerate(expected):
        assert values[offsets[place] : offsets[place + 1]].tolist() == movies
        assert np.asarray(numbers)[place].tolist() == pytest.approx(counts, rel=1e-6)


def test_histories_in_training_are_those_of_a_dict(ratings: pl.DataFrame) -> None:
    model = make_model()
    replay = Replay()
    rows = ratings.to_dicts()
    begins: list[int] = [0]

    def check(run: Any) -> None:
        part = rows[begins[0] : begins[0] + run.example.num_samples]
        begins[0] += len(part)
        expected = []
        for row in part:
            expected.append(replay.see(row))
            replay.leave(row)
        batch = run.example.batch
        check_seen(batch.ids["before"], batch.dense["likes"], expected)

    callback = SimpleNamespace(on_step_begin=check)
    model.online_train(dataset_of(ratings, model), [callback], progress=False)
    assert begins[0] == len(rows)


def test_histories_resume_to_equal_digests_and_are_served(
    ratings: pl.DataFrame, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    whole = make_model()
    whole.fit(dataset_of(ratings, whole), progress=False)
    torch.manual_seed(3)
    first = make_model()
    checkpoint = hb.callbacks.Checkpoint(tmp_path / "run", every_steps=4)
    first.fit(dataset_of(ratings, first), callbacks=[checkpoint], max_steps=10, progress=False)
    served = Replay()
    for row in ratings.head(640).to_dicts():
        served.leave(row)
    first.export(tmp_path / "served")
    later = ratings.slice(640, 200)
    session = hb.InferenceSession(tmp_path / "served")
    request = RequestEncoder(session.model.schema)(
        later.select("userId", "movieId", "timestamp").to_arrow()
    )
    filled = KeptColumns(session.model).fill(request)
    expected = [served.see(row) for row in later.to_dicts()]
    check_seen(filled.ids["before"], filled.dense["likes"], expected)

    resumed = make_model()
    checkpoint = hb.callbacks.Checkpoint(tmp_path / "run", every_steps=4)
    resumed.fit(dataset_of(ratings, resumed), callbacks=[checkpoint], progress=False)
    assert content_digest(resumed.tables) == content_digest(whole.tables)
    assert len(resumed.tables["before.older"])


@pytest.mark.parametrize(
    ("options", "passes", "problem"), [({"shuffle": 8}, 1, "shuffle=8"), ({}, 2, "2 epochs")]
)
def test_rows_out_of_order_are_refused(
    ratings: pl.DataFrame, options: dict[str, int], passes: int, problem: str
) -> None:
    model = make_model()
    dataset = hb.Dataset(hb.sources.Memory(ratings), model.schema, batch_size=64, **options)
    with pytest.raises(ConfigError, match=f"in the order of their times, got {problem}"):
        model.fit(dataset, epochs=passes, progress=False)
