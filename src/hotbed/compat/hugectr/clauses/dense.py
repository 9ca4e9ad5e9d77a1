# SPDX-License-Identifier: Apache-2.0
"""Dense layers, losses, and the network of all clauses."""

from __future__ import annotations

from typing import Any

from hotbed.compat.hugectr.clause import by_order, clause, required
from hotbed.compat.hugectr.clauses.data import Input
from hotbed.compat.hugectr.clauses.embeddings import EmbeddingCollectionConfig, SparseEmbedding
from hotbed.compat.hugectr.enums import (
    Activation_t,
    FcPosition_t,
    GroupLayer_t,
    Initializer_t,
    Layer_t,
    Regularizer_t,
)


@clause("compute_config")
class DenseLayerComputeConfig:
    """How an MLP computes its gradients."""

    async_wgrad: bool = False
    fuse_wb: bool = False


@clause("dense_layer_switches")
class DenseLayerSwitchs:
    """How a fused layer computes its gradients, in v3.9 to v4.1; its spelling."""

    fuse_wb: bool = False


_DENSE_LAYER: list[str] = []  # names of fields in their order; filled below the class


def _dense_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `lambda`, a keyword of Python, and `max_sequence_len` of v4.3 to v23.08."""
    values = by_order("dense_layer", _DENSE_LAYER, args, keywords)
    if "lambda" in values:
        values["lambda_"] = values.pop("lambda")
    if "max_sequence_len" in values:
        length = values.pop("max_sequence_len")
        values = {"max_sequence_len_from": 1, "max_sequence_len_to": length, **values}
    for key in ("bottom_names", "top_names"):
        if isinstance(values.get(key), str):
            values[key] = (values[key],)
    return values


@clause("dense_layer", _dense_form)
class DenseLayer:
    """A dense layer or a loss. The argument `lambda` is the field `lambda_`."""

    layer_type: Layer_t = required()
    bottom_names: tuple[str, ...] = required()
    top_names: tuple[str, ...] = required()
    factor: float = 1.0
    eps: float = 0.00001
    gamma_init_type: Initializer_t = Initializer_t.Default
    beta_init_type: Initializer_t = Initializer_t.Default
    dropout_rate: float = 0.5
    elu_alpha: float = 1.0
    num_output: int = 1
    weight_init_type: Initializer_t = Initializer_t.Default
    bias_init_type: Initializer_t = Initializer_t.Default
    num_layers: int = 0
    leading_dim: int = 0
    time_step: int = 0
    batchsize: int = 1
    SeqLength: int = 1
    vector_size: int = 1
    selected: bool = False
    selected_slots: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    indices: tuple[int, ...] = ()
    weight_dims: tuple[int, ...] = ()
    projection_dim: int = 0
    out_dim: int = 0
    axis: int = 1
    max_sequence_len_from: int = 1
    max_sequence_len_to: int = 1
    num_attention_heads: int = 1
    transpose_b: bool = False
    target_weight_vec: tuple[float, ...] = ()
    use_regularizer: bool = False
    regularizer_type: Regularizer_t = Regularizer_t.L1
    lambda_: float = 0.0
    pos_type: FcPosition_t = FcPosition_t.Non
    act_type: Activation_t = Activation_t.Relu
    num_outputs: tuple[int, ...] = ()
    use_bias: bool = True
    activations: tuple[Activation_t, ...] = ()
    biases: tuple[bool, ...] = ()
    compute_config: DenseLayerComputeConfig = DenseLayerComputeConfig()
    shape: tuple[int, ...] = ()
    dim: int = 0
    index: tuple[int, ...] = ()


_DENSE_LAYER += DenseLayer.__dataclass_fields__


def _group_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `bottom_name` of v3.3, too."""
    order = ["group_layer_type", "bottom_name_list", "top_name_list", "num_outputs"]
    values = by_order("group_dense_layer", [*order, "last_act_type"], args, keywords)
    bottom = values.pop("bottom_name", values.get("bottom_name_list"))
    if bottom is not None:
        values["bottom_name_list"] = (bottom,) if isinstance(bottom, str) else bottom
    return values


@clause("group_dense_layer", _group_form)
class GroupDenseLayer:
    """Linear layers in a row, of v3.3 to v23.08."""

    group_layer_type: GroupLayer_t = required()
    bottom_name_list: tuple[str, ...] = required()
    top_name_list: tuple[str, ...] = required()
    num_outputs: tuple[int, ...] = required()
    last_act_type: Activation_t = Activation_t.Relu


Clause = Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer | GroupDenseLayer
"""What `Model.add` takes."""


@clause("graph")
class Graph:
    """A network: its clauses in their order.

    Attributes:
        input: the tensors of a batch.
        embeddings: tables with their lookups.
        layers: dense layers and losses.
        model_name: as a JSON file gives it.
    """

    input: Input = required()
    embeddings: tuple[SparseEmbedding | EmbeddingCollectionConfig, ...] = ()
    layers: tuple[DenseLayer | GroupDenseLayer, ...] = ()
    model_name: str = ""
