# SPDX-License-Identifier: Apache-2.0
"""Multi-gate mixture of experts: several labels at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.models.layers import MLP, ExpertMixture, FeatureInputs, LogitHead, PositionTerm, xavier_
from hotbed.models.layers.dense import Activation
from hotbed.models.tasks import tasks_of

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class MMoE(nn.Module):
    """MMoE: experts shared by all tasks; each task has its own gate and its own tower.

    The gate mixes the experts, the tower computes the logit. Train it with a loss for each label:
    `hb.losses.MultiTask({"income": BCE(), "never_married": BCE()})`.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        tasks: names of Label columns; empty = all labels of the schema.
        num_experts: number of experts.
        expert_hidden: widths of an expert's hidden layers.
        tower_hidden: widths of a tower's hidden layers; may be empty.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.MMoE(schema, tables, tasks=("income", "never_married"), num_experts=4)`.
    Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        tasks: Sequence[str] = (),
        num_experts: int = 4,
        expert_hidden: Sequence[int] = (256, 128),
        tower_hidden: Sequence[int] = (64,),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tasks = tasks_of(schema, tasks)
        if num_experts < 1 or not expert_hidden:
            raise ConfigError(
                f"num_experts, expert_hidden: too small, got {num_experts}, "
                f"{list(expert_hidden)}. Give at least one expert with one hidden layer."
            )
        self.inputs = FeatureInputs(schema, tables)
        mlp = partial(MLP, activation=activation, dropout=dropout, batch_norm=batch_norm)
        width = self.inputs.output_dim
        mixed = expert_hidden[-1]
        self.experts = nn.ModuleList(mlp(width, expert_hidden) for _ in range(num_experts))
        self.gates = nn.ModuleDict(
            {task: nn.Linear(width, num_experts, bias=False) for task in self.tasks}
        )
        self.mixture = ExpertMixture()
        self.towers = nn.ModuleDict({task: mlp(mixed, tower_hidden) for task in self.tasks})
        self.heads = nn.ModuleDict(
            {task: LogitHead([mixed, *tower_hidden][-1]) for task in self.tasks}
        )
        self.position = PositionTerm(schema, self.tasks)
        xavier_(self)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """A batch of n samples -> logits [n] by task."""
        flat = self.inputs(batch)
        experts = torch.stack([expert(flat) for expert in self.experts], dim=1)
        logits: dict[str, Tensor] = {}
        for task in self.tasks:
            mixed = self.mixture(self.gates[task](flat), experts)
            logits[task] = self.heads[task](self.towers[task](mixed))
        placed: dict[str, Tensor] = self.position(logits, batch)
        return placed
