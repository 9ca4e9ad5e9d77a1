# SPDX-License-Identifier: Apache-2.0
"""As GRU4Rec (Hidasi et al. 2016): packed sessions, and negatives that are the batch's targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

NUM_ITEMS, LENGTH = 200, 8


class GRU4Rec(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS, dim)
        self.targets = nn.Embedding(NUM_ITEMS, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, session: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.items(session), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, state = self.gru(packed)
        return state[0] @ self.targets(target).T


def make_model() -> nn.Module:
    return GRU4Rec()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    session = torch.randint(0, NUM_ITEMS, (32, LENGTH))
    return session, torch.randint(1, LENGTH + 1, (32,)), torch.randint(0, NUM_ITEMS, (32,))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    scores = model(*batch)
    loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    loss.backward()
    optimizer.step()
    return loss.detach()
