# SPDX-License-Identifier: Apache-2.0
"""per_sample_weights that the model learns, over bags of unequal length."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weighted(nn.Module):
    def __init__(self, num_words: int = 200, dim: int = 8) -> None:
        super().__init__()
        self.importance = nn.Embedding(num_words, 1)
        self.words = nn.EmbeddingBag(num_words, dim, mode="sum", include_last_offset=True)
        self.topics = nn.EmbeddingBag(30, dim, mode="mean")
        self.head = nn.Linear(2 * dim, 1)

    def forward(self, words: dict[str, Tensor], topics: dict[str, Tensor]) -> Tensor:
        learned = torch.sigmoid(self.importance(words["values"]).squeeze(1))
        weights = learned * words["weights"]
        text = self.words(words["values"], words["offsets"], per_sample_weights=weights)
        topic = self.topics(topics["values"], topics["offsets"])
        return self.head(torch.cat([text, topic], dim=1)).squeeze(1)


def make_model() -> nn.Module:
    return Weighted()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def make_batch() -> dict[str, dict[str, Tensor] | Tensor]:
    lengths = torch.randint(0, 6, (48,))  # of a text; it may be empty
    num_words = int(lengths.sum())
    words = {
        "values": torch.randint(0, 200, (num_words,)),
        "weights": torch.rand(num_words),
        "offsets": nn.functional.pad(lengths.cumsum(0), (1, 0)),
    }
    lengths = torch.randint(1, 4, (48,))
    topics = {
        "values": torch.randint(0, 30, (int(lengths.sum()),)),
        "offsets": lengths.cumsum(0) - lengths,
    }
    return {"words": words, "topics": topics, "rating": torch.rand(48)}


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, dict[str, Tensor] | Tensor]
) -> Tensor:
    optimizer.zero_grad()
    rating = model(batch["words"], batch["topics"])
    loss = nn.functional.mse_loss(rating, batch["rating"])
    loss.backward()
    optimizer.step()
    return loss.detach()
