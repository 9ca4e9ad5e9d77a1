# SPDX-License-Identifier: Apache-2.0
"""A submodule that is called twice in one forward pass, for the two items of a pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.item = nn.Embedding(200, dim)
        self.words = nn.EmbeddingBag(100, dim, mode="mean")
        self.layer = nn.Linear(2 * dim, dim)

    def forward(self, item: Tensor, words: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.cat([self.item(item), self.words(words)], dim=1)))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.user = nn.Embedding(300, 8)

    def forward(self, user: Tensor, items: Tensor, words: Tensor) -> Tensor:
        liked = self.encoder(items[:, 0], words[:, 0])
        skipped = self.encoder(items[:, 1], words[:, 1])
        return (self.user(user) * (liked - skipped)).sum(dim=1)


def make_model() -> nn.Module:
    return Siamese()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(0, 300, (64,)),
        torch.randint(0, 200, (64, 2)),
        torch.randint(0, 100, (64, 2, 4)),
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.softplus(-model(*batch)).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
