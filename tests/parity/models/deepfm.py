# SPDX-License-Identifier: Apache-2.0
"""DeepFM (Guo et al. 2017): all fields in one embedding, at an offset of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = (300, 120, 40, 10, 5)


class DeepFM(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        starts = torch.tensor((0, *SIZES[:-1])).cumsum(0)
        self.register_buffer("starts", starts)
        self.linear = nn.Embedding(sum(SIZES), 1)
        self.embedding = nn.Embedding(sum(SIZES), dim)
        nn.init.xavier_uniform_(self.embedding.weight)
        self.bias = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(len(SIZES) * dim, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.starts
        rows = self.embedding(x)
        square_of_sum = rows.sum(dim=1) ** 2
        sum_of_square = (rows**2).sum(dim=1)
        second_order = 0.5 * (square_of_sum - sum_of_square).sum(dim=1)
        first_order = self.linear(x).sum(dim=1).squeeze(1) + self.bias
        return torch.sigmoid(first_order + second_order + self.mlp(rows.flatten(1)).squeeze(1))


def make_model() -> nn.Module:
    return DeepFM()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, Tensor]:
    fields = torch.stack([torch.randint(0, size, (64,)) for size in SIZES], dim=1)
    return fields, torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    fields, target = batch
    loss = nn.functional.binary_cross_entropy(model(fields), target)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
