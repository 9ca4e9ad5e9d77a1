# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of named tensors are those of the newest pass, and cost nothing unused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.training.last_step import LastStep

GRAPH = {
    "inputs": [{"input": "flat", "name": "ids", "columns": ["user", "item"]}],
    "layers": [
        {"layer": "mlp", "name": "deep", "inputs": ["ids"], "hidden": [4], "outputs": ["hidden"]},
        {"layer": "cross_net", "name": "crosses", "inputs": ["hidden"], "num_layers": 1},
        {"layer": "linear", "name": "logit", "inputs": ["crosses"], "out_features": 1},
    ],
    "outputs": {"y": "logit"},
}


class Branches(nn.Module):
    """A module with every kind of output; the network's are a dict by label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        self.split = Split()
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        left, right = self.split(self.body(data))
        return {"a": self.heads["a"](left), "b": self.heads["b"](right)}


class Split(nn.Module):
    def forward(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return data[:, :2], data[:, 2:]


def data(rows: int = 6, seed: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    x = torch.randn(rows, 3)
    return x, {"a": (x[:, 0] > 0).float(), "b": (x[:, 1] > 0).float()}


def model() -> hb.RecModel:
    return hb.RecModel(Branches(), "bce", "sgd")


def test_values_and_gradients_are_those_of_the_step() -> None:
    """Against the same pass by hand."""
    x, labels = data()
    net = Branches()
    linear = net.body[0](x)
    body = torch.relu(linear)
    left, right = body[:, :2], body[:, 2:]
    a, b = net.heads["a"](left), net.heads["b"](right)
    tensors = (linear, body, left, right, a, b)
    for tensor in tensors:
        tensor.retain_grad()
    bce = hb.losses.BCE()
    (bce(a.squeeze(1), labels["a"]) + bce(b.squeeze(1), labels["b"])).backward()
    names = ["body.0", "body", "split[0]", "split[1]", "heads.a", "[b]"]
    trained = model()
    with hb.models.recorded(trained.network, names) as record:
        trained.step((x, labels))
    assert list(record.values) == names
    assert set(record.gradients) == set(names)
    for name, tensor in zip(names, tensors, strict=True):
        assert record.values[name].dtype == np.float32
        np.testing.assert_allclose(record.values[name], tensor.detach(), atol=1e-7)
        np.testing.assert_allclose(record.gradients[name], tensor.grad, atol=1e-7)
    assert record.gradients["body.0"].any()


def test_evaluation_has_values_of_the_last_batch_and_no_gradients() -> None:
    trained = model()
    batches = [data(seed=seed) for seed in (1, 2)]
    with hb.models.recorded(trained.network, ["body.0"]) as record:
        trained.step(batches[0])
        assert set(record.gradients) == {"body.0"}
        trained.evaluate(batches)
    wanted = trained.network.body[0](batches[-1][0])  # type: ignore[index,operator]
    np.testing.assert_array_equal(record.values["body.0"], wanted.detach())
    assert record.gradients == {}


def test_recording_changes_no_bit_and_leaves_no_hook(
    dataset: Any, network: Any, world: Any
) -> None:
    plain = hb.RecModel(network(), "bce", "adam")
    watched = hb.RecModel(network(), "bce", "adam")
    names = [name for name, module in watched.network.named_modules() if "cross" in name]
    with hb.models.recorded(watched.network, names) as record:
        watched.fit(dataset(256), progress=False)
    plain.fit(dataset(256), progress=False)
    assert "cross" in record.values
    assert world.same(world.snapshot(watched), world.snapshot(plain))
    assert not any(module._forward_hooks for module in watched.network.modules())
    with pytest.raises(ZeroDivisionError), hb.models.recorded(watched.network, names):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in watched.network.modules())


def test_graph_is_asked_by_the_names_of_its_tensors(dataset: Any, world: Any) -> None:
    tables = hb.make_tables(world.schema, 3)
    graph = hb.models.Graph(world.schema, tables, GRAPH)
    trained = hb.RecModel(nn.Sequential(graph), "bce", "adam")
    names = ["0.ids", "0.hidden", "0.crosses", "0.logit", "0.layers.deep"]
    with hb.models.recorded(trained.network, names) as record:
        trained.step(next(iter(dataset(32))))
    assert set(graph.tensors) == {"ids", "hidden", "crosses", "logit"}
    assert record.values["0.ids"].shape == (32, 6)
    assert record.values["0.crosses"].shape == (32, 4)
    np.testing.assert_array_equal(record.values["0.layers.deep"], record.values["0.hidden"])
    with hb.models.recorded(graph, ["ids", "hidden"]) as inner, torch.no_grad():
        graph(next(iter(dataset(32))).map_arrays(torch.from_numpy))
    deep = graph.layers["deep"](torch.from_numpy(inner.values["ids"]))
    np.testing.assert_allclose(inner.values["hidden"], deep.detach(), atol=1e-6)


def test_bfloat16_is_recorded_as_float32_and_ids_as_they_are() -> None:
    class Kinds(nn.Module):
        def forward(self, value: Any) -> Any:
            return value.bfloat16(), value.long(), None

    kinds = Kinds()
    with hb.models.recorded(kinds, ["[0]", "[1]"]) as record:
        kinds(torch.tensor([1.5]))
    assert record.values["[0]"].dtype == np.float32
    assert record.values["[1]"].tolist() == [1]
    assert record.values["[1]"].dtype == np.int64
    with (
        hb.models.recorded(kinds, ["[2]"]),
        pytest.raises(ConfigError, match=r"'\[2\]' is not a tensor, got NoneType"),
    ):
        kinds(torch.tensor([1.5]))


def test_mistakes_are_named() -> None:
    net = Branches()
    with pytest.raises(ConfigError, match=r"no tensor 'body\.3'.*Did you mean 'body\.[01]'"):
        hb.models.recorded(net, ["body.3"]).__enter__()
    with pytest.raises(ConfigError, match=r"not a network, got RecModel.*model\.network"):
        hb.models.recorded(model(), ["body"]).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"one text for a list of names, got 'body'"):
        hb.models.recorded(net, "body").__enter__()
    for name, got in (("split", r"outputs \[0, 1\]"), ("", r"\['a', 'b'\]"), ("body[1]", r"\[\]")):
        with hb.models.recorded(net, [name]), pytest.raises(ConfigError, match=got):
            net(data()[0])


# --- the last step, repeated ----------------------------------------------------------------------


def random_graph(world: Any) -> hb.models.Graph:
    """A graph whose steps depend on random numbers and change buffers."""
    torch.manual_seed(7)
    layers = [
        {"layer": "dropout", "name": "drop", "inputs": ["ids"], "rate": 0.5},
        {"layer": "batch_norm", "name": "norm", "inputs": ["drop"]},
        {"layer": "mlp", "name": "deep", "inputs": ["norm"], "hidden": [4], "outputs": ["hidden"]},
        {"layer": "linear", "name": "logit", "inputs": ["hidden"], "out_features": 1},
    ]
    tables = hb.make_tables(world.schema, 3)
    return hb.models.Graph(world.schema, tables, {**GRAPH, "layers": layers})


def test_last_step_has_the_gradients_that_it_was_taken_by(dataset: Any, world: Any) -> None:
    """Against hooks that record while the step runs; nothing that comes later changes them."""
    names = ["ids", "drop", "norm", "hidden", "logit"]
    batches = list(dataset(256))
    plain = hb.RecModel(random_graph(world), "bce", "adam")
    model = hb.RecModel(random_graph(world), "bce", "adam")
    last = LastStep(model)
    assert not last.is_taken
    for batch in batches[:3]:
        torch.manual_seed(3)
        with hb.models.recorded(plain.network, names) as record:
            plain.step(batch)
        torch.manual_seed(3)
        model.step(batch)
        later = torch.get_rng_state()
        model.evaluate([batches[3]])
        for _ in range(2):
            gradients = last.gradients(names)
            assert set(gradients) == set(names)
            for name in names:
                np.testing.assert_array_equal(gradients[name], record.gradients[name])
        assert record.gradients["ids"].any()
        assert torch.equal(torch.get_rng_state(), later)
    for batch in batches[3:]:  # asking has changed nothing
        torch.manual_seed(3)
        plain.step(batch)
        torch.manual_seed(3)
        model.step(batch)
    assert world.same(world.snapshot(model), world.snapshot(plain))
