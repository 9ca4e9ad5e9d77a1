# SPDX-License-Identifier: Apache-2.0
"""Exports of models that take tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from hotbed.data.schema import Schema
from hotbed.embedding.modules import table_modules
from hotbed.errors import HotbedError
from hotbed.optim.modes import in_eval_mode, with_buffers_restored
from hotbed.persist.publish.export import check_installed, quiet
from hotbed.persist.publish.independence import check_independence
from hotbed.persist.publish.rejection import rejection
from hotbed.persist.publish.version import IdsOnnx, OnnxGraph

from .dense import PlainHalf
from .ids import IdStage
from .model import FEW_ROWS, PlainModel, argument
from .tracing import inputs_of


def export_plain(model: PlainModel, activate: Callable[[Any], Any] | None = None) -> OnnxGraph:
    """Return a model as an id graph and a dense graph, both checked against torch.

    Args:
        model: the model.
        activate: applied to its outputs, for example a sigmoid.

    Raises:
        ConfigError: it cannot be served; the message says why.
        MissingExtra: onnx is not installed.
    """
    check_installed()
    network = model.network
    try:
        with (
            torch.no_grad(),
            in_eval_mode(network),
            with_buffers_restored(network),
            quiet(),
            torch.random.fork_rng(devices=[]),
            ExitStack() as aside,
        ):
            for module in table_modules(network):
                aside.enter_context(module.rows_aside())
            return _traced(model, activate or (lambda outputs: outputs))
    except HotbedError:
        raise
    except Exception as error:
        model.schema([spec.name for spec in model.tensors])  # names a tensor without samples
        names = [argument(spec.name) for spec in model.tensors]
        raise rejection(error, network, Schema([]), names) from error


def _traced(model: PlainModel, activate: Callable[[Any], Any]) -> OnnxGraph:
    stage = IdStage(model)
    stage.check_independence()
    half = PlainHalf(model, activate, stage)
    check_independence(half)
    ids = stage.export()
    onnx, weights = half.export()
    used = inputs_of(ids) | inputs_of(onnx)
    specs = [spec for spec in model.tensors if argument(spec.name) in used]
    schema, parts = model.schema([spec.name for spec in specs])
    arguments = []
    for spec in specs:
        column, part = parts[spec.name]
        fed_by = {"name": spec.name, "column": column, "part": part}
        arguments.append({**fed_by, "dtype": spec.dtype, "shape": list(spec.shape)})
    id_graph = IdsOnnx(ids, arguments, [place.described for place in half.places], half.widths)
    graph = OnnxGraph(onnx, weights, half.lookups, [], half.outputs, schema.to_json(), id_graph)
    half.check(graph, half.num_rows, 1.0)
    half.check(graph, FEW_ROWS, 1.25)  # a smaller request, other weights
    return graph
