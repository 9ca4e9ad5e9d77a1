# SPDX-License-Identifier: Apache-2.0
"""Factorization machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.config import described
from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.models.layers import FeatureInputs, FMInteraction, LinearTerm, PositionTerm, xavier_

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@described
class FM(nn.Module):
    """Factorization machine: logistic regression plus the inner products of all pairs of fields.

    A field is one Id column, pooled; dense columns enter the linear term only. All tables must have
    the same dim.

    Args:
        schema: the columns of the data.
        tables: tables by name; the linear weights lie in tables of dim 1 like them.

    Example: `hb.models.FM(schema, hb.make_tables(schema, dim=10, rule=hb.Adagrad(lr=0.05)))`.
    Source: Rendle, "Factorization Machines", ICDM 2010.
    """

    looks_up_once = True
    ignores_mode = True

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        super().__init__()
        self.linear = LinearTerm(schema, tables)
        self.inputs = FeatureInputs(schema, tables)
        self.inputs.equal_dim("FM")
        self.interaction = FMInteraction()
        self.position = PositionTerm(schema)
        xavier_(self)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> logits [n]."""
        fields = self.inputs.fields(self.inputs(batch))
        logits: Tensor = self.position(self.linear(batch) + self.interaction(fields), batch)
        return logits
