# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules, for autograd, torch.compile and plain PyTorch loops."""

from .base import TableModule, table_modules, update_tables
from .collection import EmbeddingCollection
from .embedding import Embedding, EmbeddingBag
from .inputs import Feature
from .lookup import Lookup, performed_by
from .parameter import TableRows
from .planner import Planner

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Feature",
    "Lookup",
    "Planner",
    "TableModule",
    "TableRows",
    "performed_by",
    "table_modules",
    "update_tables",
]
