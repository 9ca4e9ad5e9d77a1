# SPDX-License-Identifier: Apache-2.0
"""Activations equal their formulas and export; among them those of torch that graphs name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

from hotbed.errors import ConfigError
from hotbed.models.layers import MLP, Dice, Softmax

from .harness import Case, Input, check_export, check_layer

pytestmark = pytest.mark.torch_core
Weights = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    errors = [math.erf(value / math.sqrt(2)) for value in x.flat]
    return x * (1 + np.reshape(errors, x.shape)) / 2


def dice(x: np.ndarray, alpha: Any, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    share = sigmoid((x - mean) / np.sqrt(variance + 1e-8))
    return share * x + (1 - share) * alpha * x


def softmax(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Over the last axis, where the mask is 1; zeros for rows without any."""
    powers = np.exp(x - x.max(-1, keepdims=True)) * mask
    return powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)


def zero_or_one(draw: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> np.ndarray:
    return draw.integers(0, 2, shape)


def positive_variance(layer: Dice) -> None:
    layer.running_var.abs_().add_(0.5)


CASES = [
    Case(
        "dice",
        lambda s: Dice(s.d),
        [("n", "t", "d")],
        lambda s, w, x: dice(x, w["alpha"], w["running_mean"], w["running_var"]),
        prepare=positive_variance,
    ),
    Case(
        "softmax",
        lambda s: Softmax(factor=0.3),
        [("n", "t", "d")],
        lambda s, w, x: softmax(0.3 * x, np.ones_like(x)),
    ),
    Case(
        "masked_softmax",
        lambda s: Softmax(),
        [("n", "h", "d"), Input(("n", 1, "d"), zero_or_one)],
        lambda s, w, x, mask: softmax(x, mask),
    ),
    Case(
        "prelu",
        lambda s: nn.PReLU(),
        [("n", "d")],
        lambda s, w, x: np.maximum(x, 0) + w["weight"] * np.minimum(x, 0),
    ),
    Case(
        "elu",
        lambda s: nn.ELU(0.7),
        [("n", "d")],
        lambda s, w, x: np.maximum(x, 0) + 0.7 * np.expm1(np.minimum(x, 0)),
    ),
    Case("sigmoid", lambda s: nn.Sigmoid(), [("n", "d")], lambda s, w, x: sigmoid(x)),
    Case("tanh", lambda s: nn.Tanh(), [("n", "d")], lambda s, w, x: np.tanh(x)),
    Case("silu", lambda s: nn.SiLU(), [("n", "d")], lambda s, w, x: x * sigmoid(x)),
    Case("gelu", lambda s: nn.GELU(), [("n", "d")], lambda s, w, x: gelu(x)),
    Case("relu", lambda s: nn.ReLU(), [("n", "d")], lambda s, w, x: np.maximum(x, 0)),
    Case(
        "leaky_relu",
        lambda s: nn.LeakyReLU(0.2),
        [("n", "d")],
        lambda s, w, x: np.maximum(x, 0) + 0.2 * np.minimum(x, 0),
    ),
]
IN_TRAINING = [
    Case(
        "dice_in_training",
        lambda s: Dice(s.d),
        [("n", "d")],
        lambda s, w, x: dice(x, w["alpha"], x.mean(0), x.var(0)),
        sizes={"n": (3, 6)},
        training=True,
    ),
    Case(
        "fixed_dice_in_training",
        lambda s: Dice(s.d, alpha=0.1, learned=False),
        [("n", "t", "d")],
        lambda s, w, x: dice(x, w["alpha"], x.mean((0, 1)), x.var((0, 1))),
        sizes={"n": (3, 6)},
        training=True,
    ),
]


@pytest.mark.parametrize("case", [*CASES, *IN_TRAINING], ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export(CASES, tmp_path)


def test_dice_learns_the_statistics_that_it_uses_in_eval_mode() -> None:
    layer, x = Dice(3), 2 + 3 * torch.randn(500, 3)
    for _ in range(100):
        layer(x)
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.eval()(x), layer.train()(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("n", [0, 1])
def test_batches_too_small_for_statistics_use_the_running_ones(n: int) -> None:
    layer = Dice(3)
    layer(torch.randn(100, 3) * 3 + 1)
    before, x = layer.running_mean.clone(), torch.randn(n, 3)
    assert torch.equal(layer(x), layer.eval()(x))
    assert torch.equal(layer.running_mean, before)


def test_a_fixed_alpha_is_saved_but_not_learned() -> None:
    layer = Dice(2, alpha=0.5, learned=False)
    assert not list(layer.parameters())
    assert layer.state_dict()["alpha"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_of_large_scores_stays_finite(dtype: torch.dtype) -> None:
    x = torch.full((2, 3), torch.finfo(dtype).max / 2, dtype=dtype).requires_grad_()
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    weights = Softmax()(x, mask)
    weights[0, 0].backward()
    assert weights.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert x.grad.isfinite().all()


def test_perceptrons_take_these_activations_by_name() -> None:
    kinds = [type(layer) for layer in MLP(3, [4, 5], activation=["dice", "prelu"])]
    assert kinds.index(Dice) == 1
    assert nn.PReLU in kinds


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dice(0),
        lambda: Dice(3, epsilon=0.0),
        lambda: Dice(3, alpha=float("nan")),
        lambda: Softmax(float("inf")),
    ],
)
def test_wrong_settings_are_config_errors(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"(Dice|Softmax)\.\w+: must be .*, got .*\. Give"):
        make()
