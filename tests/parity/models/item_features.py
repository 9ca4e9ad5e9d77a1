# SPDX-License-Identifier: Apache-2.0
"""Ids that a buffer gives (the categories of an item), and ids of numbers in buckets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ITEMS = 200


class ItemFeatures(nn.Module):
    def __init__(self, categories: Tensor, dim: int = 8) -> None:
        super().__init__()
        self.register_buffer("categories", categories)
        self.register_buffer("edges", torch.linspace(0.1, 0.9, 9))
        self.item = nn.Embedding(NUM_ITEMS, dim)
        self.category = nn.EmbeddingBag(int(categories.max()) + 1, dim, mode="mean")
        self.price = nn.Embedding(len(self.edges) + 1, dim)
        self.head = nn.Sequential(nn.Linear(3 * dim, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, item: Tensor, price: Tensor) -> Tensor:
        rows = [
            self.item(item),
            self.category(self.categories[item]),
            self.price(torch.bucketize(price, self.edges)),
        ]
        return self.head(torch.cat(rows, dim=1)).squeeze(1)


def make_model() -> nn.Module:
    return ItemFeatures(torch.randint(0, 15, (NUM_ITEMS, 2)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    item = torch.randint(0, NUM_ITEMS, (64,))
    return item, torch.rand(64), torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    item, price, bought = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(item, price), bought)
    loss.backward()
    optimizer.step()
    return loss.detach()
