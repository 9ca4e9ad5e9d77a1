# SPDX-License-Identifier: Apache-2.0
"""EmbeddingCollection: all sparse features of a batch over their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Ids, times_of
from hotbed.embedding.histories import HistoryStore
from hotbed.embedding.lookups import Feature, FeatureLayout, Pooled
from hotbed.embedding.table import Table
from hotbed.embedding.tables import check_table
from hotbed.errors import ConfigError, RowShapeError

from .base import TableModule, table_modules

if TYPE_CHECKING:
    from hotbed.data.schema import Schema


class EmbeddingCollection(TableModule):
    """All sparse features of a batch over their tables, in one native call.

    Several features may share a table. Tables have different names. Weights of ids are as for
    `EmbeddingBag`. `collection(batch)` returns each feature's rows by name: [n, dim] pooled, [m,
    dim] for pooling "none". `collection.flat(batch)` returns the pooled ones side by side, [n,
    output_dim]. In train mode new ids are inserted, counted and timed (batch.time); in eval mode
    nothing changes.

    Args:
        features: a Schema (its Id columns) or Features.
        tables: by name, or a list.
        buckets: pad to static shapes. The rows of a sequence with offsets, and the gradients of
            the distinct ids of tables of one dim and rule, are followed by rows of zeros up to the
            next of these numbers, so that compiled networks see few shapes. Values do not change. A
            batch that needs more raises RowShapeError.
        histories: the columns that the model keeps, where `features` are not a schema.

    Attributes:
        histories: the columns that are kept; None = there are none.

    Example: `hb.EmbeddingCollection(schema, hb.make_tables(schema, dim=16))`
    """

    def __init__(
        self,
        features: Schema | Sequence[Feature],
        tables: Mapping[str, Table] | Sequence[Table],
        buckets: Sequence[int] = (),
        histories: HistoryStore | None = None,
    ) -> None:
        schema = None
        if not isinstance(features, Sequence):
            schema = features
            features = [
                Feature(column.name, str(column.table), column.pooling) for column in features.ids
            ]
        if not isinstance(tables, Mapping | Sequence):
            raise ConfigError(
                f"tables: expected a mapping of names to tables or a list of tables, got "
                f"{tables!r:.60}. Give what hb.make_tables returns."
            )
        every = tables.items() if isinstance(tables, Mapping) else enumerate(tables)
        for name, table in every:
            check_table(f"tables.{name}", table)
        if schema is not None:
            histories = HistoryStore.of(schema, _by_name(tables))
        if isinstance(tables, Mapping):
            wanted = {feature.table for feature in features}
            tables = [table for table in tables.values() if table.name in wanted]
        elif histories is not None:
            tables = [table for table in tables if table.name not in histories.tables]
        super().__init__(FeatureLayout(tables, features, buckets))
        self.histories = histories

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return each feature's rows by name.

        `batch`: a Batch, or a mapping of feature names to Ids or int64 tensors [n].
        """
        flat, sequences = self._pool(batch)
        widths = [dim for dim, pooled in zip(self.dims, self.pooled, strict=True) if pooled]
        pooled = iter(torch.split(flat, widths, dim=1))
        rest = iter(sequences)
        return {
            feature.name: next(pooled if is_pooled else rest)
            for feature, is_pooled in zip(self.features, self.pooled, strict=True)
        }

    def flat(self, batch: Any) -> Tensor:
        """Return the pooled features side by side, [n, output_dim], in the order of the schema."""
        return self._pool(batch)[0]

    def flat_and_sequences(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `flat` returns, and the rows [m, dim] of each sequence feature by name."""
        flat, sequences = self._pool(batch)
        names = [feature.name for feature in self.features if feature.pooling == "none"]
        return flat, dict(zip(names, sequences, strict=True))

    def _pool(self, batch: Any) -> Pooled:
        inputs = self.inputs_of(batch)
        plan = None
        if not torch.compiler.is_compiling():
            plans = getattr(batch, "plans", None)
            if plans is not None and plans.training == self.training:
                plan = plans.take(self, inputs)
        return self.pool(inputs, times_of(batch), plan)

    def inputs_of(self, batch: Any) -> list[Ids]:
        """Return the ids of each feature of `batch`."""
        ids = batch.ids if hasattr(batch, "ids") else batch
        try:
            inputs = [ids[feature.name] for feature in self.features]
        except KeyError as missing:
            advice = "Encode it with the same schema."
            if self.histories is not None and missing.args[0] in self.histories.features:
                advice = (
                    "The model keeps it: train with hb.RecModel, or give the network "
                    "collection.histories.fill(batch, leaves=True) of its hb.EmbeddingCollection."
                )
            raise RowShapeError(
                f"embedding: the batch lacks feature {missing}, got {sorted(ids)}. {advice}"
            ) from None
        return [column if isinstance(column, Ids) else Ids(column) for column in inputs]


def _by_name(tables: Mapping[str, Table] | Sequence[Table]) -> Mapping[str, Table]:
    """Return tables by name."""
    if isinstance(tables, Mapping):
        return tables
    return {table.name: table for table in tables}


def histories_of(model: nn.Module) -> HistoryStore | None:
    """Return the histories that a model keeps; None if its schema has none."""
    for module in table_modules(model):
        if isinstance(module, EmbeddingCollection) and module.histories is not None:
            return module.histories
    return None
