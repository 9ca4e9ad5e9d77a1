# SPDX-License-Identifier: Apache-2.0
"""DIN (Zhou et al. 2018): attention of a candidate over a padded history of items and categories."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ITEMS, NUM_CATEGORIES, LENGTH = 300, 20, 10


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(4 * dim, 16), nn.PReLU(), nn.Linear(16, 1))

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        queries = query.unsqueeze(1).expand_as(keys)
        pairs = torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)
        weights = self.score(pairs).squeeze(-1).masked_fill(~mask, 0.0)
        return (weights.unsqueeze(-1) * keys).sum(dim=1)


class DIN(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_ITEMS, dim, padding_idx=0)
        self.category = nn.Embedding(NUM_CATEGORIES, dim, padding_idx=0)
        self.attention = Attention(2 * dim)
        self.head = nn.Sequential(nn.Linear(4 * dim, 16), nn.PReLU(), nn.Linear(16, 1))

    def rows(self, items: Tensor, categories: Tensor) -> Tensor:
        return torch.cat([self.item(items), self.category(categories)], dim=-1)

    def forward(self, item: Tensor, category: Tensor, items: Tensor, categories: Tensor) -> Tensor:
        candidate = self.rows(item, category)
        history = self.rows(items, categories)
        interest = self.attention(candidate, history, items != 0)
        return self.head(torch.cat([candidate, interest], dim=-1)).squeeze(-1)


def make_model() -> nn.Module:
    return DIN()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, ...]:
    lengths = torch.randint(1, LENGTH + 1, (64, 1))
    is_there = torch.arange(LENGTH) < lengths
    items = torch.randint(1, NUM_ITEMS, (64, LENGTH)) * is_there
    categories = torch.randint(1, NUM_CATEGORIES, (64, LENGTH)) * is_there
    item = torch.randint(1, NUM_ITEMS, (64,))
    category = torch.randint(1, NUM_CATEGORIES, (64,))
    return item, category, items, categories, torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]
) -> Tensor:
    *inputs, clicked = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), clicked)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.detach()
