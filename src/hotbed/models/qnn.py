# SPDX-License-Identifier: Apache-2.0
"""Quadratic neural network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import FeatureInputs, LogitHead, PositionTerm, QuadraticNet, xavier_

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class QNN(nn.Module):
    """QNN, in the alpha form of the paper: layers that multiply their input by maps of itself.

    x_{l+1} = x_l * sum_r relu(W_{l,r} x_l + b_{l,r}) + x_l, and the logit is linear in the last x.
    The paper's loss, which compares two passes with different dropout, is not built.

    Args:
        schema: the columns of the data.
        tables: tables by name.
        num_layers: quadratic layers; the degree doubles with each of them.
        num_rows: maps of one layer, which are added.
        dropout: rate after the activation of the maps and after each layer, in [0, 1).
        batch_norm: normalize the maps before their activation.

    Example: `hb.models.QNN(schema, tables, num_layers=4, dropout=0.1)`. Source: Li et al.,
    "Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks for
    Click-through Rate Prediction", KDD 2025.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(
        self,
        schema: Schema,
        tables: Mapping[str, Table],
        *,
        num_layers: int = 3,
        num_rows: int = 2,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = FeatureInputs(schema, tables)
        width = self.inputs.output_dim
        self.quadratic = QuadraticNet(
            width, num_layers, num_rows=num_rows, dropout=dropout, batch_norm=batch_norm
        )
        self.head = LogitHead(width)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        logits: Tensor = self.position(self.head(self.quadratic(self.inputs(batch))), batch)
        return logits
