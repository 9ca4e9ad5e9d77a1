# SPDX-License-Identifier: Apache-2.0
"""Why a network cannot be exported, in plain words, from what torch and ONNX Runtime raise."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from hotbed.data.schema import Schema
from hotbed.errors import ConfigError

_PACKING = os.path.join("nn", "utils", "rnn.py")
_RECURRENT = os.path.join("nn", "modules", "rnn.py")
_DETECTING = "_detect_is_causal_mask"


def rejection(
    error: Exception, network: nn.Module, schema: Schema, inputs: Sequence[str]
) -> ConfigError:
    """Return the error for a network that cannot become a graph.

    It names the layer or the feature, says what the graph cannot hold, and shows the way out.

    Args:
        error: what torch or ONNX Runtime raised.
        network: the network.
        schema: of its features.
        inputs: names of the graph's inputs, as far as they are recorded.
    """
    frames = _frames_of(error)
    if any(_packs(frame) for frame in frames):
        layers = [
            name for name, module in network.named_modules() if isinstance(module, nn.RNNBase)
        ]
        return packed_rejection(network, layers)
    place = _place_of(error, network, inputs)
    reason = _reason_of(error)
    advice = _advice(schema)
    detecting = [frame for frame in frames if frame.f_code.co_name == _DETECTING]
    if detecting:
        layer = _caller_of(detecting[0])
        place, keyword = _mask_argument(network, layer)
        reason = "a mask whose values torch.nn compares with those of a causal one"
        advice = (
            f"Give that layer {keyword}=True beside a causal mask, and {keyword}=False beside any "
            "other."
        )
    return ConfigError(
        f"export: {type(network).__name__} cannot become an ONNX graph, because of {place}, got "
        f"{reason}. {advice}"
    )


def packed_rejection(network: nn.Module, layers: Sequence[str]) -> ConfigError:
    """Return the error for a network that packs sequences for its recurrent `layers`."""
    places = " and ".join(f"layer {path!r}" for path in layers) or "its operations"
    return ConfigError(
        f"export: {type(network).__name__} cannot become an ONNX graph, because of {places}, got "
        "packed sequences (pack_padded_sequence), whose sizes depend on values. Give the layer the "
        "padded rows [n, length, dim], and take the output of each sample's last step: "
        "outputs[torch.arange(n), lengths - 1]."
    )


def _packs(frame: FrameType) -> bool:
    """Return whether a frame packs or unpacks a sequence, or runs a layer over a packed one."""
    code = frame.f_code
    if code.co_filename.endswith(_RECURRENT):
        return frame.f_locals.get("batch_sizes") is not None
    return code.co_filename.endswith(_PACKING) and "pack" in code.co_name


def _caller_of(frame: FrameType) -> Any:
    """Return the layer whose forward function called the function of a frame."""
    caller = frame.f_back
    return None if caller is None else caller.f_locals.get("self")


def _mask_argument(network: nn.Module, layer: Any) -> tuple[str, str]:
    """Return the layer that the network calls with a mask, and its argument that describes it."""
    keyword = "tgt_is_causal" if isinstance(layer, nn.TransformerDecoder) else "is_causal"
    place = type(layer).__name__
    for name, module in network.named_modules():
        if module is layer:
            place = name or place
        if isinstance(module, nn.Transformer) and layer in (module.encoder, module.decoder):
            keyword = "src_is_causal" if layer is module.encoder else "tgt_is_causal"
            return f"layer {name or type(module).__name__!r}", keyword
    return f"layer {place!r}", keyword


def _frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames through which the error and its causes went."""
    frames = []
    for cause in _causes(error):
        frames += [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    return frames


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
