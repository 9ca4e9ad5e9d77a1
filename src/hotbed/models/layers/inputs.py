# SPDX-License-Identifier: Apache-2.0
"""From a `Batch` to the tensors that layers take: embeddings and dense columns side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, SideBySide
from hotbed.data.schema import Id, Schema
from hotbed.embedding.modules import EmbeddingCollection, Feature
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


class FeatureInputs(nn.Module):
    """All features of a schema as one matrix: pooled embeddings, then the dense columns.

    Both are in the order of the schema.

    Args:
        schema: the columns of the data.
        tables: one table for each table name in the schema.

    Raises ConfigError for a schema without features, and for sequence features (pooling "none"),
    which these models do not take.
    """

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        super().__init__()
        _refuse_sequences(schema)
        self.dense_columns = [column.name for column in schema.dense]
        self.dense_dim = schema.dense_width
        self.field_dims: tuple[int, ...] = tuple(
            _table(tables, column).dim for column in schema.ids
        )
        self.collection = EmbeddingCollection(schema, tables) if schema.ids else None
        self.embedding_dim = sum(self.field_dims)
        self.output_dim = self.embedding_dim + self.dense_dim
        if not self.output_dim:
            raise ConfigError("schema: no features, got no Id and no Dense column. Add one.")

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> float32 [n, output_dim]."""
        parts = [part for part in self.parts(batch) if part is not None]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=1)

    def parts(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return embeddings [n, embedding_dim] and dense columns [n, dense_dim].

        Each is None if the schema has none.
        """
        embeddings = None
        if self.collection is not None:
            embeddings = self.collection.flat(batch)
        if not self.dense_columns:
            return embeddings, None
        dense = _dense(batch, self.dense_columns)
        if embeddings is not None:
            dense = dense.to(embeddings.device)
        return embeddings, dense

    def fields(self, flat: Tensor) -> Tensor:
        """Return the embeddings as [n, fields, dim]; all tables must have the same dim.

        `flat`: the embeddings alone, or the result of `forward`.
        """
        if flat.shape[1] != self.embedding_dim:
            flat = flat[:, : self.embedding_dim]
        return flat.reshape(-1, len(self.field_dims), self.field_dims[0])

    def equal_dim(self, model: str) -> int:
        """Return the dim that all fields share; raise ConfigError if they differ.

        Models that multiply fields with each other need it. `model`: the name for the message.
        """
        if len(set(self.field_dims)) != 1:
            raise ConfigError(
                f"{model}: all fields must have the same dim, got dims "
                f"{sorted(set(self.field_dims))}. Give the same dim to every table."
            )
        return self.field_dims[0]


class LinearTerm(nn.Module):
    """First-order term: one weight for every id and every dense column, and a bias.

    The weights of table "x" lie in a table "x.linear" of dim 1 with the same rule and policies.
    """

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        super().__init__()
        _refuse_sequences(schema)
        used = {name: _table(tables, columns[0]) for name, columns in schema.tables.items()}
        weights = [table.like(f"{name}.linear", dim=1) for name, table in used.items()]
        features = [
            Feature(column.name, f"{column.table}.linear", column.pooling) for column in schema.ids
        ]
        self.collection = EmbeddingCollection(features, weights) if features else None
        self.dense_columns = [column.name for column in schema.dense]
        self.dense_weights = nn.Linear(schema.dense_width, 1, bias=False) if schema.dense else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        """A batch of n samples -> float32 [n]."""
        logit: Tensor = self.bias
        if self.collection is not None:
            logit = logit + self.collection.flat(batch).sum(1)
        if self.dense_weights is not None:
            logit = logit + self.dense_weights(
                _dense(batch, self.dense_columns).to(self.bias.device)
            ).squeeze(-1)
        return logit


def _dense(batch: Batch, names: list[str]) -> Tensor:
    if isinstance(batch.dense, SideBySide) and list(batch.dense) == names:
        matrix: Tensor = batch.dense.matrix
        return matrix
    columns = []
    for name in names:
        column = torch.as_tensor(batch.dense[name], dtype=torch.float32)
        columns.append(column if column.dim() == 2 else column.unsqueeze(1))
    return torch.cat(columns, dim=1)


def _table(tables: Mapping[str, Table], column: Id) -> Table:
    name = column.table or column.name
    if name not in tables:
        raise ConfigError(
            f"tables: no table for column {column.name!r}, got {sorted(tables)}. "
            f"Add {name!r}, for example with hb.make_tables(schema, dim=16)."
        )
    return tables[name]


def _refuse_sequences(schema: Schema) -> None:
    for column in schema.ids:
        if column.pooling == "none":
            raise ConfigError(
                f"{column.name}: this model takes no sequence features, got pooling 'none'. "
                "Use sum, mean or max, or write your own network around hb.EmbeddingCollection."
            )
