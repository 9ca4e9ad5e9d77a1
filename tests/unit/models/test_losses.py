# SPDX-License-Identifier: Apache-2.0
"""Losses equal their formulas, weigh samples, and refuse shapes that would broadcast."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="torch absent")

from torch.nn import functional as F  # noqa: E402

from hotbed import config  # noqa: E402
from hotbed.errors import ConfigError  # noqa: E402
from hotbed.models.losses import (  # noqa: E402
    BCE,
    MSE,
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


def test_bce_is_torchs_mean_with_and_without_weights() -> None:
    x, y, w = draw()
    torch.testing.assert_close(BCE()(x, y), F.binary_cross_entropy_with_logits(x, y))
    torch.testing.assert_close(BCE()(x, y, w), F.binary_cross_entropy_with_logits(x, y, w))
    weighted = F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(3.0))
    torch.testing.assert_close(BCE(pos_weight=3.0)(x, y), weighted)
    torch.testing.assert_close(
        BCE(label_smoothing=0.2)(x, y), F.binary_cross_entropy_with_logits(x, y * 0.8 + 0.1)
    )


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
