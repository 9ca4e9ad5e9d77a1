# SPDX-License-Identifier: Apache-2.0
"""Runs of a model with grains: what is scored, what a job sets, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.job import run
from hotbed.optim.precision import AmpPrecision
from hotbed.training.step.division import Division
from hotbed.training.step.learner import StepLearner

Made = Callable[..., Any]


def model_of(network: nn.Module, grains: int = 4, **arguments: Any) -> hb.RecModel:
    return hb.RecModel(network, **{"loss_fn": "bce"} | arguments, optimizer="adam", grains=grains)


def cut(batch: hb.Batch, grains: int) -> Iterator[hb.Batch]:
    ends = [len(batch) * grain // grains for grain in range(grains + 1)]
    for first, last in itertools.pairwise(ends):
        if first < last:
            yield batch[first:last].map_arrays(np.copy)


def same_in_both_modes(schema: hb.Schema) -> nn.Module:
    """A network without batch norm and dropout."""
    torch.manual_seed(4)
    return hb.models.DCNv2(schema, hb.make_tables(schema, 4, rule=hb.Sgd(lr=0.1)), hidden=(8,))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- scores ---------------------------------------------------------------------------------------


def test_batches_are_scored_as_their_grains_would_be(
    dataset: Made, network: Made, tmp_path: Path
) -> None:
    metrics = {"auc", "log_loss"}
    model = model_of(network(), metrics=metrics)
    train = dataset(400)
    model.fit(train, progress=False)
    assert train.grains == 4
    model.save(tmp_path)
    assert hb.load(tmp_path).grains == 4
    whole = model_of(network(), 1, metrics=metrics)
    whole.restore(tmp_path, allow=["grains"])
    every = list(dataset(130, seed=2, batch_size=50))  # the last batch has 30 rows
    grains = [grain for batch in every for grain in cut(batch, 4)]
    assert model.evaluate(every) == whole.evaluate(grains)
    assert (model.predict(every) == whole.predict(grains)).all()
    scores = model.predict(train)  # it stays divided, and the scores are in the order of its rows
    np.testing.assert_allclose(scores, whole.predict(dataset(400)), rtol=1e-6)
    assert train.grains == 4


@pytest.mark.parametrize("weighted", [False, True])
def test_the_training_forward_gives_the_scores_of_each_grain(
    weighted: bool, dataset: Made, world: Any
) -> None:
    """In a network that is the same in both modes these are the scores before the step."""
    columns: list[Any] = [hb.Label("y"), hb.Id("user"), hb.Id("item"), hb.Dense("x")]
    if weighted:
        columns.append(hb.Weight("w"))
    schema = hb.Schema(columns)
    rows = {**world.columns(200), "w": np.linspace(0.5, 2, 200, dtype=np.float32)}
    results: list[Any] = []

    class Results:
        def on_stream_end(self, run: Any) -> None:
            results.append(run.observer.total.results())

    for progressive in (True, "training"):
        model = model_of(same_in_both_modes(schema), metrics={"auc"})
        data = hb.Dataset(hb.sources.Memory(rows), schema, 50)
        model.online_train(data, [Results()], progressive=progressive, progress=False)
    assert results[0] == results[1]
    assert results[0].keys() == {"loss", "auc"}


# --- half precision -------------------------------------------------------------------------------


def test_a_loss_scale_is_taken_back_and_falls_where_one_grain_overflows(
    dataset: Made, network: Made, world: Any
) -> None:
    def learned(*, scaled: bool) -> hb.RecModel:
        model = model_of(network())
        plain: Any = model.learner
        precision = AmpPrecision(torch.bfloat16, scaled=scaled)
        model.learner = StepLearner(
            model.network,
            plain.criterion,
            plain.dense,
            plain.sparse,
            precision=precision,
            way=Division(4),
        )
        model.fit(every, progress=False)
        return model

    every = list(dataset(256))
    plain, scaled = learned(scaled=False), learned(scaled=True)
    # a scale is a power of two
    assert world.same(world.snapshot(plain), world.snapshot(scaled))
    before = world.snapshot(scaled)
    bad = every[0].map_arrays(np.copy)  # ids that have rows: a map is no update
    bad.dense["x"][40] = np.inf
    scale = scaled.learner.state()["scaler"]["scale"]
    scaled.step(bad)
    assert scaled.learner.skipped == 1
    assert scaled.learner.state()["scaler"]["scale"] == scale / 2
    assert world.same(world.snapshot(scaled), before)
    with pytest.raises(NonFiniteGradient):
        plain.step(bad)


# --- jobs -----------------------------------------------------------------------------------------


def test_a_job_says_its_grains_and_has_one_thread(tmp_path: Path, torch_threads: None) -> None:
    user = np.arange(200) % 20
    pq.write_table(pa.table({"y": user % 2, "user": user}), tmp_path / "rows.parquet")
    job = hb.Job(
        schema=hb.Schema([hb.Label("y"), hb.Id("user")]),
        model="lr",
        train=hb.sources.Parquet(str(tmp_path / "rows.parquet")),
        output=str(tmp_path / "out"),
        grains=4,
    )
    with pytest.raises(ConfigError, match="grains: must be a power of two, got 6"):
        replace(job, grains=6)
    torch.set_num_threads(2)
    learned = run.train(job)
    assert torch.get_num_threads() == 1
    assert learned.model.grains == 4
    assert "\ngrains: 4" in Path(learned.report).read_text()  # the summary
    assert hb.load(job.output).grains == 4


# --- what is refused ------------------------------------------------------------------------------


def test_what_a_model_with_grains_cannot_take_is_refused_by_name(
    dataset: Made, network: Made
) -> None:
    model = model_of(network())
    with pytest.raises(ConfigError, match="grains: must be a power of two, got 12"):
        model_of(network(), 12)
    with pytest.raises(ConfigError, match="4 grains and a network that updates itself"):
        hb.RecModel(network(), "bce", grains=4)
    with pytest.raises(ConfigError, match="4 grains and a compiled network"):
        model_of(network(), compile=hb.Compile())
    with pytest.raises(ConfigError, match=r"Ahead.torch_threads.*2 threads and 4 grains"):
        model.fit(hb.Ahead(dataset(), torch_threads=2))
    mapped = next(iter(hb.Ahead(dataset(), model.network)))
    with pytest.raises(ConfigError, match=r"mapped as a whole. Give hb.Ahead\(train\) to fit"):
        model.step(mapped)
    divided = dataset()
    divided.divide(2)
    with pytest.raises(ConfigError, match=r"has 4, got a batch of 2. Call dataset.divide\(4\)"):
        model.step(next(iter(divided)))
