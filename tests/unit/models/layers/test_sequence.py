# SPDX-License-Identifier: Apache-2.0
"""Layers over histories equal their formulas and export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.errors import ConfigError
from hotbed.models.layers import (
    AUGRU,
    GRU,
    AttentionPooling,
    AttentionScores,
    AttentionSum,
    DecayedMean,
    DotAttentionPooling,
    MultiHeadAttention,
    PadSequence,
    SequenceMask,
    TransformerLayer,
)

from .harness import Case, Input, check_export, check_layer
from .test_activation import sigmoid, softmax, zero_or_one

pytestmark = pytest.mark.torch_core
Weights = dict[str, np.ndarray]


class Packed(nn.Module):
    """A layer over packed rows, told where each sample begins; the last one ends with the rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        *others, rows, starts = inputs
        offsets = torch.cat([starts, starts.new_full((1,), rows.shape[0])])
        return self.layer(*others, rows, offsets)


def starts(draw: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> np.ndarray:
    """Begins of samples with 0 to 2 * t rows, which have n * t rows together."""
    shifts = draw.integers(0, sizes.t + 1, shape)
    shifts[:1] = 0
    return np.arange(sizes.n) * sizes.t - shifts


def pad(s: Any, w: Weights, rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    padded, mask = np.zeros((s.n, s.l, rows.shape[1])), np.zeros((s.n, s.l))
    for i, history in enumerate(np.split(rows, starts[1:])[: s.n]):
        newest = history[-s.l :]
        padded[i, : len(newest)], mask[i, : len(newest)] = newest, 1
    return padded, mask


def dot_attention(
    s: Any, w: Weights, target: np.ndarray, rows: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Sample by sample, each entry projected."""
    query, key, value = (w[f"layer.{name}.weight"] for name in ("query", "key", "value"))
    results = np.zeros((s.n, s.d))
    for i, history in enumerate(np.split(rows, starts[1:])[: s.n]):
        projected = query @ target[i] + w["layer.query.bias"]
        newest = history[-s.l :]
        scores = np.array([(key @ entry) @ projected for entry in newest]) / math.sqrt(s.d)
        weights = np.exp(scores) / np.exp(scores).sum()
        for weight, entry in zip(weights, newest, strict=True):
            results[i] += weight * (value @ entry)
    return results


def decayed_mean(s: Any, w: Weights, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    results = np.zeros((s.n, s.d))
    for i, history in enumerate(np.split(rows, starts[1:])[: s.n]):
        newest = history[-s.l :][::-1]
        weights = [0.5 ** (age / 2) for age in range(len(newest))]
        for weight, entry in zip(weights, newest, strict=True):
            results[i] += weight * entry / sum(weights)
    return results


def sequence_mask(s: Any, w: Weights, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    mask = np.zeros((s.n, 1, s.f, s.t))
    for i in range(s.n):
        mask[i, 0, : int(queries[i, 0]), : int(keys[i, 0])] = 1
    return mask


def lengths(draw: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> np.ndarray:
    return draw.integers(0, 6, shape)


def unit(w: Weights, target: np.ndarray, history: np.ndarray) -> np.ndarray:
    targets = np.broadcast_to(target[:, None], history.shape)
    x = np.concatenate([targets, history, targets - history, targets * history], 2)
    hidden = sigmoid(x @ w["unit.0.weight"].T + w["unit.0.bias"])
    return (hidden @ w["unit.3.weight"].T + w["unit.3.bias"])[:, :, 0]


def weighed(weights: np.ndarray, history: np.ndarray) -> np.ndarray:
    return (weights[:, :, None] * history).sum(1)


def scores(s: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Inner products of each pair of each head, one after the other."""
    result = np.zeros((s.n, s.h, s.f, s.t))
    for head in range(s.h):
        part = slice(head * s.d, (head + 1) * s.d)
        for query in range(s.f):
            for key in range(s.t):
                products = q[:, query, part] * k[:, key, part]
                result[:, head, query, key] = products.sum(1) / math.sqrt(s.d)
    return result


def attention(heads: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = 1) -> np.ndarray:
    """Head by head; the mask is [n, length_to]."""
    dim = q.shape[2] // heads
    results = []
    for first in range(0, q.shape[2], dim):
        part = slice(first, first + dim)
        scores = q[..., part] @ k[..., part].transpose(0, 2, 1) / math.sqrt(dim)
        mask = np.broadcast_to(mask, scores.shape)
        results.append(softmax(scores, mask) @ v[..., part])
    return np.concatenate(results, 2)


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def projected(w: Weights, prefix: str, *inputs: np.ndarray) -> np.ndarray:
    *qkv, mask = inputs
    qkv = [linear(w, f"{prefix}projections.{place}", x) for place, x in enumerate(qkv)]
    return linear(w, f"{prefix}projections.3", attention(2, *qkv, mask[:, None]))


def normalized(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(2, keepdims=True)
    scaled = centred / np.sqrt(x.var(2, keepdims=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def transformer(s: Any, w: Weights, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    x = normalized(w, "norms.0", x + projected(w, "attention.", x, x, x, mask))
    hidden = linear(w, "first", x)
    hidden = np.maximum(hidden, 0) + 0.01 * np.minimum(hidden, 0)
    return normalized(w, "norms.1", x + linear(w, "second", hidden))


def gru(s: Any, w: Weights, x: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States of a GRU whose update is multiplied by `shares`; gates r, z, n as in torch."""
    state, states = np.zeros((s.n, s.h)), []
    for step in range(s.t):
        of_x = np.split(x[:, step] @ w["weight_ih"].T + w["bias_ih"], 3, axis=1)
        of_h = np.split(state @ w["weight_hh"].T + w["bias_hh"], 3, axis=1)
        reset = sigmoid(of_x[0] + of_h[0])
        update = shares[:, step : step + 1] * (1 - sigmoid(of_x[1] + of_h[1]))
        state = (1 - update) * state + update * np.tanh(of_x[2] + reset * of_h[2])
        states.append(state)
    return np.stack(states, 1), state


def torch_gru(s: Any, w: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = {name[len("gru.") :].removesuffix("_l0"): values for name, values in w.items()}
    return gru(s, weights, x, np.ones(x.shape[:2]))


SEQUENCE = [("n", "t", "d"), Input(("n", "t"), zero_or_one)]
CASES = [
    Case(
        "pad_sequence",
        lambda s: Packed(PadSequence(s.l)),
        [("n*t", "d"), Input(("n",), starts)],
        pad,
        sizes={"l": (1, 5)},
    ),
    Case(
        "dot_attention",
        lambda s: Packed(DotAttentionPooling(s.d, length=s.l)),
        [("n", "d"), ("n*t", "d"), Input(("n",), starts)],
        dot_attention,
        sizes={"l": (1, 8)},
    ),
    Case(
        "decayed_mean",
        lambda s: Packed(DecayedMean(2.0, length=s.l)),
        [("n*t", "d"), Input(("n",), starts)],
        decayed_mean,
        sizes={"l": (1, 8)},
    ),
    Case(
        "sequence_mask",
        lambda s: SequenceMask(s.f, s.t),
        [Input(("n", 1), lengths), Input(("n", 1), lengths)],
        sequence_mask,
        sizes={"f": (1, 4), "t": (1, 5)},
    ),
    Case(
        "attention_pooling",
        lambda s: AttentionPooling(s.d, [s.h]),
        [("n", "d"), *SEQUENCE],
        lambda s, w, t, x, mask: weighed(unit(w, t, x) * mask, x),
        sizes={"h": (1, 4)},
    ),
    Case(
        "softmax_pooling",
        lambda s: AttentionPooling(s.d, [s.h], softmax=True),
        [("n", "d"), *SEQUENCE],
        lambda s, w, t, x, mask: weighed(softmax(unit(w, t, x), mask), x),
        sizes={"h": (1, 4)},
    ),
    Case(
        "attention",
        lambda s: MultiHeadAttention(s.h),
        [("n", "f", "h*d"), ("n", "t", "h*d"), ("n", "t", "h*d")],
        lambda s, w, q, k, v: attention(s.h, q, k, v),
    ),
    Case(
        "attention_of_one_query",
        lambda s: MultiHeadAttention(s.h),
        [("n", "h*d"), ("n", "t", "h*d"), ("n", "t", "h*d"), Input(("n", "t"), zero_or_one)],
        lambda s, w, q, k, v, m: attention(s.h, q[:, None], k, v, m[:, None])[:, 0],
    ),
    Case(
        "attention_of_pairs",
        lambda s: MultiHeadAttention(s.h),
        [*[("n", "f", "h*d")] * 3, Input(("n", 1, "f", "f"), zero_or_one)],
        lambda s, w, q, k, v, m: attention(s.h, q, k, v, m[:, 0]),
    ),
    Case(
        "attention_scores",
        lambda s: AttentionScores(s.h),
        [("n", "f", "h*d"), ("n", "t", "h*d")],
        lambda s, w, q, k: scores(s, q, k),
    ),
    Case(
        "attention_sum",
        lambda s: AttentionSum(),
        [("n", "h", "f", "t"), ("n", "t", "h*d")],
        lambda s, w, a, v: np.concatenate(
            [a[:, i] @ v[..., i * s.d : (i + 1) * s.d] for i in range(s.h)], 2
        ),
    ),
    Case(
        "gru_without_recurrent_bias",
        lambda s: GRU(s.d, s.h, recurrent_bias=False),
        [("n", "t", "d")],
        torch_gru,
        sizes={"n": (1, 4), "h": (1, 4)},
    ),
    Case(
        "attention_of_split_heads",
        lambda s: MultiHeadAttention(s.h),
        [("n", "h", "f", "d"), ("n", "h", "t", "d"), ("n", "h", "t", "d")],
        lambda s, w, *qkv: attention(
            s.h, *(x.transpose(0, 2, 1, 3).reshape(s.n, x.shape[2], s.h * s.d) for x in qkv)
        ),
    ),
    Case(
        "projected_attention",
        lambda s: MultiHeadAttention(2, width=2 * s.d),
        [("n", "f", "2*d"), ("n", "t", "2*d"), ("n", "t", "2*d"), Input(("n", "t"), zero_or_one)],
        lambda s, w, *inputs: projected(w, "", *inputs),
    ),
    Case(
        "transformer_layer",
        lambda s: TransformerLayer(2 * s.d, 2, hidden=s.h),
        [("n", "t", "2*d"), Input(("n", "t"), zero_or_one)],
        transformer,
        sizes={"d": (2, 4), "h": (1, 4)},
    ),
    Case(
        "augru", lambda s: AUGRU(s.d, s.h), [("n", "t", "d"), ("n", "t")], gru, sizes={"h": (1, 4)}
    ),
    Case(
        "gru",
        lambda s: GRU(s.d, s.h),
        [("n", "t", "d")],
        torch_gru,
        sizes={"n": (1, 4), "h": (1, 4)},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


WITHIN_OTHERS = {"attention_of_split_heads", "projected_attention", "gru_without_recurrent_bias"}
"""Layers that others contain, or are but for an argument."""


@pytest.mark.parametrize(
    "left_out", [WITHIN_OTHERS, pytest.param(set(), marks=pytest.mark.soak)], ids=["most", "all"]
)
def test_the_layers_export(left_out: set[str], tmp_path: Path) -> None:
    # in the first three, the rows of a sample end where those of the next begin
    check_export([case for case in CASES[3:] if case.name not in left_out], tmp_path)


# --- against torch ----------------------------------------------------------------------------------


def test_attention_with_projections_is_that_of_torch() -> None:
    ours, theirs = MultiHeadAttention(2, 6), nn.MultiheadAttention(6, 2, batch_first=True)
    theirs.in_proj_weight.data = torch.cat([one.weight for one in ours.projections[:3]])
    nn.init.normal_(theirs.in_proj_bias)
    for layer, bias in zip(ours.projections, theirs.in_proj_bias.chunk(3), strict=False):
        layer.bias.data = bias.detach()
    theirs.out_proj.load_state_dict(ours.projections[3].state_dict())
    query, key, value = torch.randn(4, 3, 6), torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    mask = torch.ones(4, 5)
    mask[1, 2:] = 0
    expected = theirs(query, key, value, key_padding_mask=mask == 0)[0]
    torch.testing.assert_close(ours(query, key, value, mask), expected, rtol=1e-5, atol=1e-6)


def test_augru_with_full_attention_is_the_gru_of_torch() -> None:
    ours, theirs = AUGRU(3, 4), nn.GRU(3, 4, batch_first=True)
    theirs.load_state_dict({f"{name}_l0": value for name, value in ours.state_dict().items()})
    x = torch.randn(5, 6, 3)
    states, last = ours(x, torch.ones(5, 6))
    torch.testing.assert_close(states, theirs(x)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, theirs(x)[1][0], rtol=1e-5, atol=1e-6)


def test_a_transformer_layer_drops_out_in_training_only() -> None:
    layer, x = TransformerLayer(4, dropout=0.5), torch.randn(3, 5, 4)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_a_transformer_layer_has_a_hidden_layer_of_four_widths() -> None:
    layer = TransformerLayer(4)
    assert layer.first.out_features == 16
    x = torch.randn(2, 3, 4)
    hidden = F.leaky_relu(layer.first(layer.norms[0](x + layer.attention(x, x, x))))
    assert hidden.shape == (2, 3, 16)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3])
def test_histories_without_any_row_are_padding(n: int) -> None:
    rows = torch.zeros(0, 2, requires_grad=True)
    padded, mask = PadSequence(4)(rows, torch.zeros(n + 1, dtype=torch.int64))
    padded.sum().backward()
    assert padded.shape == (n, 4, 2)
    assert not padded.any()
    assert mask.tolist() == [[0.0] * 4] * n
    assert rows.grad.shape == (0, 2)


def test_rows_that_are_cut_off_take_no_gradient() -> None:
    rows = torch.randn(5, 2, requires_grad=True)
    PadSequence(2)(rows, torch.tensor([0, 4, 5]))[0].sum().backward()
    assert rows.grad[:, 0].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PadSequence(0), r"PadSequence\.length: must be at least 1, got 0\. Give"),
        (
            lambda: PadSequence(2)(torch.zeros(3), torch.zeros(2)),
            r"PadSequence: expected rows \[m, dim\] .* got shapes \[3\] and \[2\]\. Give the rows",
        ),
        (lambda: SequenceMask(0, 1), r"SequenceMask\.length_from: must be at least 1"),
        (lambda: AUGRU(0, 1), r"AUGRU\.input_size: must be at least 1"),
        (lambda: MultiHeadAttention(0), r"MultiHeadAttention\.num_heads: must be at least 1"),
        (lambda: MultiHeadAttention(3, 4), "must divide the width, got 3 heads and width 4"),
        (
            lambda: MultiHeadAttention(3)(*[torch.zeros(2, 5, 4)] * 3),
            "must divide the width, got 3 heads and width 4",
        ),
        (
            lambda: MultiHeadAttention(3)(*[torch.zeros(2, 2, 5, 4)] * 3),
            r"4 axes must be \[n, 3, length, head_dim\] .* got shape \[2, 2, 5, 4\]\. Give",
        ),
        (
            lambda: MultiHeadAttention(1)(*[torch.zeros(4)] * 3),
            r"must have 2, 3 or 4 axes, got shape \[4\]\. Give",
        ),
        (lambda: AttentionPooling(3, activation="dice"), "'dice' would count padding"),
    ],
)
def test_wrong_settings_and_shapes_are_config_errors(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
