# SPDX-License-Identifier: Apache-2.0
"""BPR-MF (Rendle et al. 2009): an embedding that is called twice, with biases and decay."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MatrixFactorization(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(300, dim)
        self.item = nn.Embedding(200, dim)
        self.item_bias = nn.Embedding(200, 1)
        nn.init.zeros_(self.item_bias.weight)

    def score(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(dim=1) + self.item_bias(item).squeeze(1)

    def forward(self, user: Tensor, bought: Tensor, other: Tensor) -> Tensor:
        return self.score(user, bought) - self.score(user, other)


def make_model() -> nn.Module:
    return MatrixFactorization()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-4)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(0, 300, (64,)),
        torch.randint(0, 200, (64,)),
        torch.randint(0, 200, (64,)),
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -nn.functional.logsigmoid(model(*batch)).mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()
