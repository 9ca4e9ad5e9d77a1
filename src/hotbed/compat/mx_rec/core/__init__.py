# SPDX-License-Identifier: Apache-2.0
"""Names by which Rec SDK describes features, tables and lookups.

arguments.py        the arguments of create_table and sparse_lookup, checked
embedding.py        SparseTable, create_table, sparse_lookup
feature_process.py  EvictHook: when stale rows leave the tables
asc/                features, insert functions, the start of the pipeline
"""

from hotbed.compat.mx_rec.core.embedding import create_table, sparse_lookup

__all__ = ["create_table", "sparse_lookup"]
