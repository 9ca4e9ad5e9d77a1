# SPDX-License-Identifier: Apache-2.0
"""BySegment: figures by columns that the model may not know, of the model and of its baselines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.errors import ConfigError, SchemaError
from hotbed.training.watching.readings import readings
from hotbed.training.watching.report import write_report

BOUNDS = {"age": [18, 30]}


def rows_of(world: Any, num_rows: int, seed: int = 0) -> dict[str, Any]:
    """Rows of the world with a country and an age, of which the model knows nothing."""
    rng = np.random.default_rng(seed + 7)
    rows = world.columns(num_rows, seed)
    rows["country"] = rng.choice(["DE", "FR", "CN", ""], num_rows, p=[0.5, 0.3, 0.15, 0.05])
    rows["age"] = rng.integers(10, 60, num_rows)
    rows["w"] = rng.integers(0, 3, num_rows).astype(np.float32)
    return rows


def data_of(rows: dict[str, Any], schema: hb.Schema, **keys: Any) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(rows), schema, 64, **keys)


def measured(scores: Any, rows: dict[str, Any], mask: Any) -> dict[str, float]:
    metrics = {
        "auc": hb.metrics.AUC(),
        "log_loss": hb.metrics.LogLoss(),
        "calibration": hb.metrics.Calibration(),
    }
    values = {}
    for name, metric in metrics.items():
        metric.update(scores[mask], rows["y"][mask], weight=rows["w"][mask])
        values[name] = metric.eval()
    return values


@pytest.mark.parametrize("grains", [1, 2])
def test_segments_divide_the_validation_of_the_kept_state(
    tmp_path: Path, world: Any, network: Any, grains: int
) -> None:
    """The bits of the model do not depend on them."""
    schema = hb.Schema([*world.schema.columns, hb.Weight("w")])
    valid = rows_of(world, 512, 1)
    snapshots = []
    for with_segments in (False, True):
        by = hb.callbacks.BySegment(["country", "age", "user"], BOUNDS, most=3)
        callbacks = [hb.callbacks.BestWeights("auc", mode="min"), hb.callbacks.Baselines()]
        model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"], grains=grains)
        torch.manual_seed(0)
        train = data_of(world.columns(512) | {"w": np.ones(512)}, schema, shuffle=256)
        history = model.fit(
            train,
            data_of(valid, schema, cache=True),
            3,
            callbacks + [by] * with_segments,
            progress=False,
        )
        snapshots.append(world.snapshot(model))
    assert world.same(*snapshots)
    assert history.kept.epoch < 3
    scores = model.predict(data_of(valid, schema))  # of the epoch that was kept
    masks = {
        "country": {name: valid["country"] == name for name in ("DE", "FR", "CN")},
        "age": {"below 18": valid["age"] < 18, "from 30": valid["age"] >= 30},
    }
    masks["country"]["(other)"] = valid["country"] == ""
    masks["age"]["18 to 30"] = (valid["age"] >= 18) & (valid["age"] < 30)
    for column, by_value in masks.items():
        rows = history.segments[f"valid.{column}"]
        assert {row.value for row in rows} == set(by_value)
        for row in rows:
            mask = by_value[row.value]
            assert (row.rows, row.positives) == (mask.sum(), valid["y"][mask].sum())
            wanted = measured(scores, valid, mask)
            assert row.figures["model"] == pytest.approx(wanted, rel=1e-6)
            assert set(row.figures) == {"model", *history.baselines}
    assert [row.value for row in history.segments["valid.country"]] == ["DE", "FR", "CN", "(other)"]
    user = history.segments["valid.user"]
    assert [len(user), sum(row.rows for row in user)] == [4, 512]
    page = write_report(tmp_path / "report.html", {"train": history}).read_text()
    assert "<h2>By country, validation</h2>" in page
    assert "<td>18 to 30</td>" in page
    evaluated = hb.callbacks.BySegment("country")
    model.evaluate(data_of(valid, schema), evaluated)
    assert [row.value for row in evaluated.figures["country"]][-1] == "(missing)"


def test_a_segment_where_a_baseline_is_better_is_reported(world: Any, network: Any) -> None:
    train = rows_of(world, 2048)
    valid = rows_of(world, 1024, 1)
    valid["y"] = np.where(valid["country"] == "FR", 1 - valid["y"], valid["y"])
    model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"])
    callbacks = [hb.callbacks.Baselines(), hb.callbacks.BySegment("country")]
    data = (data_of(rows, world.schema) for rows in (train, valid))
    history = model.fit(*data, 2, callbacks, progress=False)
    figures = {row.value: row.figures for row in history.segments["valid.country"]}
    losses = {name: values["log_loss"] for name, values in figures["FR"].items()}
    (sentence,) = (text for text in history.findings if text.startswith("Where country is"))
    count = (valid["country"] == "FR").sum()
    assert sentence.startswith(f"Where country is FR ({count} rows), a constant is better")
    assert f"log loss {losses['constant']:.4f} against {losses['model']:.4f}" in sentence


def test_segments_of_a_stream_are_exposed(world: Any, network: Any) -> None:
    schema = hb.Schema([*world.schema.columns, hb.Label("z", column="y")])
    rows = rows_of(world, 256)
    seen: dict[tuple[str, ...], float] = {}

    class Look:
        def on_epoch_end(self, run: Any) -> None:
            for reading in readings(run):
                seen[(reading.name, *reading.labels.values())] = reading.value

    network = hb.models.MMoE(schema, hb.make_tables(schema, 4), num_experts=2)
    model = hb.RecModel(network, "bce", "adam", ["auc"])
    callbacks = [hb.callbacks.BySegment("country"), hb.callbacks.Baselines(), Look()]
    history = model.online_train(data_of(rows, schema), callbacks, progress=False)
    assert list(history.segments) == ["y.country", "z.country"]
    (german, *_) = history.segments["z.country"]
    assert seen["segment_rows", "z.country", "DE"] == german.rows == (rows["country"] == "DE").sum()
    auc = seen["segment_metric", "z.country", "DE", "auc"]
    assert auc == german.figures["model"]["auc"]
    assert "auc" not in german.figures["constant"]  # its order is that of time


@pytest.mark.parametrize(
    ("columns", "bounds", "message"),
    [
        (["nation"], {}, r"columns \['nation'\] are missing"),
        (["bag"], {}, r"segments: one value a row is needed, got column 'bag' of list"),
        (["country"], {"country": [1]}, r"segments: bounds need numbers, got column 'country'"),
        (["age"], {"age": [2, 1]}, r"BySegment.bounds.age: ascending numbers .* got \[2, 1\]"),
        (["age"], {"size": [1]}, r"BySegment.bounds: unknown value, got 'size'. Give one of 'age'"),
        ("amounts", {}, "BySegment: predicted probabilities are needed"),
        ("tuples", {}, "BySegment: the rows have no column 'age', got tuples. Give a hb.Dataset"),
    ],
)
def test_wrong_segments_are_refused_by_name(
    world: Any, network: Any, columns: Any, bounds: Any, message: str
) -> None:
    """A column that the data lack is an error before the first step."""
    rows = rows_of(world, 128)
    rows["bag"] = [[1, 2]] * 128
    data: Any = data_of(rows, world.schema)
    loss = "bce"
    net: Any = network()
    if columns == "amounts":
        loss = "mse"
    elif columns == "tuples":
        net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))
        data = [(torch.rand(8, 1), torch.ones(8))]
    model = hb.RecModel(net, loss, "adam", ["mse"] if loss == "mse" else ["auc"])
    names = ["age"] if isinstance(columns, str) else columns
    with pytest.raises((ConfigError, SchemaError), match=message):
        model.fit(data, data, 1, hb.callbacks.BySegment(names, bounds), progress=False)
    if re.search("missing", message):
        assert model.counters["steps"] == 0
