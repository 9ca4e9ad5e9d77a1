# SPDX-License-Identifier: Apache-2.0
"""The dense layers of HugeCTR as layers of a description, one function each.

A function takes the network and the clause of the layer. It adds layers to the network, and notes
their parameters in the order of HugeCTR's dense file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotbed.compat.hugectr.clauses import DenseLayer, GroupDenseLayer
from hotbed.compat.hugectr.enums import Activation_t, Initializer_t, Layer_t
from hotbed.compat.hugectr.translate.network import Network
from hotbed.errors import ConfigError

Translate = Callable[[Network, DenseLayer], None]

_INITIALIZERS: Mapping[Initializer_t, str] = {
    Initializer_t.Uniform: "uniform",
    Initializer_t.XavierNorm: "xavier_normal",
    Initializer_t.XavierUniform: "xavier_uniform",
    Initializer_t.Zero: "zeros",
}
_ACTIVATIONS = {Activation_t.Relu: "relu", Activation_t.Non: None}


def add_layer(network: Network, layer: DenseLayer | GroupDenseLayer) -> None:
    """Add a dense layer of HugeCTR to a network.

    Raises:
        ConfigError: a tensor or an argument of the layer is wrong.
    """
    if isinstance(layer, GroupDenseLayer):
        _group_dense(network, layer)
    else:
        _LAYERS[layer.layer_type](network, layer)


def _plain(kind: str, *fields: str) -> Translate:
    """Return the translation of a layer without parameters.

    Args:
        kind: of layer here.
        fields: of the clause that are keys here: `name`, or `key=name` where the names differ.
    """
    pairs = []
    for field in fields:
        key, _, name = field.rpartition("=")
        pairs.append((key or name, name))

    def translate(network: Network, layer: DenseLayer) -> None:
        keys = {key: _json(getattr(layer, name)) for key, name in pairs}
        network.add(kind, layer.bottom_names, layer.top_names, keys)

    return translate


def _json(value: Any) -> Any:
    """Return a value with lists for tuples, as JSON has them."""
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value


def _initializers(layer: DenseLayer, **default: str) -> dict[str, str]:
    """Return the keys `weight_init` and `bias_init` of a layer that gives them.

    `default` has HugeCTR's distributions of this kind of layer that are not those of a description.
    """
    keys = dict(default)
    for key, name in (("weight_init", "weight_init_type"), ("bias_init", "bias_init_type")):
        kind = _checked_initializer(layer, name)
        if kind in _INITIALIZERS:
            keys[key] = _INITIALIZERS[kind]
    return keys


def _checked_initializer(layer: DenseLayer, name: str) -> Initializer_t:
    """Return an initializer of a layer; ConfigError for one that HugeCTR throws at, too."""
    kind: Initializer_t = getattr(layer, name)
    if kind is Initializer_t.Sinusoidal:
        raise ConfigError(
            f"{layer.top_names[0]}.{name}: dense layers do not have this initializer, got "
            f"{kind.name}. Use Uniform, XavierNorm, XavierUniform, Zero or Default."
        )
    return kind


def _scale_and_shift(layer: DenseLayer) -> dict[str, str]:
    """Return the initializer of a normalization: 1 and 0, or 0 for both with `Zero`.

    HugeCTR's other distributions are those of the default.
    """
    _checked_initializer(layer, "beta_init_type")
    if _checked_initializer(layer, "gamma_init_type") is Initializer_t.Zero:
        return {"weight_init": "zeros"}
    return {}


# --- linear layers --------------------------------------------------------------------------------


def _inner_product(network: Network, layer: DenseLayer) -> None:
    initializers = _initializers(layer, bias_init="fan_out_normal")
    keys = {"out_features": layer.num_output, **initializers}
    node = network.add("linear", layer.bottom_names[:1], layer.top_names[:1], keys)
    network.weight(layer.top_names[0], f"{node}.weight", transposed=True)
    network.weight(layer.top_names[0], f"{node}.bias")


def _fused_inner_product(network: Network, layer: DenseLayer) -> None:
    """Translate a linear layer with its activation; its other tensors are of GPUs."""
    keys = {
        "hidden": [layer.num_output],
        "activation": _ACTIVATIONS[layer.act_type],
        **_initializers(layer, bias_init="fan_out_normal"),
    }
    node = network.add("mlp", layer.bottom_names[:1], layer.top_names[:1], keys)
    network.weight(layer.top_names[0], f"{node}.0.weight", transposed=True)
    network.weight(layer.top_names[0], f"{node}.0.bias")


def _mlp(network: Network, layer: DenseLayer) -> None:
    """Translate an MLP; HugeCTR stores a bias also for those of its layers that add none."""
    widths = layer.num_outputs or (layer.num_output,)
    activations = layer.activations or (layer.act_type,) * len(widths)
    biases = layer.biases or (layer.use_bias,) * len(widths)
    top = layer.top_names[0]
    for name, values in (("activations", activations), ("biases", biases)):
        if len(values) != len(widths):
            raise ConfigError(
                f"{top}.{name}: expected one for each of {len(widths)} layers, got "
                f"{len(values)}. Give as many as num_outputs."
            )
    keys = {
        "hidden": list(widths),
        "activation": [_ACTIVATIONS[activation] for activation in activations],
        "bias": list(biases),
        **_initializers(layer, weight_init="fan_in_uniform", bias_init="fan_in_uniform"),
    }
    if not any(biases):
        keys.pop("bias_init", None)
    node = network.add("mlp", layer.bottom_names[:1], [top], keys)
    for number, width in enumerate(widths):
        linear = f"{node}.{2 * number}"  # an activation stands behind each
        network.weight(top, f"{linear}.weight", transposed=True)
        if biases[number]:
            network.weight(top, f"{linear}.bias")
        else:
            network.weight(top, "", shape=(width,))


def _group_dense(network: Network, layer: GroupDenseLayer) -> None:
    keys = {
        "widths": list(layer.num_outputs),
        "last_activation": _ACTIVATIONS[layer.last_act_type],
        "bias_init": "fan_out_normal",
    }
    tops = layer.top_name_list
    node = network.add("group_dense", layer.bottom_name_list[:1], tops, keys)
    for number, top in enumerate(tops):
        network.weight(top, f"{node}.layers.{number}.0.weight", transposed=True)
        network.weight(top, f"{node}.layers.{number}.0.bias")


def _weight_multiply(network: Network, layer: DenseLayer) -> None:
    if len(layer.weight_dims) != 2:
        raise ConfigError(
            f"{layer.top_names[0]}.weight_dims: expected two sizes, got "
            f"{list(layer.weight_dims)}. Give [slots, embedding_vec_size]."
        )
    fields, dim = layer.weight_dims
    keys = {"in_features": fields, "dim": dim, **_initializers(layer)}
    keys.pop("bias_init", None)
    node = network.add("weight_multiply", layer.bottom_names, layer.top_names, keys)
    network.weight(layer.top_names[0], f"{node}.weight")


# --- normalization --------------------------------------------------------------------------------


def _batch_norm(network: Network, layer: DenseLayer) -> None:
    keys = {"momentum": layer.factor, "eps": layer.eps, **_scale_and_shift(layer)}
    node = network.add("batch_norm", layer.bottom_names, layer.top_names, keys)
    network.weight(layer.top_names[0], f"{node}.weight")
    network.weight(layer.top_names[0], f"{node}.bias")
    for name in ("running_mean", "running_var"):
        network.statistic(layer.top_names[0], f"{node}.{name}")


def _layer_norm(network: Network, layer: DenseLayer) -> None:
    keys = {"eps": layer.eps, **_scale_and_shift(layer)}
    node = network.add("layer_norm", layer.bottom_names, layer.top_names, keys)
    network.weight(layer.top_names[0], f"{node}.weight")
    network.weight(layer.top_names[0], f"{node}.bias")


# --- interaction ----------------------------------------------------------------------------------


def _multi_cross(network: Network, layer: DenseLayer) -> None:
    """Translate DCN's cross layers; with a projection those of DCN-V2, a matrix U V each."""
    kind = "cross_net"
    keys: dict[str, Any] = {"num_layers": layer.num_layers}
    if layer.projection_dim:
        kind = "cross_net_v2"
        keys |= {"projection_dim": layer.projection_dim, **_initializers(layer)}
    else:
        keys |= _initializers(layer, weight_init="fan_in_normal")
    top = layer.top_names[0]
    node = network.add(kind, layer.bottom_names, [top], keys)
    for number in range(layer.num_layers):
        if layer.projection_dim:
            network.weight(top, f"{node}.layers.{number}.0.weight", transposed=True)
            network.weight(top, f"{node}.layers.{number}.1.weight", transposed=True)
            network.weight(top, f"{node}.layers.{number}.1.bias")
        else:
            network.weight(top, f"{node}.weights.{number}.weight")
            network.weight(top, f"{node}.biases.{number}")


def _interaction(network: Network, layer: DenseLayer) -> None:
    """Translate DLRM's interaction; a second top is a gradient of HugeCTR's own."""
    keys = {"with_dense": True, "padding": True}
    network.add("dot_interaction", layer.bottom_names, layer.top_names[:1], keys)


# --- shape ----------------------------------------------------------------------------------------


def _reshape(network: Network, layer: DenseLayer) -> None:
    keys: dict[str, Any] = {}
    if layer.selected:
        keys["selected"] = list(layer.selected_slots)
    elif layer.leading_dim > 0:
        keys["leading_dim"] = layer.leading_dim
        if layer.time_step > 0:
            keys["time_steps"] = layer.time_step
    elif layer.shape:
        keys["shape"] = list(layer.shape)
    network.add("reshape", layer.bottom_names, layer.top_names, keys)


def _slice(network: Network, layer: DenseLayer) -> None:
    """Translate a slice; one of a label cuts the list of its columns."""
    bottom = layer.bottom_names[0]
    if bottom in network.labels:
        columns = network.labels[bottom]
        for top, (first, end) in zip(layer.top_names, layer.ranges, strict=True):
            network.labels[top] = columns[first:end]
        return
    keys = {"ranges": _json(layer.ranges)}
    network.add("slice", layer.bottom_names, layer.top_names, keys)


def _select(network: Network, layer: DenseLayer) -> None:
    keys = {"indices": list(layer.index), "axis": layer.dim}
    network.add("gather", layer.bottom_names, layer.top_names, keys)


def _reduced(kind: str) -> Translate:
    """Return the translation of a sum or mean, which keeps its axis."""

    def translate(network: Network, layer: DenseLayer) -> None:
        keys = {"axis": layer.axis, "keepdim": True}
        network.add(kind, layer.bottom_names, layer.top_names, keys)

    return translate


# --- sequences ------------------------------------------------------------------------------------


def _sequence_mask(network: Network, layer: DenseLayer) -> None:
    """Translate a mask; up to v23.06 it takes the lengths of the keys alone, for any query."""
    bottoms = layer.bottom_names
    keys = {"length_from": layer.max_sequence_len_from, "length_to": layer.max_sequence_len_to}
    network.add("sequence_mask", (bottoms * 2)[:2], layer.top_names, keys)


def _prelu_dice(network: Network, layer: DenseLayer) -> None:
    keys = {"alpha": layer.elu_alpha, "epsilon": layer.eps, "learned": False}
    network.add("dice", layer.bottom_names, layer.top_names, keys)


def _scale(network: Network, layer: DenseLayer) -> None:
    keys = {"axis": layer.axis, "factor": int(layer.factor)}
    network.add("scale", layer.bottom_names, layer.top_names, keys)


def _attention(network: Network, layer: DenseLayer) -> None:
    """Translate an attention, whole or in the two parts of v4.0 to v4.3.

    There, the layer with two tops makes the scores and hands the values on; a layer of scores and
    values sums them.
    """
    keys = {"num_heads": layer.num_attention_heads}
    bottoms = layer.bottom_names
    if len(layer.top_names) == 2:
        network.add("attention_scores", bottoms[:2], layer.top_names[:1], keys)
        top = layer.top_names[1]
        network.tensors[top] = network.tensor(bottoms[2], top)
    elif len(bottoms) == 2 and layer.transpose_b:
        network.add("attention_scores", bottoms, layer.top_names, keys)
    elif len(bottoms) == 2:
        network.add("attention_sum", bottoms, layer.top_names)
    else:
        network.add("multi_head_attention", bottoms, layer.top_names, keys)


def _gru(network: Network, layer: DenseLayer) -> None:
    """Translate a GRU: rows of all steps of all samples, in and out.

    HugeCTR stores the weights in cuDNN's order, which is torch's, and a first state of zeros.
    """
    top = layer.top_names[0]
    steps = f"{top}.steps"
    states = f"{top}.states"
    shape = {"leading_dim": layer.vector_size, "time_steps": layer.SeqLength}
    network.add("reshape", layer.bottom_names, [steps], shape)
    keys = {"hidden_size": layer.num_output, "recurrent_bias": False, **_initializers(layer)}
    node = network.add("gru", [steps], [states, f"{top}.last"], keys)
    network.add("reshape", [states], [top], {"leading_dim": layer.num_output})
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0"):
        network.weight(top, f"{node}.gru.{name}")
    network.weight(top, "", shape=(layer.batchsize * layer.num_output,))


def _softmax(network: Network, layer: DenseLayer) -> None:
    """Translate a softmax; only that with a mask multiplies by its factor."""
    keys = {}
    if len(layer.bottom_names) == 2:
        keys["factor"] = layer.factor
    network.add("softmax", layer.bottom_names, layer.top_names, keys)


def _cast(network: Network, layer: DenseLayer) -> None:
    """Translate a cast: between float32 and float16 in HugeCTR, the identity here."""
    network.add("cast", layer.bottom_names, layer.top_names, {"dtype": "float32"})


_LAYERS: Mapping[Layer_t, Translate] = {
    Layer_t.InnerProduct: _inner_product,
    Layer_t.FusedInnerProduct: _fused_inner_product,
    Layer_t.MLP: _mlp,
    Layer_t.WeightMultiply: _weight_multiply,
    Layer_t.BatchNorm: _batch_norm,
    Layer_t.LayerNorm: _layer_norm,
    Layer_t.MultiCross: _multi_cross,
    Layer_t.Interaction: _interaction,
    Layer_t.FmOrder2: _plain("fm_order2", "dim=out_dim"),
    Layer_t.Dropout: _plain("dropout", "rate=dropout_rate"),
    Layer_t.ELU: _plain("elu", "alpha=elu_alpha"),
    Layer_t.ReLU: _plain("relu"),
    Layer_t.ReLUHalf: _plain("relu"),
    Layer_t.Sigmoid: _plain("sigmoid"),
    Layer_t.Add: _plain("add"),
    Layer_t.Sub: _plain("sub"),
    Layer_t.ElementwiseMultiply: _plain("elementwise_multiply"),
    Layer_t.DotProduct: _plain("elementwise_multiply"),
    Layer_t.MatrixMultiply: _plain("matrix_multiply"),
    Layer_t.ReduceSum: _reduced("reduce_sum"),
    Layer_t.ReduceMean: _reduced("reduce_mean"),
    Layer_t.Concat: _plain("concat", "axis"),
    Layer_t.Reshape: _reshape,
    Layer_t.Slice: _slice,
    Layer_t.Select: _select,
    Layer_t.Gather: _plain("gather", "indices"),
    Layer_t.FusedReshapeConcat: _plain("fused_reshape_concat"),
    Layer_t.FusedReshapeConcatGeneral: _plain("fused_reshape_concat_general"),
    Layer_t.PReLU_Dice: _prelu_dice,
    Layer_t.Scale: _scale,
    Layer_t.Softmax: _softmax,
    Layer_t.MultiHeadAttention: _attention,
    Layer_t.GRU: _gru,
    Layer_t.SequenceMask: _sequence_mask,
    Layer_t.Cast: _cast,
}
