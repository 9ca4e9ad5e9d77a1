# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: the backward pass runs the lookup again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Sequential):
    def __init__(self, num_ids: int, dim: int) -> None:
        super().__init__(nn.Embedding(num_ids, dim), nn.Flatten(), nn.Linear(3 * dim, dim))


class Recomputed(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = Tower(300, dim)
        self.item = Tower(200, dim)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user = checkpoint(self.user, users, use_reentrant=False)
        item = checkpoint(self.item, items, use_reentrant=False)
        return (torch.tanh(user) * torch.tanh(item)).sum(dim=1)


def make_model() -> nn.Module:
    return Recomputed()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.02)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    users = torch.randint(0, 300, (64, 3))
    return users, torch.randint(0, 200, (64, 3)), torch.rand(64)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    users, items, rating = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(users, items), rating)
    loss.backward()
    optimizer.step()
    return loss.detach()
