# SPDX-License-Identifier: Apache-2.0
"""RecModel: the eight arguments of its page, and what they promise together."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, DataError, SchemaError
from hotbed.optim.unchanged import PATIENCE


class Line(nn.Module):
    """[n, 3] -> [n, 1], or its squared error when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, data: Tensor, *labels: Tensor) -> Tensor:
        out = self.layer(data)
        return (out.squeeze(1) - labels[0]).square().mean() if labels else out


def pairs(batches: int = 8, size: int = 32) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(size, 3)).astype(np.float32) for _ in range(batches)]
    return [(x, (x @ np.array([1.0, -1.0, 0.5]) > 0).astype(np.float32)) for x in data]


def quiet(model: hb.RecModel, data: Any, **keywords: Any) -> Any:
    return model.fit(data, progress=False, **keywords)


def test_metrics_need_a_loss_or_an_evaluation_network() -> None:
    with pytest.raises(ConfigError, match="metrics: nothing to compute them from"):
        hb.RecModel(Line(), None, "adam", {"auc"})


def test_an_unknown_optimizer_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'adam'"):
        hb.RecModel(Line(), "bce", "adm")


def test_an_optimizer_that_holds_rows_is_refused(network: Any) -> None:
    net = network()
    with pytest.raises(ConfigError, match=r"hb\.dense_parameters"):
        hb.RecModel(net, "bce", torch.optim.Adam(net.parameters()))


def test_an_unknown_level_is_an_error_that_names_the_levels() -> None:
    with pytest.raises(ConfigError, match="amp_level: unknown value"):
        hb.RecModel(Line(), "bce", "adam", amp_level="O4")


def test_amp_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="amp_level"):
        hb.RecModel(Line(), amp_level="O2")


def test_amp_auto_on_a_cpu_is_float32_and_says_so_once(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "hotbed"):
        model = hb.RecModel(Line(), "bce", "adam", amp_level="auto")
    assert model.learner.precision.compute is None
    assert len([r for r in caplog.records if "auto" in r.message]) == 1


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [("O1", "adam"), ("O2", "adam"), ("O3", "adam"), ("O3", hb.Momentum(lr=0.1))],
)
def test_bfloat16_training_learns_and_keeps_norms_stable(
    level: str, optimizer: Any, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(), "bce", optimizer, {"auc"}, amp_level=level)
    before = [parameter.detach().clone() for parameter in hb.dense_parameters(model.network)]
    quiet(model, dataset(2048), epochs=3)
    dense = {parameter.dtype for parameter in hb.dense_parameters(model.network)}
    assert dense == {torch.bfloat16 if level == "O3" else torch.float32}
    for parameter, start in zip(hb.dense_parameters(model.network), before, strict=True):
        # the weights of norms begin at 1, where small steps are lost in rounding
        assert parameter.ndim == 1 or not torch.equal(parameter, start)
    assert model.evaluate(dataset(512, 5))["auc"] > 0.75


def test_pairs_go_to_network_and_loss() -> None:
    model = hb.RecModel(Line(), nn.BCEWithLogitsLoss(), hb.Adam(lr=0.1), {"auc"})
    quiet(model, pairs(), epochs=5)
    assert model.evaluate(pairs())["auc"] > 0.98


def test_without_a_loss_all_items_go_to_the_network_which_returns_it() -> None:
    model = hb.RecModel(Line(), None, hb.Adam(lr=0.1))
    history = quiet(model, pairs(), epochs=5)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_without_an_optimizer_the_network_updates_itself() -> None:
    class Own(Line):
        def forward(self, data: Tensor, *labels: Tensor) -> Tensor:
            loss = super().forward(data, *labels)
            self.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter -= 0.1 * parameter.grad
            return loss.detach()

    model = hb.RecModel(Own())
    history = quiet(model, pairs(), epochs=5)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def warnings_of(caplog: Any) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("way", ["fit", "online_train", "step"])
def test_without_an_optimizer_a_network_that_never_changes_is_logged_once(
    way: str, caplog: Any
) -> None:
    model = hb.RecModel(Line(), "bce")
    for _ in range(2):
        if way == "step":
            for pair in pairs(batches=60, size=4):
                model.step(pair)
        else:
            getattr(model, way)(pairs(), progress=False)
    (message,) = warnings_of(caplog)
    steps = {"fit": 8, "online_train": 8, "step": PATIENCE}[way]
    expected = f"network: layer.weight, layer.bias did not change in {steps} steps"
    assert message.startswith(expected)
    assert "give RecModel an optimizer such as 'adam'" in message


def test_tables_that_never_change_are_named_too(dataset: Any, network: Any, caplog: Any) -> None:
    quiet(hb.RecModel(network(), "bce"), dataset(64))
    (message,) = warnings_of(caplog)
    assert "table 'user', table 'item'" in message


def test_parameters_that_the_optimizer_does_not_hold_are_logged_once_by_name(caplog: Any) -> None:
    line = Line()
    model = hb.RecModel(line, "bce", torch.optim.SGD([line.layer.weight], lr=0.1))
    for _ in range(2):
        quiet(model, pairs())
    (message,) = warnings_of(caplog)
    assert "optimizer: it does not hold the parameters layer.bias, which stay" in message
    caplog.clear()
    line.layer.bias.requires_grad_(False)
    quiet(hb.RecModel(line, "bce", "sgd"), pairs())
    assert not warnings_of(caplog)


def test_a_parameter_that_is_unfrozen_later_is_logged(caplog: Any) -> None:
    line = Line()
    line.layer.bias.requires_grad_(False)
    model = hb.RecModel(line, "bce", "sgd")
    quiet(model, pairs())
    assert not warnings_of(caplog)
    line.layer.bias.requires_grad_(True)
    quiet(model, pairs())
    assert "does not hold the parameters layer.bias" in caplog.text


def test_three_items_with_a_loss_function_are_an_error() -> None:
    model = hb.RecModel(Line(), "mse", "sgd")
    with pytest.raises(DataError, match="got 3 items"):
        quiet(model, [(*pairs(1)[0], np.ones(32, np.float32))])


def test_an_iterator_cannot_be_trained_on_twice() -> None:
    with pytest.raises(ConfigError, match="an iterator can be read once"):
        quiet(hb.RecModel(Line(), "bce", "adam"), iter(pairs()), epochs=2)


@pytest.mark.parametrize(
    "given",
    [
        hb.sources.Memory({"x": [1.0]}),
        hb.sources.Memory({"x": [1.0]}).slice(0.0, 1.0),
        "train.csv",
        Path("train.csv"),
        pa.table({"x": [1.0]}),
        pl.DataFrame({"x": [1.0]}),
        {"x": [1.0]},
        None,
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_dataset_is_an_error_that_says_to_make_one(given: Any) -> None:
    model = hb.RecModel(Line(), "bce", "adam", {"auc"})
    received = repr(given) if isinstance(given, (str, Path)) else type(given).__name__
    told = rf"got {re.escape(received)}\. Give hb\.Dataset\(source, schema\)\."
    calls: list[Callable[[], Any]] = [
        lambda: quiet(model, given),
        lambda: quiet(model, given, epochs=2),
        lambda: model.evaluate(given),
        lambda: model.predict(given),
        lambda: model.online_train(given, progress=False),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=told):
            call()
    if given is not None:
        with pytest.raises(ConfigError, match="valid: .*" + told):
            quiet(model, pairs(), valid=given)
    assert model.counters["steps"] == 0


def test_one_batch_is_no_dataset_to_learn_from() -> None:
    with pytest.raises(
        ConfigError, match="train: neither a Dataset nor an iterable of batches, got Batch"
    ):
        quiet(
            hb.RecModel(_Dense(), "bce", "adam"),
            hb.Batch({}, {"x": pairs(1)[0][0]}, {"y": pairs(1)[0][1]}),
        )


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_dataset_is_learned_from_where_it_was_and_then_from_the_start(
    dataset: Any, network: Any, epochs: int
) -> None:
    positions = [batch.position for batch in dataset(640)]
    model = hb.RecModel(network(), "bce", "adam")
    quiet(model, dataset(640).resume(positions[6]), epochs=epochs)
    assert model.counters["samples"] == [192, 192 + 640][epochs - 1]


def test_all_outputs_of_an_evaluation_network_go_to_every_metric() -> None:
    def judge(data: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(0.25), label, data.sum(1)

    metrics = {"auc": hb.metrics.AUC().set_indexes([2, 1])}
    assert (
        hb.RecModel(Line(), "bce", "adam", metrics, eval_network=judge).evaluate(pairs())["auc"]
        > 0.5
    )


def test_several_labels_have_losses_and_metrics_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, batch: hb.Batch) -> dict[str, Tensor]:
            return {"click": self.a(batch.dense["x"]), "spend": self.b(batch.dense["x"])}

    data = [hb.Batch({}, {"x": x}, {"click": y, "spend": x[:, 0]}) for x, y in pairs()]
    losses = {"click": "bce", "spend": hb.losses.MSE()}
    model = hb.RecModel(Two(), losses, hb.Adam(lr=0.05), {"click": {"auc"}})
    quiet(model, data, epochs=10)
    assert set(model.evaluate(data)) == {"loss", "click.auc"}
    predicted = model.predict(data)
    assert set(predicted) == {"click", "spend"}
    assert 0.0 < predicted["click"].min() < predicted["click"].max() < 1.0
    assert predicted["spend"].min() < 0.0
    both = hb.RecModel(
        Two(),
        hb.losses.MultiTask({"click": hb.losses.BCE(), "spend": hb.losses.BCE()}),
        "adam",
        {"auc"},
    )
    assert set(
        both.evaluate([hb.Batch({}, {"x": x}, {"click": y, "spend": y}) for x, y in pairs()])
    ) == {"loss", "click.auc", "spend.auc"}
    with pytest.raises(ConfigError, match="has no label or no loss"):
        quiet(hb.RecModel(Two(), {"click": "bce"}, "adam"), data)


@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(), nn.functional.mse_loss])
def test_a_weight_of_two_is_the_sample_twice(loss: Any) -> None:
    (x, y), half = pairs(1)[0], 16
    weight = np.where(np.arange(32) < half, 2.0, 0.0).astype(np.float32)
    model = hb.RecModel(_Dense(), loss, hb.Sgd(lr=0.1), {"accuracy"})
    weighted = [hb.Batch({}, {"x": x}, {"y": y}, weight=weight)]
    # torch's function takes a weight, of another kind, from 2.5 on
    if loss is nn.functional.mse_loss:
        quiet(model, weighted)
        return
    twice = [hb.Batch({}, {"x": np.tile(x[:half], (2, 1))}, {"y": np.tile(y[:half], 2)})]
    assert model.evaluate(weighted) == pytest.approx(model.evaluate(twice))
    quiet(model, weighted)
    other = hb.RecModel(_Dense(), loss, hb.Sgd(lr=0.1))
    quiet(other, twice)
    for a, b in zip(model.network.parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_that_takes_no_weight_is_refused_where_data_carry_weights() -> None:
    data = [hb.Batch({}, {"x": x}, {"y": y}, weight=y) for x, y in pairs(1)]
    model = hb.RecModel(_Dense(), lambda outputs, labels: (outputs - labels).mean(), "sgd")
    with pytest.raises(ConfigError, match="takes no weight"):
        quiet(model, data)


class _Dense(Line):
    def forward(self, batch: Any, *labels: Tensor) -> Tensor:
        return self.layer(batch.dense["x"])


def test_predictions_are_probabilities_in_the_order_of_the_data(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    data = dataset(300)
    scores = model.predict(data)
    assert scores.dtype == np.float32
    assert scores.shape == (300,)
    assert ((scores > 0) & (scores < 1)).all()
    np.testing.assert_array_equal(scores[:64], model.predict(next(iter(data))))


def test_predicting_needs_the_features_only(dataset: Any, network: Any, world: Any) -> None:
    """Labels, weights and times may be absent or not what they should be; those that are there
    change no score.
    """
    schema = hb.Schema([*world.schema.columns, hb.Weight("w")])
    columns = {**world.columns(300), "w": np.ones(300)}
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    whole = hb.Dataset(hb.sources.Memory(columns), schema, 64)
    quiet(model, whole)
    scores = model.predict(whole)
    for changes in (
        {"y": None, "w": None, "t": None},
        {"y": None},
        {"y": ["?"] * 300, "w": [-1.0] * 300},
    ):
        given = {
            name: values for name, values in {**columns, **changes}.items() if values is not None
        }
        source = hb.sources.Memory(given)
        np.testing.assert_array_equal(
            model.predict(hb.Dataset(source, schema, 64, on_error="skip")), scores
        )
    with pytest.raises(SchemaError, match=r"columns \['y'\] are missing"):
        model.evaluate(
            hb.Dataset(hb.sources.Memory({k: v for k, v in columns.items() if k != "y"}), schema)
        )


def test_predicting_leaves_the_dataset_where_it_is(dataset: Any, network: Any) -> None:
    model, data = hb.RecModel(network(), "bce", "adam"), dataset(640)
    data.resume([batch.position for batch in data][6])
    assert len(model.predict(data)) == 192
    assert sum(batch.num_samples for batch in data) == 192


def test_evaluation_and_prediction_change_nothing(dataset: Any, network: Any, world: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    quiet(model, dataset(512))
    before = world.snapshot(model)
    stats = {name: table.stats for name, table in model.tables.items()}
    model.evaluate(dataset(512, 7))
    model.predict(dataset(512, 8))
    assert world.same(before, world.snapshot(model))
    assert stats == {name: table.stats for name, table in model.tables.items()}


def test_metrics_within_groups_read_an_id_column(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"gauc@user"})
    quiet(model, dataset(2048), epochs=2)
    assert 0.5 < model.evaluate(dataset(512, 5))["gauc@user"] <= 1.0
    with pytest.raises(ConfigError, match="the Id column 'shop' to group by is missing"):
        hb.RecModel(network(), "bce", "adam", {"gauc@shop"}).evaluate(dataset(64))


def test_the_same_seed_gives_the_same_bits(dataset: Any, network: Any, world: Any) -> None:
    states = []
    for _ in range(2):
        model = hb.RecModel(network(), "bce", "adam")
        torch.manual_seed(11)
        quiet(model, dataset(512), epochs=2)
        states.append(world.snapshot(model))
    assert world.same(*states)


def test_progressive_training_scores_each_batch_before_it_learns_it(
    dataset: Any, network: Any
) -> None:
    seen: list[np.ndarray] = []

    class Peek:
        """Scores the next batch as a server would, right after each step."""

        def __init__(self, batches: list[hb.Batch]) -> None:
            self.batches = batches

        def on_step_end(self, run: Any) -> None:
            if run.step < len(self.batches):
                seen.append(run.model.predict(self.batches[run.step]))

    batches = list(dataset(640))
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    seen.append(model.predict(batches[0]))
    history = model.fit(batches, progressive=True, callbacks=Peek(batches), progress=False)
    metric = hb.metrics.AUC()
    metric.update(np.concatenate(seen), np.concatenate([batch.labels["y"] for batch in batches]))
    assert history.metrics["auc"] == metric.eval()
    assert len(history.points) == len(batches)
    assert [point.time for point in history.points] == [int(batch.time.max()) for batch in batches]


def test_summary_prints_and_returns_parameters_tables_and_settings(
    network: Any, dataset: Any, capsys: Any
) -> None:
    tower = network(admit=hb.MinCount(2), capacity=99)
    model = hb.RecModel(tower, "bce", hb.Adam(lr=0.01), ["auc"])
    quiet(model, dataset(256))
    text = model.summary()
    assert capsys.readouterr().out == text + "\n"
    for part in (
        "DCNv2",
        "dense parameters",
        "user",
        "item",
        "adagrad(lr=0.1)",
        "min_count(count=2), capacity 99",
        "adam(lr=0.01)",
    ):
        assert part in text


@pytest.mark.torch_core
def test_a_compiled_network_learns_as_the_plain_one_and_evaluates_uncompiled(
    dataset: Any, network: Any
) -> None:
    """Compiled by a backend that needs no compiler, so that this runs anywhere; graph breaks would
    be errors.
    """
    scores = []
    for compiles in (None, hb.Compile(backend="aot_eager", fullgraph=True)):
        model = hb.RecModel(network(), "bce", "adam", {"auc"}, compile=compiles)
        quiet(model, dataset(256))
        scores.append(model.predict(dataset(128, 4)))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


def test_network_that_was_moved_after_its_model_was_made_is_refused(
    dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    model.network.to("meta")
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ConfigError, match=r"moved after the model .* on meta .* on cpu"):
            call(dataset(64))


def test_generators_of_absent_devices_are_left_out_and_logged(caplog: Any) -> None:
    states = {"cpu": torch.default_generator.get_state(), "cuda:7": torch.zeros(16)}
    states["other:0"] = torch.zeros(16)
    torch.rand(3)
    hb.checkpoints.set_random_state(states)
    assert torch.equal(torch.default_generator.get_state(), states["cpu"])
    for name in ("cuda:7", "other:0"):
        assert f"generator of {name}, which is absent here" in caplog.text
