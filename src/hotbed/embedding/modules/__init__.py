# SPDX-License-Identifier: Apache-2.0
"""Tables as torch modules, for autograd, torch.compile and plain PyTorch loops.

autograd.py    TableFlow: lookups as functions of autograd
base.py        TableModule: the base of the torch modules over tables
collection.py  EmbeddingCollection: all sparse features of a batch over their tables
compiled.py    the lookup as torch operators
embedding.py   Embedding and EmbeddingBag: one table, as in torch.nn
flow.py        Flow: how results enter the graph of torch, and where their gradients go
gradients.py   RowGradients: the gradients of rows that wait for an update
parameter.py   TableRows: the parameter that stands for tables in torch
state.py       how torch saves, loads, moves and copies a module with tables
targets.py     RowTargets: lookups whose gradients flow to tensors
transforms.py  transforms of torch that cannot follow a lookup, which native code performs
"""

from hotbed.embedding.lookups import Feature

from .base import TableModule, table_modules, update_tables
from .collection import EmbeddingCollection, histories_of
from .embedding import Embedding, EmbeddingBag
from .flow import Flow, FlowModule, with_flow
from .parameter import TableRows
from .state import device_of
from .targets import RowTargets, Target, update_targets

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Feature",
    "Flow",
    "FlowModule",
    "RowTargets",
    "TableModule",
    "TableRows",
    "Target",
    "device_of",
    "histories_of",
    "table_modules",
    "update_tables",
    "update_targets",
    "with_flow",
]
