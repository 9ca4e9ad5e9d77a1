# SPDX-License-Identifier: Apache-2.0
"""Tokens of a sample: exchange between them, and a perceptron of each."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.models.layers import tensors


class TokenMixing(nn.Module):
    """Each token gets one part of every token: y_{h, i} = x_{i, h}; it has no parameters.

    x_{i, h} is part h of token i, of as many equal parts as there are tokens. y_h has part h of all
    tokens side by side.

    Source: Zhu et al., "RankMixer: Scaling Up Ranking Models in Industrial Recommenders", 2025,
    with as many heads as tokens.

    >>> TokenMixing()(torch.tensor([[[1, 2], [3, 4]]]))
    tensor([[[1, 3],
             [2, 4]]])
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, tokens, width] -> the same shape; the number of tokens divides the width."""
        tensors.dimensions("TokenMixing", tokens, 3)
        num_tokens, width = tokens.shape[1:]
        tensors.size("TokenMixing", tokens, 2, width // num_tokens * num_tokens)
        parts: Tensor = tokens.unflatten(2, (num_tokens, -1))
        return parts.transpose(1, 2).flatten(2)


class TokenFeedForward(nn.Module):
    """A perceptron of its own for each token: y_i = B_i gelu(A_i x_i + a_i) + b_i.

    Args:
        num_tokens: number of tokens.
        width: width of a token.
        hidden: width of the hidden layers.

    Source: Zhu et al., "RankMixer", 2025 (per-token FFN).

    >>> TokenFeedForward(2, 4, hidden=8)(torch.zeros(3, 2, 4)).shape
    torch.Size([3, 2, 4])
    """

    def __init__(self, num_tokens: int, width: int, *, hidden: int) -> None:
        super().__init__()
        checks.whole_number("TokenFeedForward.num_tokens", num_tokens, 1)
        checks.whole_number("TokenFeedForward.width", width, 1)
        checks.whole_number("TokenFeedForward.hidden", hidden, 1)
        self.first = nn.Parameter(torch.empty(num_tokens, width, hidden))
        self.first_bias = nn.Parameter(torch.zeros(num_tokens, hidden))
        self.second = nn.Parameter(torch.empty(num_tokens, hidden, width))
        self.second_bias = nn.Parameter(torch.zeros(num_tokens, width))
        with torch.no_grad():
            for weight in (self.first, self.second):
                weight.normal_(std=math.sqrt(2 / (width + hidden)))  # Xavier of one token

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, tokens, width] -> the same shape."""
        tensors.dimensions("TokenFeedForward", tokens, 3)
        tensors.size("TokenFeedForward", tokens, 1, self.first.shape[0])
        hidden = F.gelu(torch.einsum("ntw,twh->nth", tokens, self.first) + self.first_bias)
        return torch.einsum("nth,thw->ntw", hidden, self.second) + self.second_bias
