# SPDX-License-Identifier: Apache-2.0
"""Averages of dense weights are those of a loop of one's own, and what is scored, saved and served."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.job.job import Job, Tables
from hotbed.persist.container.format import open_checkpoint

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
DECAY = 0.8
SCHEMA = hb.Schema([hb.Label("y"), hb.Id("item"), hb.Dense("x")])


def data(seed: int = 0, rows: int = 160) -> hb.Dataset:
    draw = np.random.default_rng(seed)
    columns = {
        "y": draw.integers(0, 2, rows),
        "item": draw.integers(0, 20, rows),
        "x": draw.normal(size=rows).astype(np.float32),
    }
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, 32, prefetch=0)


def made(optimizer: str = "adam", average: float | None = DECAY) -> hb.RecModel:
    torch.manual_seed(1)
    network = hb.models.DNN(SCHEMA, hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.1)), hidden=(8,))
    return hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, average=average)


def made_by_job(average: float | None) -> hb.RecModel:
    """The same model, as a job describes it."""
    job = Job(
        schema=SCHEMA,
        train=hb.sources.Memory({"y": [], "item": [], "x": []}),
        model={"kind": "dnn", "hidden": [8]},
        tables=Tables(dim=4, rule=hb.Adagrad(lr=0.1)),
        optimizer="adam",
        metrics=["auc", "log_loss"],
        average=average,
    )
    return job.rec_model(SCHEMA)


def weights(network: torch.nn.Module) -> list[Any]:
    return [p.detach().clone() for p in hb.dense_parameters(network)]


MAKERS = {"adam": made, "sgd": partial(made, "sgd"), "job": made_by_job}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_network_has_the_averages_of_the_weights_of_a_plain_training(maker: str) -> None:
    plain = MAKERS[maker](average=None)
    averaged = MAKERS[maker](average=DECAY)
    expected: list[Any] = []
    for batch in data():
        assert plain.step(batch) == averaged.step(batch)
        now = weights(plain.network)
        if not expected:
            expected = now
        expected = [
            DECAY * before + (1 - DECAY) * one for before, one in zip(expected, now, strict=True)
        ]
        for mine, other in zip(weights(averaged.network), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    for name, table in plain.tables.items():
        assert (
            table.lookup(np.arange(20)).tolist()
            == averaged.tables[name].lookup(np.arange(20)).tolist()
        )
    copied = copy.deepcopy(plain.network)
    for parameter, value in zip(hb.dense_parameters(copied), expected, strict=True):
        parameter.data.copy_(value)
    scored = hb.RecModel(copied, "bce", None, {"auc", "log_loss"}).evaluate(data(1))
    assert averaged.evaluate(data(1)) == pytest.approx(scored, rel=1e-5)


def test_averages_are_saved_published_served_and_resumed(tmp_path: Path) -> None:
    whole, halves = made(), made()
    batches = list(data())
    for batch in batches[:3]:
        whole.step(batch)
        halves.step(batch)
    halves.save(tmp_path / "half")
    resumed = hb.load(tmp_path / "half")
    rows = {"item": np.arange(20), "x": np.linspace(-1, 1, 20, dtype=np.float32)}
    asked = hb.Dataset(hb.sources.Memory(rows), SCHEMA, 32)
    assert resumed.predict(asked).tolist() == whole.predict(asked).tolist()
    resumed.export(tmp_path / "exported")
    served = hb.InferenceSession(tmp_path / "exported").predict(rows)
    np.testing.assert_allclose(served, whole.predict(asked), rtol=0, atol=1e-6)
    for batch in batches[3:]:
        assert whole.step(batch) == resumed.step(batch)
    for mine, other in zip(weights(resumed.network), weights(whole.network), strict=True):
        assert torch.equal(mine, other)
    publish = hb.PublishDirectory(tmp_path / "published")
    save = hb.callbacks.Checkpoint(tmp_path / "states", every_steps=2, publish=publish)
    made().fit(data(), callbacks=[save], progress=False)  # which learns the same five batches
    server = hb.ParameterServer()
    server.load("m", tmp_path / "exported")
    published = hb.InferenceSession(server.load("m", open_checkpoint(tmp_path / "published", 5)))
    np.testing.assert_allclose(published.predict(rows), whole.predict(asked), rtol=0, atol=1e-6)


def test_a_batch_that_is_not_learned_leaves_the_averages() -> None:
    model = made()
    *good, bad = list(data())[:3]
    for batch in good:
        model.step(batch)
    before = weights(model.network)
    bad.dense["x"][0] = np.inf
    with pytest.raises(NonFiniteGradient):
        model.step(bad)

    class Failing:
        def on_gradients(self, run: Any) -> None:
            raise OSError("a callback of one's own")

    with pytest.raises(OSError, match="one's own"):
        model.fit(data(), callbacks=[Failing()], progress=False)
    for mine, other in zip(weights(model.network), before, strict=True):
        assert torch.equal(mine, other)


class Late(torch.nn.Module):
    """Two linear layers, of which the second one is used from a later step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(2, 1)
        self.second = torch.nn.Linear(2, 1)
        self.uses_both = False

    def forward(self, x: Any) -> Any:
        logits = self.first(x)
        return (logits + self.second(x) if self.uses_both else logits).squeeze(1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_average_begins_when_a_parameter_is_learned_for_the_first_time(optimizer: str) -> None:
    plain = hb.RecModel(Late(), "bce", optimizer)
    averaged = hb.RecModel(Late(), "bce", optimizer, average=DECAY)
    batch = (torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1.0, 0.0]))
    is_weight = []
    for uses_both in (False, True, True):
        for model in (plain, averaged):
            model.network.uses_both = uses_both
        assert plain.step(batch) == averaged.step(batch)
        second = averaged.network.second.weight
        is_weight.append(torch.equal(second, plain.network.second.weight))
    assert is_weight == [True, True, False]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"average": 1.0}, "average: must be a finite number > 0 and < 1, got 1.0"),
        ({"amp_level": "O3"}, "average: the average of torch.bfloat16 weights"),
        ({"optimizer": None}, "average: without an optimizer the network updates itself"),
    ],
)
def test_what_cannot_be_averaged_is_refused(keywords: dict[str, Any], message: str) -> None:
    network = hb.models.DNN(SCHEMA, hb.make_tables(SCHEMA, 4), hidden=(8,))
    settings: dict[str, Any] = {"optimizer": "adam", "average": 0.9, **keywords}
    with pytest.raises(ConfigError, match=message):
        hb.RecModel(network, "bce", **settings)
