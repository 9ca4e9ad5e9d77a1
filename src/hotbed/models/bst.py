# SPDX-License-Identifier: Apache-2.0
"""Behavior Sequence Transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import (
    MLP,
    History,
    HistoryInputs,
    LogitHead,
    PositionTerm,
    TransformerLayer,
    xavier_,
)
from hotbed.models.layers.dense import Activation
from hotbed.models.layers.inputs import Histories

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class BST(nn.Module):
    """BST: a transformer over the history and its target, then a perceptron over all features.

    Positions count from the target, which is 0, back to older entries; each adds a learned vector.

    Args:
        schema: the columns of the data; histories have pooling "none", newest entry last.
        tables: tables by name.
        histories: the target column of each sequence column, `{"clicked_item": "item"}`. Columns of
            one mapping are one history, entry by entry; a list of mappings is one history each.
        length: newest entries that are read; None takes the `max_length` of the columns.
        num_layers: transformer layers.
        num_heads: heads of attention; they divide the dim of a history.
        pooling: what the perceptron sees: "target" (the transformer's output for the target) or
            "mean" (that of the target and the entries).
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid, leaky_relu, prelu or
            dice.
        dropout: rate after each hidden layer and in the transformer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.BST(schema, tables, histories={"clicked_item": "item"}, length=20)`. Source:
    Chen et al., "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", 2019.
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
        num_layers: int = 1,
        num_heads: int = 2,
        pooling: Literal["target", "mean"] = "target",
        hidden: Sequence[int] = (1024, 512, 256),
        activation: Activation = "leaky_relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.at_least("num_layers", num_layers, 1)
        checks.one_of("pooling", pooling, ("target", "mean"))
        self.inputs = HistoryInputs(schema, tables, histories, length)
        self.pooling = pooling
        self.transformers = nn.ModuleList()
        for dim, own_length in zip(self.inputs.dims, self.inputs.lengths, strict=True):
            assert own_length is not None  # padded
            transformer = _Transformer(dim, own_length, num_layers, num_heads, dropout)
            self.transformers.append(transformer)
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

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        flat, histories = self.inputs(batch)
        parts = [flat]
        for transformer, history in zip(self.transformers, histories, strict=True):
            outputs, mask = transformer(history)
            if self.pooling == "target":
                parts.append(outputs[:, 0])
            else:
                total = torch.bmm(mask.unsqueeze(1), outputs).squeeze(1)
                parts.append(total / mask.sum(1, keepdim=True))
        logits: Tensor = self.position(self.head(self.mlp(torch.cat(parts, dim=1))), batch)
        return logits


class _Transformer(nn.Module):
    """Transformer layers over the target and its history, [n, 1 + length, dim]."""

    def __init__(
        self, dim: int, length: int, num_layers: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ConfigError(
                f"num_heads: must divide the dim of a history, got {num_heads} heads and dim "
                f"{dim}. Give a divisor of {dim}."
            )
        self.positions = nn.Parameter(torch.empty(length + 1, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.layers = nn.ModuleList(
            TransformerLayer(dim, num_heads, dropout=dropout) for _ in range(num_layers)
        )

    def forward(self, history: History) -> tuple[Tensor, Tensor]:
        """Return outputs [n, 1 + length, dim], the target's first, and their mask."""
        rows = torch.cat([history.target.unsqueeze(1), history.rows], dim=1)
        mask = torch.cat([torch.ones_like(history.mask[:, :1]), history.mask], dim=1)
        steps = torch.arange(history.mask.shape[1], device=mask.device)
        ages = history.mask.sum(1, keepdim=True).long() - steps  # 1 for the newest entry
        ages = F.pad(ages.clamp_min(0), (1, 0))
        outputs = rows + F.embedding(ages, self.positions)
        for layer in self.layers:
            outputs = layer(outputs, mask)
        return outputs, mask
