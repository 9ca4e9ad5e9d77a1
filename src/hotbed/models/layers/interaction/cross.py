# SPDX-License-Identifier: Apache-2.0
"""Cross networks: explicit feature crosses of bounded degree.

All map [n, in_features] -> [n, in_features].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks


class CrossNet(nn.Module):
    """Cross network of DCN: x_{l+1} = x_0 (w_l . x_l) + b_l + x_l, with one vector w_l a layer.

    Source: Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        checks.at_least("num_cross_layers", num_layers, 1)
        self.weights = nn.ModuleList(
            nn.Linear(in_features, 1, bias=False) for _ in range(num_layers)
        )
        self.biases = nn.ParameterList(
            nn.Parameter(torch.zeros(in_features)) for _ in range(num_layers)
        )

    def forward(self, x0: Tensor) -> Tensor:
        """[n, in_features] -> [n, in_features]."""
        x = x0
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.addcmul(x + bias, x0, weight(x))
        return x


class CrossNetV2(nn.Module):
    """Cross network of DCN-V2: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with a matrix a layer.

    Args:
        in_features: width of the input and the output.
        num_layers: cross layers; the degree of the crosses is one more.
        projection_dim: None = W_l is a full matrix. Otherwise W_l = U_l V_l, of rank
            projection_dim: V_l maps to that width and U_l back.

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021. `MultiCross` of HugeCTR
    is this layer with `projection_dim`, and `CrossNet` without.

    >>> CrossNetV2(6, num_layers=2, projection_dim=3)(torch.zeros(3, 6)).shape
    torch.Size([3, 6])
    """

    def __init__(
        self, in_features: int, num_layers: int, *, projection_dim: int | None = None
    ) -> None:
        super().__init__()
        checks.at_least("num_cross_layers", num_layers, 1)
        checks.at_least("projection_dim", projection_dim, 1)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            if projection_dim is None:
                layer: nn.Module = nn.Linear(in_features, in_features)
            else:
                down = nn.Linear(in_features, projection_dim, bias=False)
                layer = nn.Sequential(down, nn.Linear(projection_dim, in_features))
            self.layers.append(layer)

    def forward(self, x0: Tensor) -> Tensor:
        """[n, in_features] -> [n, in_features]."""
        x = x0
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x


class CrossNetMix(nn.Module):
    """Low-rank cross network of DCN-V2: a gated mixture of experts a layer.

    x_{l+1} = sum_i g_i(x_l) * x_0 * (U_i tanh(C_i tanh(V_i^T x_l)) + b_l) + x_l, g = softmax of a
    linear gate. With one expert the gate is 1. All experts of a layer are computed by three matrix
    products.

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, section 3.2 (DCN-Mix).
    """

    def __init__(
        self, in_features: int, num_layers: int, *, rank: int = 32, num_experts: int = 4
    ) -> None:
        super().__init__()
        checks.at_least("num_cross_layers", num_layers, 1)
        checks.at_least("low_rank", rank, 1)
        checks.at_least("num_experts", num_experts, 1)
        self.num_layers = num_layers
        self.rank = rank
        self.num_experts = num_experts
        inner = rank * num_experts
        layers = range(num_layers)
        self.down = nn.ModuleList(nn.Linear(in_features, inner, bias=False) for _ in layers)
        self.core = nn.ParameterList(
            nn.Parameter(torch.empty(num_experts, rank, rank)) for _ in layers
        )
        self.up = nn.ModuleList(nn.Linear(inner, in_features, bias=False) for _ in layers)
        self.gates = nn.ModuleList(nn.Linear(in_features, num_experts, bias=False) for _ in layers)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(in_features)) for _ in layers)
        with torch.no_grad():
            for core in self.core:
                core.normal_(std=math.sqrt(1.0 / rank))  # Xavier of a rank x rank matrix

    def forward(self, x0: Tensor) -> Tensor:
        """[n, in_features] -> [n, in_features]."""
        x = x0
        for layer in range(self.num_layers):
            inner = torch.tanh(self.down[layer](x))
            inner = inner.view(-1, self.num_experts, self.rank)
            inner = torch.einsum("ner,esr->nes", inner, self.core[layer])
            inner = torch.tanh(inner)
            gate = F.softmax(self.gates[layer](x), dim=-1)
            # The gates sum to 1: gating before U and adding the bias once equals gating the outputs
            # of the experts.
            gated = inner * gate.unsqueeze(-1)
            mixed = self.up[layer](gated.flatten(1)) + self.biases[layer]
            x = torch.addcmul(x, x0, mixed)
        return x
