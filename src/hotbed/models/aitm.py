# SPDX-License-Identifier: Apache-2.0
"""Adaptive information transfer: events that follow each other, each helped by the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import (
    MLP,
    FeatureInputs,
    InformationTransfer,
    LogitHead,
    PositionTerm,
    xavier_,
)
from hotbed.models.layers.dense import Activation
from hotbed.models.tasks import events_of

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class AITM(nn.Module):
    """AITM: the tower of an event learns how much to take over from the event before it.

    Each event has a tower over all features. From the second event on, an attention weighs the
    output of the tower against what the event before transfers. All labels are learned over
    all samples. `hb.losses.MultiTask(…, order=("click", "buy"))` adds the paper's calibrator, which
    keeps a later event from being more likely than the one before it.

    Args:
        schema: the columns of the data.
        tables: tables by name, which all towers share.
        tasks: names of Label columns in the order of events, two or more; empty = all labels of
            the schema in its order.
        hidden: widths of a tower's hidden layers, at least one.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.AITM(schema, tables, tasks=("click", "buy"))`. Source: Xi et al., "Modeling
    the Sequential Dependence among Audience Multi-step Conversions with Multi-task Learning in
    Targeted Display Advertising", KDD 2021.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        tasks: Sequence[str] = (),
        hidden: Sequence[int] = (256, 128),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tasks = events_of(schema, tasks)
        if not hidden:
            raise ConfigError(
                f"AITM.hidden: a tower has at least one hidden layer, got {list(hidden)}. Give "
                "such as (256, 128)."
            )
        self.inputs = FeatureInputs(schema, tables)
        mlp = partial(MLP, activation=activation, dropout=dropout, batch_norm=batch_norm)
        width = self.inputs.output_dim
        top = hidden[-1]
        later = self.tasks[1:]
        self.towers = nn.ModuleDict({task: mlp(width, hidden) for task in self.tasks})
        self.transferred = nn.ModuleDict({task: mlp(top, [top]) for task in later})
        self.transfers = nn.ModuleDict({task: InformationTransfer(top) for task in later})
        self.heads = nn.ModuleDict({task: LogitHead(top) for task in self.tasks})
        self.position = PositionTerm(schema, self.tasks)
        xavier_(self)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """A batch of n samples -> logits [n] by task."""
        flat = self.inputs(batch)
        first = self.tasks[0]
        before = self.towers[first](flat)
        logits = {first: self.heads[first](before)}
        for task in self.tasks[1:]:
            of_tower = self.towers[task](flat)
            before = self.transfers[task](self.transferred[task](before), of_tower)
            logits[task] = self.heads[task](before)
        placed: dict[str, Tensor] = self.position(logits, batch)
        return placed
