# SPDX-License-Identifier: Apache-2.0
"""Deep neural network on embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import MLP, FeatureInputs, LogitHead, PositionTerm, xavier_
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DNN(nn.Module):
    """Embeddings and dense columns -> multi-layer perceptron -> logit.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DNN(schema, tables, hidden=(256, 128), dropout=0.2)`. Source: the deep part
    of Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016.
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
        logits: Tensor = self.position(self.head(self.mlp(self.inputs(batch))), batch)
        return logits
