# SPDX-License-Identifier: Apache-2.0
"""Two embeddings of one weight, as words of queries and of titles; gradients are clipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Matcher(nn.Module):
    def __init__(self, num_words: int = 250, dim: int = 8) -> None:
        super().__init__()
        self.query = nn.EmbeddingBag(num_words, dim, mode="mean")
        self.title = nn.Embedding(num_words, dim)
        self.title.weight = self.query.weight
        self.hidden = nn.Linear(3 * dim, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, query: Tensor, title: Tensor) -> Tensor:
        left = self.query(query)
        right = self.title(title).amax(dim=1)
        hidden = torch.tanh(self.hidden(torch.cat([left, right, left * right], dim=1)))
        return self.output(hidden).squeeze(1)


def make_model() -> nn.Module:
    return Matcher()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randint(0, 250, (48, 4))
    title = torch.randint(0, 250, (48, 6))
    return query, title, torch.rand(48)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    query, title, relevance = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(query, title), relevance)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()
