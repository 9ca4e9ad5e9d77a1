# SPDX-License-Identifier: Apache-2.0
"""Names by which Rec SDK describes features, tables and lookups.

arguments: the arguments of create_table and sparse_lookup, checked.
embedding: sparse tables and their lookups.
feature_process: the hook that removes stale rows.
"""

from hotbed.compat.mx_rec.core.embedding import create_table, sparse_lookup

__all__ = ["create_table", "sparse_lookup"]
