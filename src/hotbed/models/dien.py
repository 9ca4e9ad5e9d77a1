# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Evolution Network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import (
    AUGRU,
    MLP,
    History,
    HistoryInputs,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.activation import masked_softmax
from hotbed.models.layers.dense import Activation
from hotbed.models.layers.inputs import Histories

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class DIEN(nn.Module):
    """DIEN: a GRU extracts the interests of a history, a second one follows those of the target.

    The attention of a state s_k for the target t, softmax_k(s_k W t), scales the update gate of the
    second GRU (AUGRU), whose last state joins the features. A perceptron computes the logit. The
    auxiliary loss of the paper, which needs sampled negatives for every entry, is left out.

    Args:
        schema: the columns of the data; histories have pooling "none", newest entry last.
        tables: tables by name.
        histories: the target column of each sequence column, `{"clicked_item": "item"}`. Columns of
            one mapping are one history, entry by entry; a list of mappings is one history each.
        length: newest entries that are read; None takes the `max_length` of the columns.
        hidden: widths of the hidden layers.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid, leaky_relu, prelu or
            dice.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.DIEN(schema, tables, histories={"clicked_item": "item"}, length=50)`.
    Source: Zhou et al., "Deep Interest Evolution Network for Click-Through Rate Prediction", AAAI
    2019.
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
        hidden: Sequence[int] = (200, 80),
        activation: Activation = "dice",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = HistoryInputs(schema, tables, histories, length)
        self.evolutions = nn.ModuleList(_Evolution(dim) for dim in self.inputs.dims)
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
        for evolution, history in zip(self.evolutions, histories, strict=True):
            parts.append(evolution(history))
        logits: Tensor = self.position(self.head(self.mlp(torch.cat(parts, dim=1))), batch)
        return logits


class _Evolution(nn.Module):
    """What a history says about its target: the last state of the AUGRU, [n, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.extract = nn.GRU(dim, dim, batch_first=True)
        self.relate = nn.Linear(dim, dim, bias=False)
        self.evolve = AUGRU(dim, dim)

    def forward(self, history: History) -> Tensor:
        states, _ = self.extract(history.rows)
        scores = torch.bmm(states, self.relate(history.target).unsqueeze(2)).squeeze(2)
        attention = masked_softmax(scores, history.mask)
        _, last = self.evolve(states, attention)
        interest: Tensor = last
        return interest
