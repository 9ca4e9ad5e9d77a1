# SPDX-License-Identifier: Apache-2.0
"""A lookup of the ids that a mask selects: how many they are depends on the data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Masked(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.item = nn.Embedding(200, dim)
        self.seller = nn.Embedding(90, dim)
        self.unknown = nn.Parameter(torch.zeros(dim))
        self.head = nn.Linear(2 * dim, 1)

    def forward(self, item: Tensor, seller: Tensor) -> Tensor:
        is_known = seller >= 0
        sellers = self.unknown.repeat(len(seller), 1)
        sellers[is_known] = self.seller(seller[is_known])
        rows = torch.cat([self.item(item), sellers], dim=1)
        return self.head(rows).squeeze(1)


def make_model() -> nn.Module:
    return Masked()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    item = torch.randint(0, 200, (64,))
    return item, torch.randint(-30, 90, (64,)), torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    item, seller, bought = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(item, seller), bought)
    loss.backward()
    optimizer.step()
    return loss.detach()
