# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Network."""

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
    AttentionPooling,
    DecayedMean,
    DotAttentionPooling,
    HistoryInputs,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation
from hotbed.models.layers.inputs import Histories, PackedHistory

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DIN(nn.Module):
    """DIN: each history is pooled by how much its entries matter for the target.

    A perceptron computes the logit from all features and the pooled histories.

    Args:
        schema: the columns of the data; histories have pooling "none", newest entry last.
        tables: tables by name.
        histories: the target column of each sequence column, `{"clicked_item": "item"}`. Columns of
            one mapping are one history, entry by entry; a list of mappings is one history each.
        length: newest entries that are read; None takes the `max_length` of the columns. "dot" and
            "decay" read all entries if the columns have none.
        attention: how entries are weighed: "perceptron" (the paper's), "dot" (inner products of
            learned projections of target and entry, with softmax, which is fast over long
            histories) or "decay" (by age alone, the baseline of the others).
        half_life: of "decay": number of newer entries at which an entry counts half.
        attention_hidden: of "perceptron": widths of the hidden layers that weigh an entry.
        attention_activation: of these: relu, gelu, silu, tanh, sigmoid, leaky_relu or prelu.
        softmax: of "perceptron": whether the weights of a history sum to 1.
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid, leaky_relu, prelu or
            dice.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DIN(schema, tables, histories={"clicked_item": "item"}, length=50)`. Source:
    Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        histories: Histories,
        length: int | None = None,
        attention: Literal["perceptron", "dot", "decay"] = "perceptron",
        half_life: float = 10.0,
        attention_hidden: Sequence[int] = (80, 40),
        attention_activation: Activation = "sigmoid",
        softmax: bool = False,
        hidden: Sequence[int] = (200, 80),
        activation: Activation = "dice",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.one_of("attention", attention, ("perceptron", "dot", "decay"))
        self.attention = attention
        is_padded = attention == "perceptron"
        self.inputs = HistoryInputs(schema, tables, histories, length, is_padded=is_padded)
        self.poolings = nn.ModuleList()
        for dim, own_length in zip(self.inputs.dims, self.inputs.lengths, strict=True):
            pooling: nn.Module = DecayedMean(half_life, length=own_length)
            if attention == "dot":
                pooling = DotAttentionPooling(dim, length=own_length)
            elif attention == "perceptron":
                pooling = AttentionPooling(
                    dim, attention_hidden, activation=attention_activation, softmax=softmax
                )
            self.poolings.append(pooling)
        self.mlp = MLP(
            self.inputs.output_dim + sum(self.inputs.dims),
            hidden,
            activation=activation,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        self.head = LogitHead(self.mlp.output_dim)
        self.position = PositionTerm(schema)
        xavier_(self)

    @property
    def shares_histories(self) -> bool:
        """Whether `forward` takes one list of each history for all samples, with offsets [2]."""
        return self.attention == "dot"

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        if self.attention == "perceptron":
            flat, padded = self.inputs(batch)
            pooled = [
                pooling(history.target, history.rows, history.mask)
                for pooling, history in zip(self.poolings, padded, strict=True)
            ]
        else:
            flat, packed = self.inputs.packed(batch)
            pooled = [
                self._packed(pooling, history)
                for pooling, history in zip(self.poolings, packed, strict=True)
            ]
        logits: Tensor = self.position(
            self.head(self.mlp(torch.cat([flat, *pooled], dim=1))), batch
        )
        return logits

    def _packed(self, pooling: nn.Module, history: PackedHistory) -> Tensor:
        if self.attention == "dot":
            pooled: Tensor = pooling(history.target, history.rows, history.offsets)
        else:
            pooled = pooling(history.rows, history.offsets)
        return pooled
