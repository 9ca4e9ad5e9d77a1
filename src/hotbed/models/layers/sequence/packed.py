# SPDX-License-Identifier: Apache-2.0
"""Histories pooled as they are packed: rows of all samples in one tensor, without padding.

Sample i has the rows `rows[offsets[i]:offsets[i + 1]]`, oldest first, as `hb.EmbeddingCollection`
gives them for pooling "none". The time grows with the number of rows, not with the longest history.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.models.layers import tensors

from .attend import ALL, attend

_BLOCK = 16  # entries that are multiplied as one matrix


class DotAttentionPooling(nn.Module):
    """Attention by inner products: y = V sum_k a_k h_k, a = softmax_k(Q t . K h_k / sqrt(dim)).

    An empty history gives zeros. Q t . K h = (K^T Q t) . h, so that no map runs over the entries.

    Args:
        dim: size of an entry, and of the target.
        length: newest entries that are read; None reads all.

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, with the target as the only
        query, as in Chen et al., "End-to-end User Behavior Retrieval in Click-Through Rate
        Prediction Model" (ETA), 2021.

    >>> rows, offsets = torch.ones(3, 4), torch.tensor([0, 3, 3])
    >>> DotAttentionPooling(4)(torch.ones(2, 4), rows, offsets).shape
    torch.Size([2, 4])
    """

    def __init__(self, dim: int, *, length: int | None = None) -> None:
        super().__init__()
        checks.whole_number("DotAttentionPooling.dim", dim, 1)
        checks.at_least("DotAttentionPooling.length", length, 1)
        self.length = length
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)

    def forward(self, target: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        """Targets [n, dim], rows [m, dim] and offsets int64 [n + 1] -> [n, dim].

        Offsets [2] say that all targets share one history, whose rows are there once.
        """
        tensors.dimensions("DotAttentionPooling", target, 2)
        tensors.dimensions("DotAttentionPooling", rows, 2)
        offsets = offsets.to(rows.device)
        queries = self.query(target) @ self.key.weight / math.sqrt(target.shape[1])
        is_exported = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        is_native = rows.device.type == "cpu" and rows.dtype == torch.float32
        if is_native and not is_exported and offsets.shape[0] - 1 == target.shape[0]:
            length = ALL if self.length is None else self.length
            pooled, _ = attend(queries.float(), rows, offsets, length)
        elif torch.compiler.is_compiling() or len(target):
            pooled = self._pool_blocks(queries, rows, offsets)
        else:  # there is no block without a sample
            pooled = queries + rows.sum(0)
        result: Tensor = self.value(pooled)
        return result

    def _pool_blocks(self, queries: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the weighed mean of each sample by products of matrices, as graphs for servers do.

        It takes one history of all samples, too, to the bits of one for each. Servers multiply a
        matrix of one row by another kernel, so sample 0, which nobody reads, is in each product.
        """
        queries = F.pad(queries, (0, 0, 1, 0))
        num_samples = queries.shape[0]
        blocks, is_entry, histories = _blocks(rows, offsets, self.length)
        is_entry = is_entry.unsqueeze(1)
        # the samples of each block: one if each has its history, all if they share one
        step = offsets.shape[0] - 1
        samples = torch.arange(1, num_samples, step, device=rows.device) + histories.unsqueeze(1)
        samples = F.pad(samples, (1, 0))
        scores = F.embedding(samples, queries) @ blocks.transpose(1, 2)
        scores = scores.masked_fill(~is_entry, torch.finfo(scores.dtype).min)
        flat = samples.flatten()
        highest = scores.detach().amax(2).flatten()
        largest = scores.new_zeros(num_samples)
        largest = largest.scatter_reduce(0, flat, highest, "amax", include_self=False)
        weights = torch.exp(scores - F.embedding(samples, largest.unsqueeze(1)))
        weights = weights * is_entry.to(weights.dtype)
        total = weights.new_zeros(num_samples).index_add(0, flat, weights.sum(2).flatten())
        sums = rows.new_zeros(num_samples, rows.shape[1])
        sums = sums.index_add(0, flat, (weights @ blocks).flatten(0, 1))
        return _divided(sums, total)[1:]

    def extra_repr(self) -> str:
        """Return the length, for `repr`."""
        return f"length={self.length}"


class DecayedMean(nn.Module):
    """Mean of a history in which old entries count less: weights 2^(-age / half_life).

    It has no parameters and looks at no target: the cheap baseline of attention. An empty history
    gives zeros.

    Args:
        half_life: age at which an entry counts half as much as one of age 0.
        length: newest entries that are read; None reads all.

    >>> rows, offsets = torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2])
    >>> DecayedMean(1.0)(rows, offsets)
    tensor([[2.]])
    """

    def __init__(self, half_life: float, *, length: int | None = None) -> None:
        super().__init__()
        checks.above("half_life", half_life, 0.0)
        checks.at_least("DecayedMean.length", length, 1)
        self.half_life = half_life
        self.length = length

    def forward(self, rows: Tensor, offsets: Tensor, ages: Tensor | None = None) -> Tensor:
        """Rows [m, dim], offsets int64 [n + 1] and ages [m] -> [n, dim].

        Without `ages` the age of an entry is the number of newer entries.
        """
        tensors.dimensions("DecayedMean", rows, 2)
        offsets = offsets.to(rows.device)
        samples = _samples(offsets, rows.shape[0])
        newer = _ages(offsets, samples)
        weights = torch.exp2((newer if ages is None else ages).to(rows.dtype) / -self.half_life)
        if self.length is not None:
            weights = weights.masked_fill(newer >= self.length, 0.0)
        return _weighed_mean(rows, weights, samples, offsets.shape[0] - 1)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"half_life={self.half_life}, length={self.length}"


def _blocks(rows: Tensor, offsets: Tensor, length: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cut each history into blocks of equal size, from its newest entry on.

    So a block is a matrix, and the entries before those that are read change no bit of the others.
    The number of blocks depends on the numbers of rows and histories alone, as exporters need it;
    blocks that no history needs have no entries.

    Returns:
        Rows [blocks, size, dim]; which of them are entries, bool [blocks, size]; and the history
        of each block, int64 [blocks].
    """
    starts = offsets[:-1]
    ends = offsets[1:]
    if length is not None:
        starts = torch.maximum(starts, ends - length)
    block_ends = ((ends - starts + _BLOCK - 1) // _BLOCK).cumsum(0)
    padded = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
    # of at least one row: (0 - 1) // size is not the same number in a graph
    most = padded.shape[0] + _BLOCK * (offsets.shape[0] - 1)
    places = torch.arange(0, most, _BLOCK, device=rows.device)  # of the first row of each block
    begun = block_ends[:-1]
    begins = torch.zeros_like(places).index_add(0, begun, torch.ones_like(begun))
    histories = begins.cumsum(0)
    first = (ends - _BLOCK * block_ends)[histories] + places
    entries = first.unsqueeze(1) + torch.arange(_BLOCK, device=rows.device)
    is_entry = entries >= starts[histories].unsqueeze(1)
    is_entry = is_entry & (entries < ends[histories].unsqueeze(1))
    blocks = F.embedding((entries + 1) * is_entry, padded)
    return blocks, is_entry, histories


def _samples(offsets: Tensor, num_rows: int) -> Tensor:
    """Return the sample of each row, int64 [num_rows].

    It counts the samples that begin at or before a row: exporters know these operations, and not
    those whose sizes depend on values.
    """
    inner = offsets[1:-1]
    begun = offsets.new_zeros(num_rows + 1).index_add(0, inner, torch.ones_like(inner))
    return begun[:num_rows].cumsum(0)


def _ages(offsets: Tensor, samples: Tensor) -> Tensor:
    """Return how many newer entries the sample of each row has, int64 [m]."""
    places = torch.ones_like(samples).cumsum(0)
    return offsets[1:][samples] - places


def _weighed_mean(rows: Tensor, weights: Tensor, samples: Tensor, num_samples: int) -> Tensor:
    """Return sum(w_k h_k) / sum(w_k) of each sample, [n, dim]; zeros where it has no row."""
    total = weights.new_zeros(num_samples).index_add(0, samples, weights)
    sums = rows.new_zeros(num_samples, rows.shape[1])
    sums = sums.index_add(0, samples, (weights.unsqueeze(1) * rows).to(rows.dtype))
    return _divided(sums, total)


def _divided(sums: Tensor, total: Tensor) -> Tensor:
    """Return sums [n, dim] divided by weights [n]; zeros where there are none."""
    smallest = torch.finfo(total.dtype).tiny
    return sums / total.clamp_min(smallest).unsqueeze(1)
