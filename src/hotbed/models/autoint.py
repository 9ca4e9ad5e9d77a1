# SPDX-License-Identifier: Apache-2.0
"""AutoInt: self-attention over fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    FeatureInputs,
    InteractingLayer,
    LogitHead,
    PositionTerm,
    WeightMultiply,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class AutoInt(nn.Module):
    """AutoInt: layers of self-attention over the fields; with `hidden` a perceptron beside them.

    A dense column is a field, too: its number scales a learned vector. The logit is linear in the
    fields of the last layer and in the perceptron. All tables must have the same dim.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        num_layers: layers of attention.
        num_heads: heads of attention; they divide the width.
        width: width of a field after each layer, over all heads.
        hidden: widths of the hidden layers of the perceptron, which sees all features; empty leaves
            it out. With it the paper calls the model AutoInt+.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.AutoInt(schema, tables, num_layers=3, num_heads=2, hidden=(400, 400))`.
    Source: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
    Networks", CIKM 2019.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        num_layers: int = 3,
        num_heads: int = 2,
        width: int = 64,
        hidden: Sequence[int] = (),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.at_least("num_layers", num_layers, 1)
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("AutoInt")
        num_fields = len(self.inputs.field_dims) + self.inputs.dense_dim
        self.numbers: WeightMultiply | None = None
        if self.inputs.dense_dim:
            self.numbers = WeightMultiply(self.inputs.dense_dim, dim=dim)
        self.layers = nn.ModuleList()
        for size in [dim] + [width] * (num_layers - 1):
            self.layers.append(InteractingLayer(size, width, num_heads=num_heads))
        self.mlp: MLP | None = None
        if hidden:
            self.mlp = MLP(
                self.inputs.output_dim,
                hidden,
                activation=activation,
                dropout=dropout,
                batch_norm=batch_norm,
            )
        self.head = LogitHead([num_fields * width, *hidden[-1:]])
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        fields = self.inputs.fields(flat)
        if self.numbers is not None:
            vectors = self.numbers(flat[:, self.inputs.embedding_dim :])
            fields = torch.cat([fields, vectors.unflatten(1, (-1, fields.shape[2]))], dim=1)
        for layer in self.layers:
            fields = layer(fields)
        parts = [fields.flatten(1)]
        if self.mlp is not None:
            parts.append(self.mlp(flat))
        logits: Tensor = self.position(self.head(*parts), batch)
        return logits
