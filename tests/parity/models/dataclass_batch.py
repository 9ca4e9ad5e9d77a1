# SPDX-License-Identifier: Apache-2.0
"""A dataclass as the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Impressions:
    user: Tensor
    items: Tensor
    position: Tensor
    clicked: Tensor


class Listwise(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(400, dim)
        self.item = nn.Embedding(250, dim)
        self.bias = nn.Embedding(10, 1)

    def forward(self, batch: Impressions) -> Tensor:
        scores = torch.einsum("nd,nkd->nk", self.user(batch.user), self.item(batch.items))
        return scores / 3.0 + self.bias(batch.position).squeeze(-1)


def make_model() -> nn.Module:
    return Listwise()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def make_batch() -> Impressions:
    return Impressions(
        user=torch.randint(0, 400, (48,)),
        items=torch.randint(0, 250, (48, 10)),
        position=torch.arange(10).repeat(48, 1),
        clicked=torch.randint(0, 10, (48,)),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Impressions) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), batch.clicked)
    loss.backward()
    optimizer.step()
    return loss.detach()
