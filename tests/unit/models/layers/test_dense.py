# SPDX-License-Identifier: Apache-2.0
"""Perceptrons, normalization, dropout and the last layer equal their formulas and export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn
from torch.nn import functional as F

from hotbed.errors import ConfigError
from hotbed.models.layers import (
    MLP,
    BatchNorm,
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    Dropout,
    GroupDense,
    LogitHead,
    ReLUDropout,
    xavier_,
)

from .harness import Case, check_export, check_layer

pytestmark = pytest.mark.torch_core


def mlp(s: Any, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    for place in (0, 2):
        x = np.maximum(x @ w[f"{place}.weight"].T + w[f"{place}.bias"], 0)
    return x @ w["4.weight"].T + w["4.bias"]


def varied_mlp(s: Any, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["0.weight"].T) @ w["3.weight"].T + w["3.bias"]


def group(s: Any, w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, ...]:
    first = np.maximum(x @ w["layers.0.0.weight"].T + w["layers.0.0.bias"], 0)
    return first, first @ w["layers.1.0.weight"].T + w["layers.1.0.bias"]


def head(s: Any, w: dict[str, np.ndarray], *parts: np.ndarray) -> np.ndarray:
    return (np.concatenate(parts, axis=1) @ w["linear.weight"].T + w["linear.bias"])[:, 0]


def normalized(
    w: dict[str, np.ndarray], x: np.ndarray, mean: np.ndarray, variance: np.ndarray
) -> np.ndarray:
    return (x - mean) / np.sqrt(variance + 1e-5) * w["weight"] + w["bias"]


def positive_variance(layer: BatchNorm) -> None:
    assert layer.running_var is not None
    layer.running_var.abs_().add_(0.5)


CASES = [
    Case(
        "linear",
        lambda s: nn.Linear(s.i, s.o),
        [("n", "i")],
        lambda s, w, x: x @ w["weight"].T + w["bias"],
        sizes={"o": (1, 3)},
    ),
    Case(
        "mlp",
        lambda s: MLP(s.i, [s.h, s.g], output_dim=s.o, dropout=0.5),
        [("n", "i")],
        mlp,
        sizes={"h": (1, 4), "g": (1, 4), "o": (1, 3)},
    ),
    Case(
        "varied_mlp",
        lambda s: MLP(s.i, [s.h, s.o], activation=["tanh", None], bias=[False, True]),
        [("n", "i")],
        varied_mlp,
        sizes={"h": (1, 4), "o": (1, 3)},
    ),
    Case(
        "group_dense",
        lambda s: GroupDense(s.i, [s.h, s.o], last_activation=None),
        [("n", "i")],
        group,
        sizes={"h": (1, 4), "o": (1, 3)},
    ),
    Case(
        "layer_norm",
        lambda s: nn.LayerNorm(s.d),
        [("n", "t", "d")],
        lambda s, w, x: normalized(w, x, x.mean(2, keepdims=True), x.var(2, keepdims=True)),
    ),
    Case(
        "batch_norm",
        lambda s: BatchNorm(s.d),
        [("n", "d")],
        lambda s, w, x: normalized(w, x, w["running_mean"], w["running_var"]),
        prepare=positive_variance,
    ),
    Case("dropout", lambda s: Dropout(0.5), [("n", "d")], lambda s, w, x: x),
    Case(
        "relu_dropout", lambda s: ReLUDropout(0.5), [("n", "d")], lambda s, w, x: np.maximum(x, 0)
    ),
]
# It computes in float32 always: see its own tests.
HEAD = Case("head", lambda s: LogitHead([s.a, s.b]), [("n", "a"), ("n", "b")], head)
IN_TRAINING = Case(
    "batch_norm_in_training",
    lambda s: BatchNorm(s.d),
    [("n", "d")],
    lambda s, w, x: normalized(w, x, x.mean(0), x.var(0)),
    sizes={"n": (2, 5)},
    training=True,
)


@pytest.mark.parametrize("case", [*CASES, IN_TRAINING], ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export([*CASES, HEAD], tmp_path)


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


# --- linear ---------------------------------------------------------------------------------------


def test_the_head_equals_a_linear_layer_over_the_concatenation() -> None:
    head, parts = (
        LogitHead([2, 3, 4]),
        [torch.randn(5, width, requires_grad=True) for width in (2, 3, 4)],
    )
    logits = head(*parts)
    whole = torch.cat(parts, dim=1)
    close(logits, head.linear(whole).squeeze(1))
    gradients = torch.autograd.grad(logits.square().sum(), [*parts, head.linear.weight])
    expected = torch.autograd.grad(head.linear(whole).square().sum(), [*parts, head.linear.weight])
    for gradient, wanted in zip(gradients, expected, strict=True):
        close(gradient, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_stay_float32_under_autocast(dtype: torch.dtype) -> None:
    head, x = LogitHead(64), torch.randn(8, 64)
    with torch.autocast("cpu", dtype):
        logits = head(x)
    assert logits.dtype == torch.float32
    close(logits, head(x))


def test_xavier_sets_weights_and_zero_biases() -> None:
    mlp = MLP(300, [200], output_dim=1)
    xavier_(mlp)
    assert isinstance(mlp[0], nn.Linear)
    assert mlp[0].weight.std().item() == pytest.approx(math.sqrt(2 / 500), rel=0.02)
    assert not mlp[0].bias.any()


# --- perceptron -----------------------------------------------------------------------------------


def test_the_order_is_linear_norm_activation_dropout() -> None:
    assert [
        type(layer)
        for layer in MLP(3, [4], activation="tanh", dropout=0.5, batch_norm=True, output_dim=1)
    ] == [nn.Linear, BatchNorm, nn.Tanh, Dropout, nn.Linear]
    assert [type(layer) for layer in MLP(3, [4], dropout=0.5)] == [nn.Linear, ReLUDropout]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu"])
def test_every_activation_works_and_eval_equals_plain_torch(activation: str) -> None:
    mlp = MLP(3, [8, 8], output_dim=2, activation=activation, dropout=0.3, batch_norm=True).eval()  # type: ignore[arg-type]
    function = getattr(F, activation) if hasattr(F, activation) else getattr(torch, activation)
    x = torch.randn(5, 3)
    h = x
    for at in range(0, len(mlp) - 1, len(mlp) // 2):
        h = function(mlp[at + 1](mlp[at](h)))
    close(mlp(x), mlp[-1](h))


@pytest.mark.parametrize("n", [0, 1])
def test_batches_too_small_for_statistics_use_the_running_ones(n: int) -> None:
    norm = BatchNorm(4)
    norm(torch.randn(100, 4) * 3 + 1)
    before = norm.running_mean.clone()
    x = torch.randn(n, 4)
    close(norm(x), norm.eval()(x))
    assert torch.equal(norm.running_mean, before)


def test_running_statistics_move_by_the_momentum() -> None:
    norm = BatchNorm(3, momentum=0.25)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    first, second = torch.randn(6, 3) + 2, torch.randn(5, 3)
    norm(first)
    norm(second)
    mean = 0.25 * (0.75 * first.mean(0) + second.mean(0))
    variance = 0.75 * (0.75 + 0.25 * first.var(0)) + 0.25 * second.var(0)
    close(norm.running_mean, mean)
    close(norm.running_var, variance)


def test_an_mlp_without_hidden_layers_is_linear_or_nothing() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(MLP(3, [])(x), x)
    assert MLP(3, [], output_dim=2)(x).shape == (5, 2)
    assert MLP(3, []).output_dim == 3


def test_bad_widths_rates_and_names_are_config_errors() -> None:
    for make in (
        lambda: MLP(3, [0]),
        lambda: MLP(0, [4]),
        lambda: MLP(3, [4], dropout=1.0),
        lambda: MLP(3, [4], dropout=-0.1),
        lambda: MLP(3, [4], activation="rellu"),  # type: ignore[arg-type]
        lambda: MLP(3, [4], activation=["relu", "relu"]),
        lambda: MLP(3, [4, 4], bias=[True]),
        lambda: GroupDense(3, []),
        lambda: GroupDense(3, [4], last_activation="rellu"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r", got .*\. Give"):
            make()


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.5, 0.9, 1e-3])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    x = torch.ones(1000, 1000)
    out = Dropout(rate)(x)
    dropped = (out == 0).double().mean().item()
    spread = math.sqrt(rate * (1 - rate) / x.numel())
    assert dropped == pytest.approx(rate, abs=5 * spread)
    assert out.double().mean().item() == pytest.approx(1.0, abs=5 * spread / (1 - rate))
    assert out[out != 0].unique().numel() == 1


def test_dropped_elements_are_independent_of_their_neighbours() -> None:
    kept = (Dropout(0.4)(torch.ones(1 << 20)) != 0).double() - 0.6
    for lag in (1, 2, 3, 4, 8, 400):  # 4 elements share one 64-bit draw
        correlation = (kept[lag:] * kept[:-lag]).mean().item() / 0.24
        assert abs(correlation) < 5 / math.sqrt(len(kept)), lag


@pytest.mark.parametrize("layer", [Dropout, ReLUDropout])
def test_the_seed_of_torch_decides_the_mask(layer: type[nn.Module]) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return layer(0.5)(torch.ones(31, 7))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("layer", [Dropout, ReLUDropout])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3,), (5, 7, 3)])
def test_dropout_takes_any_shape_and_rests_in_eval(
    layer: type[nn.Module], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    assert layer(0.5)(x).shape == x.shape
    still = x if layer is Dropout else x.relu()
    assert torch.equal(layer(0.5).eval()(x), still)
    assert torch.equal(layer(0.0)(x), still)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_relu_dropout_equals_relu_then_dropout_forward_and_backward(dtype: torch.dtype) -> None:
    x = torch.randn(50, 20, dtype=dtype)
    outs, gradients = [], []
    for make in (ReLUDropout(0.4), nn.Sequential(nn.ReLU(), Dropout(0.4))):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        out = make(leaf)
        (out * torch.arange(20)).sum().backward()
        outs.append(out.detach())
        gradients.append(leaf.grad)
    tolerance = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    )
    torch.testing.assert_close(outs[0], outs[1], **tolerance)
    torch.testing.assert_close(gradients[0], gradients[1], **tolerance)


@pytest.mark.parametrize("layer", [Dropout, ReLUDropout])
def test_a_compiled_dropout_draws_the_same_mask_once(layer: type[nn.Module]) -> None:
    compiled = torch.compile(layer(0.4), backend="aot_eager", fullgraph=True)
    x, outs = torch.rand(40, 30) + 0.1, []
    for run in (layer(0.4), compiled):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.sum().backward()
        assert torch.equal(out != 0, leaf.grad != 0)
        outs.append(out.detach())
    close(outs[0], outs[1])
    stacked = torch.compile(
        nn.Sequential(layer(0.4), layer(0.4)), backend="aot_eager", fullgraph=True
    )
    assert (stacked(torch.ones(300, 300)) != 0).float().mean().item() == pytest.approx(
        0.36, abs=0.02
    )


def test_relu_dropout_lets_nan_through_so_that_the_loop_can_see_it() -> None:
    out = ReLUDropout(0.5)(torch.full((64,), math.nan))
    assert out.isnan().any()


def test_layers_run_under_autocast() -> None:
    x = torch.randn(6, 12, requires_grad=True)
    for net in (
        CrossNet(12, 2),
        CrossNetV2(12, 2),
        CrossNetMix(12, 2),
        MLP(12, [8, 8], dropout=0.4, batch_norm=True),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        out.float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
