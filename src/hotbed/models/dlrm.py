# SPDX-License-Identifier: Apache-2.0
"""DLRM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    DotInteraction,
    FeatureInputs,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DLRM(nn.Module):
    """DLRM: a bottom perceptron, interactions of fields, and a top perceptron.

    The bottom perceptron turns the dense columns into one more field; without dense columns the
    model does not have one. The top perceptron computes the logit from the interactions. All tables
    must have the same dim.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        interaction: "dot" (the bottom's output and the inner products of all pairs of fields) or
            "cat" (fields side by side).
        bottom: widths of the bottom perceptron's hidden layers; its output has the tables' dim.
        hidden: widths of the top perceptron's hidden layers.
        activation: of all layers but the last: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer of the top perceptron, in [0, 1).
        batch_norm: normalize each hidden layer of the top perceptron before its activation.

    Example: `hb.models.DLRM(schema, tables, bottom=(512, 256), hidden=(512, 256))`. Source: Naumov
    et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    2019.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        interaction: Literal["dot", "cat"] = "dot",
        bottom: Sequence[int] = (400, 400),
        hidden: Sequence[int] = (400, 400, 400),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("interaction", interaction, ("dot", "cat"))
        self.inputs = FeatureInputs(schema, tables)
        dim = self.inputs.equal_dim("DLRM")
        self.bottom: MLP | None = None
        num_fields = len(self.inputs.field_dims)
        if self.inputs.dense_dim:
            self.bottom = MLP(self.inputs.dense_dim, [*bottom, dim], activation=activation)
            num_fields += 1
        self.dot: DotInteraction | None = None
        if interaction == "cat":
            width = num_fields * dim
        else:
            self.dot = DotInteraction(num_fields)
            width = self.dot.output_dim + dim * (self.bottom is not None)
        self.top = MLP(width, hidden, activation=activation, dropout=dropout, batch_norm=batch_norm)
        self.head = LogitHead(self.top.output_dim)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        embeddings, numbers = self.inputs.parts(batch)
        assert embeddings is not None
        fields = self.inputs.fields(embeddings)
        parts: list[Tensor] = []
        if self.bottom is not None:
            dense = self.bottom(numbers).to(fields.dtype)
            fields = torch.cat([dense.unsqueeze(1), fields], dim=1)
            parts.append(dense)
        if self.dot is None:
            parts = [fields.flatten(1)]
        else:
            parts.append(self.dot(fields))
        logits: Tensor = self.position(self.head(self.top(torch.cat(parts, dim=1))), batch)
        return logits
