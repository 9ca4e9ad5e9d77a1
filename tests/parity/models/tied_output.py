# SPDX-License-Identifier: Apache-2.0
"""The next item of a session; the output layer is tied to the embedding of items."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ITEMS, NUM_USERS = 150, 400


class NextItem(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS, dim)
        self.users = nn.Embedding(NUM_USERS, dim)
        self.hidden = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, NUM_ITEMS)
        self.output.weight = self.items.weight

    def forward(self, user: Tensor, session: Tensor) -> Tensor:
        state = self.items(session).mean(dim=1) + self.users(user)
        return self.output(torch.tanh(self.hidden(state)))


def make_model() -> nn.Module:
    return NextItem()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    session = torch.randint(0, NUM_ITEMS, (64, 5))
    return torch.randint(0, NUM_USERS, (64,)), session, session[:, 0] // 2


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    user, session, following = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(user, session), following)
    loss.backward()
    optimizer.step()
    return loss.detach()
