# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a first day: each error says what is wrong and what to do, before training where it
can be seen then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from pathlib import Path

from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, DataError, SchemaError

TWO = hb.Schema([hb.Label("y"), hb.Label("z"), hb.Id("user"), hb.Id("item")])


class OwnLoss(nn.Module):
    """A network that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = hb.losses.BCE()(self.network(batch), batch.labels["y"])
        return loss


def two_labels(world: Any) -> hb.Dataset:
    columns = world.columns(64)
    return hb.Dataset(hb.sources.Memory({**columns, "z": columns["y"]}), TWO, 64)


def empty(world: Any) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(world.columns(0)), world.schema, 64)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda net, world: hb.RecModel(type(net), "bce"),
            "network: a class, got DCNv2. Pass an instance",
        ),
        (
            lambda net, world: hb.RecModel(net.forward, "bce"),
            "network: not an nn.Module, got method",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam", compile="default"),
            "compile: must be a Compile, got 'default'. Give such as hb.Compile(), or None.",
        ),
        (
            lambda net, world: hb.RecModel(net, compile=hb.Compile()),
            "compile: without an optimizer the network updates itself, got Compile(mode='default'",
        ),
        (
            lambda net, world: hb.RecModel(net, 3, "adam"),
            "loss_fn: must be a name, a loss or a function of (prediction, label), got 3. Give",
        ),
        (
            lambda net, world: hb.RecModel(net, {"y": ["bce"]}, "adam"),
            "loss_fn: must be a name, a loss or a function of (prediction, label), got ['bce']",
        ),
        (
            lambda net, world: hb.RecModel(net, nn.MSELoss, "adam"),
            "loss_fn: must be a name, a loss or a function of (prediction, label), got MSELoss, a",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", []),
            "optimizer: unknown optimizer, got []. Give a torch optimizer",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam", {"auc"}, eval_network=3),
            "eval_network: must be an nn.Module or a function of the items of a batch, got 3. Give",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam", {"auc"}, eval_network=type(net)),
            "eval_network: must be an nn.Module or a function of the items of a batch, got the cl",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam").fit([], epochs=1.5),
            "epochs: must be an integer >= 1, got 1.5. Give the number of passes",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam").fit([], max_steps=1.5),
            "max_steps: must be an integer >= 0, got 1.5. Give a number, or None",
        ),
        (
            lambda net, world: hb.RecModel(net, "bce", "adam").online_train([], max_seconds="9"),
            "max_seconds: must be at least 0, got '9'. Give a number, or None",
        ),
        (
            lambda net, world: hb.Dataset("a/b.csv", world.schema),
            "dataset.source: not a source, got 'a/b.csv'. Give hb.sources.Csv('a/b.csv').",
        ),
        (
            lambda net, world: hb.Dataset(Path("b.parquet"), world.schema),
            "Give hb.sources.Parquet('b.parquet').",
        ),
        (
            lambda net, world: hb.Dataset({"y": [1]}, world.schema),
            "dataset.source: not a source, got dict. Give a value of hb.sources",
        ),
        (
            lambda net, world: hb.Dataset(hb.sources.Memory({"y": [1]}), world.schema, seed=-1),
            "dataset.seed: must be an integer >= 0, got -1",
        ),
        (
            lambda net, world: hb.Dataset(hb.sources.Memory({"y": [1]}), world.schema, cache="no"),
            "dataset.cache: unknown value, got 'no'. Give one of True, False.",
        ),
        (
            lambda net, world: hb.Dataset(hb.sources.Memory({"y": [1]}), [hb.Label("y")]),
            "dataset.schema: expected a Schema, got list. Give hb.Schema",
        ),
    ],
)
def test_wrong_argument_is_named_with_the_right_one(
    wrong: Callable[..., Any], message: str, network: Any, world: Any
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        wrong(network(), world)


@pytest.mark.parametrize(
    ("loss", "received"),
    [
        (lambda prediction, label: None, "NoneType"),
        (lambda prediction, label: 1.0, "float"),
        (lambda prediction, label: prediction - label, "a tensor of shape [64]"),
    ],
)
def test_loss_that_is_not_one_number_is_an_error_that_says_so(
    loss: Callable[..., Any], received: str, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(), loss, "adam")
    message = f"loss_fn: <lambda> must return a tensor of one number, got {received}. Return"
    with pytest.raises(ConfigError, match=re.escape(message)):
        model.fit(dataset(64), progress=False)
    assert model.counters["steps"] == 0


def test_two_labels_for_a_network_of_one_output_are_an_error_before_anything_is_learned(
    world: Any,
) -> None:
    network = hb.models.DNN(TWO, hb.make_tables(TWO, 4), hidden=(4,))
    model = hb.RecModel(OneOutput(network), "bce", "adam", {"auc"})
    with pytest.raises(ConfigError, match="several labels and the network returns one output"):
        model.fit(two_labels(world), progress=False)
    assert model.counters["steps"] == 0
    model = hb.RecModel(OneOutput(network), {"y": "bce", "z": "bce"}, "adam")
    with pytest.raises(
        ConfigError, match=r"the network returns one output, got losses of \['y', 'z'\]"
    ):
        model.fit(two_labels(world), progress=False)


class OneOutput(nn.Module):
    """The first output of a network with several."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Any:
        outputs = self.network(batch)
        return next(iter(outputs.values())) if isinstance(outputs, dict) else outputs


def test_empty_data_are_an_error_and_empty_validation_data_before_training(
    dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    with pytest.raises(DataError, match="valid: no row to evaluate"):
        model.fit(dataset(64), empty(world), progress=False)
    assert model.counters["steps"] == 0
    with pytest.raises(DataError, match="valid: no row to evaluate"):
        model.online_train(dataset(64), valid=empty(world), progress=False)
    with pytest.raises(DataError, match="evaluate: no batch"):
        model.evaluate(empty(world))
    assert len(model.predict(empty(world))) == 0


@pytest.mark.parametrize("by", ["valid", "callback"])
def test_validation_data_without_a_column_or_of_another_type_are_an_error_before_training(
    by: str,
) -> None:
    schema = hb.Schema([hb.Label("label"), hb.Id("user")])
    data = hb.Dataset(hb.sources.Memory({"label": [0, 1], "user": [1, 2]}), schema)
    network = hb.models.LR(schema, hb.make_tables(schema, 1))
    model = hb.RecModel(network, "bce", "adam")
    for columns, message in (
        ({"user": [1]}, r"valid: columns \['label'\] are missing"),
        ({"label": [1], "user": ["a"]}, "valid: column 'user': it held integer values"),
    ):
        valid = hb.Dataset(hb.sources.Memory(columns), schema)
        callbacks = [hb.callbacks.Validate(data=valid)] if by == "callback" else []
        with pytest.raises(SchemaError, match=message):
            model.fit(data, None if callbacks else valid, callbacks=callbacks, progress=False)
        assert model.counters["steps"] == 0


def test_validation_of_a_network_that_returns_its_loss_is_rejected_before_training(
    dataset: Any, network: Any
) -> None:
    model = hb.RecModel(OwnLoss(network()), None, "adam")
    for callbacks in ([], [hb.callbacks.Validate(data=dataset(64, 7))]):
        valid = None if callbacks else dataset(64, 7)
        with pytest.raises(ConfigError, match="valid: nothing to compute"):
            model.fit(dataset(64), valid, callbacks=callbacks, progress=False)
        assert model.counters["steps"] == 0


def test_network_that_returns_its_loss_has_it_in_its_history(dataset: Any, network: Any) -> None:
    model = hb.RecModel(OwnLoss(network()), None, "adam")
    history = model.fit(dataset(640), epochs=2, progress=False)
    assert 0 < history.metrics["loss"] == history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert model.online_train(dataset(64), progress=False).metrics["loss"] > 0


def test_evaluation_before_training_is_logged(dataset: Any, network: Any, caplog: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    model.evaluate(dataset(64))
    assert "the model has learned nothing yet" in caplog.text
    caplog.clear()
    model.fit(dataset(64), dataset(64), progress=False)
    assert "learned nothing" not in caplog.text


def test_predict_of_a_dataset_without_a_dense_column_names_it(
    dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    model.fit(dataset(64), progress=False)
    ids = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
    with pytest.raises(SchemaError, match=r"the batch lacks the dense columns \['x'\], got \[\]"):
        model.predict(hb.Dataset(hb.sources.Memory(world.columns(64)), ids, 64))


def test_predict_of_none_says_what_to_give(network: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"data: neither a Dataset .* got NoneType\. Give hb\.Dataset"
    ):
        hb.RecModel(network(), "bce", "adam").predict(None)


def test_a_network_that_is_frozen_as_a_whole_is_an_error(dataset: Any, network: Any) -> None:
    frozen = network().requires_grad_(False)
    with pytest.raises(ConfigError, match="network: there is nothing to learn"):
        hb.RecModel(frozen, "bce", "adam").fit(dataset(64), progress=False)
