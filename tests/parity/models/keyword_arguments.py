# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments, one of them with a default."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scorer(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user_embedding = nn.Embedding(300, dim)
        self.item_embedding = nn.Embedding(200, dim)
        self.price = nn.Linear(1, dim)
        self.output = nn.Linear(dim, 1)

    def forward(self, *, item: Tensor, user: Tensor, price: Tensor | None = None) -> Tensor:
        state = self.user_embedding(user) * self.item_embedding(item)
        if price is not None:
            state = state + self.price(price.unsqueeze(1))
        return self.output(torch.relu(state)).squeeze(1)


def make_model() -> nn.Module:
    return Scorer()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def make_batch() -> dict[str, Tensor]:
    return {
        "user": torch.randint(0, 300, (64,)),
        "item": torch.randint(0, 200, (64,)),
        "price": torch.rand(64),
        "rating": torch.rand(64),
    }


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    rating = model(user=batch["user"], item=batch["item"], price=batch["price"])
    loss = nn.functional.huber_loss(rating, batch["rating"])
    loss.backward()
    optimizer.step()
    return loss.detach()
