# SPDX-License-Identifier: Apache-2.0
"""Models equal their formulas, written out sample by sample over plain `nn.Embedding`: values,
gradients, and what an export serves. All share one network, since an export is expensive.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from any_batch import check_any_batch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed.embedding.modules.state import dense_state

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
DIM = 4
NUM_IDS = 12
FEATURES = [hb.Id("user"), hb.Id("item"), hb.Id("shop"), hb.Dense("age"), hb.Dense("price")]
Weights = dict[str, Tensor]


def schema_of(*labels: str) -> hb.Schema:
    return hb.Schema([*(hb.Label(name) for name in labels), *FEATURES])


class SideBySide(nn.Module):
    """Models over the same tables, each the logit of one label."""

    def __init__(self) -> None:
        super().__init__()
        schema = schema_of("y")
        tables = hb.make_tables(schema, DIM, rule=hb.Sgd(lr=1.0), init=hb.Normal(0.5))
        self.models = nn.ModuleDict()
        for name, (kind, settings, _) in MODELS.items():
            torch.manual_seed(0)  # so that no model depends on the draws of another
            self.models[name] = getattr(hb.models, kind)(schema, tables, **settings)

    def forward(self, batch: hb.Batch) -> dict[str, Tensor]:
        return {name: model(batch) for name, model in self.models.items()}


def columns(n: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    numbers = {name: draw.normal(size=n).astype(np.float32) for name in ("age", "price")}
    return {name: draw.integers(0, NUM_IDS, n) for name in ("user", "item", "shop")} | numbers


def batch(values: dict[str, np.ndarray]) -> hb.Batch:
    ids = {name: hb.Ids(values[name]) for name in ("user", "item", "shop")}
    numbers = {name: values[name] for name in ("age", "price")}
    arrays = hb.Batch(ids, numbers, num_samples=len(values["user"]))
    return arrays.map_arrays(torch.from_numpy)


# --- formulas -------------------------------------------------------------------------------------


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = w[f"{name}.weight"] @ x
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    centered = x - x.mean()
    normalized = centered / torch.sqrt(centered.square().mean() + 1e-5)
    return normalized * w[f"{name}.weight"] + w[f"{name}.bias"]


def perceptron(w: Weights, name: str, x: Tensor, num_layers: int) -> Tensor:
    """Linear layers with a ReLU after each; modules 0, 2, … of a sequence."""
    for layer in range(num_layers):
        x = torch.relu(linear(w, f"{name}.{2 * layer}", x))
    return x


def head(w: Weights, *parts: Tensor) -> Tensor:
    return linear(w, "head.linear", torch.cat(parts))[0]


def autoint(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    flat = torch.cat([*fields, numbers])
    fields = [*fields, *(x * w["numbers.weight"][k] for k, x in enumerate(numbers))]
    for layer in range(2):
        query, key, value = (
            [linear(w, f"layers.{layer}.projections.{k}", field) for field in fields]
            for k in range(3)
        )
        residual = fields  # the second layer is as wide as its input
        if layer == 0:
            residual = [linear(w, "layers.0.residual", field) for field in fields]
        outputs = []
        for i in range(len(fields)):
            heads = []
            for part in (slice(0, 3), slice(3, 6)):
                scores = torch.stack([query[i][part] @ other[part] for other in key])
                shares = torch.exp(scores) / torch.exp(scores).sum()
                weighed = [s * v[part] for s, v in zip(shares, value, strict=True)]
                heads.append(torch.stack(weighed).sum(0))
            outputs.append(torch.relu(torch.cat(heads) + residual[i]))
        fields = outputs
    return head(w, *fields, perceptron(w, "mlp", flat, 1))


def finalmlp(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    flat = torch.cat([*fields, numbers])
    contexts = [torch.cat([fields[0], numbers[:1]]), w["gates.1.context"][0]]
    streams = []
    for number, context in enumerate(contexts):
        gate = perceptron(w, f"gates.{number}.gate", context, 1)
        gate = torch.sigmoid(linear(w, f"gates.{number}.gate.2", gate))
        streams.append(perceptron(w, f"streams.{number}", 2 * gate * flat, 2))
    first, second = streams
    products = first[:3] @ w["product.weight"][0] @ second[:2]
    products = products + first[3:] @ w["product.weight"][1] @ second[2:]
    return head(w, first, second) + products


def mask_block(w: Weights, name: str, x: Tensor, v: Tensor) -> Tensor:
    mask = linear(w, f"{name}.mask.2", torch.relu(linear(w, f"{name}.mask.0", v)))
    return torch.relu(layer_norm(w, f"{name}.norm", linear(w, f"{name}.linear", x * mask)))


def normalized_fields(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    normalized = []
    for place, field in enumerate(fields):
        own = {"own.weight": w["norm.weight"][place], "own.bias": w["norm.bias"][place]}
        normalized.append(layer_norm(own, "own", field))
    return torch.cat([*normalized, numbers])


def parallel_masks(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    v, x = torch.cat([*fields, numbers]), normalized_fields(w, fields, numbers)
    blocks = torch.cat([mask_block(w, f"blocks.{number}", x, v) for number in range(2)])
    return head(w, perceptron(w, "mlp", blocks, 1))


def serial_masks(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    v, x = torch.cat([*fields, numbers]), normalized_fields(w, fields, numbers)
    for number in range(2):
        x = mask_block(w, f"blocks.{number}", x, v)
    return head(w, x)


def qnn(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    x = torch.cat([*fields, numbers])
    for layer in range(2):
        maps = torch.relu(linear(w, f"quadratic.maps.{layer}.0", x))
        x = x * maps[: len(x)] + x * maps[len(x) : 2 * len(x)] + x * maps[2 * len(x) :] + x
    return head(w, x)


def rankmixer(w: Weights, fields: list[Tensor], numbers: Tensor) -> Tensor:
    user, item, shop = fields
    groups = [torch.cat([user, numbers[:1]]), torch.cat([shop, item]), numbers[1:]]
    tokens = [linear(w, f"projections.{place}", group) for place, group in enumerate(groups)]
    for layer in range(2):
        mixed = []
        for place in range(3):
            parts = [token[2 * place : 2 * place + 2] for token in tokens]
            mixed.append(layer_norm(w, f"mixing_norms.{layer}", torch.cat(parts) + tokens[place]))
        tokens = []
        for place, token in enumerate(mixed):
            own = {
                key.rpartition(".")[2]: value[place]
                for key, value in w.items()
                if key.startswith(f"feed_forwards.{layer}.")
            }
            hidden = F.gelu(token @ own["first"] + own["first_bias"])
            output = hidden @ own["second"] + own["second_bias"]
            tokens.append(layer_norm(w, f"norms.{layer}", output + token))
    return head(w, torch.stack(tokens).mean(0))


Formula = Callable[[Weights, list[Tensor], Tensor], Tensor]
MODELS: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "autoint": ("AutoInt", {"width": 6, "num_layers": 2, "hidden": (5,)}, autoint),
    "finalmlp": (
        "FinalMLP",
        {
            "hidden": (5, 6),
            "second_hidden": (5, 4),
            "num_heads": 2,
            "context": ("user", "age"),
            "gate_hidden": (3,),
        },
        finalmlp,
    ),
    "parallel_masks": (
        "MaskNet",
        {"num_blocks": 2, "block_width": 5, "hidden": (4,), "reduction_ratio": 0.5},
        parallel_masks,
    ),
    "serial_masks": ("MaskNet", {"structure": "serial", "hidden": (6, 5)}, serial_masks),
    "qnn": ("QNN", {"num_layers": 2, "num_rows": 3}, qnn),
    "rankmixer": (
        "RankMixer",
        {"groups": [["user", "age"], ["shop", "item"], ["price"]], "part_width": 2},
        rankmixer,
    ),
}


CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""Sums of float32 in another order; a wrong formula differs by 1e-3 and more."""


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_formula(name: str) -> None:
    values = columns(30, seed=1)
    model, formula = SideBySide().models[name], MODELS[name][2]
    model(batch(values))  # inserts every id
    plain = {}
    for table in model.inputs.collection.tables:
        rows = torch.from_numpy(table.lookup(np.arange(NUM_IDS))).clone()
        plain[table.name] = nn.Embedding(NUM_IDS, DIM, _weight=rows)
    parameters = {k: p for k, p in model.named_parameters() if k in dense_state(model)}
    weights = {key: p.detach().clone().requires_grad_() for key, p in parameters.items()}
    expected = []
    for row in range(len(values["user"])):
        fields = [plain[name](torch.tensor(values[name][row])) for name in plain]
        numbers = torch.tensor([values["age"][row], values["price"][row]])
        expected.append(formula(weights, fields, numbers))
    logits = model(batch(values))
    torch.testing.assert_close(logits, torch.stack(expected), **CLOSE)
    for outputs in (logits, torch.stack(expected)):
        outputs.square().mean().backward()
    for key, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, weights[key].grad, **CLOSE)
    hb.SparseOptimizer(model).step()  # of SGD with rate 1: subtracts the gradients
    for table in model.inputs.collection.tables:
        embedding = plain[table.name]
        stepped = embedding.weight - embedding.weight.grad
        assert embedding.weight.grad.abs().max() > 1e-4
        found = torch.from_numpy(table.lookup(np.arange(NUM_IDS)))
        torch.testing.assert_close(found, stepped.detach(), **CLOSE)


def test_served_scores_are_those_of_training(tmp_path: Path) -> None:
    values = columns(60, seed=2)
    labels = {name: np.random.default_rng(3).integers(0, 2, 60) for name in MODELS}
    schema = schema_of(*MODELS)
    model = hb.RecModel(SideBySide(), {name: hb.losses.BCE() for name in MODELS}, hb.Adam(lr=0.01))
    data = hb.Dataset(hb.sources.Memory(values | labels), schema, 20)
    model.fit(data, progress=False)
    session = hb.InferenceSession(model.export(tmp_path / "export"))
    asked = columns(40, seed=4)
    asked["user"] += NUM_IDS // 2  # half of them never seen
    nothing = {name: np.zeros(40) for name in MODELS}
    expected = model.predict(hb.Dataset(hb.sources.Memory(asked | nothing), schema, 16))
    check_any_batch(session, asked)
    served = session.predict(asked)
    for name in MODELS:
        np.testing.assert_allclose(served[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
