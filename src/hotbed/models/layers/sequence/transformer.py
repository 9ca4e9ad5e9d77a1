# SPDX-License-Identifier: Apache-2.0
"""A transformer layer for padded sequences."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.models.layers.dense import Dropout
from hotbed.models.layers.sequence.attention import MultiHeadAttention


class TransformerLayer(nn.Module):
    """Self-attention and a perceptron, each with a residual connection and normalized after it.

    s = LayerNorm(x + MultiHead(x, x, x)), y = LayerNorm(s + W_2 LeakyReLU(W_1 s + b_1) + b_2). It
    equals `nn.TransformerEncoderLayer(width, num_heads, hidden, dropout, F.leaky_relu,
    batch_first=True)`, but takes batches without samples, and its mask is 1 for entries.

    Source: Chen et al., "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba",
        2019, section 2.2.

    Args:
        width: size of an entry.
        num_heads: heads of attention; they divide the width.
        hidden: width of the perceptron's hidden layer; None = 4 * width.
        dropout: rate after the attention, and in and after the perceptron, in [0, 1).
    """

    def __init__(
        self, width: int, num_heads: int = 1, *, hidden: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.attention = MultiHeadAttention(num_heads, width)
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Sequences [n, length, width] and a mask [n, length] -> [n, length, width]."""
        attended = self.dropout(self.attention(x, x, x, mask))
        x = self.norms[0](x + attended)
        hidden = self.dropout(F.leaky_relu(self.first(x)))
        y: Tensor = self.norms[1](x + self.dropout(self.second(hidden)))
        return y
