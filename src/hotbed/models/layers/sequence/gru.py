# SPDX-License-Identifier: Apache-2.0
"""GRU over histories."""

from __future__ import annotations

from torch import Tensor, nn


class GRU(nn.Module):
    """`nn.GRU` of one layer over [n, length, input_size], with the last state as [n, hidden_size].

    It has no mask: the last state is that of the last entry, padding or not. `AUGRU` with a mask as
    its attention skips padding.

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
        Machine Translation", EMNLP 2014; `GRU` of HugeCTR.

    Args:
        input_size: size of an entry.
        hidden_size: size of the state.
        bias: whether the gates add one.
        recurrent_bias: whether they add a second one to the product of the state; False keeps it 0,
            as in HugeCTR.

    >>> import torch
    >>> [output.shape for output in GRU(4, 8)(torch.zeros(2, 3, 4))]
    [torch.Size([2, 3, 8]), torch.Size([2, 8])]
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, recurrent_bias: bool = True
    ) -> None:
        super().__init__()
        self.gru = nn.GRU(input_size, hidden_size, bias=bias, batch_first=True)
        if bias and not recurrent_bias:
            second = self.gru.get_parameter("bias_hh_l0")
            nn.init.zeros_(second)
            second.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [n, length, input_size] -> all states [n, length, hidden_size], and the last."""
        states, last = self.gru(x)
        return states, last.squeeze(0)
