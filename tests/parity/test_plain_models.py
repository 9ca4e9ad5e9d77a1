# SPDX-License-Identifier: Apache-2.0
"""Models equal a loop of one's own over plain torch: `nn.Embedding`, and the layers written out.

An entry of `MODELS` is a model's keywords, and its formula. A formula takes `x`, the embeddings and
dense columns side by side, and the model's parameters by name; it returns logits by label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor
from torch.nn import functional as F

import hotbed as hb

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
NUM_ROWS, NUM_IDS, DIM = 40, 7, 4
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""Sums of float32 in another order; a wrong formula differs by 1e-3 and more."""

FIELDS = ("user", "item", "shop")
SCHEMA = hb.Schema(
    [hb.Label("y"), hb.Label("z"), *(hb.Id(name) for name in FIELDS), hb.Dense("x", width=2)]
)
Weights = Mapping[str, Tensor]
Formula = Callable[[Tensor, Weights], dict[str, Tensor]]


def linear(p: Weights, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", torch.zeros(()))


def hidden(p: Weights, name: str, x: Tensor) -> Tensor:
    """One hidden layer of a perceptron."""
    return torch.relu(linear(p, f"{name}.0", x))


def head(p: Weights, task: str, x: Tensor) -> Tensor:
    return linear(p, f"heads.{task}.linear", x)[:, 0]


def mixed(gate: Tensor, experts: list[Tensor]) -> Tensor:
    shares = torch.exp(gate) / torch.exp(gate).sum(1, keepdim=True)
    return sum(shares[:, [i]] * expert for i, expert in enumerate(experts))  # type: ignore[return-value]


def mmoe(x: Tensor, p: Weights) -> dict[str, Tensor]:
    experts = [hidden(p, f"experts.{i}", x) for i in range(3)]
    logits = {}
    for task in ("y", "z"):
        of_task = mixed(linear(p, f"gates.{task}", x), experts)
        logits[task] = head(p, task, hidden(p, f"towers.{task}", of_task))
    return logits


def ple(x: Tensor, p: Weights) -> dict[str, Tensor]:
    own, shared = {"y": x, "z": x}, x
    for level in ("levels.0", "levels.1"):
        of_all = [hidden(p, f"{level}.shared_experts.0", shared)]
        of_task = {}
        for task in own:
            names = [f"{level}.experts.{task}.{i}" for i in range(2)]
            of_task[task] = [hidden(p, name, own[task]) for name in names]
        if level == "levels.0":
            gate = linear(p, f"{level}.shared_gate", shared)
            shared = mixed(gate, [*of_task["y"], *of_task["z"], *of_all])
        for task in own:
            gate = linear(p, f"{level}.gates.{task}", own[task])
            own[task] = mixed(gate, [*of_task[task], *of_all])
    return {task: head(p, task, hidden(p, f"towers.{task}", own[task])) for task in own}


def esmm(x: Tensor, p: Weights) -> dict[str, Tensor]:
    first, then = (
        torch.sigmoid(head(p, task, hidden(p, f"towers.{task}", x)).double()) for task in "yz"
    )
    both = first * then
    return {"y": torch.log(first / (1 - first)).float(), "z": torch.log(both / (1 - both)).float()}


def aitm(x: Tensor, p: Weights) -> dict[str, Tensor]:
    q, z = (hidden(p, f"towers.{task}", x) for task in "yz")
    given = hidden(p, "transferred.z", q)
    scores, values = [], []
    for u in (given, z):
        query, key = (linear(p, f"transfers.z.{name}", u) for name in ("query", "key"))
        scores.append((query * key).sum(1) / u.shape[1] ** 0.5)
        values.append(linear(p, "transfers.z.value", u))
    return {"y": head(p, "y", q), "z": head(p, "z", mixed(torch.stack(scores, 1), values))}


MODELS: dict[str, tuple[dict[str, Any], Formula]] = {
    "MMoE": ({"num_experts": 3, "expert_hidden": (8,), "tower_hidden": (4,)}, mmoe),
    "PLE": (
        {"levels": ((8,), (6,)), "task_experts": 2, "shared_experts": 1, "tower_hidden": (4,)},
        ple,
    ),
    "ESMM": ({"hidden": (8,)}, esmm),
    "AITM": ({"hidden": (8,)}, aitm),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_its_formula_over_plain_embeddings(name: str) -> None:
    keywords, formula = MODELS[name]
    torch.manual_seed(1)
    draw = np.random.default_rng(2)
    tables = hb.make_tables(SCHEMA, dim=DIM, rule=hb.Sgd(lr=1.0), init=hb.Normal(0.5))
    model = getattr(hb.models, name)(SCHEMA, tables, **keywords)
    ids = {field: draw.integers(0, NUM_IDS, NUM_ROWS) for field in FIELDS}
    dense = draw.normal(size=(NUM_ROWS, 2)).astype(np.float32)
    labels = {label: draw.integers(0, 2, NUM_ROWS).astype(np.float32) for label in "yz"}
    columns = {field: hb.Ids(values) for field, values in ids.items()}
    batch = hb.Batch(columns, {"x": dense}, labels=labels, num_samples=NUM_ROWS)

    plain = {field: torch.nn.Embedding(NUM_IDS, DIM) for field in FIELDS}
    every_id = np.arange(NUM_IDS)
    for field, embedding in plain.items():
        with torch.no_grad():
            embedding.weight.copy_(torch.from_numpy(tables[field].lookup(every_id)))
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    weights = {key: value.requires_grad_() for key, value in weights.items() if value.numel()}
    parts = [plain[field](torch.from_numpy(ids[field])) for field in FIELDS]
    expected = formula(torch.cat([*parts, torch.from_numpy(dense)], dim=1), weights)
    outputs = model(batch.map_arrays(torch.from_numpy))

    assert set(outputs) == set(expected)
    for key, values in expected.items():
        torch.testing.assert_close(outputs[key], values, **CLOSE)
    for logits in (outputs, expected):
        losses = [
            F.binary_cross_entropy_with_logits(logits[label], torch.from_numpy(labels[label]))
            for label in labels
        ]
        sum(losses).backward()  # type: ignore[union-attr]
    own = dict(model.named_parameters())
    for key, value in weights.items():
        torch.testing.assert_close(own[key].grad, value.grad, **CLOSE, msg=key)
    before = {field: tables[field].lookup(every_id) for field in FIELDS}
    hb.SparseOptimizer(model).step()
    for field, embedding in plain.items():
        gradient = before[field] - tables[field].lookup(every_id)
        torch.testing.assert_close(torch.from_numpy(gradient), embedding.weight.grad, **CLOSE)
