# SPDX-License-Identifier: Apache-2.0
"""Layers that change shapes keep every element in its place, forward and backward, and export."""

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
    Concat,
    FusedReshapeConcat,
    FusedReshapeConcatGeneral,
    Gather,
    Reshape,
    Slice,
)

from .harness import Case, check_export, check_layer


def history_and_target(
    s: Any, w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    history = np.zeros((s.n * (s.t - 1), s.a + s.b))
    target = np.zeros((s.n, s.a + s.b))
    for sample in range(s.n):
        for item in range(s.t - 1):
            row = np.concatenate([x[sample, item], y[sample, item]])
            history[sample * (s.t - 1) + item] = row
        target[sample] = np.concatenate([x[sample, -1], y[sample, -1]])
    return history, target


WIDE = {"d": (3, 6)}
CASES = [
    Case(
        "slices",
        lambda s: Slice([[0, 2], [1, s.d], [0, 1]]),
        [("n", "d")],
        lambda s, w, x: (x[:, :2], x[:, 1:], x[:, :1]),
        sizes=WIDE,
    ),
    Case(
        "slice_of_fields",
        lambda s: Slice([[1, 3]]),
        [("n", "f", "d")],
        lambda s, w, x: (x[:, :, 1:3],),
        sizes=WIDE,
    ),
    Case(
        "gather",
        lambda s: Gather([2, 0, 2]),
        [("n", "d")],
        lambda s, w, x: np.stack([x[:, 2], x[:, 0], x[:, 2]], axis=1),
        sizes=WIDE,
    ),
    Case(
        "gather_in_the_last_dimension",
        lambda s: Gather([1, 0], axis=2),
        [("n", "f", "d")],
        lambda s, w, x: np.stack([x[:, :, 1], x[:, :, 0]], axis=2),
        sizes=WIDE,
    ),
    Case(
        "concat",
        lambda s: Concat(),
        [("n", "a"), ("n", "b"), ("n", "a")],
        lambda s, w, x, y, z: np.hstack([x, y, z]),
    ),
    Case(
        "concat_of_fields",
        lambda s: Concat(axis=1),
        [("n", "a", "d"), ("n", "b", "d")],
        lambda s, w, x, y: np.concatenate([x, y], axis=1),
    ),
    Case(
        "concat_of_embeddings",
        lambda s: Concat(axis=2),
        [("n", "t", "a"), ("n", "t", "b")],
        lambda s, w, x, y: np.concatenate([x, y], axis=2),
    ),
    Case(
        "history_and_target",
        lambda s: FusedReshapeConcat(),
        [("n", "t", "a"), ("n", "t", "b")],
        history_and_target,
        sizes={"t": (2, 4)},
    ),
    Case(
        "rows_of_items",
        lambda s: FusedReshapeConcatGeneral(),
        [("n", "t", "a"), ("n", "t", "b")],
        lambda s, w, x, y: np.concatenate([x, y], axis=2).reshape(s.n * s.t, s.a + s.b),
    ),
    Case("flat", lambda s: Reshape(), [("n", "f", "d")], lambda s, w, x: x.reshape(s.n, s.f * s.d)),
    Case(
        "rows_of_fields",
        lambda s: Reshape(leading_dim=s.d),
        [("n", "f", "d")],
        lambda s, w, x: x.reshape(s.n * s.f, s.d),
    ),
    Case(
        "one_row_a_sample",
        lambda s: Reshape(leading_dim=s.t),
        [("n*t", 1)],
        lambda s, w, x: x.reshape(s.n, s.t),
    ),
    Case(
        "steps",
        lambda s: Reshape(leading_dim=s.d, time_steps=s.t),
        [("n*t", "d")],
        lambda s, w, x: x.reshape(s.n, s.t, s.d),
    ),
    Case(
        "shape",
        lambda s: Reshape(shape=[-1, s.d, s.t]),
        [("n", "t", "d")],
        lambda s, w, x: x.reshape(s.n, s.d, s.t),
    ),
    Case(
        "selected",
        lambda s: Reshape(selected=[2, 0]),
        [("n", "f", "d")],
        lambda s, w, x: np.hstack([x[:, 2], x[:, 0]]),
        sizes={"f": (3, 5)},
    ),
]


@pytest.mark.torch_core
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_equals_its_reference(case: Case) -> None:
    check_layer(case)


def test_the_layers_export(tmp_path: Path) -> None:
    check_export(CASES, tmp_path)


def test_places_are_no_state() -> None:
    assert not Gather([1, 0]).state_dict()
    assert not Reshape(selected=[1]).state_dict()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Slice([]), "Slice.ranges: empty, got []"),
        (lambda: Slice([[2, 2]]), "with 0 <= first < end, got [2, 2]"),
        (lambda: Slice([[-1, 2]]), "with 0 <= first < end, got [-1, 2]"),
        (lambda: Slice([[1, 2, 3]]), "with 0 <= first < end, got [1, 2, 3]"),
        (lambda: Gather([]), "Gather.indices: expected places from 0 on, got []"),
        (lambda: Gather([0, -1]), "Gather.indices: expected places from 0 on, got [0, -1]"),
        (lambda: Gather([0], axis=0), "Gather.axis: must be an integer >= 1, got 0"),
        (lambda: Concat(axis=0), "Concat.axis: must be an integer >= 1, got 0"),
        (lambda: Reshape(leading_dim=0), "Reshape.leading_dim: must be an integer >= 1, got 0"),
        (lambda: Reshape(time_steps=3), "Reshape.time_steps: needs leading_dim, got 3 alone"),
        (lambda: Reshape(selected=[]), "Reshape.selected: expected places from 0 on, got []"),
        (lambda: Reshape(selected=[1], leading_dim=3), "Reshape: selected and shape come alone"),
        (lambda: Reshape(shape=[2, 3]), "Reshape.shape: expected sizes from 1 on, and -1 once"),
        (lambda: Reshape(shape=[-1], selected=[1]), "Reshape: shape comes alone, got selected"),
    ],
)
def test_bad_arguments_are_config_errors(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "layer, shapes, message",
    [
        (Slice([[0, 4]]), [(2, 3)], "[0, 4] leaves the last dimension, got shape [2, 3]"),
        (Gather([3]), [(2, 3)], "index 3 does not exist in dimension 1, got shape [2, 3]"),
        (Gather([0], axis=2), [(2, 3)], "index 0 does not exist in dimension 2, got shape [2, 3]"),
        (Concat(), [(2, 3), (2, 3, 1)], "of one shape, dimension 1 excepted, got [[2, 3], [2, 3"),
        (Concat(), [(2, 3, 4), (2, 3, 5)], "of one shape, dimension 1 excepted, got"),
        (Concat(axis=2), [(2, 3), (2, 3)], "dimension 2 does not exist, got shape [2, 3]"),
        (Concat(), [], "expected tensors of one shape, dimension 1 excepted, got []"),
        (FusedReshapeConcat(), [(2, 1, 3)], "so two or more items, got shape [2, 1, 3]"),
        (FusedReshapeConcat(), [(2, 3)], "expected a tensor of 3 dimensions, got shape [2, 3]"),
        (
            FusedReshapeConcatGeneral(),
            [(2, 3, 1), (2, 4, 1)],
            "dimension 2 excepted, got [[2, 3, 1], [2, 4, 1]]",
        ),
        (Reshape(leading_dim=4), [(2, 3)], "6 elements do not fill rows of [4], got shape [2, 3]"),
        (Reshape(selected=[3]), [(2, 3, 4)], "field 3 does not exist, got shape [2, 3, 4]"),
        (Reshape(selected=[0]), [(2, 3)], "expected a tensor of 3 dimensions, got shape [2, 3]"),
    ],
)
def test_tensors_that_do_not_fit_are_config_errors(
    layer: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        layer(*[torch.zeros(shape) for shape in shapes])
