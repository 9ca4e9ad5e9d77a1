# SPDX-License-Identifier: Apache-2.0
"""The layers of a network from a description: their names, and sizes that follow from inputs.

A key of a layer is a keyword of the constructor of its class. Keywords that `Kind.sizes` computes
from the shapes of the inputs may be left out. To add a layer, add its line to `LAYERS`.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotbed.config import did_you_mean
from hotbed.errors import ConfigError
from hotbed.models import layers
from hotbed.models.graph.description import KeyPlace, Node, Words
from hotbed.models.layers import xavier_

Shape = tuple[int, ...]

NUM_ROWS = 99_991
"""Rows of the tensors by which shapes are inferred: a prime number, to be recognized in shapes."""

_NO_KEYS = (
    "device",
    "dtype",
    "inplace",
    "normalized_shape",
)  # keywords of torch's classes that are not keys
Initializer = Literal[
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
    "fan_in_uniform",
    "fan_in_normal",
    "fan_out_normal",
]
_INITIALIZERS = {"weight_init": Initializer, "bias_init": Initializer}  # keys of every layer


def _nothing(*shapes: Shape) -> dict[str, Any]:
    return {}


def _last(key: str) -> Callable[..., dict[str, Any]]:
    """Return the rule that `key` is the last size of the first input."""
    return lambda shape, *others: {key: shape[-1]}


def _widths(key: str) -> Callable[..., dict[str, Any]]:
    """Return the rule that `key` lists the last size of each input."""
    return lambda *shapes: {key: [shape[-1] for shape in shapes]}


def _mask_block(x: Shape, v: Shape) -> dict[str, Any]:
    return {"in_features": x[-1], "mask_features": v[-1]}


def _feature_gate(x: Shape, context: Shape = (0,)) -> dict[str, Any]:
    return {"in_features": x[-1], "context_features": context[-1]}


def _tokens(tokens: Shape) -> dict[str, Any]:
    return {"num_tokens": tokens[1], "width": tokens[2]}


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        layer: its class.
        sizes: returns the keywords that follow from the shapes of the inputs, one argument each.
    """

    layer: type[nn.Module]
    sizes: Callable[..., dict[str, Any]] = _nothing


LAYERS: Mapping[str, Kind] = {
    # dense
    "linear": Kind(nn.Linear, _last("in_features")),
    "logit_head": Kind(layers.LogitHead, _widths("in_features")),
    "mlp": Kind(layers.MLP, _last("in_features")),
    "group_dense": Kind(layers.GroupDense, _last("in_features")),
    "batch_norm": Kind(layers.BatchNorm, _last("num_features")),
    "layer_norm": Kind(nn.LayerNorm, _last("normalized_shape")),
    "dropout": Kind(layers.Dropout),
    # activation
    "relu": Kind(nn.ReLU),
    "prelu": Kind(nn.PReLU),
    "elu": Kind(nn.ELU),
    "gelu": Kind(nn.GELU),
    "silu": Kind(nn.SiLU),
    "tanh": Kind(nn.Tanh),
    "sigmoid": Kind(nn.Sigmoid),
    "leaky_relu": Kind(nn.LeakyReLU),
    "dice": Kind(layers.Dice, _last("width")),
    "softmax": Kind(layers.Softmax),
    # interaction
    "cross_net": Kind(layers.CrossNet, _last("in_features")),
    "cross_net_v2": Kind(layers.CrossNetV2, _last("in_features")),
    "cross_net_mix": Kind(layers.CrossNetMix, _last("in_features")),
    "dot_interaction": Kind(layers.DotInteraction, lambda *shapes: {"num_fields": shapes[-1][1]}),
    "fm_interaction": Kind(layers.FMInteraction),
    "fm_order2": Kind(layers.FMOrder2),
    "quadratic_net": Kind(layers.QuadraticNet, _last("in_features")),
    "interacting_layer": Kind(layers.InteractingLayer, _last("in_features")),
    "field_norm": Kind(layers.FieldNorm, lambda shape: {"num_fields": shape[1], "dim": shape[2]}),
    "mask_block": Kind(layers.MaskBlock, _mask_block),
    "feature_gate": Kind(layers.FeatureGate, _feature_gate),
    "bilinear_product": Kind(layers.BilinearProduct, _widths("in_features")),
    "token_mixing": Kind(layers.TokenMixing),
    "token_feed_forward": Kind(layers.TokenFeedForward, _tokens),
    # arithmetic
    "add": Kind(layers.Add),
    "sub": Kind(layers.Sub),
    "elementwise_multiply": Kind(layers.ElementwiseMultiply),
    "weight_multiply": Kind(layers.WeightMultiply, _last("in_features")),
    "matrix_multiply": Kind(layers.MatrixMultiply),
    "scale": Kind(layers.Scale),
    "reduce_sum": Kind(layers.ReduceSum),
    "reduce_mean": Kind(layers.ReduceMean),
    "cast": Kind(layers.Cast),
    # shape
    "slice": Kind(layers.Slice),
    "concat": Kind(layers.Concat),
    "reshape": Kind(layers.Reshape),
    "gather": Kind(layers.Gather),
    "fused_reshape_concat": Kind(layers.FusedReshapeConcat),
    "fused_reshape_concat_general": Kind(layers.FusedReshapeConcatGeneral),
    # sequence
    "sequence_mask": Kind(layers.SequenceMask),
    "attention_pooling": Kind(layers.AttentionPooling, _last("dim")),
    "multi_head_attention": Kind(layers.MultiHeadAttention),
    "attention_scores": Kind(layers.AttentionScores),
    "attention_sum": Kind(layers.AttentionSum),
    "transformer_layer": Kind(layers.TransformerLayer, _last("width")),
    "gru": Kind(layers.GRU, _last("input_size")),
    "augru": Kind(layers.AUGRU, _last("input_size")),
    # tasks
    "expert_mixture": Kind(layers.ExpertMixture),
    "information_transfer": Kind(layers.InformationTransfer, _last("dim")),
    "joint_logit": Kind(layers.JointLogit),
}


def made(node: Node, shapes: Mapping[str, Shape]) -> nn.Module:
    """Return the layer that a node describes, for inputs of these shapes.

    Raises:
        ConfigError: the kind or a key is unknown, or a value is wrong; the message starts with the
            place in the description.
    """
    kind = _kind(node)
    _check_num_inputs(node, kind)
    arguments = _arguments(node, kind, shapes)
    initializers = {key: arguments.pop(key) for key in _INITIALIZERS if key in arguments}
    layer = _construct(kind, arguments, node.place)
    xavier_(layer)
    for key, initializer in initializers.items():
        _initialize(node, layer, key, initializer)
    return layer


def inferred(node: Node, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a node's outputs, for inputs of these shapes.

    The layer runs on tensors without memory.

    Raises:
        ConfigError: as `made`; or the layer does not take these shapes.
    """
    with torch.device("meta"):
        layer = made(node, shapes).eval()
        inputs = [torch.empty(shapes[name]) for name in node.inputs]
        try:
            outputs = layer(*inputs)
        except (ConfigError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _refused(node, shapes, error) from error
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    if len(outputs) != len(node.outputs):
        problem = f"another number of outputs than {node.kind} has, which is {len(outputs)}"
        place = node.place.key("outputs")
        raise place.error(problem, list(node.outputs), "Name each of them.")
    made_shapes = {}
    for name, output in zip(node.outputs, outputs, strict=True):
        if not output.dim() or output.shape[0] % NUM_ROWS:
            raise _refused(node, shapes, "The result would not have a row for each sample.")
        made_shapes[name] = tuple(output.shape)
    return made_shapes


def shape_text(shape: Shape) -> str:
    """Return a shape as text; n is the number of rows.

    >>> shape_text((NUM_ROWS, 8)), shape_text((3 * NUM_ROWS,))
    ('[n, 8]', '[3n]')
    """
    return f"[{', '.join(_size_text(size) for size in shape)}]"


def _size_text(size: int) -> str:
    factor, rest = divmod(size, NUM_ROWS)
    if size == 0 or rest:
        return str(size)
    return "n" if factor == 1 else f"{factor}n"


# --- building -------------------------------------------------------------------------------------


def _kind(node: Node) -> Kind:
    if node.kind not in LAYERS:
        advice = did_you_mean(node.kind, LAYERS)
        raise node.place.key("layer").error("unknown layer", node.kind, advice)
    return LAYERS[node.kind]


def _check_num_inputs(node: Node, kind: Kind) -> None:
    """Raise ConfigError if the layer takes more or fewer tensors."""
    signature = inspect.signature(kind.layer.forward)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    required = [p for p in parameters if p.default is p.empty]
    many = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    count = len(node.inputs)
    if many or len(required) <= count <= len(parameters):
        return
    names = ", ".join(parameter.name for parameter in parameters)
    problem = f"{node.kind} takes {names}"
    advice = f"Name {len(required)} tensors."
    raise node.place.key("inputs").error(problem, list(node.inputs), advice)


def _arguments(node: Node, kind: Kind, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keywords of a layer: from its keys, and from the shapes of its inputs."""
    try:
        sizes = kind.sizes(*[shapes[name] for name in node.inputs])
    except IndexError as error:
        raise _refused(node, shapes, error) from error
    hints = {}
    required = []
    for name, parameter in _keywords(kind.layer).items():
        hints[name] = parameter.annotation
        if parameter.default is parameter.empty and name not in sizes:
            required.append(name)
    arguments = node.values({**hints, **_INITIALIZERS}, required)
    for key, size in sizes.items():
        if arguments.setdefault(key, size) != size:
            problem = f"the inputs need {size}"
            raise node.place.key(key).error(problem, arguments[key], "Leave it out.")
    return arguments


def _keywords(layer: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a layer's constructor, with type hints of their keys."""
    hints = typing.get_type_hints(layer.__init__)
    keywords = {}
    for name, parameter in inspect.signature(layer.__init__).parameters.items():
        of_torch = layer.__module__.startswith("torch.") and name in _NO_KEYS
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name != "self" and is_named and not of_torch:
            keywords[name] = parameter.replace(annotation=hints.get(name, Any))
    return keywords


def _construct(kind: Kind, arguments: Mapping[str, Any], place: KeyPlace) -> nn.Module:
    try:
        return kind.layer(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{place.text}: {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        reason = Words(str(error).partition("\n")[0])
        raise place.error("the layer cannot be built", reason, "Correct its keys.") from error


def _initialize(node: Node, layer: nn.Module, key: str, initializer: Initializer) -> None:
    """Draw the weights or the biases of a layer anew.

    Weights are the parameters of two axes or more; of a normalization, its factors.
    """
    place = node.place.key(key)
    drawn = False
    parameters = dict(layer.named_parameters())
    scales = isinstance(layer, (nn.LayerNorm, layers.BatchNorm))
    for name, parameter in parameters.items():
        is_bias = "bias" in name
        is_meant = is_bias == (key == "bias_init") and (is_bias or scales or parameter.dim() > 1)
        if is_meant and parameter.requires_grad:
            _draw(parameter, initializer, parameters.get(name.replace("bias", "weight"), parameter))
            drawn = True
    if not drawn:
        what = "biases" if key == "bias_init" else "weights"
        raise place.error(f"{node.kind} has no {what}", initializer, "Leave it out.")


def _draw(parameter: nn.Parameter, initializer: Initializer, weight: nn.Parameter) -> None:
    """Draw a parameter; the fan of a vector is its length.

    Args:
        parameter: a weight or a bias.
        initializer: its distribution.
        weight: the weight itself, or the one to whose products the bias is added.
    """
    fan = sum(parameter.shape[-2:])
    if initializer == "zeros":
        nn.init.zeros_(parameter)
    elif initializer == "xavier_normal":
        nn.init.normal_(parameter, std=math.sqrt(2 / fan))
    elif initializer == "fan_in_normal":
        nn.init.normal_(parameter, std=weight.shape[-1] ** -0.5)
    elif initializer == "fan_out_normal":
        num_outputs = weight.shape[-2] if weight.dim() > 1 else len(weight)
        std = num_outputs**-0.5
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
    else:
        bounds = {
            "uniform": 1 / fan,
            "xavier_uniform": math.sqrt(6 / fan),
            "fan_in_uniform": weight.shape[-1] ** -0.5,
        }
        nn.init.uniform_(parameter, -bounds[initializer], bounds[initializer])


def _refused(node: Node, shapes: Mapping[str, Shape], reason: object) -> ConfigError:
    """Return the error that a layer does not take the shapes of its inputs."""
    text = str(reason).partition("\n")[0].rstrip(".")
    text = re.sub(r"\d+", lambda number: _size_text(int(number[0])), text)
    inputs = ", ".join(f"{name} {shape_text(shapes[name])}" for name in node.inputs)
    problem = f"{node.kind} does not take these shapes"
    return node.place.key("inputs").error(problem, Words(inputs), f"{text}.")
