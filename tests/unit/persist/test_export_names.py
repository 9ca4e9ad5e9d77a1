# SPDX-License-Identifier: Apache-2.0
"""Labels may have any name, also one that torch gives to values inside a graph."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch absent")
pytest.importorskip("onnxscript", reason="onnx absent")

import onnx
from torch import Tensor, nn

import hotbed as hb
from hotbed.persist.publish.export import export_graph

LABELS = ["linear", "layer_norm", "output/linear"]
SCHEMA = hb.Schema([*(hb.Label(name) for name in LABELS), hb.Dense("x", width=4)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, batch: hb.Batch) -> dict[str, Tensor]:
        hidden = self.linear(batch.dense["x"])
        normal = self.norm(hidden)
        sums = [normal.sum(1), hidden.sum(1), (hidden * normal).sum(1)]
        return dict(zip(LABELS, sums, strict=True))


def test_outputs_may_have_the_names_of_operations() -> None:
    graph = export_graph(Net(), SCHEMA)  # compares every output with the network's
    model = onnx.load_from_string(graph.onnx)
    assert graph.outputs == LABELS == [output.name for output in model.graph.output]
