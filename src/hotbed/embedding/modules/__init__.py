# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules, for autograd, torch.compile and plain PyTorch loops."""

from .base import TableModule, table_modules, update_tables
from .collection import EmbeddingCollection
from .embedding import Embedding, EmbeddingBag
from .inputs import Feature
from .lookup import Lookup, performed_by
from .parameter import TableRows
from .planner import Planner
from .targets import RowTargets, Target, update_targets

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Feature",
    "Lookup",
    "Planner",
    "RowTargets",
    "TableModule",
    "TableRows",
    "Target",
    "performed_by",
    "table_modules",
    "update_tables",
    "update_targets",
]
