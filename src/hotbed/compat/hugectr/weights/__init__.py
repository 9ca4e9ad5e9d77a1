# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's weight files: dense parameters, tables, optimizer states, embedding collections.

The formats are those of all releases from v2.3 on; docs/migrate/hugectr.md describes them. Every
size is checked before anything changes. Numbers are little-endian.

sparse.py      files of a table, and its optimizer state
dense.py       files of dense parameters, and their optimizer state
collection.py  the folder of an embedding collection
rows.py        rows of tables as arrays, and back
gathered.py    GatheredRows: the rows of a table of all ranks
slots.py       SlotsOfKeys: which slot a key was read for
arrays.py      arrays in files without a header
"""

from hotbed.compat.hugectr.weights.collection import load_collection, save_collection
from hotbed.compat.hugectr.weights.dense import (
    load_dense,
    load_dense_states,
    save_dense,
    save_dense_states,
)
from hotbed.compat.hugectr.weights.gathered import GatheredRows, Rows
from hotbed.compat.hugectr.weights.slots import SlotsOfKeys
from hotbed.compat.hugectr.weights.sparse import (
    SparseFile,
    load_served,
    load_sparse,
    load_sparse_states,
    save_sparse,
    save_sparse_states,
)

__all__ = [
    "GatheredRows",
    "Rows",
    "SlotsOfKeys",
    "SparseFile",
    "load_collection",
    "load_dense",
    "load_dense_states",
    "load_served",
    "load_sparse",
    "load_sparse_states",
    "save_collection",
    "save_dense",
    "save_dense_states",
    "save_sparse",
    "save_sparse_states",
]
