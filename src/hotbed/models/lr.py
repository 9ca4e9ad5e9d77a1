# SPDX-License-Identifier: Apache-2.0
"""Logistic regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import LinearTerm, PositionTerm, xavier_

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class LR(nn.Module):
    """Logistic regression: logit = b + sum of one weight for each id and dense column.

    Args:
        schema: the columns of the data.
        tables: tables by name; the weights lie in tables of dim 1 like them.

    Example: `hb.models.LR(schema, hb.make_tables(schema, dim=1, rule=hb.Ftrl(lr=0.1)))`. Source:
    McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        super().__init__()
        self.linear = LinearTerm(schema, tables)
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        logits: Tensor = self.position(self.linear(batch), batch)
        return logits
