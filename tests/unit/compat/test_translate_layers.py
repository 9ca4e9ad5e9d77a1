# SPDX-License-Identifier: Apache-2.0
"""Each layer of HugeCTR, translated, equals its formula in plain torch.

A formula gets the parameters as arrays of HugeCTR's dense file, in its order and shapes, so that a
parameter in a wrong place or transposed is found too.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import Activation_t, DenseLayer, Initializer_t, Layer_t
from hotbed.compat.hugectr.json.graph import write_graph
from hotbed.compat.hugectr.json.layers import LAYER_KEYS, Keys, read_graph
from hotbed.compat.hugectr.translate import Translation, translate
from hotbed.errors import ConfigError

NUM_SAMPLES = 4
RELU, NON = Activation_t.Relu, Activation_t.Non


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and its formula.

    Args:
        layer: its arguments; bottoms are named x0, x1, …, tops y0, y1, ….
        shapes: of the bottoms, without samples.
        formula: parameters and bottoms -> top, or a tuple of tops.
        sizes: elements of a sample in each top.
        training: whether the network is in training mode.
    """

    layer: dict[str, Any]
    shapes: Sequence[tuple[int, ...]]
    formula: Callable[..., Any]
    sizes: tuple[int, ...]
    training: bool = False


def fc(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return x @ w + b


def cross(w: Sequence[Tensor], x0: Tensor) -> Tensor:
    x = x0
    for weight, bias in zip(w[::2], w[1::2], strict=True):
        x = x0 * (x * weight.flatten()).sum(1, keepdim=True) + bias + x
    return x


def low_rank_cross(w: Sequence[Tensor], x0: Tensor) -> Tensor:
    x = x0
    for down, up, bias in zip(w[::3], w[1::3], w[2::3], strict=True):
        x = x0 * (x @ down @ up + bias) + x
    return x


def interaction(w: Sequence[Tensor], dense: Tensor, fields: Tensor) -> Tensor:
    vectors = torch.cat([dense[:, None], fields], 1)
    products = []
    for i in range(vectors.shape[1]):
        for j in range(i):
            products.append((vectors[:, i] * vectors[:, j]).sum(1))
    zero = torch.zeros(len(dense), 1)
    return torch.cat([dense, torch.stack(products, 1), zero], 1)


def scores(heads: int, query: Tensor, key: Tensor) -> Tensor:
    parts = []
    for q, k in zip(query.chunk(heads, 2), key.chunk(heads, 2), strict=True):
        parts.append(q @ k.transpose(1, 2) / math.sqrt(q.shape[2]))
    return torch.stack(parts, 1)


def weighed(weights: Tensor, value: Tensor) -> Tensor:
    heads = value.chunk(weights.shape[1], 2)
    return torch.cat([weights[:, i] @ heads[i] for i in range(len(heads))], 2)


def gru(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Rows of all steps; the gates lie one after another: reset, update, new."""
    inputs = w[0].chunk(3)
    states = w[1].chunk(3)
    biases = w[2].chunk(3)
    h = torch.zeros(NUM_SAMPLES, 5)
    rows = []
    for step in x.reshape(NUM_SAMPLES, 3, 2).unbind(1):
        reset = torch.sigmoid(step @ inputs[0].T + biases[0] + h @ states[0].T)
        update = torch.sigmoid(step @ inputs[1].T + biases[1] + h @ states[1].T)
        new = torch.tanh(step @ inputs[2].T + biases[2] + reset * (h @ states[2].T))
        h = (1 - update) * new + update * h
        rows.append(h)
    assert not w[3].any()  # HugeCTR's first state
    return torch.stack(rows, 1).reshape(-1, 5)


def dice(w: Sequence[Tensor], x: Tensor) -> Tensor:
    normed = (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
    share = torch.sigmoid(normed)
    return share * x + (1 - share) * 0.2 * x


def side_by_side(*x: Tensor) -> Tensor:
    return torch.cat(x, 2)


CASES = {
    "InnerProduct": Case({"num_output": 3}, [(5,)], lambda w, x: fc(*w, x), (3,)),
    "InnerProduct of histories": Case(
        {"layer_type": Layer_t.InnerProduct, "num_output": 3},
        [(2, 5)],
        lambda w, x: fc(*w, x),
        (6,),
    ),
    "FusedInnerProduct": Case({"num_output": 3}, [(5,)], lambda w, x: F.relu(fc(*w, x)), (3,)),
    "FusedInnerProduct at the tail": Case(
        {
            "layer_type": Layer_t.FusedInnerProduct,
            "num_output": 3,
            "act_type": NON,
            "pos_type": hugectr.FcPosition_t.Tail,
        },
        [(5,)],
        lambda w, x: fc(*w, x),
        (3,),
    ),
    "MLP": Case(
        {"num_outputs": [3, 2], "activations": [RELU, NON], "biases": [True, False]},
        [(5,)],
        lambda w, x: F.relu(fc(w[0], w[1], x)) @ w[2],
        (2,),
    ),
    "MLP of one activation": Case(
        {"layer_type": Layer_t.MLP, "num_outputs": [3, 2], "act_type": RELU, "use_bias": True},
        [(5,)],
        lambda w, x: F.relu(fc(w[2], w[3], F.relu(fc(w[0], w[1], x)))),
        (2,),
    ),
    "MultiCross": Case({"num_layers": 3}, [(5,)], cross, (5,)),
    "MultiCross of low rank": Case(
        {"layer_type": Layer_t.MultiCross, "num_layers": 2, "projection_dim": 3},
        [(5,)],
        low_rank_cross,
        (5,),
    ),
    "WeightMultiply": Case(
        {"weight_dims": [5, 3]}, [(5,)], lambda w, x: (x[:, :, None] * w[0]).flatten(1), (15,)
    ),
    "Multiply": Case(
        {"weight_dims": [5, 3]}, [(5,)], lambda w, x: (x[:, :, None] * w[0]).flatten(1), (15,)
    ),
    "BatchNorm": Case(
        {"factor": 0.9, "eps": 1e-3},
        [(5,)],
        lambda w, x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt() * w[0] + w[1],
        (5,),
        training=True,
    ),
    "LayerNorm": Case(
        {"eps": 1e-3},
        [(2, 5)],
        lambda w, x: (
            (x - x.mean(2, keepdim=True))
            / (x.var(2, unbiased=False, keepdim=True) + 1e-3).sqrt()
            * w[0]
            + w[1]
        ),
        (10,),
    ),
    "Interaction": Case({}, [(4,), (3, 4)], interaction, (11,)),
    "FmOrder2": Case({"out_dim": 3}, [(6,)], lambda w, x: x[:, :3] * x[:, 3:], (3,)),
    "Dropout": Case({"dropout_rate": 0.5}, [(5,)], lambda w, x: x, (5,)),
    "ELU": Case(
        {"elu_alpha": 0.5}, [(5,)], lambda w, x: torch.where(x > 0, x, 0.5 * x.expm1()), (5,)
    ),
    "ReLU": Case({}, [(5,)], lambda w, x: x.clamp_min(0), (5,)),
    "ReLUHalf": Case({}, [(5,)], lambda w, x: x.clamp_min(0), (5,)),
    "Sigmoid": Case({}, [(5,)], lambda w, x: 1 / (1 + torch.exp(-x)), (5,)),
    "Add": Case({}, [(5,)] * 3, lambda w, x, y, z: x + y + z, (5,)),
    "Sub": Case({}, [(5,)] * 2, lambda w, x, y: x - y, (5,)),
    "ElementwiseMultiply": Case({}, [(5,)] * 3, lambda w, x, y, z: x * y * z, (5,)),
    "DotProduct": Case({}, [(5,)] * 2, lambda w, x, y: x * y, (5,)),
    "MatrixMultiply": Case({}, [(2, 3), (3, 4)], lambda w, x, y: torch.bmm(x, y), (8,)),
    "ReduceSum": Case({"axis": 1}, [(5,)], lambda w, x: x.sum(1, keepdim=True), (1,)),
    "ReduceMean": Case({"axis": 2}, [(3, 5)], lambda w, x: x.mean(2, keepdim=True), (3,)),
    "Concat": Case({}, [(5,), (3,)], lambda w, x, y: torch.cat([x, y], 1), (8,)),
    "Concat of fields": Case(
        {"layer_type": Layer_t.Concat, "axis": 2},
        [(3, 5), (3, 2)],
        lambda w, *x: side_by_side(*x),
        (21,),
    ),
    "Reshape": Case({"leading_dim": 6}, [(3, 2)], lambda w, x: x.reshape(-1, 6), (6,)),
    "Reshape of all": Case(
        {"layer_type": Layer_t.Reshape}, [(3, 2)], lambda w, x: x.reshape(-1, 6), (6,)
    ),
    "Reshape with steps": Case(
        {"layer_type": Layer_t.Reshape, "leading_dim": 2, "time_step": 3},
        [(6,)],
        lambda w, x: x.reshape(-1, 3, 2),
        (6,),
    ),
    "Reshape with a shape": Case(
        {"layer_type": Layer_t.Reshape, "shape": [-1, 2, 3]},
        [(6,)],
        lambda w, x: x.reshape(-1, 2, 3),
        (6,),
    ),
    "Reshape of slots": Case(
        {"layer_type": Layer_t.Reshape, "selected": True, "selected_slots": [2, 0]},
        [(3, 2)],
        lambda w, x: torch.cat([x[:, 2], x[:, 0]], 1),
        (4,),
    ),
    "Slice": Case({"ranges": [(0, 3), (2, 5)]}, [(5,)], lambda w, x: (x[:, :3], x[:, 2:]), (3, 3)),
    "Select": Case({"dim": 1, "index": [2, 0]}, [(3, 2)], lambda w, x: x[:, [2, 0]], (4,)),
    "Gather": Case({"indices": [4, 1]}, [(5,)], lambda w, x: x[:, [4, 1]], (2,)),
    "FusedReshapeConcat": Case(
        {},
        [(3, 2), (3, 4)],
        lambda w, *x: (side_by_side(*x)[:, :2].reshape(-1, 6), side_by_side(*x)[:, 2]),
        (12, 6),
    ),
    "FusedReshapeConcatGeneral": Case(
        {}, [(3, 2), (3, 4)], lambda w, *x: side_by_side(*x).reshape(-1, 6), (18,)
    ),
    "PReLU_Dice": Case({"elu_alpha": 0.2, "eps": 1e-5}, [(5,)], dice, (5,), training=True),
    "Scale": Case(
        {"axis": 0, "factor": 2}, [(3,)], lambda w, x: torch.stack([x, x], 2).flatten(1), (6,)
    ),
    "Scale of rows": Case(
        {"layer_type": Layer_t.Scale, "axis": 1, "factor": 2},
        [(3,)],
        lambda w, x: torch.stack([x, x], 1).reshape(-1, 3),
        (6,),
    ),
    "Softmax": Case({"factor": 3.0}, [(5,)], lambda w, x: torch.softmax(x, 1), (5,)),
    "Softmax with a mask": Case(
        {"layer_type": Layer_t.Softmax, "factor": 3.0},
        [(2, 5), (2, 5)],
        lambda w, x, mask: torch.softmax(3 * x, 2),  # numbers other than 0 keep the entry
        (10,),
    ),
    "MultiHeadAttention": Case(
        {"num_attention_heads": 2},
        [(3, 4)] * 3,
        lambda w, q, k, v: weighed(torch.softmax(scores(2, q, k), 3), v),
        (12,),
    ),
    "scores of MultiHeadAttention": Case(
        {"layer_type": Layer_t.MultiHeadAttention, "num_attention_heads": 2, "transpose_b": True},
        [(3, 4)] * 2,
        lambda w, q, k: scores(2, q, k),
        (18,),
    ),
    "sum of MultiHeadAttention": Case(
        {"layer_type": Layer_t.MultiHeadAttention, "transpose_b": False},
        [(2, 3, 5), (5, 4)],
        lambda w, a, v: weighed(a, v),
        (12,),
    ),
    "GRU": Case(
        {"num_output": 5, "batchsize": NUM_SAMPLES, "SeqLength": 3, "vector_size": 2},
        [(6,)],
        gru,
        (15,),
    ),
    "SequenceMask": Case(
        {"max_sequence_len_from": 2, "max_sequence_len_to": 3},
        [(1,), (1,)],
        lambda w, x, y: (
            (torch.arange(2)[:, None] < x[:, :, None]) & (torch.arange(3) < y[:, :, None])
        )[:, None].float(),
        (6,),
    ),
    "SequenceMask of one length": Case(
        {"layer_type": Layer_t.SequenceMask, "max_sequence_len": 3},
        [(1,)],
        lambda w, x: (torch.arange(3) < x)[:, None, None].float(),
        (3,),
    ),
    "Cast": Case({}, [(5,)], lambda w, x: x, (5,)),
}


def graph_of(case: Case, name: str) -> hugectr.Graph:
    """Return a network around one layer: bottoms are cut out of the dense tensor."""
    layers: list[Any] = []
    ranges = []
    first = 0
    for number, shape in enumerate(case.shapes):
        ranges.append((first, first + math.prod(shape)))
        first += math.prod(shape)
        bottom, top = [f"flat{number}"], [f"x{number}"]
        layers.append(DenseLayer(Layer_t.Reshape, bottom, top, shape=[-1, *shape]))
    flat = [f"flat{number}" for number in range(len(case.shapes))]
    layers.insert(0, DenseLayer(Layer_t.Slice, ["dense"], flat, ranges=ranges))
    arguments = {"layer_type": getattr(Layer_t, name, None), **case.layer}
    bottoms = [f"x{number}" for number in range(len(case.shapes))]
    tops = [f"y{number}" for number in range(len(case.sizes))]
    layers.append(DenseLayer(bottom_names=bottoms, top_names=tops, **arguments))
    return closed(layers, dict(zip(tops, case.sizes, strict=True)), first)


def closed(layers: list[Any], sizes: dict[str, int], dense_dim: int) -> hugectr.Graph:
    """Return layers whose tops are all taken by one logit."""
    for top, size in sizes.items():
        layers.append(DenseLayer(Layer_t.Reshape, [top], [f"{top}.flat"], leading_dim=size))
    ends = ["dense", *[f"{top}.flat" for top in sizes]]
    layers += [
        DenseLayer(Layer_t.Concat, ends, ["all"]),
        DenseLayer(Layer_t.InnerProduct, ["all"], ["logit"], num_output=1),
        DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]),
    ]
    data = hugectr.Input(1, "label", dense_dim, "dense", [])
    return hugectr.Graph(data, (), layers)


def batch_of(translation: Translation, dense: Tensor) -> hb.Batch:
    rows = pa.array(dense.double().tolist(), pa.list_(pa.float32()))
    table = pa.table({"label": np.zeros(len(dense)), "dense": rows})
    source = hb.sources.Memory(table)
    return next(iter(hb.Dataset(source, translation.schema, batch_size=len(dense))))


def built(graph: hugectr.Graph) -> tuple[Translation, nn.Module]:
    """Return a translation, and its network with random parameters."""
    translation = translate(graph, hugectr.OptParams())
    network = hb.models.Graph(translation.schema, translation.tables, translation.description)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return translation, network


def stored(translation: Translation, network: nn.Module, layer: str) -> list[Tensor]:
    """Return the parameters of a layer as HugeCTR's dense file has them."""
    state = network.state_dict()
    arrays = []
    for weight in translation.dense_weights:
        if weight.layer == layer:
            array = state[weight.path] if weight.path else torch.zeros(weight.shape)
            array = array.T if weight.transposed else array
            assert tuple(array.shape) == weight.shape
            arrays.append(array)
    return arrays


@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_its_formula(name: str) -> None:
    case = CASES[name]
    translation, network = built(graph_of(case, name))
    network.train(case.training)
    sizes = [math.prod(shape) for shape in case.shapes]
    dense = torch.randn(NUM_SAMPLES, sum(sizes)) * 2
    bottoms = []
    for x, shape in zip(dense.split(sizes, 1), case.shapes, strict=True):
        bottoms.append(x.reshape(NUM_SAMPLES, *shape))
    tops = [f"y{number}" for number in range(len(case.sizes))]
    names = [translation.tensors[top] for top in tops]
    with hb.models.recorded(network, names) as tensors, torch.no_grad():
        network(batch_of(translation, dense))
    weights = stored(translation, network, "y0")
    expected = case.formula(weights, *bottoms)
    if isinstance(expected, Tensor):
        expected = (expected,)
    for top, values in zip(names, expected, strict=True):
        assert tensors.values[top].shape == tuple(values.shape)
        assert torch.allclose(torch.tensor(tensors.values[top]), values, atol=1e-5), top
    trained = [path for path, _ in network.named_parameters() if path.startswith("layers.y0")]
    assert bool(trained) == bool(weights)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_survives_its_json(name: str) -> None:
    graph = graph_of(CASES[name], name)
    text = json.dumps(write_graph(graph, hugectr.OptParams()))
    assert read_graph(json.loads(text)) == graph


@pytest.mark.parametrize("name", CASES)
def test_zero_is_the_initializer_of_each_layer_that_takes_one(name: str) -> None:
    kind = CASES[name].layer.get("layer_type") or Layer_t[name]
    arguments = LAYER_KEYS.get(kind, Keys()).arguments.values()
    for argument in {"weight_init_type", "gamma_init_type"}.intersection(arguments):
        layer = {**CASES[name].layer, argument: Initializer_t.Zero}
        translation = translate(
            graph_of(dataclasses.replace(CASES[name], layer=layer), name), hugectr.OptParams()
        )
        network = hb.models.Graph(translation.schema, translation.tables, translation.description)
        weights = stored(translation, network, "y0")
        assert not weights[0].any()
        layer[argument] = Initializer_t.Sinusoidal
        with pytest.raises(ConfigError, match=f"y0.{argument}: .*got Sinusoidal"):
            translate(
                graph_of(dataclasses.replace(CASES[name], layer=layer), name), hugectr.OptParams()
            )


def test_every_kind_of_layer_has_a_case() -> None:
    losses = {kind for kind in Layer_t if kind.name.endswith("Loss")}
    tested = set()
    for name, case in CASES.items():
        tested.add(case.layer.get("layer_type") or Layer_t[name])
    assert {*Layer_t} - losses == tested
