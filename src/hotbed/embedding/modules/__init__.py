# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules, for autograd, torch.compile and plain PyTorch loops.

base.py        TableModule: the base of the torch modules over tables
collection.py  EmbeddingCollection: all sparse features of a batch over their tables
compiled.py    the lookup as torch operators
embedding.py   Embedding and EmbeddingBag: one table, as in torch.nn
gradients.py   gradients of a lookup
inputs.py      the ids of a batch, checked and moved to the host
lookup.py      Lookup: who performs the lookups of a TableModule
parameter.py   TableRows: the parameter that stands for tables in torch
plan.py        Plans: ids that were mapped to slots before the network looks them up
state.py       how torch saves, loads, moves and copies a module with tables
targets.py     RowTargets: lookups whose gradients flow to tensors
transforms.py  transforms of torch that cannot follow a lookup, which native code performs
"""

from .base import TableModule, table_modules, update_tables
from .collection import EmbeddingCollection
from .embedding import Embedding, EmbeddingBag
from .inputs import Feature
from .lookup import Lookup, performed_by
from .parameter import TableRows
from .targets import RowTargets, Target, update_targets

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Feature",
    "Lookup",
    "RowTargets",
    "TableModule",
    "TableRows",
    "Target",
    "performed_by",
    "table_modules",
    "update_tables",
    "update_targets",
]
