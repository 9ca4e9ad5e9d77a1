# SPDX-License-Identifier: Apache-2.0
"""Arithmetic layers equal their formulas, forward and backward, and export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

from hotbed.errors import ConfigError
from hotbed.models.layers import (
    Add,
    Cast,
    ElementwiseMultiply,
    MatrixMultiply,
    ReduceMean,
    ReduceSum,
    Scale,
    Sub,
    WeightMultiply,
)

from .harness import Case, check_export, check_layer

TWO = [("n", "t", "d"), ("n", "t", "d")]
THREE = [("n", "d"), ("n", "d"), ("n", "d")]
FACTOR = {"k": (1, 3)}
CASES = [
    Case("add", lambda s: Add(), THREE, lambda s, w, x, y, z: x + y + z),
    Case("sub", lambda s: Sub(), TWO, lambda s, w, x, y: x - y),
    Case("product", lambda s: ElementwiseMultiply(), THREE, lambda s, w, x, y, z: x * y * z),
    Case(
        "weight_multiply",
        lambda s: WeightMultiply(s.f, dim=s.d),
        [("n", "f")],
        lambda s, w, x: np.einsum("nf,fd->nfd", x, w["weight"]).reshape(s.n, s.f * s.d),
        sizes={"d": (1, 4)},
    ),
    Case(
        "matrices",
        lambda s: MatrixMultiply(),
        [("n", "k"), ("k", "j")],
        lambda s, w, x, y: np.einsum("nk,kj->nj", x, y),
    ),
    Case(
        "matrices_by_sample",
        lambda s: MatrixMultiply(),
        [("n", "m", "k"), ("n", "k", "j")],
        lambda s, w, x, y: np.einsum("nmk,nkj->nmj", x, y),
    ),
    Case(
        "matrices_by_head",
        lambda s: MatrixMultiply(),
        [("n", "h", "m", "k"), ("n", "h", "k", "j")],
        lambda s, w, x, y: np.einsum("nhmk,nhkj->nhmj", x, y),
    ),
    Case(
        "matrix_and_cube",
        lambda s: MatrixMultiply(),
        [("n", "k"), ("k", "g", "j")],
        lambda s, w, x, y: np.einsum("nk,kgj->ngj", x, y),
    ),
    Case("sum", lambda s: ReduceSum(axis=2), [("n", "t", "d")], lambda s, w, x: x.sum(2)),
    Case(
        "sum_kept",
        lambda s: ReduceSum(keepdim=True),
        [("n", "t", "d")],
        lambda s, w, x: x.sum(1, keepdims=True),
    ),
    Case("mean", lambda s: ReduceMean(), [("n", "t", "d")], lambda s, w, x: x.mean(1)),
    Case(
        "mean_kept",
        lambda s: ReduceMean(axis=1, keepdim=True),
        [("n", "d")],
        lambda s, w, x: x.mean(1, keepdims=True),
    ),
    Case(
        "scaled_elements",
        lambda s: Scale(axis=0, factor=s.k),
        [("n", "d")],
        lambda s, w, x: np.repeat(x, s.k, axis=1),
        sizes=FACTOR,
    ),
    Case(
        "scaled_rows",
        lambda s: Scale(axis=1, factor=s.k),
        [("n", "d")],
        lambda s, w, x: np.repeat(x, s.k, axis=0),
        sizes=FACTOR,
    ),
    Case("cast", lambda s: Cast("float64"), [("n", "d")], lambda s, w, x: x),
]


@pytest.mark.torch_core
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export(CASES, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cast_rounds_to_its_type(dtype: Any) -> None:
    x = torch.randn(50, dtype=torch.float64)
    assert torch.equal(Cast(dtype)(x), x.to(getattr(torch, dtype)))


def test_weights_of_weight_multiply_start_xavier_uniform() -> None:
    weight = WeightMultiply(40, dim=30).weight
    limit = (6 / (40 + 40 * 30)) ** 0.5
    assert weight.abs().max().item() == pytest.approx(limit, rel=0.01)
    assert weight.std().item() == pytest.approx(limit / 3**0.5, rel=0.05)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ReduceSum(axis=0), "ReduceSum.axis: must be an integer >= 1, got 0"),
        (lambda: ReduceMean(axis=-1), "ReduceMean.axis: must be an integer >= 1, got -1"),
        (lambda: Scale(axis=2, factor=2), "Scale.axis: unknown value, got 2. Give one of 0, 1"),
        (lambda: Scale(axis=0, factor=0), "Scale.factor: must be an integer >= 1, got 0"),
        (lambda: Cast("int8"), "Cast.dtype: unknown value, got 'int8'"),  # type: ignore[arg-type]
        (lambda: WeightMultiply(3, dim=0), "WeightMultiply.dim: must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments_are_config_errors(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "layer, shapes, message",
    [
        (Add(), [(2, 3)], "Add: expected two or more tensors, got 1"),
        (Add(), [(2, 3), (2, 4)], "Add: expected tensors of one shape, got [[2, 3], [2, 4]]"),
        (Sub(), [(2, 3), (2, 1)], "Sub: expected tensors of one shape, got [[2, 3], [2, 1]]"),
        (ElementwiseMultiply(), [(2, 3), (2,)], "ElementwiseMultiply: expected tensors of one sh"),
        (WeightMultiply(3, dim=2), [(2, 4)], "expected size 3 in dimension 1, got shape [2, 4]"),
        (ReduceSum(axis=2), [(2, 3)], "ReduceSum: dimension 2 does not exist, got shape [2, 3]"),
        (Scale(axis=0, factor=2), [(2, 3, 4)], "expected a tensor of 2 dimensions, got shape"),
        (MatrixMultiply(), [(2, 3), (4, 5)], "got shapes [2, 3] and [4, 5]"),
        (MatrixMultiply(), [(2, 3, 4), (5, 4, 1)], "got shapes [2, 3, 4] and [5, 4, 1]"),
        (MatrixMultiply(), [(2, 3), (4, 5, 6)], "got shapes [2, 3] and [4, 5, 6]"),
    ],
)
def test_tensors_that_do_not_fit_are_config_errors(
    layer: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        layer(*[torch.zeros(shape) for shape in shapes])
