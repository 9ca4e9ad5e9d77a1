# SPDX-License-Identifier: Apache-2.0
"""MMoE (Ma et al. 2018): several tasks, a dict of outputs, and a schedule of the rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = (300, 100, 25)
TASKS = ("click", "buy")


class MMoE(nn.Module):
    def __init__(self, dim: int = 8, num_experts: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, dim) for size in SIZES)
        width = dim * len(SIZES)
        self.experts = nn.ModuleList(nn.Linear(width, 12) for _ in range(num_experts))
        self.gates = nn.ModuleDict({task: nn.Linear(width, num_experts) for task in TASKS})
        self.towers = nn.ModuleDict({task: nn.Linear(12, 1) for task in TASKS})

    def forward(self, *fields: Tensor) -> dict[str, Tensor]:
        rows = [embed(ids) for embed, ids in zip(self.embeddings, fields, strict=True)]
        inputs = torch.cat(rows, dim=1)
        experts = torch.stack([torch.relu(expert(inputs)) for expert in self.experts], dim=1)
        outputs = {}
        for task in TASKS:
            gate = torch.softmax(self.gates[task](inputs), dim=1).unsqueeze(2)
            outputs[task] = self.towers[task]((gate * experts).sum(dim=1)).squeeze(1)
        return outputs


def make_model() -> nn.Module:
    return MMoE()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[list[Tensor], dict[str, Tensor]]:
    fields = [torch.randint(0, size, (64,)) for size in SIZES]
    return fields, {task: torch.randint(0, 2, (64,)).float() for task in TASKS}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[list[Tensor], dict[str, Tensor]],
) -> Tensor:
    fields, labels = batch
    optimizer.zero_grad()
    outputs = model(*fields)
    losses = [
        nn.functional.binary_cross_entropy_with_logits(outputs[task], labels[task])
        for task in TASKS
    ]
    total = losses[0] + 0.5 * losses[1]
    total.backward()
    optimizer.step()
    return total.detach()
