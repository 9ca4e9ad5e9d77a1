# SPDX-License-Identifier: Apache-2.0
"""A table module updates its own tables; SparseOptimizer only owns the rates."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.embedding.modules import Feature

RULE = hb.Adagrad(lr=0.5)


def collection() -> hb.EmbeddingCollection:
    tables = [hb.Table("user", dim=3, rule=RULE), hb.Table("item", dim=2, rule=RULE)]
    return hb.EmbeddingCollection([Feature("user", "user"), Feature("item", "item")], tables)


def backward(module: hb.EmbeddingCollection) -> None:
    ids = {"user": hb.Ids(torch.tensor([3, -1, 3])), "item": hb.Ids(torch.tensor([5, 6, 7]))}
    (module.flat(ids) ** 2).sum().backward()


def test_update_of_a_module_equals_a_step_of_the_optimizer() -> None:
    module, stepped = collection(), collection()
    optimizer = hb.SparseOptimizer(stepped)
    optimizer.param_groups[1]["lr"] = 0.25
    for _ in range(3):
        backward(module)
        module.update([0.5, 0.25])
        backward(stepped)
        optimizer.step()
        optimizer.zero_grad()
    for own, other in zip(module.tables, stepped.tables, strict=True):
        assert own.step == 3
        assert list(own.export()) == list(other.export())


def test_update_applies_gradients_once_and_none_after_zero_grad() -> None:
    module = collection()
    backward(module)
    module.update([0.5, 0.5])
    module.update([0.5, 0.5])
    assert [table.step for table in module.tables] == [1, 1]
    backward(module)
    module.zero_grad()
    module.update([0.5, 0.5])
    assert [table.step for table in module.tables] == [1, 1]


def test_a_function_can_still_be_applied_to_all_modules_of_a_model() -> None:
    module = collection()
    names = []
    nn.Sequential(module, nn.Linear(1, 1)).apply(lambda part: names.append(type(part).__name__))
    assert names == ["EmbeddingCollection", "Linear", "Sequential"]
