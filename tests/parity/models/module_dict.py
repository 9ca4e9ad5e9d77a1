# SPDX-License-Identifier: Apache-2.0
"""A dict of columns, and nn.ModuleDict with an embedding for each categorical one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = {"user": 400, "item": 150, "city": 20, "device": 4}


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {name: nn.Embedding(size, min(12, 2 + size // 10)) for name, size in SIZES.items()}
        )
        width = sum(embedding.embedding_dim for embedding in self.embeddings.values())
        self.layers = nn.Sequential(nn.Linear(width + 2, 24), nn.SiLU(), nn.Linear(24, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = [embedding(batch[name]) for name, embedding in self.embeddings.items()]
        parts.append(torch.stack([batch["price"], batch["age"]], dim=1))
        return self.layers(torch.cat(parts, dim=1)).squeeze(1)


def make_model() -> nn.Module:
    return Tabular()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)


def make_batch() -> dict[str, Tensor]:
    batch = {name: torch.randint(0, size, (64,)) for name, size in SIZES.items()}
    batch |= {"price": torch.rand(64), "age": torch.randn(64)}
    return batch | {"clicked": torch.randint(0, 2, (64,)).float()}


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["clicked"])
    loss.backward()
    optimizer.step()
    return loss.detach()
