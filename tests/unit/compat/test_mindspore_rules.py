# SPDX-License-Identifier: Apache-2.0
"""What mindspore_parameters.yaml says holds, where test_mindspore_page and _map do not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from parameter_pages import MINDSPORE

import hotbed as hb
from hotbed.compat import mindspore_rec as ms


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.weight(x).squeeze(-1)


def test_unknown_arguments_are_errors() -> None:
    for name in ("loss_scale_manager", "keep_batchnorm_fp32", "anything"):
        with pytest.raises(TypeError, match=name):
            ms.RecModel(Line(), "bce", "adam", **{name: None})


def test_data_may_train_several_models() -> None:
    data = [(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))] * 3
    for _ in range(2):
        model = ms.RecModel(Line(), "bce", "adam")
        model.online_train(data, dataset_sink_mode=False)
        assert model.engine.counters["steps"] == 3


def test_large_batches() -> None:
    batch = (torch.ones(1 << 16, 1), torch.ones(1 << 16))
    model = ms.RecModel(Line(), "bce", "adam")
    model.online_train([batch], dataset_sink_mode=False)
    assert model.engine.counters["samples"] == 1 << 16


def test_export_of_admitted_keys() -> None:
    lookup = ms.HashEmbeddingLookup(2, permit_filter_value=2)
    optimizer = hb.SparseOptimizer(lookup)
    for keys in ([1, 2], [1]):
        rows = lookup(torch.tensor(keys))
        if rows.requires_grad:
            rows.sum().backward()
        optimizer.step()
    assert lookup.embedding_table.export_data().keys.tolist() == [1]


def test_environment_is_not_read() -> None:
    section = next(s for s in MINDSPORE.sections if s["title"].startswith("Embedding cache"))
    door = Path(ms.__file__).parent
    text = "".join(path.read_text() for path in door.rglob("*.py"))
    assert [name for name in section["names"] if name in text] == []
    assert "environ" not in text
