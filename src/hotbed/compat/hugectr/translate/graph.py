# SPDX-License-Identifier: Apache-2.0
"""translate: a graph of HugeCTR as values of the engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hotbed.compat.hugectr.clauses import DenseLayer, Graph, GroupDenseLayer, OptParams
from hotbed.compat.hugectr.clauses.training import NEWEST_RELEASE
from hotbed.compat.hugectr.enums import Layer_t
from hotbed.compat.hugectr.reader import Columns, known_columns
from hotbed.compat.hugectr.translate.inputs import Inputs
from hotbed.compat.hugectr.translate.layers import add_layer
from hotbed.compat.hugectr.translate.losses import LOSSES, Losses
from hotbed.compat.hugectr.translate.network import Network
from hotbed.compat.hugectr.translate.rules import dense_rule, table_rule
from hotbed.compat.hugectr.translate.translation import DenseWeight, Translation
from hotbed.data.schema import Schema
from hotbed.embedding.tier import Tier
from hotbed.models.graph.network import Graph as DescribedNetwork

if TYPE_CHECKING:
    from hotbed.embedding.table import Table

_LOG = logging.getLogger("hotbed.compat.hugectr")


def translate(
    graph: Graph,
    optimizer: OptParams,
    columns: Columns | None = None,
    *,
    lr: float = 0.001,
    batchsize: int = 1,
    seed: int = 0,
    loss_weights: Mapping[str, float] | None = None,
    release: str = NEWEST_RELEASE,
    tiers: Mapping[str, Tier] | None = None,
) -> Translation:
    """Return a graph of HugeCTR as values of the engine.

    The last tensor of a graph without losses is its logit; a `Sigmoid` in the last place is left
    out, since the engine makes scores of logits itself.

    Args:
        graph: of HugeCTR.
        optimizer: of the model.
        columns: raw columns of the reader; None names them as the tensors of the input, with
            the slot sizes that its JSON file gives.
        lr: learning rate of the optimizers.
        batchsize: samples of a step, which divide the factor of a regularizer.
        seed: of the initial rows.
        loss_weights: by label; 1 where missing. None takes those of the input.
        release: of HugeCTR, whose Ftrl it is.
        tiers: of tables whose rows do not lie in memory, by name.

    Raises:
        ConfigError: the graph is wrong; the message names the layer and the argument.
    """
    network = Network()
    if columns is None:
        columns = known_columns(graph.input)
    rule_of = partial(table_rule, lr=lr, release=release)
    inputs = Inputs(network, graph, columns, optimizer, rule_of, seed, tiers or {})
    losses = _add_layers(network, graph, loss_weights)
    labels = [label for name in inputs.labels for label in inputs.labels[name]]
    with_losses = [label for label in labels if label.name in losses.outputs]
    schema = Schema([*with_losses, *inputs.dense, *inputs.ids])
    description = _description(network, losses.outputs)
    outputs = _tensors_of(description)
    shapes = _shapes(schema, inputs.tables, description)
    return Translation(
        schema=schema,
        tables=inputs.tables,
        description=description,
        loss=losses.loss,
        rule=dense_rule(optimizer, lr, losses.l1 / batchsize, losses.l2 / batchsize, release),
        tensors={name: place for name, place in network.tensors.items() if place in outputs},
        dense_weights=_with_shapes(network.weights, shapes),
        statistics=_with_shapes(network.statistics, shapes),
        embeddings=tuple(inputs.embeddings),
        labels=dict(network.labels),
        limits=inputs.limits,
    )


def _add_layers(network: Network, graph: Graph, loss_weights: Mapping[str, float] | None) -> Losses:
    """Add the layers of a graph to a network, and return its losses."""
    if loss_weights is None:
        names = graph.input.label_names
        loss_weights = dict(zip(names, graph.input.label_weights, strict=False))
    losses = Losses(network, dict(loss_weights))
    layers = list(graph.layers)
    scores = _without_last_sigmoid(layers)
    for layer in layers:
        if isinstance(layer, DenseLayer) and layer.layer_type in LOSSES:
            losses.add(layer)
        else:
            add_layer(network, layer)
    if not losses.outputs:
        losses.add_ends(graph.input.label_names)
    if scores is not None:  # the engine makes scores of these logits
        top = scores.top_names[0]
        network.tensors[top] = network.tensor(scores.bottom_names[0], top)
    return losses


def _without_last_sigmoid(layers: list[DenseLayer | GroupDenseLayer]) -> DenseLayer | None:
    """Take a sigmoid in the last place out of the layers, and return it."""
    last = layers[-1] if layers else None
    if isinstance(last, DenseLayer) and last.layer_type is Layer_t.Sigmoid:
        layers.pop()
        return last
    return None


def _description(network: Network, outputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the description, without inputs and layers that no logit depends on."""
    needed = network.taken(list(outputs.values()))
    parts: dict[str, list[dict[str, Any]]] = {}
    for key, entries in (("inputs", network.inputs), ("layers", network.layers)):
        parts[key] = [entry for entry in entries if needed.intersection(entry["outputs"])]
        for entry in entries:
            if entry not in parts[key]:
                _LOG.warning("hugectr: %s is left out, because no loss needs it", entry["name"])
    return {**parts, "outputs": dict(outputs)}


def _tensors_of(description: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that inputs and layers of a description make."""
    entries = (*description["inputs"], *description["layers"])
    return {name for entry in entries for name in entry["outputs"]}


def _shapes(
    schema: Schema, tables: Mapping[str, Table], description: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the network's parameters and statistics, by their names in it."""
    with torch.device("meta"):  # shapes without memory
        network = DescribedNetwork(schema, tables, description)
    tensors = (*network.named_parameters(), *network.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _with_shapes(
    weights: Sequence[DenseWeight], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[DenseWeight, ...]:
    """Return weights with the shapes that they have in HugeCTR's file.

    Those of layers that no loss needs are left out, as the layers are.
    """
    shaped = []
    for weight in weights:
        if weight.path and weight.path not in shapes:
            continue  # of a layer that is left out
        shape = weight.shape or shapes[weight.path]
        if weight.transposed:
            shape = shape[::-1]
        shaped.append(dataclasses.replace(weight, shape=shape))
    return tuple(shaped)
