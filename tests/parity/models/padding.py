# SPDX-License-Identifier: Apache-2.0
"""padding_idx: rows that are read and never learned, and ids that bags leave out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ITEMS, PAD = 120, 7


class Padded(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.sequence = nn.Embedding(NUM_ITEMS, dim, padding_idx=-1)
        self.mean = nn.EmbeddingBag(NUM_ITEMS, dim, mode="mean", padding_idx=PAD)
        self.total = nn.EmbeddingBag(NUM_ITEMS, dim, mode="sum", padding_idx=PAD)
        self.peak = nn.EmbeddingBag(NUM_ITEMS, dim, mode="max", padding_idx=PAD)
        self.head = nn.Linear(4 * dim, 1)

    def forward(self, left_padded: Tensor, items: Tensor) -> Tensor:
        rows = [
            self.sequence(left_padded).sum(dim=1),
            self.mean(items),
            self.total(items),
            self.peak(items),
        ]
        return self.head(torch.cat(rows, dim=1)).squeeze(1)


def make_model() -> nn.Module:
    model = Padded()
    nn.init.normal_(model.sequence.weight)  # also of the padding row, which is read
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    left_padded = torch.randint(0, NUM_ITEMS, (64, 6))
    left_padded[torch.arange(6) < torch.randint(0, 4, (64, 1))] = NUM_ITEMS - 1
    items = torch.randint(0, NUM_ITEMS, (64, 6))
    items[torch.arange(6) >= torch.randint(1, 7, (64, 1))] = PAD
    items[0] = PAD
    return left_padded, items, torch.rand(64)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    left_padded, items, rating = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(left_padded, items), rating)
    loss.backward()
    optimizer.step()
    return loss.detach()
