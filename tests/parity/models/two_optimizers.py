# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients with SparseAdam, and Adam for the dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ranker(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(1000, dim, sparse=True)
        self.item = nn.Embedding(300, dim, sparse=True)
        self.tags = nn.EmbeddingBag(40, dim, mode="sum", sparse=True)
        self.hidden = nn.Linear(3 * dim, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor, tags: Tensor) -> Tensor:
        rows = torch.cat([self.user(user), self.item(item), self.tags(tags)], dim=1)
        return self.output(torch.relu(self.hidden(rows))).squeeze(1)


def make_model() -> nn.Module:
    return Ranker()


def make_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    assert isinstance(model, Ranker)
    embeddings = [model.user.weight, model.item.weight, model.tags.weight]
    layers = [*model.hidden.parameters(), *model.output.parameters()]
    return [torch.optim.SparseAdam(embeddings, lr=5e-3), torch.optim.Adam(layers, lr=1e-3)]


def make_batch() -> tuple[Tensor, ...]:
    return (
        torch.randint(0, 1000, (64,)),
        torch.randint(0, 300, (64,)),
        torch.randint(0, 40, (64, 3)),
        torch.randint(0, 2, (64,)).float(),
    )


def train_step(
    model: nn.Module, optimizer: list[torch.optim.Optimizer], batch: tuple[Tensor, ...]
) -> Tensor:
    *inputs, clicked = batch
    for each in optimizer:
        each.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), clicked)
    loss.backward()
    for each in optimizer:
        each.step()
    return loss.detach()
