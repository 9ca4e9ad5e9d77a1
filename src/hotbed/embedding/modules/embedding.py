# SPDX-License-Identifier: Apache-2.0
"""Embedding and EmbeddingBag: one table, as in torch.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import checks
from hotbed.data.batch import Ids
from hotbed.embedding.lookups import Feature, FeatureLayout
from hotbed.embedding.table import Table
from hotbed.embedding.tables import check_table
from hotbed.errors import ConfigError

from .base import TableModule


class Embedding(TableModule):
    """A table as nn.Embedding: ids int64 [...] -> rows [..., dim].

    `Ids` of m ids give rows [m, dim] (a sequence lookup). `buckets`: see `EmbeddingCollection`.
    `max_norm`: results longer than this (Euclidean) are scaled to it; the rows of the table stay,
    and gradients flow through the scaling.

    Example: `hb.Embedding(hb.Table("item", dim=16))(torch.tensor([[7, -1]]))` has shape [1, 2, 16].
    """

    def __init__(
        self, table: Table, buckets: Sequence[int] = (), max_norm: float | None = None
    ) -> None:
        check_table("Embedding.table", table)
        feature = Feature(table.name, table.name, "none")
        super().__init__(FeatureLayout([table], [feature], buckets))
        if max_norm is not None:
            checks.finite_number("Embedding.max_norm", max_norm, above=0)
        self.max_norm = max_norm

    @property
    def settings(self) -> dict[str, Any]:
        return {"pooling": self.features[0].pooling, "max_norm": self.max_norm}

    def forward(self, ids: Tensor | Ids, time: Any = None) -> Tensor:
        """Return the rows of `ids`.

        `time`: int64 microseconds, one an id (or one a sample of Ids), for tables whose eviction
        needs it.
        """
        if isinstance(ids, Ids):
            _, (rows,) = self.pool([ids], time)
            return self._clipped(rows)
        flat = Ids(ids.reshape(-1))
        _, (rows,) = self.pool([flat], time)
        return self._clipped(rows.view(*ids.shape, self.dims[0]))

    def _clipped(self, rows: Tensor) -> Tensor:
        if self.max_norm is None:
            return rows
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        clipped: Tensor = rows * (self.max_norm / norms.clamp(min=self.max_norm))
        return clipped


class EmbeddingBag(TableModule):
    """A table as nn.EmbeddingBag: bags of ids -> pooled rows [n, dim].

    `pooling`: sum, mean or max. An empty bag reads as zeros. `buckets`: see `EmbeddingCollection`.

    Example: `hb.EmbeddingBag(table, pooling="mean")(values, offsets)` with offsets [n + 1], as in
        hb.Ids.
    """

    def __init__(self, table: Table, pooling: str = "sum", buckets: Sequence[int] = ()) -> None:
        if pooling == "none":
            raise ConfigError(
                "EmbeddingBag: pooling must be sum, mean or max, got 'none'. "
                "Use hb.Embedding for sequences."
            )
        check_table("EmbeddingBag.table", table)
        feature = Feature(table.name, table.name, pooling)
        super().__init__(FeatureLayout([table], [feature], buckets))

    @property
    def settings(self) -> dict[str, Any]:
        return {"pooling": self.features[0].pooling, "max_norm": None}

    def forward(
        self,
        ids: Tensor | Ids,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        time: Any = None,
    ) -> Tensor:
        """Return the pooled rows of each bag, [n, dim].

        Rows are multiplied by their weights before they are pooled; mean divides by the number of
        ids, not by the sum of weights. Weights that require a gradient get one, as
        nn.EmbeddingBag's per_sample_weights.

        Args:
            ids: int64 [m] with `offsets`, or [n, k] = n bags of k ids, or Ids.
            offsets: int64 [n + 1].
            weights: float32, of the shape of `ids`.
            time: int64 microseconds, for tables whose eviction needs it.
        """
        if isinstance(ids, Ids):
            return self.pool([ids], time)[0]
        if ids.dim() == 2 and offsets is None:
            if ids.shape[1]:
                offsets = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
            else:
                offsets = torch.zeros(len(ids) + 1, dtype=torch.int64, device=ids.device)
            if weights is not None:
                weights = weights.reshape(-1)
            ids = ids.reshape(-1)
        return self.pool([Ids(ids, offsets, weights)], time)[0]
