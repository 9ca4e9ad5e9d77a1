# SPDX-License-Identifier: Apache-2.0
"""Progressive layered extraction: several labels, with experts of their own and shared ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed import checks
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
class PLE(nn.Module):
    """PLE: on each level, a task mixes experts of its own with shared ones.

    The gate of a task mixes its own experts and the shared ones; the shared gate mixes all. Their
    outputs are the inputs of the next level; the last level has gates of tasks only. A tower of
    each task computes its logit. Train it with a loss for each label, as `MMoE`.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        tasks: names of Label columns; empty = all labels of the schema.
        levels: of each level, the widths of an expert's hidden layers.
        task_experts: experts of each task on a level.
        shared_experts: experts on a level that all tasks share.
        tower_hidden: widths of a tower's hidden layers; may be empty.
        activation: of the hidden layers: relu, gelu, silu, tanh, sigmoid or leaky_relu.
        dropout: rate after each hidden layer, in [0, 1).
        batch_norm: normalize each hidden layer before its activation.

    Example: `hb.models.PLE(schema, tables, tasks=("click", "like"), levels=((256,), (128,)))`.
    Source: Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model
    for Personalized Recommendations", RecSys 2020.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        tasks: Sequence[str] = (),
        levels: Sequence[Sequence[int]] = ((256,), (128,)),
        task_experts: int = 2,
        shared_experts: int = 2,
        tower_hidden: Sequence[int] = (64,),
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tasks = tasks_of(schema, tasks)
        advice = "Give a positive integer."
        checks.at_least("PLE.task_experts", task_experts, 1, advice)
        checks.at_least("PLE.shared_experts", shared_experts, 1, advice)
        if not levels or not all(levels):
            raise ConfigError(
                f"PLE.levels: each level has experts with a hidden layer, got {levels}. Give such "
                "as ((256,), (128,))."
            )
        self.inputs = FeatureInputs(schema, tables)
        mlp = partial(MLP, activation=activation, dropout=dropout, batch_norm=batch_norm)
        width = self.inputs.output_dim
        self.levels = nn.ModuleList()
        for number, hidden in enumerate(levels, start=1):
            level = _Level(self.tasks, width, hidden, mlp, (task_experts, shared_experts))
            if number < len(levels):
                level.add_shared_gate()
            self.levels.append(level)
            width = hidden[-1]
        self.towers = nn.ModuleDict({task: mlp(width, tower_hidden) for task in self.tasks})
        top = [width, *tower_hidden][-1]
        self.heads = nn.ModuleDict({task: LogitHead(top) for task in self.tasks})
        self.position = PositionTerm(schema, self.tasks)
        xavier_(self)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """A batch of n samples -> logits [n] by task."""
        flat = self.inputs(batch)
        of_tasks = dict.fromkeys(self.tasks, flat)
        shared = flat
        for level in self.levels:
            of_tasks, shared = level(of_tasks, shared)
        logits = {task: self.heads[task](self.towers[task](of_tasks[task])) for task in self.tasks}
        placed: dict[str, Tensor] = self.position(logits, batch)
        return placed


class _Level(nn.Module):
    """Experts of each task and shared ones, and the gates that mix them.

    Args:
        tasks: their names.
        width: of the inputs.
        hidden: widths of an expert's hidden layers.
        mlp: makes an expert.
        counts: the number of experts of a task, and that of shared ones.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        width: int,
        hidden: Sequence[int],
        mlp: partial[MLP],
        counts: tuple[int, int],
    ) -> None:
        super().__init__()
        of_task, of_all = counts
        self.width = width
        self.num_experts = of_task * len(tasks) + of_all
        self.experts = nn.ModuleDict(
            {task: _Experts(mlp(width, hidden) for _ in range(of_task)) for task in tasks}
        )
        self.shared_experts = _Experts(mlp(width, hidden) for _ in range(of_all))
        self.gates = nn.ModuleDict(
            {task: nn.Linear(width, of_task + of_all, bias=False) for task in tasks}
        )
        self.shared_gate: nn.Linear | None = None
        self.mixture = ExpertMixture()

    def add_shared_gate(self) -> None:
        """Let the shared experts have an output too, for the next level."""
        self.shared_gate = nn.Linear(self.width, self.num_experts, bias=False)

    def forward(
        self, own: Mapping[str, Tensor], shared: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of tasks [n, width] and the shared one -> those of the next level.

        Without a shared gate, the shared input is returned as it is.
        """
        of_all = self.shared_experts(shared)
        of_tasks = {task: self.experts[task](own[task]) for task in own}
        outputs: dict[str, Tensor] = {}
        for task, experts in of_tasks.items():
            gate = self.gates[task](own[task])
            outputs[task] = self.mixture(gate, torch.cat([experts, of_all], dim=1))
        if self.shared_gate is None:
            return outputs, shared
        every = torch.cat([*of_tasks.values(), of_all], dim=1)
        return outputs, self.mixture(self.shared_gate(shared), every)


class _Experts(nn.ModuleList):
    """Perceptrons side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] -> [n, experts, width of an expert]."""
        return torch.stack([expert(x) for expert in self], dim=1)
