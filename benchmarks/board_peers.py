# SPDX-License-Identifier: Apache-2.0
"""FuxiCTR's layers between the tables and the last layer of Hotbed, one network each.

FuxiCTR's package has layers; the networks lie in its repository. Each network here joins the layers
as that one does. It needs `pip install fuxictr==2.3.10`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from fuxictr.pytorch.layers import (
    CrossNet,
    CrossNetV2,
    DIN_Attention,
    InnerProductInteraction,
    MLP_Block,
)
from torch import Tensor, nn

import hotbed as hb
from hotbed.models.layers import FeatureInputs, HistoryInputs, LinearTerm, LogitHead, xavier_

Tables = Mapping[str, hb.Table]
CROSSES = {"DCN": CrossNet, "DCNv2": CrossNetV2}


class Crossed(nn.Module):
    """DNN, DCN or DCNv2: a perceptron, beside it `num_crosses` cross layers."""

    def __init__(
        self,
        schema: hb.Schema,
        tables: Tables,
        *,
        hidden: Sequence[int],
        kind: str = "DNN",
        num_crosses: int = 0,
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.cross = CROSSES[kind](width, num_crosses) if num_crosses else None
        self.mlp = MLP_Block(width, list(hidden))
        self.head = LogitHead(hidden[-1] + width * (self.cross is not None))
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        outputs = [self.mlp(flat)]
        if self.cross is not None:
            outputs.insert(0, self.cross(flat))
        logits: Tensor = self.head(torch.cat(outputs, dim=1))
        return logits


class DeepFM(nn.Module):
    """A factorization machine and a perceptron."""

    def __init__(self, schema: hb.Schema, tables: Tables, *, hidden: Sequence[int]) -> None:
        super().__init__()
        self.linear = LinearTerm(schema, tables)
        self.inputs = FeatureInputs(schema, tables)
        self.pairs = InnerProductInteraction(len(self.inputs.field_dims), "product_sum")
        self.mlp = MLP_Block(self.inputs.output_dim, list(hidden))
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat = self.inputs(batch)
        pairs = self.pairs(self.inputs.fields(flat)).squeeze(1)
        logits: Tensor = self.linear(batch) + pairs + self.head(self.mlp(flat))
        return logits


class DIN(nn.Module):
    """A perceptron over the features and the history that attention weighs."""

    def __init__(
        self,
        schema: hb.Schema,
        tables: Tables,
        *,
        histories: Mapping[str, str],
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self.inputs = HistoryInputs(schema, tables, histories)
        [dim] = self.inputs.dims
        self.attention = DIN_Attention(dim, [80, 40], hidden_activations="sigmoid")
        self.mlp = MLP_Block(self.inputs.output_dim + dim, list(hidden))
        self.head = LogitHead(hidden[-1])
        xavier_(self)

    def forward(self, batch: hb.Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat, [history] = self.inputs(batch)
        pooled = self.attention(history.target, history.rows, history.mask)
        logits: Tensor = self.head(self.mlp(torch.cat([flat, pooled], dim=1)))
        return logits
