# SPDX-License-Identifier: Apache-2.0
"""DeepFM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    FeatureInputs,
    FMInteraction,
    LinearTerm,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DeepFM(nn.Module):
    """DeepFM: a factorization machine plus a multi-layer perceptron on the same embeddings.

    Their logits are added. Dense columns enter the linear term and the perceptron. All tables must
    have the same dim.

    Args:
        schema: the columns of the data.
        tables: tables by name; the linear weights lie in tables of dim 1 like them.
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DeepFM(schema, tables, hidden=(400, 400, 400), dropout=0.2)`. Source: Guo et
    al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.
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
        self.linear = LinearTerm(schema, tables)
        self.inputs = FeatureInputs(schema, tables)
        self.inputs.equal_dim("DeepFM")
        self.interaction = FMInteraction()
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
        flat = self.inputs(batch)
        pairs = self.interaction(self.inputs.fields(flat))
        logits = self.linear(batch) + pairs + self.head(self.mlp(flat))
        placed: Tensor = self.position(logits, batch)
        return placed
