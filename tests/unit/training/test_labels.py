# SPDX-License-Identifier: Apache-2.0
"""Labels that a loss cannot take are row errors before anything is learned; others are unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, DataError, DecodeError
from hotbed.training.step.criterion import Criterion


def events(labels: Sequence[Any], label: hb.Label | None = None, **arguments: Any) -> hb.Dataset:
    schema = hb.Schema([label or hb.Label("y"), hb.Id("user")])
    source = hb.sources.Memory({"y": list(labels), "user": list(range(len(labels)))})
    return hb.Dataset(source, schema, 2, **arguments)


def model(data: hb.Dataset, loss: Any, metrics: Any = None) -> hb.RecModel:
    return hb.RecModel(
        hb.models.LR(data.schema, hb.make_tables(data.schema, dim=1)), loss, "adam", metrics
    )


CROSS_ENTROPIES = [
    "bce",
    "focal",
    nn.BCEWithLogitsLoss(),
    nn.functional.binary_cross_entropy_with_logits,
]


@pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=["bce", "focal", "torch", "function"])
@pytest.mark.parametrize(("labels", "value"), [([0, 1, -1, 1], "-1"), ([1, 5, 3, 2], "5")])
def test_labels_outside_0_to_1_are_refused_by_a_cross_entropy(
    loss: Any, labels: list[int], value: str
) -> None:
    data = events(labels)
    message = rf"memory, row .: label 'y': the loss is a cross-entropy and needs labels from 0 to 1, got {value}"
    for use in ("fit", "online_train", "evaluate"):
        learner = model(data, loss)
        with pytest.raises(DecodeError, match=message):
            getattr(learner, use)(data, **({} if use == "evaluate" else {"progress": False}))
    assert len(model(data, loss).predict(data)) == 4  # labels are not read


@pytest.mark.parametrize("loss", [hb.losses.Softmax(), hb.losses.InBatchSoftmax()])
def test_labels_below_0_are_refused_by_a_softmax(loss: hb.losses.Loss) -> None:
    data = events([2, 0, -1, 1])
    for use in ("fit", "evaluate"):
        with pytest.raises(DataError, match="needs labels of at least 0, got -1"):
            getattr(model(data, loss), use)(data)


def test_labels_outside_0_to_1_are_left_out_where_bad_rows_are() -> None:
    data = events([0, 1, -1, 1, 5], on_error="skip")
    learner = model(data, "bce")
    learner.fit(data, progress=False)
    assert learner.counters["samples"] == 3
    assert data.skips.counts == {"value": 2}


def test_soft_labels_thresholds_and_other_losses_pass() -> None:
    for label, labels, loss in (
        (None, [0.0, 0.25, 1.0, 0.9], "bce"),
        (hb.Label("y", threshold=4), [1, 5, 3, 4], "bce"),
        (None, [1, 5, -3, 4], "mse"),
        (None, [1, 5, 0, 4], "softmax"),
    ):
        data = events(labels, label)
        learner = model(data, loss)
        learner.fit(data, progress=False)
        assert learner.counters["samples"] == 4


def test_each_label_is_held_to_its_own_loss() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, batch: Any) -> dict[str, Tensor]:
            user = batch.ids["user"].values
            return {"click": self.bias[0] + 0.0 * user, "rating": self.bias[1] + 0.0 * user}

    schema = hb.Schema([hb.Label("click"), hb.Label("rating"), hb.Id("user")])
    columns = {"click": [0, 1, 1], "rating": [5, 1, 3], "user": [1, 2, 3]}
    data = hb.Dataset(hb.sources.Memory(columns), schema, 2)
    losses = {"click": hb.losses.BCE(), "rating": hb.losses.MSE()}
    for loss in (losses, hb.losses.MultiTask(losses)):
        hb.RecModel(Two(), loss, "adam").fit(data, progress=False)
        assert Criterion(loss).unit_labels(["click", "rating"]) == ["click"]
    with pytest.raises(DecodeError, match="label 'rating'"):
        hb.RecModel(Two(), "bce", "adam").fit(data, progress=False)


def test_a_single_label_may_have_a_loss_by_name() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, batch: Any) -> dict[str, Tensor]:
            return {"rating": self.bias + 0.0 * batch.ids["user"].values}

    schema = hb.Schema([hb.Label("rating"), hb.Id("user")])
    data = hb.Dataset(hb.sources.Memory({"rating": [5, 1, 3], "user": [1, 2, 3]}), schema, 3)
    losses = {"rating": hb.losses.MSE()}
    for loss in (losses, hb.losses.MultiTask(losses)):
        model = hb.RecModel(One(), loss, "adam")
        assert model.fit(data, progress=False).metrics["loss"] == pytest.approx(35 / 3)


def test_a_positive_that_matches_nothing_ends_training_but_not_evaluation() -> None:
    data = events(["no", "yes", "no"], hb.Label("y", positive="Yes"))
    learner = model(data, "bce", {"log_loss"})
    with pytest.raises(DataError, match="none of 3 rows is positive='Yes'"):
        learner.fit(data, progress=False)
    assert learner.evaluate(events(["no"] * 3, hb.Label("y", positive="Yes")))["log_loss"] > 0


def test_labels_of_tuples_are_looked_at_in_the_first_batches() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, data: Tensor) -> Tensor:
            return self.layer(data)

    data = [(torch.zeros(3, 2), torch.tensor([1.0, -1.0, 1.0]))]
    with pytest.raises(
        DataError,
        match="label: the loss is a cross-entropy and needs labels from 0 to 1, got -1 to 1",
    ):
        hb.RecModel(Line(), "bce", "adam").fit(data, progress=False)
    hb.RecModel(Line(), "mse", "adam").fit(data, progress=False)


def test_several_labels_of_one_output_are_an_error_that_names_them() -> None:
    schema = hb.Schema([hb.Label("click"), hb.Label("buy"), hb.Id("user")])
    data = hb.Dataset(hb.sources.Memory({"click": [0, 1], "buy": [0, 1], "user": [1, 2]}), schema)
    with pytest.raises(
        ConfigError,
        match=r"several labels and the network returns one output, got labels \['buy', 'click'\]",
    ):
        model(data, "bce").fit(data, progress=False)


def test_evaluating_no_rows_is_an_error() -> None:
    data = events([0, 1])
    with pytest.raises(DataError, match="evaluate: no batch"):
        model(data, "bce").evaluate(hb.Dataset(data.source.slice(0, 0), data.schema))
    assert len(model(data, "bce").predict(hb.Dataset(data.source.slice(0, 0), data.schema))) == 0


def test_missing_labels_are_left_out_of_metrics_and_are_no_bad_rows() -> None:
    columns = {"label": [1, -1, 0, 1, -1, 0], "user": [1, 1, 2, 1, 2, 1]}
    known = {name: [values[k] for k in (0, 2, 3, 5)] for name, values in columns.items()}
    schema = hb.Schema([hb.Label("label"), hb.Id("user")])
    results = []
    for rows in (columns, known):
        torch.manual_seed(0)
        network = hb.models.LR(schema, hb.make_tables(schema, 1))
        metrics = {"auc", "accuracy", "calibration"}
        model = hb.RecModel(network, hb.losses.BCE(missing_below=0), "adam", metrics)
        data = hb.Dataset(hb.sources.Memory(rows), schema, 3)
        results.append({name: model.evaluate(data)[name] for name in sorted(metrics)})
        model.fit(data, progress=False)
    assert results[0] == results[1]
    with pytest.raises(DecodeError, match="label 'label'"):
        hb.RecModel(network, "bce", "adam").fit(
            hb.Dataset(hb.sources.Memory(columns), schema, 3), progress=False
        )
