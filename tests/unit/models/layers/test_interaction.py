# SPDX-License-Identifier: Apache-2.0
"""Products of features equal their formulas, forward and backward, and export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch absent")

from hotbed.errors import ConfigError  # noqa: E402
from hotbed.models.layers import (  # noqa: E402
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    DotInteraction,
    FMInteraction,
    FMOrder2,
)

from .harness import Case, check_export, check_layer  # noqa: E402

Weights = dict[str, np.ndarray]


def cross(s: Any, w: Weights, x0: np.ndarray) -> np.ndarray:
    x = x0
    for layer in range(s.l):
        scale = x @ w[f"weights.{layer}.weight"][0]
        x = x0 * scale[:, None] + w[f"biases.{layer}"] + x
    return x


def cross_v2(s: Any, w: Weights, x0: np.ndarray) -> np.ndarray:
    x = x0
    for layer in range(s.l):
        x = x0 * (x @ w[f"layers.{layer}.weight"].T + w[f"layers.{layer}.bias"]) + x
    return x


def cross_projected(s: Any, w: Weights, x0: np.ndarray) -> np.ndarray:
    x = x0
    for layer in range(s.l):
        inner = x @ w[f"layers.{layer}.0.weight"].T
        x = x0 * (inner @ w[f"layers.{layer}.1.weight"].T + w[f"layers.{layer}.1.bias"]) + x
    return x


def cross_mix(s: Any, w: Weights, x0: np.ndarray) -> np.ndarray:
    x = x0
    for layer in range(s.l):
        logits = np.exp(x @ w[f"gates.{layer}.weight"].T)
        gates = logits / logits.sum(1, keepdims=True)
        mixed = np.zeros_like(x)
        for expert in range(s.e):
            rows = slice(s.r * expert, s.r * (expert + 1))
            inner = np.tanh(x @ w[f"down.{layer}.weight"][rows].T)
            inner = np.tanh(inner @ w[f"core.{layer}"][expert].T)
            whole = x0 * (inner @ w[f"up.{layer}.weight"][:, rows].T + w[f"biases.{layer}"])
            mixed = mixed + gates[:, expert : expert + 1] * whole
        x = mixed + x
    return x


def pairs(fields: np.ndarray) -> np.ndarray:
    """[n, fields, dim] -> the inner products of (1, 0), (2, 0), (2, 1), …"""
    columns = [
        (fields[:, i] * fields[:, j]).sum(1) for i in range(fields.shape[1]) for j in range(i)
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(fields), 0))


def products(fields: np.ndarray) -> np.ndarray:
    """[n, fields, dim] -> [n, dim]: the sum over all pairs of fields."""
    total = np.zeros((len(fields), fields.shape[2]))
    for i in range(fields.shape[1]):
        for j in range(i):
            total = total + fields[:, i] * fields[:, j]
    return total


def with_dense(s: Any, w: Weights, dense: np.ndarray, fields: np.ndarray) -> np.ndarray:
    together = np.concatenate([dense[:, None], fields], axis=1)
    output = np.concatenate([dense, pairs(together), np.zeros((len(dense), 1))], axis=1)
    assert output.shape[1] == s.d + (s.f + 1) * (s.f + 2) // 2 - (s.f + 1) + 1
    return output


LAYERS = {"l": (1, 2)}
CASES = [
    Case("cross_net", lambda s: CrossNet(s.d, s.l), [("n", "d")], cross, sizes=LAYERS),
    Case("cross_net_v2", lambda s: CrossNetV2(s.d, s.l), [("n", "d")], cross_v2, sizes=LAYERS),
    Case(
        "cross_net_projected",
        lambda s: CrossNetV2(s.d, s.l, projection_dim=s.p),
        [("n", "d")],
        cross_projected,
        sizes={**LAYERS, "p": (1, 3)},
    ),
    Case(
        "cross_net_mix",
        lambda s: CrossNetMix(s.d, s.l, rank=s.r, num_experts=s.e),
        [("n", "d")],
        cross_mix,
        sizes={**LAYERS, "r": (1, 3), "e": (1, 3)},
    ),
    Case(
        "fm",
        lambda s: FMInteraction(),
        [("n", "f", "d")],
        lambda s, w, fields: pairs(fields).sum(1),
    ),
    Case(
        "fm_order2", lambda s: FMOrder2(), [("n", "f", "d")], lambda s, w, fields: products(fields)
    ),
    Case(
        "fm_order2_flat",
        lambda s: FMOrder2(dim=s.d),
        [("n", "f*d")],
        lambda s, w, flat: products(flat.reshape(-1, s.f, s.d)),
    ),
    Case(
        "dot_with_dense",
        lambda s: DotInteraction(s.f, with_dense=True, padding=True),
        [("n", "d"), ("n", "f", "d")],
        with_dense,
    ),
    Case(
        "dot",
        lambda s: DotInteraction(s.f),
        [("n", "f", "d")],
        lambda s, w, fields: pairs(fields),
        sizes={"f": (1, 5)},
    ),
]


@pytest.mark.torch_core
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export(CASES, tmp_path)


def test_dot_has_no_state_and_knows_its_width() -> None:
    layer = DotInteraction(4)
    assert layer.output_dim == 6
    assert not layer.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: CrossNet(3, 0),
        lambda: CrossNetV2(3, 0),
        lambda: CrossNetV2(3, 1, projection_dim=0),
        lambda: CrossNetMix(3, 1, rank=0),
        lambda: FMOrder2(dim=0),
        lambda: DotInteraction(0),
    ],
)
def test_bad_sizes_are_config_errors(make: Any) -> None:
    with pytest.raises(ConfigError, match=r", got .*\. Give"):
        make()


@pytest.mark.parametrize(
    "layer, shapes, message",
    [
        (FMOrder2(), [(2, 6)], "6 columns are not fields of None each, got shape [2, 6]"),
        (FMOrder2(dim=4), [(2, 6)], "6 columns are not fields of 4 each, got shape [2, 6]"),
        (FMOrder2(dim=4), [(2, 3, 5)], "expected size 4 in dimension 2, got shape [2, 3, 5]"),
        (FMOrder2(), [(2,)], "expected a tensor of 2 or 3 dimensions, got shape [2]"),
        (DotInteraction(3), [(2, 6)], "expected a tensor of 3 dimensions, got shape [2, 6]"),
        (DotInteraction(3), [(2, 4, 5)], "expected size 3 in dimension 1, got shape [2, 4, 5]"),
        (DotInteraction(3, with_dense=True), [(2, 3, 5)], "expected 2 tensors, got 1"),
        (
            DotInteraction(3, with_dense=True),
            [(2, 4), (2, 3, 5)],
            "expected size 5 in dimension 1, got shape [2, 4]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_config_errors(
    layer: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        layer(*[torch.zeros(shape) for shape in shapes])
