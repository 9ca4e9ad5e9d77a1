# SPDX-License-Identifier: Apache-2.0
"""The checks of layers fail for layers that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

from hotbed.models.graph.kinds import LAYERS

from . import (
    test_activation,
    test_arithmetic,
    test_dense,
    test_interaction,
    test_sequence,
    test_shape,
    test_tasks,
)
from .harness import Case, check_export, check_layer


class Scaled(nn.Module):
    """x * weight, right or wrong in one place."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        factor = self.weight
        if self.wrong == "value":
            factor = factor * 1.001
        if self.wrong == "gradient of the weight":
            factor = factor.detach()
        if self.wrong == "gradient of the input":
            x = x.detach()
        if self.wrong == "export" and torch.compiler.is_exporting():
            x = x + 0.001
        product = x * factor
        if self.wrong == "gradient of the input and the weight":
            product = product.detach()
        return product


def case(wrong: str) -> Case:
    return Case(
        "scaled",
        lambda s: Scaled(wrong),
        [("n", "d")],
        lambda s, w, x: x * w["weight"],
        sizes={"n": (1, 4)},
    )


def test_a_right_layer_passes() -> None:
    check_layer(case("nothing"))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("value", "tolerance"),
        ("gradient of the weight", "gradient of weight"),
        ("gradient of the input", "gradient of input 0"),
        ("gradient of the input and the weight", "gradient of input 0"),
    ],
)
def test_a_wrong_layer_fails(wrong: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layer(case(wrong))


def test_a_wrong_export_fails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("hotbed.persist.publish.export.TOLERANCE", 1.0)  # its own check comes first
    with pytest.raises(AssertionError, match="scaled"):
        check_export([case("export")], tmp_path)


def test_every_layer_of_descriptions_has_an_entry() -> None:
    kinds = (
        test_activation,
        test_arithmetic,
        test_dense,
        test_interaction,
        test_sequence,
        test_shape,
        test_tasks,
    )
    cases = [test_dense.HEAD]
    for kind in kinds:
        cases += kind.CASES
    layers = {type(case.make(case.largest_sizes)) for case in cases}
    assert not [name for name, kind in LAYERS.items() if kind.layer not in layers]
