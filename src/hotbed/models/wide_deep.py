# SPDX-License-Identifier: Apache-2.0
"""Wide & Deep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import MLP, FeatureInputs, LinearTerm, LogitHead, PositionTerm, xavier_
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class WideDeep(nn.Module):
    """Wide & Deep: a linear model (memorizes) plus a multi-layer perceptron (generalizes).

    Their logits are added. Crosses for the wide part are columns with a `Cross` transform in the
    schema.

    Args:
        schema: the columns of the data.
        tables: tables by name; the wide weights lie in tables of dim 1 like them.
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.WideDeep(schema, tables, hidden=(256, 128))`. Source: Cheng et al., "Wide &
    Deep Learning for Recommender Systems", DLRS 2016.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        hidden: Sequence[int] = (400, 400, 400),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.wide = LinearTerm(schema, tables)
        self.inputs = FeatureInputs(schema, tables)
        self.mlp = MLP(
            self.inputs.output_dim,
            hidden,
            activation=activation,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        self.head = LogitHead(self.mlp.output_dim)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        logits: Tensor = self.position(
            self.wide(batch) + self.head(self.mlp(self.inputs(batch))), batch
        )
        return logits
