# SPDX-License-Identifier: Apache-2.0
"""The hashing trick: any 64-bit id, multiplied with wrap-around, falls into one of a few bins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BINS = 97


class Hashed(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(BINS, dim)
        self.item = nn.Embedding(BINS, dim)
        self.quotient = nn.Embedding(BINS, dim)
        self.hidden = nn.Linear(3 * dim, 16)
        self.output = nn.Linear(16, 1)

    def hash(self, ids: Tensor, salt: int) -> Tensor:
        mixed = (ids ^ salt) * -7046029254386353131
        return mixed ^ (mixed >> 29)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = [
            self.user(self.hash(user, 1) % BINS),
            self.item(self.hash(item, 2) % BINS),
            self.quotient(torch.div(item, BINS, rounding_mode="floor") % BINS),
        ]
        return self.output(torch.relu(self.hidden(torch.cat(rows, dim=1)))).squeeze(1)


def make_model() -> nn.Module:
    return Hashed()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    user = torch.randint(-(2**62), 2**62, (64,))
    item = torch.randint(-(2**62), 2**62, (64,))
    return user, item, torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    user, item, clicked = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked)
    loss.backward()
    optimizer.step()
    return loss.detach()
