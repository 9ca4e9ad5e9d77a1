# SPDX-License-Identifier: Apache-2.0
"""Ids that the forward pass computes: crosses, shifts, hours of a time, and their concatenation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Crosses(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.single = nn.Embedding(64 + 32, dim)
        self.crossed = nn.Embedding(64 * 32, dim)
        self.hours = nn.Embedding(24 * 7, dim)
        self.mixed = nn.Embedding(1 << 8, dim)
        self.hidden = nn.Linear(5 * dim, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, city: Tensor, device: Tensor, seconds: Tensor) -> Tensor:
        single = self.single(torch.stack([city, 64 + device], dim=1))
        crossed = self.crossed(city * 32 + device)
        hours = self.hours((seconds // 3600) % (24 * 7))
        mixed = self.mixed((city << 3 ^ device ^ (seconds >> 4)) & 0xFF)
        rows = torch.cat([single.flatten(1), crossed, hours, mixed], dim=1)
        return self.output(torch.relu(self.hidden(rows))).squeeze(1)


def make_model() -> nn.Module:
    return Crosses()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, ...]:
    city = torch.randint(0, 64, (64,))
    device = torch.randint(0, 32, (64,))
    seconds = torch.randint(1_600_000_000, 1_700_000_000, (64,))
    return city, device, seconds, torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]
) -> Tensor:
    city, device, seconds, clicked = batch
    optimizer.zero_grad()
    logits = model(city, device, seconds)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked)
    loss.backward()
    optimizer.step()
    return loss.detach()
