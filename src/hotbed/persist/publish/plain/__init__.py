# SPDX-License-Identifier: Apache-2.0
"""Exports of models that take tensors: an id graph, and a graph over tensors and rows.

A server encodes a request into the model's tensors, runs the id graph, looks up the ids that it
returns, and runs the dense graph over the tensors and the rows.
"""

from .export import export_plain
from .model import Part, PlainModel, ServedLookup, TensorSpec

__all__ = ["Part", "PlainModel", "ServedLookup", "TensorSpec", "export_plain"]
