# SPDX-License-Identifier: Apache-2.0
"""What mindspore_parameters.yaml says holds, where test_mindspore_page and _map do not show it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from parameter_pages import MINDSPORE

import hotbed as hb
from hotbed.compat import mindspore_rec as ms
from hotbed.compat.mindspore_rec import no_effect as ms_no_effect


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.weight(x).squeeze(-1)


def test_unknown_arguments_are_errors() -> None:
    for name in ("loss_scale_manager", "keep_batchnorm_fp32", "anything"):
        with pytest.raises(TypeError, match=name):
            ms.RecModel(Line(), "bce", "adam", **{name: None})


def test_data_may_train_several_models() -> None:
    data = [(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))] * 3
    for _ in range(2):
        model = ms.RecModel(Line(), "bce", "adam")
        model.online_train(data, dataset_sink_mode=False)
        assert model.engine.counters["steps"] == 3


def test_large_batches() -> None:
    batch = (torch.ones(1 << 16, 1), torch.ones(1 << 16))
    model = ms.RecModel(Line(), "bce", "adam")
    model.online_train([batch], dataset_sink_mode=False)
    assert model.engine.counters["samples"] == 1 << 16


def test_export_of_admitted_keys() -> None:
    lookup = ms.HashEmbeddingLookup(2, permit_filter_value=2)
    optimizer = hb.SparseOptimizer(lookup)
    for keys in ([1, 2], [1]):
        rows = lookup(torch.tensor(keys))
        if rows.requires_grad:
            rows.sum().backward()
        optimizer.step()
    assert lookup.embedding_table.export_data().keys.tolist() == [1]


def test_environment_is_not_read() -> None:
    section = next(s for s in MINDSPORE.sections if s["title"].startswith("Embedding cache"))
    door = Path(ms.__file__).parent
    text = "".join(path.read_text() for path in door.rglob("*.py"))
    assert [name for name in section["names"] if name in text] == []
    assert "environ" not in text


LABELLED = [(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))]


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss"},
        "loss",
        {"loss", "accuracy", "acc", "precision", "recall", "F1", "auc", "mae", "mse"},
        {"loss": "loss", "accuracy": "acc"},
        {"mine": "F1", "other": "acc"},
    ],
)
def test_names_of_metrics_are_those_of_mindspore(metrics: Any) -> None:
    model = ms.RecModel(Line(), "bce", "adam", metrics)
    results = model.eval(LABELLED)
    names = [metrics] if isinstance(metrics, str) else metrics
    assert list(results) == [*sorted(set(names) - {"loss"}), "loss"]  # as the program asked
    if "mse" in results:
        scores = model.predict(LABELLED[0][0])
        assert results["mse"] == pytest.approx(((scores - LABELLED[0][1].numpy()) ** 2).mean())


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"topk"}, "'topk' of MindSpore .* its name does not say k: give TopKCategoricalAccuracy"),
        ({"roc"}, "it is not a number"),
        ({"confusion_matrix_metric"}, "it is not a number"),
        ({"curve": "roc_curve"}, "it is not a number"),
        ({"my_loss": "loss"}, "the loss is reported as 'loss', got the name 'my_loss'"),
    ],
)
def test_metrics_without_a_counterpart_are_errors(metrics: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ms.RecModel(Line(), "bce", "adam", metrics)


@pytest.mark.parametrize("name", ["acc", "accuracy", "top_1_accuracy"])
def test_accuracy_counts_classes(name: str) -> None:
    scores = torch.eye(7)[:4] + torch.arange(7) / 10  # of sample i, class i has the highest
    label = torch.tensor([0, 5, 2, 1])

    def evaluates(scores: Any, label: Any) -> Any:
        return torch.zeros(()), scores, label

    model = ms.RecModel(Line(), "bce", "adam", {name}, evaluates, [0, 1, 2])
    assert model.eval([(scores, label), (scores[:2], label[:2])])[name] == 3 / 6
    metric = hb.metrics.Accuracy().set_indexes([1, 0])
    metric.update(label, scores)
    assert metric.eval() == 2 / 4


@pytest.mark.parametrize("one_hot", [False, True])
def test_top_5_accuracy_finds_the_label_among_the_highest_scores(one_hot: bool) -> None:
    draws = np.random.default_rng(3)
    scores = draws.integers(0, 4, (40, 9)).astype(np.float32)  # many are equal
    labels = draws.integers(0, 9, 40)
    right = 0
    for row, label in zip(scores, labels, strict=True):
        higher = (row > row[label]).sum() + (row[:label] == row[label]).sum()
        right += bool(higher < 5)

    def evaluates(scores: Any, label: Any) -> Any:
        return torch.zeros(()), scores, label

    model = ms.RecModel(Line(), "bce", "adam", {"top_5_accuracy"}, evaluates, [0, 1, 2])
    given = torch.from_numpy(np.eye(9)[labels] if one_hot else labels)
    batches = list(zip(torch.from_numpy(scores).split(16), given.split(16), strict=True))
    assert model.eval(batches)["top_5_accuracy"] == right / 40
    first, second = ms.TopKCategoricalAccuracy(5), ms.TopKCategoricalAccuracy(5)
    first.update(*batches[0])
    second.load_state(first.state())
    for batch in batches[1:]:
        second.update(*batch)
    assert second.eval() == right / 40
    with pytest.raises(ValueError, match=r"needs scores of classes, got scores \[3\] and labels"):
        second.update(scores[0, :3], labels[:3])


def test_a_metric_of_a_program_gets_tensors_with_asnumpy() -> None:
    class Mean(ms.Metric):
        """A metric as public programs have them."""

        def __init__(self) -> None:
            super().__init__()
            self.clear()

        def clear(self) -> None:
            self.scores: list[float] = []

        @ms.rearrange_inputs
        def update(self, *inputs: Any) -> None:
            self.scores.extend(inputs[1].asnumpy().flatten().tolist())

        def eval(self) -> float:
            return float(np.mean(self.scores))

    def evaluates(x: Any, label: Any) -> Any:
        return torch.zeros(()), x[:, :1] * 2, label

    metrics = {"mean": Mean(), "picked": Mean().set_indexes([0, 1])}
    model = ms.RecModel(Line(), "bce", "adam", metrics, evaluates)
    results = model.eval(LABELLED)
    assert results["picked"] == results["mean"]
    expected = float(np.mean(np.concatenate([x[:, :1] * 2 for x, _ in LABELLED])))
    assert model.eval(LABELLED)["mean"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="set_indexes: must be a list of integers, got 1"):
        Mean().set_indexes(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sink", "data", "expected"),
    [(True, LABELLED, 1), (False, LABELLED, len(LABELLED)), (False, iter(LABELLED), sys.maxsize)],
    ids=["sunk", "a list", "a stream"],
)
def test_callbacks_may_count_by_the_batches_of_an_epoch(
    sink: bool, data: Any, expected: int
) -> None:
    seen = []

    class Counts(ms.Callback):
        def step_end(self, run_context: Any) -> None:
            args = run_context.original_args()
            seen.append((args.batch_num, (args.cur_step_num - 1) % args.batch_num + 1))

    ms.RecModel(Line(), "bce", "adam").online_train(data, Counts(), dataset_sink_mode=sink)
    assert seen[0] == (expected, 1)


def test_loss_metric_needs_a_loss() -> None:
    with pytest.raises(ValueError, match="got neither loss_fn nor eval_indexes"):
        ms.RecModel(Line(), "bce", "adam", {"loss"}, eval_network=lambda *items: items)


def test_boolean_positions_are_errors() -> None:
    with pytest.raises(ValueError, match="three positions needed"):
        ms.RecModel(Line(), "bce", "adam", {"auc"}, lambda *items: items, [False, True, 2])


def test_items_that_are_dicts_name_what_the_network_needs() -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = ms.HashEmbeddingLookup(2)

        def forward(self, user: Any) -> Any:
            return self.table(user).sum(-1)

    data = [({"user": torch.tensor([1, 2])}, torch.tensor([0.0, 1.0]))]
    with pytest.raises(ValueError, match=r"got a dict with user\. Items .* are tuples"):
        ms.RecModel(Network(), "bce", "adam").online_train(data, dataset_sink_mode=False)


class TrainStep(torch.nn.Module):
    """Two losses of two parts of a network, each with an optimizer of its own, as in mindrec."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.optimizer_d = torch.optim.Adam(hb.dense_parameters(network), lr=3.5e-4)
        self.optimizer_w = hb.SparseOptimizer(network)

    def forward(self, ids: Any, weights: Any, label: Any) -> Any:
        scores, _ = self.network(ids, weights)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, label)
        loss.backward()
        for optimizer in (self.optimizer_d, self.optimizer_w):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach(), loss.detach()


class WideAndDeep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = ms.HashEmbeddingLookup(4, name="deep", rule=hb.Adam(lr=3.5e-4))
        self.wide = ms.HashEmbeddingLookup(1, name="wide", rule=hb.Ftrl(lr=5e-2))
        self.embedding_table = self.deep.embedding_table
        self.embedding_table.set_param_ps()
        self.layer = torch.nn.Linear(12, 1)

    def forward(self, ids: Any, weights: Any) -> Any:
        wide = (self.wide(ids) * weights[..., None]).sum(1)
        deep = self.layer((self.deep(ids) * weights[..., None]).flatten(1))
        return wide + deep, self.embedding_table


class Predicts(torch.nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Any, weights: Any, label: Any) -> Any:
        scores, _ = self.network(ids, weights)
        return scores, torch.sigmoid(scores), label


class AUCMetric(ms.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.inner = hb.metrics.AUC()

    def update(self, *inputs: Any) -> None:
        self.inner.update(inputs[1].asnumpy().flatten(), inputs[2].asnumpy().flatten())

    def eval(self) -> float:
        return self.inner.eval()


class Evaluates(ms.Callback):
    """Evaluates at the end of each epoch, and prints what MindSpore's programs print."""

    def __init__(self, model: Any, data: Any, metric: Any) -> None:
        super().__init__()
        self.model, self.data, self.metric = model, data, metric
        self.values: list[Any] = []

    def step_end(self, run_context: Any) -> None:
        args = run_context.original_args()
        step = (args.cur_step_num - 1) % args.batch_num + 1
        losses = [float(output.asnumpy()) for output in args.net_outputs]
        assert args.cur_epoch_num, (step, losses)

    def epoch_end(self, run_context: Any) -> None:
        self.metric.clear()
        self.values.append(list(self.model.eval(self.data, dataset_sink_mode=True).values()))


def test_the_program_of_wide_and_deep_trains_evaluates_and_loads(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)

    def batches(steps: int) -> Any:
        for _ in range(steps):
            ids = torch.randint(0, 40, (32, 3), dtype=torch.int32, generator=draws)
            yield ids, torch.ones(32, 3), (ids.sum(1, keepdim=True) % 2).float()

    train, valid = list(batches(8)), list(batches(2))
    network, metric = WideAndDeep(), AUCMetric()
    model = ms.RecModel(TrainStep(network), None, None, {"auc": metric}, Predicts(network))
    evaluates = Evaluates(model, valid, metric)
    config = ms.CheckpointConfig(save_checkpoint_steps=len(train), keep_checkpoint_max=5)
    saves = ms.ModelCheckpoint("widedeep_train", str(tmp_path), config)
    callbacks = [ms.TimeMonitor(len(train)), evaluates, saves]
    model.train(2, train, callbacks, dataset_sink_mode=True)
    assert len(evaluates.values) == 2
    again = WideAndDeep()
    loaded = ms.RecModel(TrainStep(again), None, None, {"auc": AUCMetric()}, Predicts(again))
    loaded.engine.restore(saves.latest_ckpt_file_name)
    assert list(loaded.eval(valid).values()) == evaluates.values[-1]
    assert loaded.train_network.optimizer_d.state_dict()["state"][0]["step"] == 16


def test_a_parameter_has_the_attributes_and_clones_of_mindspore(caplog: Any) -> None:
    caplog.set_level("INFO", "hotbed")
    ms_no_effect.ARGUMENTS.logged.discard("MapParameter.set_param_ps")
    values = ms.MapParameter(value_shape=3, name="map", permit_filter_value=2, requires_grad=False)
    values.set_param_ps()
    assert "set_param_ps has no effect, because the processes that train" in caplog.text
    section = next(s for s in MINDSPORE.sections if "attributes" in s)
    plain = ms.MapParameter()
    assert [(name, getattr(plain, name)) for name in section["names"]] == [
        ("name", "embedding_table"),
        ("key_dtype", torch.int32),
        ("value_dtype", torch.float32),
        ("value_shape", (1,)),
        ("default_value", "normal"),
        ("permit_filter_value", 1),
        ("evict_filter_value", sys.maxsize),
        ("requires_grad", True),
    ]
    clone = values.clone(init="zeros")
    assert (clone.name, clone.default_value, clone.clone().default_value) == (
        "map",
        "zeros",
        "zeros",
    )
    assert (clone.value_shape, clone.permit_filter_value) == ((3,), 2)
    assert not clone.requires_grad
    assert (len(clone), values.default_value) == (0, "normal")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"save_checkpoint_steps": None, "save_checkpoint_seconds": 9}, (0, 9, 5)),
        ({"save_checkpoint_seconds": None, "keep_checkpoint_max": 0}, (1, 0, 1)),
        ({"keep_checkpoint_max": None, "incremental": True}, (1, 0, 1)),
    ],
)
def test_a_checkpoint_config_takes_none_for_zero(given: Any, kept: tuple[int, int, int]) -> None:
    config = ms.CheckpointConfig(**given)
    steps, seconds = config.save_checkpoint_steps, config.save_checkpoint_seconds
    assert (steps, seconds, config.keep_checkpoint_max) == kept


def test_what_train_and_predict_cannot_do_is_said(caplog: Any) -> None:
    ms_no_effect.ARGUMENTS.logged.discard("RecModel.sink_size")
    model = ms.RecModel(Line(), "bce", "adam")
    model.train(1, LABELLED * 4, sink_size=2)  # ignored without sink mode, as there
    assert "sink_size" not in caplog.text
    model.train(1, LABELLED * 4, dataset_sink_mode=True, sink_size=2)
    assert "sink_size has no effect, because each epoch of train and fit learns all" in caplog.text
    assert model.engine.counters["steps"] == 8
    with pytest.raises(ValueError, match=r"predict\.backend"):
        model.predict(LABELLED[0][0], backend="lite")  # type: ignore[arg-type]


def test_a_loss_monitor_prints_the_step_of_the_epoch_or_nothing(capsys: Any) -> None:
    model = ms.RecModel(Line(), "bce", "adam")
    model.train(2, LABELLED * 3, [ms.LossMonitor(2), ms.LossMonitor(0)])
    lines = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["epoch: 1 step: 2", "epoch: 2 step: 1", "epoch: 2 step: 3"]


class Looks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = ms.HashEmbeddingLookup(2)
        self.own = ms.HashEmbeddingLookup(2, rule=hb.Sgd(lr=0.5), name="own")
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        return self.layer(torch.cat([self.rows(ids), self.own(ids)], 1)).squeeze(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda network: torch.optim.Adam(network.parameters(), 0.1),
        lambda network: torch.optim.SGD(
            [
                {"params": hb.dense_parameters(network), "lr": 0.2},
                {"params": network.rows.parameters()},
            ],
            0.1,
        ),
        lambda network: hb.Adam(lr=0.1),
        lambda network: "adam",
    ],
    ids=["torch", "groups", "rule", "name"],
)
def test_rows_follow_the_learning_rate_of_the_optimizer(make: Any) -> None:
    ids = torch.arange(4)
    batch = (ids, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    network = Looks()
    model = ms.RecModel(network, "mse", make(network))

    def rows() -> list[Any]:
        return [network.rows(ids).tolist(), network.own(ids).tolist()]

    class Schedules(ms.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def step_end(self, run_context: Any) -> None:
            args = run_context.original_args()
            self.seen.append(rows())
            if args.cur_step_num == 2:
                for group in args.optimizer.param_groups:
                    group["lr"] = 0.0

    schedules = Schedules()
    model.online_train([batch] * 4, schedules)
    followed, own = zip(*schedules.seen, strict=True)
    assert followed[0] != followed[1] == followed[2] == followed[3]
    assert own[1] != own[2]
    model.engine.learner.dense.param_groups[-1]["lr"] = 0.1  # between two calls
    model.online_train([batch])
    assert rows()[0] != followed[3]
    model.engine.table_learning_rates = {"rows.embedding_table": 0.3}  # of rows alone
    model.engine.dense_learning_rate = 0.2
    model.online_train([batch])
    assert model.engine.table_learning_rates == {"rows.embedding_table": 0.3, "own": 0.5}


def test_data_of_epochs_may_have_no_length() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from LABELLED * 3

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    model = ms.RecModel(Line(), "bce", "adam")
    model.train(2, loader, ms.LossMonitor(2))
    assert model.engine.counters["steps"] == 6
