# SPDX-License-Identifier: Apache-2.0
"""As BERT4Rec (Sun et al. 2019): a transformer that restores masked items of a history."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ITEMS, LENGTH = 200, 12
PAD, MASK = 0, NUM_ITEMS + 1


class BERT4Rec(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS + 2, dim, padding_idx=PAD)
        self.positions = nn.Embedding(LENGTH, dim)
        for embedding in (self.items, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            dim, nhead=2, dim_feedforward=32, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.output = nn.Linear(dim, NUM_ITEMS + 2)

    def forward(self, history: Tensor) -> Tensor:
        positions = torch.arange(history.shape[1], device=history.device)
        rows = self.items(history) + self.positions(positions)
        rows = self.dropout(self.norm(rows))
        rows = self.encoder(rows, src_key_padding_mask=history == PAD)
        return self.output(rows)


def make_model() -> nn.Module:
    return BERT4Rec()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))


def make_batch() -> tuple[Tensor, Tensor]:
    items = torch.randint(1, NUM_ITEMS + 1, (32, LENGTH))
    items[:, -1] = 1 + items[:, 0] % NUM_ITEMS
    items[torch.arange(LENGTH) < torch.randint(0, 4, (32, 1))] = PAD
    is_masked = (torch.rand(32, LENGTH) < 0.2) & (items != PAD)
    is_masked[:, -1] = True
    return items.masked_fill(is_masked, MASK), items.masked_fill(~is_masked, PAD)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    history, targets = batch
    optimizer.zero_grad()
    logits = model(history)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
    loss.backward()
    optimizer.step()
    return loss.detach()
