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
    ],
)
def test_names_of_metrics_are_those_of_mindspore(metrics: Any) -> None:
    model = ms.RecModel(Line(), "bce", "adam", metrics)
    results = model.eval(LABELLED)
    names = [metrics] if isinstance(metrics, str) else metrics
    wanted = {{"acc": "accuracy", "F1": "f1"}.get(name, name) for name in names}
    assert set(results) == wanted
    if "mse" in results:
        scores = model.predict(LABELLED[0][0])
        assert results["mse"] == pytest.approx(((scores - LABELLED[0][1].numpy()) ** 2).mean())


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"topk"}, "'topk' of MindSpore has no counterpart, because accuracies are of the class"),
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
    assert model.eval([(scores, label), (scores[:2], label[:2])])["accuracy"] == 3 / 6
    metric = hb.metrics.Accuracy().set_indexes([1, 0])
    metric.update(label, scores)
    assert metric.eval() == 2 / 4


def test_a_metric_of_a_program_gets_tensors_with_asnumpy() -> None:
    class Mean:
        """A metric as public programs have them, which MindSpore's own does not read as ours."""

        def __init__(self) -> None:
            self.clear()

        def clear(self) -> None:
            self.scores: list[float] = []

        def update(self, *inputs: Any) -> None:
            self.scores.extend(inputs[1].asnumpy().flatten().tolist())

        def eval(self) -> float:
            return float(np.mean(self.scores))

    def evaluates(x: Any, label: Any) -> Any:
        return torch.zeros(()), x[:, :1] * 2, label

    model = ms.RecModel(Line(), "bce", "adam", {"mean": Mean()}, evaluates)
    expected = float(np.mean(np.concatenate([x[:, :1] * 2 for x, _ in LABELLED])))
    assert model.eval(LABELLED)["mean"] == pytest.approx(expected)


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
