# SPDX-License-Identifier: Apache-2.0
"""Histories of any length as one tensor with a mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.errors import ConfigError


class PadSequence(nn.Module):
    """Histories of any length -> a tensor of one length and a mask.

    Sample i has the rows `rows[offsets[i]:offsets[i + 1]]`, oldest first, as `hb.Embedding` and
    `hb.EmbeddingCollection` give them for pooling "none". A longer history keeps its newest
    `length` rows. A shorter one is followed by rows of zeros, where the mask is 0. All sizes are
    those of the inputs, so that a network with this layer exports for any number of samples.

    Args:
        length: rows of each sample in the output.

    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> padded, mask = PadSequence(2)(rows, torch.tensor([0, 3, 3, 4]))
    >>> padded.squeeze(2)
    tensor([[2., 3.],
            [0., 0.],
            [4., 0.]])
    >>> mask
    tensor([[1., 1.],
            [0., 0.],
            [1., 0.]])
    """

    steps: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        checks.at_least("PadSequence.length", length, 1)
        self.length = length
        self.register_buffer("steps", torch.arange(length), persistent=False)

    def forward(self, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [m, dim] and offsets int64 [n + 1] -> [n, length, dim] and a mask [n, length].

        The mask has the dtype of the rows.
        """
        if rows.dim() != 2 or offsets.dim() != 1:
            raise ConfigError(
                "PadSequence: expected rows [m, dim] and offsets [n + 1], got shapes "
                f"{list(rows.shape)} and {list(offsets.shape)}. Give the rows of a feature with "
                "pooling 'none', and batch.ids[name].offsets."
            )
        offsets = offsets.to(rows.device)
        ends = offsets[1:]
        starts = torch.maximum(offsets[:-1], ends - self.length)
        places = starts.unsqueeze(1) + self.steps
        mask = places < ends.unsqueeze(1)
        # place 0 is a row of zeros, which takes no gradient
        table = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
        padded = F.embedding((places + 1) * mask, table, padding_idx=0)
        return padded, mask.to(rows.dtype)

    def extra_repr(self) -> str:
        """Return the length, for `repr`."""
        return f"length={self.length}"
