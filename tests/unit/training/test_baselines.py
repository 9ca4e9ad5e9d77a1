# SPDX-License-Identifier: Apache-2.0
"""Baselines: simple models that learn beside a model, change nothing of it, and tell the truth."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.training.watching.report import write_report


def charts_of(page: str) -> dict[str, Any]:
    """Return the data of each chart by its title."""
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="(.*?)"', page)]
    return dict(zip(titles, charts, strict=True))


POPULARITY = "popularity of item"


@pytest.mark.parametrize("grains", [1, 4])
def test_baselines_change_no_bit_of_the_model(
    world: Any, dataset: Any, network: Any, grains: int
) -> None:
    snapshots = []
    for callbacks in ([], [hb.callbacks.Baselines()]):
        model = hb.RecModel(network(), "bce", "adam", ["auc"], grains=grains)
        torch.manual_seed(0)
        history = model.fit(dataset(512), dataset(256, 1), 2, callbacks, progress=False)
        snapshots.append(world.snapshot(model))
        assert bool(history.baselines) == bool(callbacks)
    assert world.same(*snapshots)


def test_baselines_are_what_they_say(world: Any, dataset: Any, network: Any) -> None:
    """Of the first pass alone: the mean label, the rate of each item with a prior, a linear model."""
    model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"])
    baselines = hb.callbacks.Baselines()
    history = model.fit(dataset(1024), dataset(512, 1), 3, baselines, progress=False)
    train = world.columns(1024)
    valid = world.columns(512, 1)
    mean = (train["y"].sum() + 0.5) / 1025
    rates = np.full(80, mean)
    for item in range(80):
        labels = train["y"][train["item"] == item]
        rates[item] = (labels.sum() + 10 * mean) / (len(labels) + 10)
    for name, scores in (("constant", np.full(512, mean)), (POPULARITY, rates[valid["item"]])):
        for metric in (hb.metrics.AUC(), hb.metrics.LogLoss()):
            metric.update(scores, valid["y"])
            key = "valid.auc" if isinstance(metric, hb.metrics.AUC) else "valid.log_loss"
            assert history.baselines[name][key] == pytest.approx(metric.eval(), rel=1e-5)
    linear = history.baselines["linear"]["valid.auc"]
    assert linear > history.baselines[POPULARITY]["valid.auc"] + 0.1
    assert (
        model.evaluate(dataset(512, 1), baselines.comparison())["auc"]
        == history.metrics["valid.auc"]
    )


def test_a_model_that_a_constant_beats_is_told_so(tmp_path: Path, network: Any, world: Any) -> None:
    columns = world.columns(512) | {"y": np.arange(512) % 2}
    data = hb.Dataset(hb.sources.Memory(columns), world.schema, 64)
    new = hb.Dataset(
        hb.sources.Memory(world.columns(256, 1) | {"y": np.arange(256) // 2 % 2}), world.schema, 64
    )
    model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"])
    history = model.fit(data, new, 8, hb.callbacks.Baselines(), progress=False)
    constant = history.baselines["constant"]["valid.log_loss"]
    own = history.metrics["valid.log_loss"]
    (sentence,) = (text for text in history.findings if text.startswith("A constant is better"))
    assert f"log loss {constant:.4f} against {own:.4f}" in sentence
    assert sentence in repr(history)
    page = write_report(tmp_path / "report.html", {"train": history}).read_text()
    assert sentence in page
    charts = charts_of(page)
    for title, key in (("Validation AUC", "auc"), ("Validation log loss", "log_loss")):
        for name, figures in history.baselines.items():
            (line,) = (line for line in charts[title]["series"] if line["name"] == name)
            assert line["y"] == pytest.approx([figures[f"valid.{key}"]] * 2, rel=1e-5)


class OfDense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        return self.linear(batch.dense["x"].reshape(-1, 1)).squeeze(1)


LABELS = [hb.Label("y"), hb.Label("z")]
FEATURES = [hb.Id("user"), hb.Id("item"), hb.Dense("x")]


@pytest.mark.parametrize(
    "kind", ["weights", "missing", "tasks", "amounts", "bags", "no ids", "tuples"]
)
def test_baselines_of_other_data(world: Any, kind: str) -> None:
    """The constant is the mean of the labels that count; linear models learn from what is there."""
    rows = world.columns(2048)
    rows["y"] = rows["y"].astype(np.float32)
    rows["w"] = np.where(np.arange(2048) % 3 == 0, 0.0, 2.0).astype(np.float32)
    rows["z"] = 1 - rows["y"]
    rows["bag"] = [[user, user + 1] for user in rows["user"]]
    loss: Any = "bce"
    columns: list[Any] = [LABELS[0], *FEATURES]
    metrics: Any = ["log_loss"]
    counts = np.ones(2048, bool)
    if kind == "weights":
        columns.append(hb.Weight("w"))
        counts = rows["w"] > 0
        rows["y"] = np.where(counts, rows["y"], 1.0)
    elif kind == "missing":
        loss = hb.losses.BCE(missing_below=0)
        counts = np.arange(2048) % 3 > 0
        rows["y"] = np.where(counts, rows["y"], -1.0)
    elif kind == "tasks":
        columns = [*LABELS, *FEATURES]
    elif kind == "amounts":
        loss = "mse"
        metrics = ["mse"]
        rows["y"] = (30 + 5 * rows["x"]).astype(np.float32)
    elif kind == "bags":
        columns = [LABELS[0], hb.Id("bag", pooling="mean")]
    elif kind == "no ids":
        columns = [LABELS[0], hb.Dense("x")]
    schema = hb.Schema(columns)
    data: Any = hb.Dataset(hb.sources.Memory(rows), schema, 64)
    tables = hb.make_tables(schema, 4) if schema.ids else None
    if kind == "tasks":
        net: Any = hb.models.MMoE(schema, tables, num_experts=2)
    elif kind == "no ids":
        net = OfDense()
    elif kind == "tuples":
        net = torch.nn.Linear(1, 1)
        pairs = zip(
            torch.from_numpy(rows["x"]).split(64),
            torch.from_numpy(rows["y"]).split(64),
            strict=True,
        )
        data = [(x.reshape(-1, 1), y) for x, y in pairs]
    else:
        net = hb.models.LR(schema, tables)
    model = hb.RecModel(net, loss, "adam", metrics)
    baselines = hb.callbacks.Baselines()
    figures = model.fit(data, data, 1, baselines, progress=False).baselines
    labels = ["y."] if kind != "tasks" else ["y.", "z."]
    mean = rows["y"][counts].mean()
    best = (mean - rows["y"][counts]).std() ** 2
    if kind != "amounts":
        best = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    for label in labels:
        key = f"valid.{label if kind == 'tasks' else ''}{metrics[0]}"
        assert figures["constant"][key] == pytest.approx(best, rel=2e-3)
        assert ("linear" in figures) == (kind != "tuples")
        if "linear" in figures:
            assert figures["linear"][key] < 0.97 * best


def test_windows_of_a_stream_compare_and_resume_to_the_same_figures(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    def run(folder: str, steps: list[int]) -> Any:
        for last in steps:
            model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"])
            callbacks = [
                hb.callbacks.Windows(samples=200),
                hb.callbacks.Baselines(),
                hb.callbacks.BySegment(["user", "t"], {"t": [100, 900]}),
                hb.callbacks.Checkpoint(tmp_path / folder, every_steps=3, wait=True),
            ]
            history = model.online_train(dataset(1024), callbacks, max_steps=last, progress=False)
        return history, hb.checkpoints.content_digest(
            hb.checkpoints.open_checkpoint(tmp_path / folder)
        )

    history, digest = run("one", [16])
    resumed, resumed_digest = run("parts", [5, 10, 16])
    assert resumed.baselines == history.baselines
    assert repr(resumed.segments) == repr(history.segments)  # nan is not equal to itself
    assert set(history.segments["t"][0].figures) == {"model", *history.baselines}
    assert set(history.compared) == {"constant", "linear", POPULARITY}
    for name, windows in history.compared.items():
        assert [window.values for window in windows] == [w.values for w in resumed.compared[name]]
        assert len(windows) == 5
        assert ("auc" in windows[0].values) == (name != "constant")  # whose order is that of time
    assert resumed_digest == digest
    page = write_report(tmp_path / "report.html", {"stream": history}).read_text()
    assert "popularity of item" in page


@pytest.mark.parametrize("steps", [[3, 16], [8, 16], [11, 16]])
def test_a_fit_that_resumes_has_the_figures_of_an_unbroken_one(
    tmp_path: Path, dataset: Any, network: Any, steps: list[int]
) -> None:
    """Killed inside the first pass, at its end, and inside a later one."""
    figures = []
    for folder, ends in (("one", [16]), ("parts", steps)):
        for last in ends:
            model = hb.RecModel(network(), "bce", "adam", ["auc", "log_loss"])
            saves = hb.callbacks.Checkpoint(tmp_path / folder, every_steps=50, wait=True)
            callbacks = [hb.callbacks.Baselines(), hb.callbacks.BySegment("t", {"t": [180]}), saves]
            history = model.fit(
                dataset(512), dataset(128, 1), 2, callbacks, max_steps=last, progress=False
            )
        assert len(history.segments["valid.t"]) == 2
        figures.append((history.baselines, history.new_ids, history.findings, history.segments))
    assert figures[0] == figures[1]


def test_a_column_without_one_id_a_sample_is_no_item(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    with pytest.raises(
        hb.errors.ConfigError, match=r"Baselines.item: one id .* got 'film' and the"
    ):
        model.fit(dataset(64), callbacks=hb.callbacks.Baselines("film"), progress=False)


def test_rates_of_another_item_begin_anew(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    learned = hb.callbacks.Baselines("item")
    model.fit(dataset(512), callbacks=learned, progress=False)
    other = hb.callbacks.Baselines("user")
    other.load_state(learned.state())
    same = hb.callbacks.Baselines()
    same.load_state(learned.state())
    model.evaluate(dataset(512), [one := other.comparison(), two := same.comparison()])
    assert two.results()["popularity of item"]["auc"] > 0.7
    assert one.results()["popularity of user"]["auc"] == 0.5
    assert one.results()["linear"] == two.results()["linear"]


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_with_new_ids_are_measured_apart(
    tmp_path: Path, world: Any, network: Any, weighted: bool
) -> None:
    train = world.columns(512)
    valid = world.columns(256, 1)
    valid["item"] = np.where(np.arange(256) % 4 == 0, 1000 + valid["item"], valid["item"])
    columns = list(world.schema.columns)
    if weighted:
        columns.append(hb.Weight("w"))
    for rows in (train, valid):
        rows["w"] = 1.0 + rows["user"] % 3
    schema = hb.Schema(columns)
    data, new = (hb.Dataset(hb.sources.Memory(rows), schema, 64) for rows in (train, valid))
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    callbacks = [hb.callbacks.BestWeights("auc", mode="min"), hb.callbacks.Baselines()]
    history = model.fit(data, new, 4, callbacks, progress=False)
    assert history.kept.epoch < 4
    scores = model.predict(new)  # of the epoch that was kept
    is_new = np.isin(valid["item"], train["item"], invert=True)
    measured = history.new_ids["item"]
    assert measured["new"] == is_new.mean() >= 0.25
    for part, rows in (("known", ~is_new), ("new", is_new)):
        auc = hb.metrics.AUC()
        auc.update(scores[rows], valid["y"][rows], weight=valid["w"][rows] if weighted else None)
        assert measured[f"auc_{part}"] == pytest.approx(auc.eval(), abs=1e-9)
    assert "user" not in history.new_ids  # all are known
    page = write_report(tmp_path / "report.html", {"train": history}).read_text()
    assert "Known and new ids, train" in page
