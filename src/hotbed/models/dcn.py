# SPDX-License-Identifier: Apache-2.0
"""Deep & Cross networks: DCN and DCN-V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    MLP,
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    FeatureInputs,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DCN(nn.Module):
    """DCN: a cross network with one vector a layer and a multi-layer perceptron, side by side.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        num_cross_layers: cross layers; the degree of the crosses is one more.
        hidden: widths of the hidden layers; empty leaves the perceptron out.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DCN(schema, tables, num_cross_layers=3, dropout=0.2)`. Source: Wang et al.,
    "Deep & Cross Network for Ad Click Predictions", ADKDD 2017.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        num_cross_layers: int = 3,
        hidden: Sequence[int] = (400, 400, 400),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.cross = CrossNet(width, num_cross_layers)
        self.mlp: MLP | None = None
        if hidden:
            self.mlp = MLP(
                width, hidden, activation=activation, dropout=dropout, batch_norm=batch_norm
            )
        self.head = LogitHead([width, *hidden[-1:]])
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        parts = [self.cross(flat)]
        if self.mlp is not None:
            parts.append(self.mlp(flat))
        logits: Tensor = self.position(self.head(*parts), batch)
        return logits


@described
class DCNv2(nn.Module):
    """DCN-V2: a cross network with one matrix a layer and a multi-layer perceptron.

    The matrices are full, or a low-rank mixture of experts.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        structure: "parallel" (both see the input, one linear layer joins them) or "stacked" (the
            perceptron sees the crosses).
        num_cross_layers: cross layers; the degree of the crosses is one more.
        low_rank: rank of the cross matrices, None = full rank.
        num_experts: number of experts that a low-rank cross layer mixes.
        hidden: widths of the hidden layers; empty leaves the perceptron out.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DCNv2(schema, tables, num_cross_layers=4, dropout=0.4, batch_norm=True)`.
    Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale
    Learning to Rank Systems", WWW 2021.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        num_cross_layers: int = 3,
        low_rank: int | None = None,
        num_experts: int = 4,
        hidden: Sequence[int] = (400, 400, 400),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("structure", structure, ("parallel", "stacked"))
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.cross: CrossNetV2 | CrossNetMix
        if low_rank is None:
            self.cross = CrossNetV2(width, num_cross_layers)
        else:
            self.cross = CrossNetMix(
                width, num_cross_layers, rank=low_rank, num_experts=num_experts
            )
        self.mlp: MLP | None = None
        if hidden:
            self.mlp = MLP(
                width, hidden, activation=activation, dropout=dropout, batch_norm=batch_norm
            )
        self.stacked = structure == "stacked"
        widths = [width, *hidden[-1:]]
        if self.stacked:
            widths = widths[-1:]
        self.head = LogitHead(widths)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        crossed = self.cross(flat)
        if self.mlp is None:
            parts = [crossed]
        elif self.stacked:
            parts = [self.mlp(crossed)]
        else:
            parts = [crossed, self.mlp(flat)]
        logits: Tensor = self.position(self.head(*parts), batch)
        return logits
