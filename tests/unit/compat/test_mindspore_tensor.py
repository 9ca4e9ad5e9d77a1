# SPDX-License-Identifier: Apache-2.0
"""What callbacks of MindSpore see of a step: tensors with `asnumpy`, in values of their own kind."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

from hotbed.compat.mindspore_rec.tensor import Tensor, with_asnumpy


class Outputs(NamedTuple):
    loss: torch.Tensor
    name: str


def test_tensors_and_arrays_become_tensors_without_gradients() -> None:
    tensor = with_asnumpy(torch.ones(2, requires_grad=True))
    assert type(tensor) is Tensor
    assert not tensor.requires_grad
    array = np.arange(3)
    shared = with_asnumpy(array)
    assert type(shared) is Tensor
    array[0] = 7
    assert shared.asnumpy().tolist() == [7, 1, 2]


def test_lists_tuples_and_named_tuples_keep_their_kind() -> None:
    listed = with_asnumpy([torch.ones(1), (np.ones(1), 3)])
    assert type(listed) is list
    assert type(listed[1]) is tuple
    assert type(listed[0]) is type(listed[1][0]) is Tensor
    outputs = with_asnumpy(Outputs(torch.ones(1), "bce"))
    assert type(outputs) is Outputs
    assert type(outputs.loss) is Tensor
    assert outputs.name == "bce"


def test_dicts_come_back_plain_and_other_values_unchanged() -> None:
    by_name = with_asnumpy(OrderedDict(loss=torch.ones(1)))
    assert type(by_name) is dict
    assert type(by_name["loss"]) is Tensor
    other = {1.5}
    assert with_asnumpy(other) is other
