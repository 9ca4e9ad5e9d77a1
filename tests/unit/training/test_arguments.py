# SPDX-License-Identifier: Apache-2.0
"""The arguments of RecModel mean in online_train what docs/training.md says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import ConfigError, DataError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest

RNG = np.random.default_rng(0)
PAIRS = [
    (RNG.normal(size=(8, 3)).astype(np.float32), RNG.integers(0, 2, 8).astype(np.float32))
    for _ in range(6)
]


class Calls(nn.Module):
    """A linear model that remembers what it was called with, and whether it was training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1, bias=False)
        self.calls: list[tuple[int, bool]] = []

    def forward(self, *items: torch.Tensor) -> torch.Tensor:
        self.calls.append((len(items), self.training))
        return self.linear(items[0]).squeeze(1)


class OwnLoss(Calls):
    """Computes its loss from three items."""

    def forward(self, *items: torch.Tensor) -> torch.Tensor:
        scores = super().forward(*items)
        return (
            nn.functional.binary_cross_entropy_with_logits(scores, items[1], reduction="none")
            * items[2]
        ).mean()


class OwnUpdate(OwnLoss):
    """Runs backward and updates itself too."""

    def forward(self, *items: torch.Tensor) -> torch.Tensor:
        loss = super().forward(*items)
        (gradient,) = torch.autograd.grad(loss, [self.linear.weight])
        with torch.no_grad():
            self.linear.weight -= 0.5 * gradient
        return loss.detach()


def online(model: hb.RecModel, data: Any = PAIRS, **keywords: Any) -> Any:
    return model.online_train(data, progress=False, **keywords)


def test_1_network_and_2_loss_fn_get_data_and_label() -> None:
    network = Calls()
    history = online(hb.RecModel(network, "bce", "adam"))
    assert network.calls == [(1, False), (1, True)] * 6  # predicted in eval mode, then learned
    assert "loss" in history.metrics
    with pytest.raises(DataError, match=r"must yield \(data, label\), got 3 items"):
        online(hb.RecModel(Calls(), "bce", "adam"), [(*PAIRS[0], PAIRS[0][1])])


def test_2_without_a_loss_fn_every_item_goes_to_the_network_which_computes_the_loss() -> None:
    network = OwnLoss()
    before = network.linear.weight.detach().clone()
    online(
        hb.RecModel(network, None, hb.Sgd(lr=0.5)),
        [(*pair, np.ones(8, np.float32)) for pair in PAIRS],
        progressive=False,
    )
    assert network.calls == [(3, True)] * 6
    assert not torch.equal(before, network.linear.weight)
    with pytest.raises(ConfigError, match="network: without loss_fn it must return its loss"):
        online(hb.RecModel(Calls(), None, "adam"), progressive=False)


def test_3_without_an_optimizer_the_network_updates_itself_to_the_same_weights() -> None:
    data = [(*pair, np.ones(8, np.float32)) for pair in PAIRS]
    own, given = OwnUpdate(), OwnLoss()
    online(hb.RecModel(own), data, progressive=False)
    online(hb.RecModel(given, None, hb.Sgd(lr=0.5)), data, progressive=False)
    torch.testing.assert_close(own.linear.weight, given.linear.weight)


@pytest.mark.parametrize(
    "metrics", [{"accuracy", "recall"}, {"accuracy": hb.metrics.Accuracy(), "recall": "recall"}]
)
def test_4_metrics_are_a_set_or_a_dict(metrics: Any) -> None:
    history = online(hb.RecModel(Calls(), "bce", "adam", metrics))
    assert {"accuracy", "recall", "loss"} == set(history.metrics)


def test_5_without_an_eval_network_network_and_loss_fn_evaluate_with_one_it_does() -> None:
    seen: list[int] = []

    def evaluate(data: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(data))
        return torch.full((len(data),), 0.25), label

    network = Calls()
    history = online(hb.RecModel(network, "bce", "adam", {"calibration"}, evaluate))
    assert seen == [8] * 6
    assert network.calls == [(1, True)] * 6
    positives = sum(label.sum() for _, label in PAIRS)
    assert history.metrics["calibration"] == pytest.approx(0.25 * 48 / positives)


@pytest.mark.parametrize(
    ("level", "dtype", "inside"),
    [
        ("O0", torch.float32, torch.float32),
        ("O1", torch.float32, torch.bfloat16),
        ("O2", torch.float32, torch.bfloat16),
        ("O3", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32, torch.float32),
    ],
)
def test_7_amp_level_on_a_cpu(
    level: str, dtype: Any, inside: Any, dataset: Any, network: Any, tmp_path: Path, caplog: Any
) -> None:
    """What computes in which format; and a stream that is left and resumed ends with the same bits."""
    caplog.set_level(logging.INFO, "hotbed")

    def model() -> hb.RecModel:
        return hb.RecModel(network(), "bce", "adam", {"auc"}, amp_level=level)

    seen = []
    first = model()
    layer = next(
        one
        for one in first.network.modules()
        if isinstance(one, nn.Linear) and one is not first.network.head
    )
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    torch.manual_seed(0)
    online(first, dataset(256), callbacks=hb.callbacks.Checkpoint(tmp_path / "whole"))
    assert set(seen) == {inside}
    assert {parameter.dtype for parameter in hb.dense_parameters(first.network)} == {dtype}
    assert all(rows.dtype == torch.float32 for rows in first.learner.parameters()[-1:])
    assert ("amp_level='auto' on cpu: O0" in caplog.text) == (level == "auto")
    for steps in (2, None):
        part = model()
        torch.manual_seed(0)
        online(
            part,
            dataset(256),
            callbacks=hb.callbacks.Checkpoint(tmp_path / "parts"),
            max_steps=steps,
        )
    assert content_digest(open_checkpoint(tmp_path / "parts")) == content_digest(
        open_checkpoint(tmp_path / "whole")
    )


def test_8_compile_compiles_the_training_step_with_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def compile_(network: nn.Module, **settings: Any) -> nn.Module:
        asked.append(settings)
        return network

    monkeypatch.setattr(torch, "compile", compile_)
    online(hb.RecModel(Calls(), "bce", "adam", compile=hb.Compile("max-autotune")))
    settings = {"dynamic": True, "fullgraph": False, "backend": "inductor"}
    assert asked == [{"mode": "max-autotune", **settings}]
    hb.RecModel(Calls(), "bce", "adam", {"accuracy"})
    assert len(asked) == 1
