# SPDX-License-Identifier: Apache-2.0
"""Dense optimizers from names and rules; schedules as values; precision levels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.config import build, describe
from hotbed.errors import ConfigError
from hotbed.optim.dense import NAMES, TorchOptimizer, dense_optimizer
from hotbed.optim.precision import precision
from hotbed.optim.schedule import Chain, Cosine, Hold, Polynomial, Schedule, Warmup


@pytest.mark.parametrize(
    ("rule", "kind", "expected"),
    [
        (
            hb.Adam(lr=0.1, beta1=0.8, l2=0.01),
            torch.optim.Adam,
            {"lr": 0.1, "betas": (0.8, 0.999), "weight_decay": 0.01},
        ),
        (hb.Adam(decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
        (
            hb.Adagrad(lr=0.2, initial_accumulator=0.1),
            torch.optim.Adagrad,
            {"lr": 0.2, "initial_accumulator_value": 0.1},
        ),
        (hb.RmsProp(alpha=0.9), torch.optim.RMSprop, {"alpha": 0.9}),
        (hb.Sgd(lr=0.3), torch.optim.SGD, {"lr": 0.3, "momentum": 0}),
        (hb.Nesterov(momentum=0.7), torch.optim.SGD, {"momentum": 0.7, "nesterov": True}),
    ],
)
def test_a_rule_becomes_the_torch_optimizer_of_its_name(
    rule: Any, kind: type, expected: dict[str, Any]
) -> None:
    made = dense_optimizer(rule, nn.Linear(2, 2).parameters())
    assert type(made) is kind
    assert {key: made.param_groups[0][key] for key in expected} == expected


@pytest.mark.parametrize(
    "rule", [hb.RowwiseAdagrad(), hb.Adam(clip=1.0), hb.Adam(decay=0.1, l2=0.1)]
)
def test_a_rule_that_torch_does_not_have_is_refused(rule: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer:"):
        dense_optimizer(rule, nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    "rule",
    [
        hb.Adam(lr=0.01, eps=0.03, eps_hat=True),
        hb.Adam(lr=0.01, eps=0.03),
        hb.Ftrl(lr=0.1, beta=0.2, l1=0.05, l2=0.3),
        hb.Ftrl(lr=0.1, initial_accumulator=1e-7),
        hb.Ftrl(lr=0.1, initial_accumulator=0.0, eps=1e-3),
        hb.Ftrl(lr=0.1, beta=0.2, l1=0.05, gradient_l1=0.3, gradient_l2=0.2),
        hb.Momentum(lr=0.1, l1=0.01, l2=0.02, lr_inside=True),
        hb.Nesterov(lr=0.1, lr_inside=True),
    ],
)
def test_dense_parameters_follow_the_reference_of_their_rule(rule: Any) -> None:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = dense_optimizer(rule, [weight])
    assert optimizer is not None
    values = weight.detach().numpy().astype(np.float64)
    state = np.tile(rule.initial_state(3).astype(np.float64), (4, 1))
    for step in range(1, 6):
        weight.grad = torch.randn(4, 3)
        grads = weight.grad.numpy().astype(np.float64)
        values, state = rule.reference(values, state, grads, step)
        optimizer.step()
        np.testing.assert_allclose(weight.detach().numpy(), values, rtol=2e-5, atol=1e-6)
        saved = optimizer.state_dict()
        optimizer = dense_optimizer(rule, [weight])  # as after a resumption
        assert optimizer is not None
        optimizer.load_state_dict(saved)


WIDTHS = (1, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 200)
"""Weights around the length of a vector register, in one of which torch's loops differ."""

STEPPED = {
    "sgd": hb.Sgd(lr=0.05),
    "sgd l1 l2": hb.Sgd(lr=0.05, l1=0.01, l2=0.02),
    "momentum": hb.Momentum(lr=0.05),
    "momentum inside": hb.Momentum(lr=0.05, lr_inside=True),
    "nesterov": hb.Nesterov(lr=0.05, l2=0.01),
    "adam": hb.Adam(lr=0.05),
    "adamw": hb.Adam(lr=0.05, decay=0.01),
    "adagrad": hb.Adagrad(lr=0.05, eps=1e-3),
    "rms_prop": hb.RmsProp(lr=0.05, eps=1e-3),
    "ftrl": hb.Ftrl(lr=0.05),
    "name": "sgd",
    "described": TorchOptimizer("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
}


def stepped(spec: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights of all WIDTHS, which begin at 0, and the state after 4 steps."""
    generator = torch.Generator().manual_seed(5)
    weights = [nn.Parameter(torch.zeros(width, dtype=dtype)) for width in WIDTHS]
    optimizer = dense_optimizer(spec, weights)
    assert optimizer is not None
    for _ in range(4):
        for weight in weights:
            gradient = torch.rand(len(weight), generator=generator) + 0.5
            weight.grad = gradient.to(dtype)
        optimizer.step()
    state = [
        entry
        for weight in weights
        for entry in optimizer.state[weight].values()
        if torch.is_tensor(entry)
    ]
    return [weight.detach() for weight in weights], state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STEPPED)
def test_weights_of_half_precision_learn_as_those_of_float32(name: str, dtype: torch.dtype) -> None:
    spec = STEPPED[name]
    weights, state = stepped(spec, dtype)
    exact, _ = stepped(spec, torch.float32)
    for weight, reference in zip(weights, exact, strict=True):
        torch.testing.assert_close(weight.float(), reference, rtol=0.1, atol=2e-3)
        assert bool(weight.all())
    assert all(bool(entry.isfinite().all()) for entry in state)
    again = stepped(spec, dtype)
    assert all(map(torch.equal, [*weights, *state], [*again[0], *again[1]]))


def test_fused_sgd_of_the_user_steps_half_weights_unfused_and_says_so_once(caplog: Any) -> None:
    weights = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(64))]
    groups = [{"params": [weight]} for weight in weights]
    made = torch.optim.SGD(groups, lr=0.125, momentum=0.5, fused=True)
    optimizer = dense_optimizer(made, weights)
    assert optimizer is made
    saved = optimizer.state_dict()
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weights[0].float(), weights[1])
    assert weights[0][0] == -0.3125
    assert [group["fused"] for group in optimizer.param_groups] == [False, True]
    assert caplog.text.count("SGD(fused=True) does not move weights of bfloat16") == 1
    optimizer.load_state_dict(saved)  # fused, as a state of before
    optimizer.step()
    assert weights[0][0] < -0.3125


def test_ftrl_takes_a_state_of_before_its_eps() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dense_optimizer(hb.Ftrl(eps=1e-3), [weight])
    assert optimizer is not None
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["eps"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["eps"] == 0.0


@pytest.mark.parametrize("make", [hb.Sgd, hb.Adam, hb.Adagrad])
def test_l1_and_l2_are_penalties_of_the_dense_weights(make: Any) -> None:
    """HugeCTR's regularizers: lambda / batch sum(abs(w)), and lambda / (2 batch) sum(w^2)."""
    batch_size, lambda1, lambda2 = 16, 0.8, 0.3
    x = torch.randn(batch_size, 3)

    def layer() -> nn.Linear:
        torch.manual_seed(2)
        return nn.Linear(3, 2)

    penalized, plain = layer(), layer()
    rule = make(lr=0.1, l1=lambda1 / batch_size, l2=lambda2 / batch_size)
    first = dense_optimizer(rule, penalized.parameters())
    second = dense_optimizer(make(lr=0.1), plain.parameters())
    assert first is not None
    assert second is not None
    for _ in range(3):
        first.zero_grad()
        penalized(x).square().mean().backward()
        first.step()
        second.zero_grad()
        weights = torch.cat([weight.flatten() for weight in plain.parameters()])
        penalty = lambda1 / batch_size * weights.abs().sum()
        penalty = penalty + lambda2 / (2 * batch_size) * weights.square().sum()
        (plain(x).square().mean() + penalty).backward()
        second.step()
        for one, other in zip(penalized.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert not torch.equal(penalized.weight, layer().weight)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_makes_its_optimizer_and_no_parameters_make_none(name: str) -> None:
    assert isinstance(dense_optimizer(name, nn.Linear(2, 2).parameters()), NAMES[name])
    assert dense_optimizer(name, []) is None


def test_schedules_have_the_published_shapes() -> None:
    assert [Warmup(4).factor(step) for step in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [Polynomial(4, power=2.0).factor(step) for step in (0, 2, 4, 9)] == [1.0, 0.25, 0.0, 0.0]
    assert [round(Cosine(4, end=0.5).factor(step), 6) for step in (0, 2, 4)] == [1.0, 0.75, 0.5]
    chain = Chain((Warmup(2, start=0.5), Hold(3), Polynomial(2)))
    assert [chain.factor(step) for step in range(9)] == [
        0.75,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.5,
        0.0,
        0.0,
    ]


def test_a_polynomial_may_begin_inside_its_decay_and_stops_at_its_floor() -> None:
    decay = Polynomial(4, power=2.0, floor=0.1, first=1)
    assert [decay.factor(step) for step in (0, 1, 2, 3, 9)] == [0.5625, 0.25, 0.1, 0.1, 0.1]


def test_a_polynomial_equals_torchs(recwarn: Any) -> None:
    rates = []
    for make in (
        Polynomial(5, power=2.0).attach,
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5, 2.0),
    ):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        scheduler, seen = make(optimizer), []
        for _ in range(7):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == pytest.approx(rates[1])


def test_schedules_are_values_that_a_job_can_hold() -> None:
    schedule = Warmup(100, start=0.1)
    assert build(describe(schedule), Schedule, "schedule") == schedule
    with pytest.raises(ConfigError, match=r"Chain\.parts"):
        Chain(())


def test_levels_mean_what_their_table_says() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert precision("O0", cpu).compute is None
    assert precision("O2", cpu).compute is torch.bfloat16
    assert (precision("O2", cuda).compute, precision("O2", cuda).scaled) == (torch.float16, True)
    assert precision("auto", cuda) == precision("O2", cuda)
    assert precision("O3", cuda).convert
    assert not precision("O3", cuda).scaled
