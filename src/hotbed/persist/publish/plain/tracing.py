# SPDX-License-Identifier: Apache-2.0
"""Traces of modules for requests of any size, and the inputs of ONNX graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def traced(
    module: nn.Module, many: Sequence[Tensor], few: Sequence[Tensor]
) -> torch.export.ExportedProgram:
    """Return a trace of the module for requests of any size.

    Args:
        module: the module.
        many: its arguments for some samples.
        few: its arguments for fewer samples; sizes that differ from `many` stay open.
    """
    sizes = []
    for tensor, smaller in zip(many, few, strict=True):
        open_sizes = {}
        for axis, (size, other) in enumerate(zip(tensor.shape, smaller.shape, strict=True)):
            if size != other:
                open_sizes[axis] = torch.export.Dim.AUTO
        sizes.append(open_sizes)
    return torch.export.export(module, tuple(many), dynamic_shapes=(tuple(sizes),), strict=False)


def drop_unused_inputs(model: Any) -> None:
    """Remove the inputs that an ONNX model does not use, such as labels in a dict of columns."""
    used = {value.name for value in model.graph.output} | _read_by(model.graph)
    for value in list(model.graph.input):
        if value.name not in used:
            model.graph.input.remove(value)


def _read_by(graph: Any) -> set[str]:
    """Return the values that the nodes of an ONNX graph, and the graphs inside of them, read."""
    names = set()
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                names |= _read_by(inner) | {value.name for value in inner.output}
    return names


def inputs_of(onnx: bytes) -> set[str]:
    """Return the inputs of a graph."""
    import onnx as library

    model = library.load_from_string(onnx)
    return {value.name for value in model.graph.input}
