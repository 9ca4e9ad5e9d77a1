# SPDX-License-Identifier: Apache-2.0
"""Vectors of items that were trained elsewhere and stay as they are, beside ids that learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    def __init__(self, vectors: Tensor, dim: int = 8) -> None:
        super().__init__()
        self.content = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.item = nn.Embedding(len(vectors), dim)
        self.user = nn.Embedding(500, dim)
        self.project = nn.Linear(vectors.shape[1], dim)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = self.item(item) + torch.tanh(self.project(self.content(item)))
        return (self.user(user) * rows).sum(dim=1)


def make_model() -> nn.Module:
    return Recommender(torch.randn(200, 6))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adagrad(learning, lr=0.05)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    user = torch.randint(0, 500, (64,))
    return user, torch.randint(0, 200, (64,)), torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    user, item, liked = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), liked)
    loss.backward()
    optimizer.step()
    return loss.detach()
