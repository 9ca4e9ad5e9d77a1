# SPDX-License-Identifier: Apache-2.0
"""DLRM (Naumov et al. 2019): bags of ids, dense features, and the products of all pairs."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

SIZES = (400, 150, 30, 8)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, dim, mode="sum") for size in SIZES)
        self.bottom = mlp(5, 16, dim)
        self.top = mlp(dim + 10, 16, 1)
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [bag(ids[:, number]) for number, bag in enumerate(self.bags)]
        stacked = torch.stack([bottom, *rows], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, crossed], dim=1)).squeeze(1)


def make_model() -> nn.Module:
    return DLRM()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randint(0, size, (64, 3)) for size in SIZES], dim=1)
    return torch.randn(64, 5), ids, torch.randint(0, 2, (64,)).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    dense, ids, clicked = batch
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), clicked)
    loss.backward()
    optimizer.step()
    return loss.detach()
