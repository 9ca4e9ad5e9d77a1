# SPDX-License-Identifier: Apache-2.0
"""Two towers with a softmax over the items of the batch (Yi et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize


class Tower(nn.Module):
    def __init__(self, num_ids: int, num_groups: int, dim: int = 8) -> None:
        super().__init__()
        self.ids = nn.Embedding(num_ids, dim)
        self.groups = nn.EmbeddingBag(num_groups, dim, mode="mean")
        self.project = nn.Linear(2 * dim, dim)

    def forward(self, ids: Tensor, groups: Tensor) -> Tensor:
        rows = torch.cat([self.ids(ids), self.groups(groups)], dim=1)
        return normalize(self.project(rows), dim=1)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = Tower(500, 30)
        self.item = Tower(200, 12)
        self.temperature = nn.Parameter(torch.tensor(5.0))

    def forward(
        self, user: Tensor, user_groups: Tensor, item: Tensor, item_groups: Tensor
    ) -> Tensor:
        scores = self.user(user, user_groups) @ self.item(item, item_groups).T
        return scores * self.temperature


def make_model() -> nn.Module:
    return TwoTowers()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def make_batch() -> tuple[Tensor, ...]:
    return (
        torch.randint(0, 500, (64,)),
        torch.randint(0, 30, (64, 3)),
        torch.randint(0, 200, (64,)),
        torch.randint(0, 12, (64, 2)),
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]
) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    scores = model(*batch)
    loss = cross_entropy(scores, torch.arange(len(scores)))
    loss.backward()
    optimizer.step()
    return loss.detach()
