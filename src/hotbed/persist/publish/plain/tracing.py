# SPDX-License-Identifier: Apache-2.0
"""Traces of modules for requests of any size, and the inputs of ONNX graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def traced(
    module: nn.Module, many: Sequence[Tensor], few: Sequence[Tensor]
) -> torch.export.ExportedProgram:
    """Return a trace of the module for requests of any size.

    Args:
        module: The module.
        many: Its arguments for some samples.
        few: Its arguments for fewer samples; sizes that differ from `many` stay open.
    """
    sizes = []
    for tensor, smaller in zip(many, few, strict=True):
        open_sizes = {}
        for axis, (size, other) in enumerate(zip(tensor.shape, smaller.shape, strict=True)):
            if size != other:
                open_sizes[axis] = torch.export.Dim.AUTO
        sizes.append(open_sizes)
    return torch.export.export(
        module,
        tuple(many),
        dynamic_shapes=(tuple(sizes),),
        strict=False,
    )


def inputs_of(onnx: bytes) -> set[str]:
    """Return the inputs of a graph; those that it does not use are not among them."""
    import onnx as library

    model = library.load_from_string(onnx)
    return {value.name for value in model.graph.input}
