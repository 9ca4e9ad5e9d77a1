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
from kept_ratings import Replay, check_seen, dataset_of, make_model, read_ratings

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest
from hotbed.persist.upkeep.kept import kept_entries


@pytest.fixture(scope="module")
def ratings(request: pytest.FixtureRequest) -> pl.DataFrame:
    return read_ratings(request.config.rootpath, 1200)


def files_and_stream(ratings: pl.DataFrame, folder: Path) -> hb.sources.Source:
    """Return old ratings in a file, and a followed folder with newer ones behind them."""
    incoming = folder / "incoming"
    incoming.mkdir()
    ratings.head(700).write_csv(folder / "old.csv")
    ratings.slice(700, 200).write_csv(incoming / "1.csv")
    ratings.slice(900).write_csv(incoming / "2.csv")
    old = hb.sources.Csv(str(folder / "old.csv"))
    return hb.sources.Concat([old, hb.sources.Follow(str(incoming))])


@pytest.mark.parametrize("is_stream", [False, True])
def test_histories_in_training_are_those_of_a_dict(
    ratings: pl.DataFrame, tmp_path: Path, is_stream: bool
) -> None:
    model = make_model()
    replay = Replay()
    ratings = ratings.head(18 * 64)  # whole batches: a stream would wait for the rest of one
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
        if begins[0] == len(rows):
            run.stop("all ratings were read")

    callback = SimpleNamespace(on_step_begin=check)
    dataset = dataset_of(ratings, model)
    if is_stream:
        source = files_and_stream(ratings, tmp_path)
        dataset = hb.Dataset(source, model.schema, batch_size=64)
    model.online_train(dataset, [callback], progress=False, max_seconds=300)
    assert begins[0] == len(rows)


def test_histories_resume_to_equal_digests_and_are_served_by_deltas(
    ratings: pl.DataFrame, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    whole = make_model()
    whole.fit(dataset_of(ratings, whole), progress=False)
    torch.manual_seed(3)
    first = make_model()
    keywords: dict[str, Any] = {"every_steps": 4, "full_every": 9, "wait": True}
    publish = hb.PublishDirectory(tmp_path / "published")
    checkpoint = hb.callbacks.Checkpoint(tmp_path / "run", publish=publish, **keywords)
    first.fit(dataset_of(ratings, first), callbacks=[checkpoint], max_steps=10, progress=False)
    full, *_, delta = open_checkpoint(tmp_path / "published").links
    assert [full.manifest.kind, delta.manifest.kind] == ["full", "delta"]
    changed = {
        row["userId"] for row in ratings.slice(512, 128).filter(pl.col("rating") >= 4).to_dicts()
    }
    assert sum(part.num_rows for part in delta.parts("before.newest")) == len(changed)
    served = Replay()
    for row in ratings.head(640).to_dicts():
        served.leave(row)
    later = ratings.slice(640, 200)
    version = hb.ParameterServer().load("ratings", tmp_path / "published")
    session = hb.InferenceSession(version)
    kept = session.ask(later.select("userId", "movieId", "timestamp").to_arrow()).kept
    expected = [served.see(row) for row in later.to_dicts()]
    check_seen(kept["before"], kept["likes"], expected)

    (history,) = kept_entries(tmp_path / "run", "user", str(later["userId"][0]))
    movies, _ = expected[0]
    assert history.values[:, 0].tolist()[-len(movies) :] == movies
    (likes,) = kept_entries(tmp_path / "published", "movie", str(ratings["movieId"][0]))
    num_rated = (ratings.head(640)["movieId"] == ratings["movieId"][0]).sum()
    assert 0 < likes.values[:, 1].sum() <= num_rated  # tiles of more than two windows are gone

    resumed = make_model()
    checkpoint = hb.callbacks.Checkpoint(tmp_path / "run", **keywords)
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
    with pytest.raises(ConfigError, match=f"in the order of their times, got {problem}") as error:
        model.fit(dataset, epochs=passes, progress=False)
    assert "give each row its list as a column of the data" in str(error.value)


LAYERS = {
    "inputs": [
        {"input": "flat", "name": "ids", "columns": ["user", "movie"]},
        {"input": "dense", "name": "numbers", "columns": ["likes"]},
        {
            "input": "sequence",
            "name": "before",
            "column": "before",
            "length": 8,
            "outputs": ["movies", "mask"],
        },
    ],
    "layers": [
        {"layer": "mlp", "name": "target", "inputs": ["ids"], "hidden": [4]},
        {
            "layer": "attention_pooling",
            "name": "interest",
            "inputs": ["target", "movies", "mask"],
            "hidden": [4],
        },
        {"layer": "logit_head", "name": "logit", "inputs": ["ids", "numbers", "interest"]},
    ],
    "outputs": {"liked": "logit"},
}


def make_graph(schema: hb.Schema, tables: Any) -> hb.models.Graph:
    return hb.models.Graph(schema, tables, LAYERS)


@pytest.mark.parametrize("network", [make_graph, hb.models.LR])
def test_networks_that_look_up_a_part_of_the_schema_keep_and_serve_the_same(
    ratings: pl.DataFrame, tmp_path: Path, network: Any
) -> None:
    other = make_model()
    columns = other.schema.columns
    if network is hb.models.LR:  # it takes no history
        columns = [column for column in columns if not isinstance(column, hb.History)]
    schema = hb.Schema(columns)
    model = hb.RecModel(network(schema, hb.make_tables(schema, dim=4)), "bce", "adam")
    learned, later = ratings.head(640), ratings.slice(640, 100)
    for each in (model, other):
        each.fit(dataset_of(learned, each), progress=False)
    tables = {name: table for name, table in model.tables.items() if table.dtype == "int32"}
    assert len(tables) == 2 * len(schema.kept)
    assert content_digest(tables) == content_digest({name: other.tables[name] for name in tables})
    model.export(tmp_path)
    served = hb.InferenceSession(tmp_path).predict(
        later.select("userId", "movieId", "timestamp").to_arrow()
    )
    np.testing.assert_allclose(served, model.predict(dataset_of(later, model)), atol=1e-6)
