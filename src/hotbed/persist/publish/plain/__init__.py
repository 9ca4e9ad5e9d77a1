# SPDX-License-Identifier: Apache-2.0
"""Exports of models that take tensors: an id graph, and a graph over tensors and rows.

A server encodes a request into the model's tensors, runs the id graph, looks up the ids that it
returns, and runs the dense graph over the tensors and the rows.

    dense.py     the dense graph of a model that takes tensors, over these tensors and rows
    export.py    exports of models that take tensors
    fbgemm.py    operators of FBGEMM, which models of TorchRec call, by those of torch
    ids.py       the id graph of a model as ONNX, checked against torch
    integers.py  integer operations that ONNX Runtime computes to the bit as torch does
    model.py     a model that takes tensors, as the exporter needs it
    places.py    where the results of lookups enter a dense graph
    tracing.py   traces of modules for requests of any size, and the inputs of ONNX graphs
"""

from .export import export_plain
from .model import Part, PlainModel, ServedLookup, TensorSpec

__all__ = ["Part", "PlainModel", "ServedLookup", "TensorSpec", "export_plain"]
