# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules, for autograd, torch.compile and plain PyTorch loops."""

from .base import TableModule, table_modules
from .collection import EmbeddingCollection
from .embedding import Embedding, EmbeddingBag
from .inputs import Feature
from .parameter import TableRows

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Feature",
    "TableModule",
    "TableRows",
    "table_modules",
]
