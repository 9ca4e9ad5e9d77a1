# SPDX-License-Identifier: Apache-2.0
"""Layers of models with several labels equal their formulas, forward and backward, and export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

from hotbed.errors import ConfigError
from hotbed.models.layers import ExpertMixture, InformationTransfer, JointLogit

from .harness import Case, check_export, check_layer

Weights = dict[str, np.ndarray]


def mixture(s: Any, w: Weights, gate: np.ndarray, experts: np.ndarray) -> np.ndarray:
    shares = np.exp(gate) / np.exp(gate).sum(1, keepdims=True)
    return (shares[:, :, None] * experts).sum(1)


def joint(s: Any, w: Weights, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    both = 1 / (1 + np.exp(-x)) / (1 + np.exp(-y))
    return np.log(both / (1 - both))


def transfer(s: Any, w: Weights, transferred: np.ndarray, own: np.ndarray) -> np.ndarray:
    both = np.stack([transferred, own], axis=1)

    def linear(name: str) -> np.ndarray:
        return both @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    gate = (linear("query") * linear("key")).sum(2) / np.sqrt(s.d)
    return mixture(s, w, gate, linear("value"))


CASES = [
    Case("expert_mixture", lambda s: ExpertMixture(), [("n", "e"), ("n", "e", "d")], mixture),
    Case("joint_logit", lambda s: JointLogit(), [("n",), ("n",)], joint),
    Case("transfer", lambda s: InformationTransfer(s.d), [("n", "d"), ("n", "d")], transfer),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export(CASES, tmp_path)


@pytest.mark.parametrize("x", [-200.0, -30.0, 0.0, 30.0, 200.0])
def test_a_joint_logit_keeps_its_digits_far_from_zero(x: float) -> None:
    """Beside a sure event it is the other's logit; two rare ones add up."""
    logit = torch.tensor([x])
    assert JointLogit()(logit, torch.tensor([300.0])).item() == pytest.approx(x, rel=1e-6, abs=1e-6)
    rare = JointLogit()(torch.tensor([-90.0]), torch.tensor([-80.0]))
    assert rare.item() == pytest.approx(-170.0, rel=1e-6)


@pytest.mark.parametrize(
    ("layer", "shapes", "message"),
    [
        (ExpertMixture(), [(2, 3), (2, 4, 5)], "expected size 3 in dimension 1, got shape"),
        (JointLogit(), [(2,), (2, 1)], "JointLogit: expected tensors of one shape"),
        (InformationTransfer(4), [(2, 3), (2, 3)], "InformationTransfer: expected size 4"),
    ],
)
def test_tensors_that_do_not_fit_are_config_errors(
    layer: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        layer(*[torch.zeros(shape) for shape in shapes])
