# SPDX-License-Identifier: Apache-2.0
"""The demo's data: MovieLens ratings joined with their movies, in time order, as batches."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import hotbed as hb

pytestmark = pytest.mark.core

SCHEMA = hb.Schema(
    [
        hb.Label("liked", column="rating", threshold=4),
        hb.Time("timestamp", unit="s"),
        hb.Id("user", column="userId"),
        hb.Id("movie", column="movieId"),
        hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
        hb.Id(
            "year",
            column="title",
            transforms=[hb.transforms.Extract(r"\((\d{4})\)\s*$", number=True)],
        ),
        hb.Id("hour", column="timestamp", transforms=[hb.transforms.TimeOfDay("hour")]),
    ]
)


@pytest.fixture
def events(shipped_data: Path) -> hb.sources.Source:
    folder = shipped_data / "ml_latest_small"
    ratings, movies = hb.sources.Csv(folder / "ratings.csv"), hb.sources.Csv(folder / "movies.csv")
    return ratings.join(movies, on="movieId").sort("timestamp")


def test_offline_and_online_parts_share_no_event(events: hb.sources.Source) -> None:
    parts = [events.slice(0.0, 0.72), events.slice(0.72, 0.8), events.slice(0.8, 1.0)]
    assert sum(part.count_rows() for part in parts) == 100_836
    last = -1
    for part in parts:
        times = np.concatenate([batch.time for batch in hb.Dataset(part, SCHEMA, 4096)])
        assert times.min() >= last
        last = int(times.max())


def test_every_column_is_what_the_files_say(events: hb.sources.Source, shipped_data: Path) -> None:
    folder = shipped_data / "ml_latest_small"
    with (folder / "movies.csv").open(newline="") as file:
        movies = {int(row["movieId"]): row for row in csv.DictReader(file)}
    with (folder / "ratings.csv").open(newline="") as file:
        ratings = sorted(csv.DictReader(file), key=lambda row: int(row["timestamp"]))
    dataset = hb.Dataset(events, SCHEMA, 1000)
    batch = next(iter(dataset))
    genres = batch.ids["genres"]
    words: dict[int, str] = {}
    for i, row in enumerate(ratings[:1000]):
        movie = movies[int(row["movieId"])]
        assert batch.ids["user"].values[i] == int(row["userId"])
        assert batch.ids["movie"].values[i] == int(row["movieId"])
        assert batch.labels["liked"][i] == (float(row["rating"]) >= 4)
        assert batch.time[i] == int(row["timestamp"]) * 1_000_000
        assert batch.ids["hour"].values[i] == int(row["timestamp"]) // 3600 % 24
        hashed = genres.values[genres.offsets[i] : genres.offsets[i + 1]].tolist()
        assert [
            words.setdefault(h, g) for h, g in zip(hashed, movie["genres"].split("|"), strict=True)
        ] == movie["genres"].split("|")
        year = re.search(r"\((\d{4})\)\s*$", movie["title"])
        assert year is not None
        assert batch.ids["year"].values[i] == int(year.group(1))
    for _ in dataset:
        pass
    assert 0 < dataset.encoder.stats.missing["year"] < 100  # a few titles have no year


def test_the_schema_is_saved_and_serves_a_request(events: hb.sources.Source) -> None:
    schema = hb.Schema.from_json(json.dumps(SCHEMA.to_json()))
    assert schema == SCHEMA
    assert list(schema.tables) == ["user", "movie", "genres", "year", "hour"]
    request = hb.sources.Memory(
        {
            "userId": [7],
            "movieId": [1],
            "genres": ["Comedy|Drama"],
            "title": ["X (1999)"],
            "timestamp": [3600],
        }
    )
    batch = hb.Encoder(schema)(request.table, labels=False)
    assert batch.labels == {}
    assert batch.ids["year"].values.tolist() == [1999]
    assert batch.ids["hour"].values.tolist() == [1]
    assert batch.ids["genres"].lengths().tolist() == [2]
