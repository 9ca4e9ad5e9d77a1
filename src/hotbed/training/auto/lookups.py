# SPDX-License-Identifier: Apache-2.0
"""What takes the place of nn.Embedding and nn.EmbeddingBag: lookups with torch's own arguments."""

from __future__ import annotations

from typing import Any

from hotbed.embedding.modules import TableModule
from hotbed.embedding.modules.plan import Plan


class MovedLookup(TableModule):
    """Base of the modules that took the place of an nn.Embedding or nn.EmbeddingBag.

    Attributes:
        path: where it lies in the model.
        plans: plans of the lookups of the next forward pass, in their order; each lookup takes one.
        times: int64 microseconds of the samples of this forward pass, or None.
    """

    path: str
    plans: list[Plan]
    times: Any


class MovedEmbedding(MovedLookup):
    """nn.Embedding over a table."""


class MovedEmbeddingBag(MovedLookup):
    """nn.EmbeddingBag over a table."""
