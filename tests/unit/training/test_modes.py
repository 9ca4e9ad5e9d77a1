# SPDX-License-Identifier: Apache-2.0
"""Train and eval modes: evaluation leaves every module's flag as it was, and training leaves the
user's flags alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules.state import dense_state


class WithLoss(nn.Module):
    """The network with its loss, as code for MindSpore has it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = hb.losses.BCE()(self.network(batch), batch.labels["y"])
        return loss


class Judge(nn.Module):
    """Prediction and label of a network that it shares with the training network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(self.network(batch)), batch.labels["y"]


def flags(network: nn.Module) -> list[bool]:
    return [module.training for module in network.modules()]


def seen(network: nn.Module, modes: list[set[bool]]) -> Callable[..., Any]:
    """Judge as a plain callable that also notes the modes of the network's modules."""
    judge = Judge(network)

    def score(batch: Any) -> Any:
        modes.append(set(flags(network)))
        return judge(batch)

    return score


def test_eval_network_that_shares_modules_learns_as_the_network_with_a_loss(
    dataset: Any, network: Any, world: Any
) -> None:
    """Evaluated before, between and after: the rows, weights and batch statistics of training are
    the same.
    """
    models = []
    for shared in (True, False):
        net = network()
        if shared:
            model = hb.RecModel(WithLoss(net), None, "adam", {"auc"}, Judge(net))
        else:
            model = hb.RecModel(net, "bce", "adam", {"auc"})
        model.evaluate(dataset(256, 7))
        model.fit(dataset(), dataset(256, 7), epochs=2, progress=False)
        history = model.online_train(dataset(seed=1), progress=False)
        assert all(flags(model.network))
        models.append((model, history.metrics["auc"]))
    rows = [{name: len(table) for name, table in model.tables.items()} for model, _ in models]
    assert rows[0] == rows[1] == {"user": 50, "item": 80}
    weights = [dense_state(m.network) for m, _ in models]
    assert all(torch.equal(weights[0][f"network.{name}"], weights[1][name]) for name in weights[1])
    assert models[0][1] == models[1][1]


@pytest.mark.parametrize("stream", [False, True])
def test_callable_is_scored_with_the_network_in_eval_mode(
    dataset: Any, network: Any, stream: bool
) -> None:
    net, modes = network(), list[set[bool]]()
    model = hb.RecModel(net, "bce", "adam", {"auc"}, seen(net, modes))
    if stream:
        model.online_train(dataset(256), progress=False)
    else:
        running = {name: value.clone() for name, value in net.named_buffers()}
        model.evaluate(dataset(256))
        assert all(torch.equal(value, running[name]) for name, value in net.named_buffers())
    assert modes == [{False}] * 4
    assert all(flags(net))


def test_flags_that_the_user_set_stay_through_training_evaluation_and_export(
    dataset: Any, network: Any
) -> None:
    """A frozen batch norm keeps its statistics, and stays frozen after a graph was made of the
    network.
    """
    net = network()
    norms = [module for module in net.modules() if "BatchNorm" in type(module).__name__]
    for norm in norms:
        norm.eval()
    before, running = flags(net), [norm.running_mean.clone() for norm in norms]
    model = hb.RecModel(net, "bce", "adam", {"auc"})
    model.fit(dataset(), dataset(256, 7), progress=False)
    model.online_train(dataset(256), progress=False)
    model.predict(dataset(256))
    pytest.importorskip("onnxscript", reason="onnx absent")
    model.graph()
    assert norms
    assert flags(net) == before
    assert all(
        torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, running, strict=True)
    )


def test_network_in_eval_mode_as_a_whole_is_trained_and_then_in_eval_mode_again(
    dataset: Any, network: Any
) -> None:
    net = network().eval()
    model = hb.RecModel(net, "bce", "adam")
    model.fit(dataset(), progress=False)
    assert len(model.tables["user"]) == 50
    assert not any(flags(net))


def test_tables_in_eval_mode_inside_a_network_in_train_mode_are_named_in_the_log(
    dataset: Any, network: Any, caplog: Any
) -> None:
    net = network()
    Judge(net.embedding if hasattr(net, "embedding") else next(iter(net.children()))).eval()
    hb.RecModel(net, "bce", "adam").fit(dataset(64), progress=False)
    assert "in eval mode" in caplog.text
    assert "take no new ids" in caplog.text


def test_evaluation_that_fails_leaves_the_flags_as_they_were(dataset: Any, network: Any) -> None:
    net = network()

    def fail(batch: Any) -> Any:
        raise RuntimeError("no answer")

    model = hb.RecModel(net, "bce", "adam", {"auc"}, fail)
    with pytest.raises(RuntimeError, match="no answer"):
        model.evaluate(dataset(64))
    assert all(flags(net))
