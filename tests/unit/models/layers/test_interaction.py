# SPDX-License-Identifier: Apache-2.0
"""Products of features equal their formulas, forward and backward, and export."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

from hotbed.errors import ConfigError
from hotbed.models.layers import (
    BilinearProduct,
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    DotInteraction,
    FeatureGate,
    FieldNorm,
    FMInteraction,
    FMOrder2,
    InteractingLayer,
    MaskBlock,
    QuadraticNet,
    TokenFeedForward,
    TokenMixing,
)

from .harness import Case, check_export, check_layer

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


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normalized(x: np.ndarray) -> np.ndarray:
    """The last axis with mean 0 and variance 1, but for 1e-5."""
    spread = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    return (x - x.mean(axis=-1, keepdims=True)) / spread


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def quadratic(s: Any, w: Weights, x: np.ndarray) -> np.ndarray:
    for layer in range(s.l):
        maps = relu(linear(w, f"maps.{layer}.0", x))
        rows = [maps[:, s.d * row : s.d * (row + 1)] for row in range(s.r)]
        x = sum(x * row for row in rows) + x
    return x


def interacting(s: Any, w: Weights, fields: np.ndarray) -> np.ndarray:
    outputs = []
    for i in range(s.f):
        heads = []
        for head in range(2):
            rows = slice(head * s.w, (head + 1) * s.w)
            query, key, value = (w[f"projections.{k}.weight"][rows] for k in range(3))
            scores = [
                ((fields[:, i] @ query.T) * (fields[:, j] @ key.T)).sum(1) for j in range(s.f)
            ]
            weights = np.exp(scores) / np.exp(scores).sum(0)
            heads.append(sum(weights[j][:, None] * (fields[:, j] @ value.T) for j in range(s.f)))
        attended = np.concatenate(heads, axis=1)
        residual = fields[:, i]
        if s.d != 2 * s.w:
            residual = linear(w, "residual", residual)
        outputs.append(relu(attended + residual))
    return np.stack(outputs, axis=1)


def mask_block(s: Any, w: Weights, x: np.ndarray, v: np.ndarray) -> np.ndarray:
    mask = linear(w, "mask.2", relu(linear(w, "mask.0", v)))
    return relu(normalized(linear(w, "linear", x * mask)) * w["norm.weight"] + w["norm.bias"])


def gated(s: Any, w: Weights, x: np.ndarray, context: np.ndarray) -> np.ndarray:
    return x * 2 * sigmoid(linear(w, "gate.2", relu(linear(w, "gate.0", context))))


def gated_alike(s: Any, w: Weights, x: np.ndarray) -> np.ndarray:
    return gated(s, w, x, w["context"])


def bilinear(s: Any, w: Weights, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    total = np.zeros(len(x))
    for head in range(2):
        first = x[:, head * s.a : (head + 1) * s.a]
        second = y[:, head * s.b : (head + 1) * s.b]
        total = total + ((first @ w["weight"][head]) * second).sum(1)
    return total


def token_mixing(s: Any, w: Weights, tokens: np.ndarray) -> np.ndarray:
    mixed = np.empty_like(tokens)
    for to in range(3):
        for origin in range(3):
            part = tokens[:, origin, to * s.p : (to + 1) * s.p]
            mixed[:, to, origin * s.p : (origin + 1) * s.p] = part
    return mixed


def token_feed_forward(s: Any, w: Weights, tokens: np.ndarray) -> np.ndarray:
    outputs = []
    for token in range(s.t):
        hidden = tokens[:, token] @ w["first"][token] + w["first_bias"][token]
        hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        outputs.append(hidden @ w["second"][token] + w["second_bias"][token])
    return np.stack(outputs, axis=1)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


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
    Case(
        "quadratic_net",
        lambda s: QuadraticNet(s.d, s.l, num_rows=s.r),
        [("n", "d")],
        quadratic,
        sizes={**LAYERS, "r": (1, 3)},
    ),
    Case(
        "interacting_layer",
        lambda s: InteractingLayer(s.d, 2 * s.w, num_heads=2),
        [("n", "f", "d")],
        interacting,
        sizes={"w": (1, 2)},
    ),
    Case(
        "field_norm",
        lambda s: FieldNorm(s.f, s.d),
        [("n", "f", "d")],
        lambda s, w, fields: normalized(fields) * w["weight"] + w["bias"],
        sizes={"d": (3, 5)},
    ),
    Case(
        "mask_block",
        lambda s: MaskBlock(s.d, s.v, s.o, reduction_ratio=1.5),
        [("n", "d"), ("n", "v")],
        mask_block,
        sizes={"o": (3, 5)},
    ),
    Case("feature_gate", lambda s: FeatureGate(s.d, s.c, [3]), [("n", "d"), ("n", "c")], gated),
    Case("feature_gate_alike", lambda s: FeatureGate(s.d, hidden=[3]), [("n", "d")], gated_alike),
    Case(
        "bilinear_product",
        lambda s: BilinearProduct([2 * s.a, 2 * s.b], num_heads=2),
        [("n", "2*a"), ("n", "2*b")],
        bilinear,
    ),
    Case("token_mixing", lambda s: TokenMixing(), [("n", 3, "3*p")], token_mixing),
    Case(
        "token_feed_forward",
        lambda s: TokenFeedForward(s.t, s.d, hidden=s.h),
        [("n", "t", "d")],
        token_feed_forward,
        sizes={"h": (1, 3)},
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
        lambda: QuadraticNet(3, 0),
        lambda: InteractingLayer(3, 5, num_heads=2),
        lambda: MaskBlock(3, 3, 3, reduction_ratio=0.0),
        lambda: BilinearProduct([4, 6], num_heads=4),
        lambda: TokenFeedForward(0, 4, hidden=8),
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
        (TokenMixing(), [(2, 3, 5)], "expected size 3 in dimension 2, got shape [2, 3, 5]"),
        (FeatureGate(3, 2), [(2, 3)], "FeatureGate: expected 2 tensors, got 1"),
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
