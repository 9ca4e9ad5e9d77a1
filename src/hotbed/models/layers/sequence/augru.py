# SPDX-License-Identifier: Apache-2.0
"""GRU whose updates follow an attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks


class AUGRU(nn.Module):
    """GRU with attentional update gate: h_k = (1 - a_k u_k) * h_{k-1} + a_k u_k * c_k, h_0 = 0.

    Reset gate r, update gate u and candidate c are those of `nn.GRU`, with its weights, where u is
    1 - z: with attention 1 everywhere it is `nn.GRU(input_size, hidden_size, batch_first=True)`.
    Entries of attention 0 leave the state as it is, so that padding changes nothing.

    The loop over entries is unrolled: a graph holds one copy of the step for each.

    Source: Zhou et al., "Deep Interest Evolution Network for Click-Through Rate Prediction", AAAI
        2019, section 4.3.

    Args:
        input_size: size of an entry.
        hidden_size: size of the state.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        checks.at_least("AUGRU.input_size", input_size, 1)
        checks.at_least("AUGRU.hidden_size", hidden_size, 1)
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_size))
        bound = 1.0 / math.sqrt(hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [n, length, hidden_size], and the last one [n, hidden_size].

        Args:
            x: [n, length, input_size].
            attention: [n, length], 0 for padding.
        """
        size = self.hidden_size
        weights = torch.split(self.weight_hh.t(), size, dim=1)
        of_reset, of_keep, of_new = torch.split(self.bias_hh, size)
        inputs = torch.split(F.linear(x, self.weight_ih, self.bias_ih), size, dim=2)
        state = x.new_zeros(x.shape[0], size)
        states = []
        for reset, keep, new, share in zip(
            (inputs[0] + of_reset).unbind(1),
            (inputs[1] + of_keep).unbind(1),
            inputs[2].unbind(1),
            attention.unsqueeze(2).unbind(1),
            strict=True,
        ):
            reset = torch.sigmoid(torch.addmm(reset, state, weights[0]))
            keep = torch.sigmoid(torch.addmm(keep, state, weights[1]))
            new = torch.tanh(new + reset * torch.addmm(of_new, state, weights[2]))
            state = state + (share - share * keep) * (new - state)
            states.append(state)
        return torch.stack(states, dim=1), state

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"{self.weight_ih.shape[1]}, {self.hidden_size}"
