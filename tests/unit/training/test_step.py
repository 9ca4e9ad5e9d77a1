# SPDX-License-Identifier: Apache-2.0
"""A loop of single steps gives the bits of `fit`, also when it is saved and resumed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.training.run import Run
from hotbed.training.step.learner import StepLearner

Make = Callable[..., Any]


def pairs(rows: int = 256, labels: tuple[str, ...] = ()) -> list[tuple[Any, Any]]:
    """Batches of 32 as tuples; one label as an array, several by name."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.float32)
    batches = []
    for start in range(0, rows, 32):
        part = slice(start, start + 32)
        target: Any = y[part]
        if labels:
            target = {name: y[part] for name in labels}
        batches.append((x[part], target))
    return batches


class Heads(nn.Module):
    """One logit for each label, after a batch norm and a dropout."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.heads = nn.ModuleDict({label: nn.Linear(8, 1) for label in labels})

    def forward(self, data: torch.Tensor) -> Any:
        body = self.body(data)
        logits = {label: head(body) for label, head in self.heads.items()}
        if len(logits) == 1:
            return next(iter(logits.values()))
        return logits


def heads(*labels: str) -> nn.Module:
    torch.manual_seed(5)
    return Heads(labels)


def learned_step_by_step(model: hb.RecModel, batches: Any) -> list[float]:
    torch.manual_seed(11)
    return [model.step(batch) for batch in batches]


def fitted(model: hb.RecModel, batches: Any) -> hb.RecModel:
    torch.manual_seed(11)
    model.fit(batches, progress=False)
    return model


@pytest.mark.parametrize("kind", ["tables", "tuples", "labels", "amp", "self updating"])
def test_steps_give_the_bits_of_a_fit(kind: str, dataset: Make, network: Make, world: Any) -> None:
    def model_and_batches() -> tuple[hb.RecModel, Any]:
        if kind == "tables":
            return hb.RecModel(network(admit=hb.MinCount(2)), "bce", "adam"), dataset(512)
        if kind == "labels":
            return hb.RecModel(heads("a", "b"), "bce", "adam"), pairs(labels=("a", "b"))
        if kind == "amp":
            return hb.RecModel(network(), "bce", "adam", amp_level="O1"), dataset(512)
        if kind == "tuples":
            return hb.RecModel(heads("a"), "bce", "sgd"), pairs()
        torch.manual_seed(5)
        return hb.RecModel(UpdatesItself()), pairs()

    whole, batches = model_and_batches()
    fitted(whole, batches)
    model, batches = model_and_batches()
    losses = learned_step_by_step(model, batches)
    assert world.same(world.snapshot(model), world.snapshot(whole))
    assert model.counters == {**whole.counters, "epochs": 0}
    assert all(np.isfinite(losses))
    assert len(set(losses)) == len(losses)


class UpdatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        error = self.linear(data).squeeze(1) - label
        loss = error.square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss


def test_an_evaluation_batch_by_batch_gives_the_bits_of_evaluate(
    dataset: Make, network: Make
) -> None:
    model = hb.RecModel(network(), "bce", "adam", metrics={"auc", "log_loss"})
    model.fit(dataset(256), progress=False)
    evaluation = hb.Evaluation(model)
    assert evaluation.results() == {}
    for batch in dataset(128):
        evaluation.add(batch)
    assert evaluation.results() == model.evaluate(dataset(128))
    model.fit(dataset(256), progress=False)  # later batches are scored by the model of then
    evaluation.add(next(iter(dataset(128))))
    assert evaluation.results() != hb.Evaluation(model).results()


def test_step_returns_the_loss_of_the_batch_before_it_is_learned(
    dataset: Make, network: Make
) -> None:
    net = network()
    model = hb.RecModel(net, "bce", "adam")
    for batch in dataset(256):
        tensors = batch.map_arrays(torch.from_numpy)
        net.train()
        logits = net(tensors).squeeze(-1)
        wanted = hb.losses.BCE()(logits, tensors.labels["y"]).item()
        loss = model.step(batch)
        assert isinstance(loss, float)
        assert loss == pytest.approx(wanted, abs=1e-6)


def test_steps_resume_from_a_save_with_the_same_bits(
    dataset: Make, network: Make, world: Any, tmp_path: Path
) -> None:
    """The rates change at every step; evaluation between two steps changes nothing."""

    def learn(model: hb.RecModel, data: Any, steps: int) -> Any:
        position = None
        for _, batch in zip(range(steps), data, strict=False):
            number = model.counters["steps"]
            model.dense_learning_rate = 0.01 / (1 + number)
            model.table_learning_rates = 0.2 / (1 + number)
            model.step(batch)
            position = batch.position
        return position

    whole = hb.RecModel(network(), "bce", "adam", {"auc"})
    learn(whole, dataset(1024), 16)
    first = hb.RecModel(network(), "bce", "adam", {"auc"})
    position = learn(first, dataset(1024), 7)
    first.evaluate(dataset(256))
    first.save(tmp_path)
    second = hb.load(tmp_path)
    assert second.dense_learning_rate == 0.01 / 7
    assert second.table_learning_rates == {"user": 0.2 / 7, "item": 0.2 / 7}
    learn(second, dataset(1024).resume(position), 9)
    assert world.same(world.snapshot(second), world.snapshot(whole))
    assert second.counters == whole.counters


def test_step_restores_the_modes_of_the_network(dataset: Make, network: Make) -> None:
    net = network().eval()
    seen = []
    net.register_forward_hook(lambda module, inputs, outputs: seen.append(module.training))
    model = hb.RecModel(net, "bce", "adam")
    for batch in dataset(128):
        model.step(batch)
    assert seen == [True, True]
    assert not any(module.training for module in net.modules())
    net.train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    flags = [module.training for module in net.modules()]
    model.step(batch)
    assert [module.training for module in net.modules()] == flags


def test_failed_step_changes_nothing_and_the_next_one_learns(
    dataset: Make, network: Make, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    batches = list(dataset(256))
    model.step(batches[0])
    before = world.snapshot(model)
    bad = batches[0].map_arrays(np.copy)
    bad.dense["x"][3] = np.nan
    with pytest.raises(NonFiniteGradient):
        model.step(bad)
    assert world.same(world.snapshot(model), before)
    assert model.counters["steps"] == 1
    model.step(batches[0])
    assert model.counters == {"epochs": 0, "steps": 2, "samples": 128}


def test_gradients_that_wait_are_dropped_before_a_step(
    dataset: Make, network: Make, world: Any
) -> None:
    batch = next(iter(dataset(64)))
    model = hb.RecModel(network(), "bce", "adam")
    model.step(batch)
    other = hb.RecModel(network(), "bce", "adam")
    for parameter in hb.dense_parameters(other.network):
        parameter.grad = torch.ones_like(parameter)
    other.step(batch)
    assert world.same(world.snapshot(other), world.snapshot(model))


def test_skipped_batch_is_counted_as_fit_counts_it(world: Any) -> None:
    """A learner whose scale overflows at the second batch: it is skipped, and steps go on."""

    def skipping() -> hb.RecModel:
        model = hb.RecModel(heads("a"), "bce", "sgd")
        learner = model.learner
        assert isinstance(learner, StepLearner)
        finite = learner.gradients_are_finite
        answers = iter([True, False, True, True, True, True, True, True])

        def answer() -> bool:
            if next(answers):
                return finite()
            learner.forget()
            learner.skipped += 1
            return False

        learner.gradients_are_finite = answer  # type: ignore[method-assign]
        return model

    whole = fitted(skipping(), pairs())
    model = skipping()
    learned_step_by_step(model, pairs())
    assert world.same(world.snapshot(model), world.snapshot(whole))
    assert model.learner.skipped == whole.learner.skipped == 1


def test_model_of_steps_knows_the_types_of_the_raw_columns(dataset: Make, network: Make) -> None:
    data = dataset(128)
    stepped = hb.RecModel(network(), "bce", "adam")
    for batch in data:
        stepped.step(batch)
    model = hb.RecModel(network(), "bce", "adam")
    model.fit(dataset(128), progress=False)
    assert stepped.state().schema == model.state().schema
    assert stepped.state().schema["types"] != {}


def test_learning_rates_are_set_for_the_next_step(dataset: Make, network: Make, world: Any) -> None:
    net = network()
    model = hb.RecModel(net, "bce", "adam")
    batches = list(dataset(256))
    model.step(batches[0])
    before = world.snapshot(model)
    weights = {name: value.clone() for name, value in net.named_parameters()}
    model.dense_learning_rate = 0.0
    model.table_learning_rates = 0.0
    model.step(batches[0])
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    after = world.snapshot(model)
    values = [name for name in before if name.endswith("/value")]
    assert values
    assert all(torch.equal(after[name], before[name]) for name in values)
    model.table_learning_rates = 0.5
    assert model.dense_learning_rate == 0.0
    model.table_learning_rates = {"user": 0.25, "item": 0.25}
    assert model.table_learning_rates == {"user": 0.25, "item": 0.25}


def test_rates_of_tables_are_set_by_name(world: Any) -> None:
    tables = {
        "user": hb.Table("user", 4, rule=hb.Adagrad(lr=0.1)),
        "item": hb.Table("item", 4, rule=hb.Sgd(lr=0.2)),
    }
    model = hb.RecModel(hb.models.DNN(world.schema, tables, hidden=[4]), "bce", "adam")
    model.table_learning_rates = {"item": 0.05}
    assert model.table_learning_rates == {"user": 0.1, "item": 0.05}


def test_mistakes_are_named(dataset: Make, network: Make) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    with pytest.raises(ConfigError, match=r"step: not a batch, got Dataset\. Give one batch"):
        model.step(dataset(64))
    with pytest.raises(ConfigError, match=r"step: not a batch, got NoneType"):
        model.step(None)
    with pytest.raises(ConfigError, match=r"no table has this name, got 'users'.*'user'"):
        model.table_learning_rates = {"users": 0.1}
    with pytest.raises(ConfigError, match=r"share a rate, got \{'user': 0\.1\}"):
        model.table_learning_rates = {"user": 0.1}
    with pytest.raises(ConfigError, match=r"dense parameters: must be a finite number >= 0"):
        model.dense_learning_rate = -1.0
    with pytest.raises(ConfigError, match=r"rate of table 'user': must be a finite number >= 0"):
        model.table_learning_rates = float("nan")
    plain = hb.RecModel(heads("a"), "bce")
    assert plain.dense_learning_rate is None
    assert plain.table_learning_rates == {}
    with pytest.raises(ConfigError, match=r"dense_learning_rate: the model has no optimizer that"):
        plain.dense_learning_rate = 0.1
    with pytest.raises(ConfigError, match=r"table_learning_rates: the model has no optimizer"):
        plain.table_learning_rates = 0.1


def test_a_step_of_fit_waits_twice_for_what_a_device_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For whether gradients are finite, and for the loss; labels are checked in ten batches."""
    reads: list[str] = []
    steps: list[list[str]] = []

    def counted(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def count(tensor: torch.Tensor) -> Any:
            reads.append(name)
            return read(tensor)

        return count

    class Steps:
        def on_step_end(self, run: Run) -> None:
            steps.append(reads.copy())
            reads.clear()

    schema = hb.Schema([hb.Label("y"), hb.Id("item"), hb.Dense("price")])
    rows = {"y": np.arange(64) % 2, "item": np.arange(64) % 9, "price": np.ones(64, np.float32)}
    network = hb.models.DNN(schema, hb.make_tables(schema, 4), hidden=[4])
    model = hb.RecModel(network, "bce", "adam", {"auc"})
    data = hb.Dataset(hb.sources.Memory(rows), schema, 4, prefetch=0)
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    model.fit(data, callbacks=[Steps()], progress=False)
    assert [sorted(names) for names in steps[11:]] == [["__float__", "item"]] * 5
