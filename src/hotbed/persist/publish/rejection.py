# SPDX-License-Identifier: Apache-2.0
"""Why a network cannot be exported, in plain words, from what torch and ONNX Runtime raise."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError


def rejection(
    error: Exception, network: nn.Module, schema: Schema, inputs: Sequence[str]
) -> ConfigError:
    """Return the error for a network that cannot become a graph.

    It names the layer or the feature, says what the graph cannot hold, and shows the way out.

    Args:
        error: What torch or ONNX Runtime raised.
        network: The network.
        schema: Of its features.
        inputs: Names of the graph's inputs, as far as they are recorded.
    """
    return ConfigError(
        f"export: {type(network).__name__} cannot become an ONNX graph, because of "
        f"{_place_of(error, network, inputs)}, got {_reason_of(error)}. {_advice(schema)}"
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and what led to it, the first cause last."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


def _place_of(error: Exception, network: nn.Module, inputs: Sequence[str]) -> str:
    """Return the feature or layer that an error is about: by its text, else by its traceback."""
    for name in inputs:
        if f"input: {name} " in f"{error} ":
            return f"feature {name.split('/')[-1]!r}"
    layers = {id(module): name for name, module in network.named_modules()}
    place = ""
    for cause in reversed(_causes(error)):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            place = _layer_in(frame.f_locals, layers) or place
        if place:
            break
    return f"layer {place!r}" if place else "its operations"


def _layer_in(values: Mapping[str, Any], layers: Mapping[int, str]) -> str:
    """Return the layer that a frame runs, or from which the node that it translates was traced."""
    module = values.get("self")
    if id(module) in layers:
        return layers[id(module)] or type(module).__name__
    node = values.get("node")
    stack = getattr(node, "meta", {}).get("nn_module_stack", {})
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).rpartition("network")[2].lstrip(".")


def _reason_of(error: Exception) -> str:
    """Return in plain words what the graph cannot hold.

    For causes that are not known, it is the first line of the first one, without colours.
    """
    cause = _causes(error)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
    if "[ONNXRuntimeError]" in text:  # the graph was checked with fewer rows than it was made with
        return "a size that Python counted, which the graph keeps for every request"
    if "Length of all samples" in text:
        return "packed sequences (pack_padded_sequence), whose sizes depend on values"
    if "data-dependent" in text:
        return "sizes or branches that depend on the values of a tensor"
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip()]
    return next(iter(lines), type(cause).__name__)


def _advice(schema: Schema) -> str:
    rule = "without len(), int(), if and loops over values"
    names = [column.name for column in schema.ids if column.pooling == "none"]
    if not names:
        return f"Compute with tensors of any size, {rule}."
    return (
        f"Give the rows of {', '.join(map(repr, names))} to hb.models.layers.PadSequence(length), "
        f"and compute with the tensor and the mask that it returns, {rule}."
    )
