# SPDX-License-Identifier: Apache-2.0
"""Losses equal their formulas, weigh samples, and refuse shapes that would broadcast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

import torch
from torch.nn import functional as F

from hotbed import config
from hotbed.errors import ConfigError
from hotbed.models.losses import (
    BCE,
    MSE,
    CrossEntropy,
    Focal,
    Loss,
    MultiTask,
    Pairwise,
    Softmax,
    correct_sampling,
    get_loss,
)

pytestmark = pytest.mark.torch_core
ALL = (BCE, MSE, Focal, Pairwise, Softmax)


def draw(n: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(n), (torch.rand(n) < 0.4).float(), torch.rand(n)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)


def bce_of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    return float(np.mean(-w * (y * log_sigmoid(x) + (1 - y) * log_sigmoid(-x))))


def cross_entropy_of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    exp = np.exp(x - x.max(1, keepdims=True))
    p = exp / exp.sum(1, keepdims=True)
    return float(np.mean(-w * np.log(np.where(y < 0.5, p[:, 0], p[:, 1]))))


def focal_of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    log_p = np.where(y > 0.5, log_sigmoid(x), log_sigmoid(-x))
    return float(np.mean(-w * (1 - np.exp(log_p)) ** 2 * log_p))


def pairwise_of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    pairs = [(i, j) for i in np.flatnonzero(y > 0.5) for j in np.flatnonzero(y <= 0.5)]
    total = sum(w[i] * w[j] * np.logaddexp(0.0, x[j] - x[i]) for i, j in pairs)
    return float(total) / max(len(pairs), 1)


def softmax_of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    log_share = x - np.logaddexp.reduce(x)
    return float(-np.sum(y * w * log_share) / max(np.sum(y * w), 1e-12))


REFERENCES: dict[Any, Any] = {
    BCE: bce_of,
    CrossEntropy: cross_entropy_of,
    MSE: lambda x, y, w: float(np.mean(w * (x - y) ** 2)),
    Focal: focal_of,
    Pairwise: pairwise_of,
    Softmax: softmax_of,
}


@pytest.mark.parametrize("cls", REFERENCES)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 12))
def test_losses_and_gradients_equal_numpy(cls: Any, seed: int, rows: int) -> None:
    """Gradients against central differences of the reference in float64."""
    random = np.random.default_rng(seed)
    x = 3 * random.normal(size=(rows, *cls.outputs))
    y = (random.random(rows) < 0.4).astype(np.float64)
    w = random.random(rows)
    logits = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    loss = cls()(logits, torch.tensor(y), torch.tensor(w))
    loss.backward()
    reference = REFERENCES[cls]
    assert loss.item() == pytest.approx(reference(x, y, w), rel=1e-4, abs=1e-5)
    assert logits.grad is not None
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-5
        slope = (reference(x + step, y, w) - reference(x - step, y, w)) / 2e-5
        assert logits.grad[place].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_labels_with_target_weights_are_multi_task() -> None:
    """HugeCTR's MultiCrossEntropyLoss: the mean over samples and labels of weighted entropies."""
    random = np.random.default_rng(3)
    x = random.normal(size=(8, 3))
    y = (random.random((8, 3)) < 0.5).astype(np.float64)
    targets = {"a": 0.5, "b": 1.0, "c": 2.5}
    entropies = -(y * log_sigmoid(x) + (1 - y) * log_sigmoid(-x))
    wanted = float(np.mean(entropies * np.array(list(targets.values()))))
    losses = {name: BCE() for name in targets}
    loss = MultiTask(losses, {name: weight / 3 for name, weight in targets.items()})
    logits = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    labels = torch.tensor(y, dtype=torch.float32)
    value = loss(
        dict(zip(targets, logits.T, strict=True)), dict(zip(targets, labels.T, strict=True))
    )
    value.backward()
    assert value.item() == pytest.approx(wanted, rel=1e-5)
    slopes = (1 / (1 + np.exp(-x)) - y) * np.array(list(targets.values())) / x.size
    np.testing.assert_allclose(logits.grad, slopes, atol=1e-6)


def test_two_logits_predict_evaluate_and_train_as_their_difference() -> None:
    """A head of two outputs with CrossEntropy against one of their difference with BCE."""
    import hotbed as hb

    class Difference(torch.nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            self.head = head

        def forward(self, data: Any) -> Any:
            two = self.head(data)
            return two[:, 1] - two[:, 0]

    def trained(wrap: Any, loss: Any) -> Any:
        torch.manual_seed(1)
        model = hb.RecModel(wrap(torch.nn.Linear(3, 2)), loss, "sgd", {"auc", "log_loss"})
        model.fit([(x, y)] * 3, progress=False)
        return model

    torch.manual_seed(0)
    x = torch.randn(16, 3)
    y = (x[:, 0] > 0).float()
    one = trained(Difference, "bce")
    two = trained(lambda head: head, "cross_entropy")
    np.testing.assert_allclose(two.predict([(x, y)]), one.predict([(x, y)]), atol=1e-6)
    assert two.evaluate([(x, y)]) == pytest.approx(one.evaluate([(x, y)]), abs=1e-6)
    with pytest.raises(ConfigError, match=r"CrossEntropy: .*got \[4\], \[4\].*\[n, 2\]"):
        CrossEntropy()(torch.zeros(4), torch.zeros(4))


def test_bce_is_torchs_mean_with_and_without_weights() -> None:
    x, y, w = draw()
    torch.testing.assert_close(BCE()(x, y), F.binary_cross_entropy_with_logits(x, y))
    torch.testing.assert_close(BCE()(x, y, w), F.binary_cross_entropy_with_logits(x, y, w))
    weighted = F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(3.0))
    torch.testing.assert_close(BCE(pos_weight=3.0)(x, y), weighted)
    torch.testing.assert_close(
        BCE(label_smoothing=0.2)(x, y), F.binary_cross_entropy_with_logits(x, y * 0.8 + 0.1)
    )


def test_missing_labels_count_as_samples_without_loss() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    y = torch.tensor([1.0, -1.0, 0.0])
    known = F.binary_cross_entropy_with_logits(x[[0, 2]], y[[0, 2]], reduction="none")
    torch.testing.assert_close(BCE(missing_below=-0.5)(x, y), known.sum() / 3)
    weight = torch.tensor([2.0, 5.0, 0.5])
    weighted = (known * weight[[0, 2]]).sum() / 3
    torch.testing.assert_close(BCE(missing_below=-0.5)(x, y, weight), weighted)


def test_mse_is_torchs_mean() -> None:
    x, y, w = draw()
    torch.testing.assert_close(MSE()(x, y), F.mse_loss(x, y))
    torch.testing.assert_close(MSE()(x, y, w), (w * (x - y) ** 2).mean())


def test_focal_is_its_formula_and_bce_at_gamma_zero() -> None:
    x, y, w = draw()
    p = torch.where(y > 0, torch.sigmoid(x), 1 - torch.sigmoid(x))
    torch.testing.assert_close(Focal()(x, y, w), (-w * (1 - p) ** 2 * p.log()).mean())
    torch.testing.assert_close(Focal(gamma=0.0)(x, y), BCE()(x, y))


def test_pairwise_is_the_mean_over_all_pairs() -> None:
    x, y, w = draw()
    pairs = [(i, j) for i in range(20) for j in range(20) if y[i] > 0.5 >= y[j]]
    plain = [math.log1p(math.exp(x[j] - x[i])) for i, j in pairs]
    weighted = [loss * float(w[i] * w[j]) for loss, (i, j) in zip(plain, pairs, strict=True)]
    assert Pairwise()(x, y).item() == pytest.approx(sum(plain) / len(pairs), rel=1e-5)
    assert Pairwise()(x, y, w).item() == pytest.approx(sum(weighted) / len(pairs), rel=1e-5)


def test_softmax_is_cross_entropy_over_the_batch() -> None:
    x, y, w = draw()
    expected = -(y * w * torch.log_softmax(x / 2.0, 0)).sum() / (y * w).sum()
    torch.testing.assert_close(Softmax(temperature=2.0)(x, y, w), expected)


@pytest.mark.parametrize("cls", ALL)
def test_losses_are_finite_on_empty_one_class_and_extreme_batches(cls: type[Loss]) -> None:
    for x, y in (
        (torch.empty(0, requires_grad=True), torch.empty(0)),
        (torch.randn(4, requires_grad=True), torch.zeros(4)),
        (torch.randn(4, requires_grad=True), torch.ones(4)),
        (torch.tensor([200.0, -200.0], requires_grad=True), torch.tensor([0.0, 1.0])),
    ):
        loss = cls()(x, y)
        loss.backward()
        assert loss.shape == ()
        assert loss.isfinite()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("cls", ALL)
def test_losses_are_float32_also_for_bfloat16_logits(cls: type[Loss]) -> None:
    x, y, w = draw()
    assert cls()(x.bfloat16(), y, w).dtype == torch.float32


@pytest.mark.parametrize("cls", ALL)
def test_shapes_that_would_broadcast_are_refused(cls: type[Loss]) -> None:
    with pytest.raises(ConfigError, match=r"differ in shape, got \[4, 1\], \[4\], None"):
        cls()(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(ConfigError, match="differ in shape"):
        cls()(torch.zeros(4), torch.zeros(4), torch.ones(1))


def test_multi_task_adds_weighted_losses_by_label() -> None:
    (a, ya, w), (b, yb, _) = draw(), draw()
    loss = MultiTask({"a": BCE(), "b": MSE()}, {"b": 0.5})
    torch.testing.assert_close(
        loss({"a": a, "b": b}, {"a": ya, "b": yb, "c": ya}, w),
        BCE()(a, ya, w) + 0.5 * MSE()(b, yb, w),
    )
    assert set(loss.parts({"a": a, "b": b}, {"a": ya, "b": yb})) == {"a", "b"}
    with pytest.raises(ConfigError, match=r"MultiTask\.losses\.b: no such label"):
        loss({"a": a}, {"a": ya})
    with pytest.raises(ConfigError, match=r"weights\.aa: .*Did you mean 'a'\?"):
        MultiTask({"a": BCE()}, {"aa": 1.0})
    with pytest.raises(ConfigError, match="empty"):
        MultiTask({})


def test_events_in_order_cost_what_a_later_one_exceeds_the_one_before_it() -> None:
    x, y, w = draw()
    logits = {"click": x, "cart": torch.randn(20), "buy": torch.randn(20)}
    labels = dict.fromkeys(logits, y)
    losses = {"click": BCE(), "cart": Focal(), "buy": BCE()}
    ordered = MultiTask(losses, {"buy": 3.0}, order=("click", "cart", "buy"), order_weight=0.5)
    p = {name: 1 / (1 + np.exp(-logit.double().numpy())) for name, logit in logits.items()}
    excess = np.maximum(p["cart"] - p["click"], 0) + np.maximum(p["buy"] - p["cart"], 0)
    for weight in (None, w):
        difference = ordered(logits, labels, weight) - MultiTask(losses, {"buy": 3.0})(
            logits, labels, weight
        )
        factor = np.ones(20) if weight is None else weight.numpy()
        assert difference.item() == pytest.approx(0.5 * np.mean(factor * excess), rel=1e-4)
    assert config.build(config.describe(ordered), MultiTask).order == ("click", "cart", "buy")
    for order in (("click", "view"), ("click", "price")):
        with pytest.raises(ConfigError, match=rf"MultiTask\.order: .* got '{order[1]}' with"):
            MultiTask({**losses, "price": MSE()}, order=order)


def test_uncertainty_weighs_as_kendalls_objective_at_its_optimum() -> None:
    """Beside the paper's objective, whose log-variance is the best one of a grid."""
    logits = {name: torch.randn(20, requires_grad=True) for name in ("click", "price")}
    labels = {"click": draw()[1], "price": 100 * torch.rand(20)}
    losses = {"click": BCE(), "price": MSE()}
    loss = MultiTask(losses, {"price": 3.0}, weighting="uncertainty")
    value = loss(logits, labels)
    mine = torch.autograd.grad(value, list(logits.values()))
    total = torch.zeros(())
    grid = torch.linspace(-5, 12, 170_001)
    for name, factor in (("click", 1.0), ("price", 3.0)):
        part = losses[name](logits[name], labels[name])
        best = grid[torch.argmin(part.detach() / grid.exp() + grid / 2)]
        total = total + factor * (part / best.exp() + best / 2)
    theirs = torch.autograd.grad(total, list(logits.values()))
    assert value.item() == pytest.approx(total.item(), rel=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)
    empty = {name: torch.zeros(0) for name in logits}
    assert math.isfinite(loss(empty, empty))


@pytest.mark.parametrize("cls", ALL)
def test_every_loss_is_found_by_name_and_describes_itself(cls: type[Loss]) -> None:
    assert get_loss(config.kind_of(cls)) == cls()
    assert config.build(config.describe(cls()), Loss) == cls()


def test_wrong_names_and_numbers_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'focal'"):
        get_loss("focl")
    for make in (
        lambda: BCE(pos_weight=-1.0),
        lambda: BCE(label_smoothing=2.0),
        lambda: Focal(gamma=math.nan),
    ):
        with pytest.raises(ConfigError, match=", got "):
            make()
    with pytest.raises(ConfigError, match="negative_rate"):
        correct_sampling(0.0, 0.0)


def test_correcting_down_sampling_gives_the_probability_on_all_samples() -> None:
    p, rate = 0.3, 0.1
    logit = math.log(p / (1 - p))
    corrected = 1.0 / (1.0 + math.exp(-correct_sampling(logit, rate)))
    assert corrected == pytest.approx(p / (p + (1 - p) / rate))
