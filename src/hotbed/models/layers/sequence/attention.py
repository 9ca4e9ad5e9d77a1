# SPDX-License-Identifier: Apache-2.0
"""Attention of several heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers.activation.softmax import masked_softmax


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention: softmax(Q K^T / sqrt(head_dim)) V for each head, side by side.

    Without `width` it has no parameters, as HugeCTR's layer of the same name. With `width` it
    projects queries, keys, values and the result linearly, as `nn.MultiheadAttention`. A query
    without any key to look at gets zeros.

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.2.

    Args:
        num_heads: number of heads.
        width: size of the last axis of all inputs, for the projections; None leaves them out.

    >>> rows = torch.ones(2, 3, 4)
    >>> MultiHeadAttention(2)(rows, rows, rows, torch.tensor([[1, 1, 0], [0, 0, 0]]))[:, 0]
    tensor([[1., 1., 1., 1.],
            [0., 0., 0., 0.]])
    """

    def __init__(self, num_heads: int = 1, width: int | None = None) -> None:
        super().__init__()
        checks.at_least("MultiHeadAttention.num_heads", num_heads, 1)
        if width is not None and (width < 1 or width % num_heads):
            raise _indivisible(width, num_heads)
        self.num_heads = num_heads
        self.width = width
        self.projections: nn.ModuleList | None = None
        if width is not None:
            self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the attention's results, [n, length_from, width].

        Args:
            query: [n, length_from, width]; [n, width] for one query a sample, which gives a result
                [n, width]; or [n, heads, length_from, head_dim], already apart.
            key: of length_to, likewise.
            value: like `key`.
            mask: not 0 where a query may look: [n, length_to], or [n, 1 or heads, 1 or
                length_from, length_to], for example of `SequenceMask`.
        """
        queries = self._heads(query, 0)
        keys = self._heads(key, 1)
        values = self._heads(value, 2)
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
        results = (masked_softmax(scores, mask) @ values).transpose(1, 2).flatten(2)
        if self.projections is not None:
            results = self.projections[3](results)
        if query.dim() == 2:
            return results.squeeze(1)
        return results

    def _heads(self, x: Tensor, number: int) -> Tensor:
        """Return an input as [n, heads, length, head_dim]."""
        if x.dim() == 4 and self.projections is not None:
            raise _four_axes(x, self.num_heads)
        if self.projections is not None:
            if x.dim() in (2, 3) and x.shape[-1] % self.num_heads:
                raise _indivisible(x.shape[-1], self.num_heads)
            x = self.projections[number](x)
        return _in_heads(x, self.num_heads)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"num_heads={self.num_heads}, width={self.width}"


class AttentionScores(nn.Module):
    """Scaled inner products of queries and keys for each head: Q K^T / sqrt(head_dim).

    It is the first half of `MultiHeadAttention`; a `Softmax` with a mask and `AttentionSum` are the
    others, for networks that work on the scores.

    Source: `MultiHeadAttention` of HugeCTR 4.0 to 4.3 with `transpose_b`.

    Args:
        num_heads: number of heads.

    >>> rows = torch.ones(2, 3, 4)
    >>> AttentionScores(2)(rows, rows).shape
    torch.Size([2, 2, 3, 3])
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        checks.at_least("AttentionScores.num_heads", num_heads, 1)
        self.num_heads = num_heads

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores [n, heads, length_from, length_to].

        `query` and `key` are [n, length, width], or [n, heads, length, head_dim], already apart.
        """
        queries = _in_heads(query, self.num_heads)
        keys = _in_heads(key, self.num_heads)
        return queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])

    def extra_repr(self) -> str:
        """Return the number of heads, for `repr`."""
        return f"num_heads={self.num_heads}"


class AttentionSum(nn.Module):
    """Values weighed by the scores of each head, side by side: the last part of an attention.

    Source: `MultiHeadAttention` of HugeCTR 4.0 to 4.3 without `transpose_b`.

    >>> AttentionSum()(torch.ones(2, 2, 3, 5), torch.ones(2, 5, 4)).shape
    torch.Size([2, 3, 4])
    """

    def forward(self, scores: Tensor, value: Tensor) -> Tensor:
        """Return the sums [n, length_from, width].

        `scores` are [n, heads, length_from, length_to]; `value` is [n, length_to, width], or
        [n, heads, length_to, head_dim], already apart.
        """
        if scores.dim() != 4:
            raise ConfigError(
                "AttentionSum: scores must be [n, heads, length_from, length_to], got shape "
                f"{list(scores.shape)}. Connect those of AttentionScores."
            )
        values = _in_heads(value, scores.shape[1])
        return (scores @ values).transpose(1, 2).flatten(2)


def _in_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return [n, length, width], [n, width] or what is apart as [n, heads, length, head_dim]."""
    if x.dim() == 4:
        if x.shape[1] != num_heads:
            raise _four_axes(x, num_heads)
        return x
    if x.dim() not in (2, 3):
        raise ConfigError(
            f"MultiHeadAttention: an input must have 2, 3 or 4 axes, got shape "
            f"{list(x.shape)}. Give [n, length, width]."
        )
    if x.dim() == 2:
        x = x.unsqueeze(1)
    if x.shape[2] % num_heads:
        raise _indivisible(x.shape[2], num_heads)
    head_dim = x.shape[2] // num_heads
    return torch.unflatten(x, 2, (num_heads, head_dim)).transpose(1, 2)


def _four_axes(x: Tensor, num_heads: int) -> ConfigError:
    return ConfigError(
        f"MultiHeadAttention: inputs of 4 axes must be [n, {num_heads}, length, "
        f"head_dim] and need a layer without width, got shape {list(x.shape)}. Give "
        "inputs [n, length, width]."
    )


def _indivisible(width: int, num_heads: int) -> ConfigError:
    return ConfigError(
        f"MultiHeadAttention.num_heads: must divide the width, got {num_heads} heads and width "
        f"{width}. Give a divisor of {width}."
    )
