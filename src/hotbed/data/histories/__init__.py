# SPDX-License-Identifier: Apache-2.0
"""Histories and counts that a model keeps, the same code in training and in serving.

columns.py  History and Count: what is declared, and how entries lie in rows
rule.py     the rule of time: what rows see, and what they leave
"""

from hotbed.data.histories.columns import Count, EntryKind, History, KeptByKey, SeenEntries, age_ids
from hotbed.data.histories.rule import (
    LeftEntries,
    RowKeys,
    StoredEntries,
    TableReader,
    keys_of,
    read_stored,
    see,
)

__all__ = [
    "Count",
    "EntryKind",
    "History",
    "KeptByKey",
    "LeftEntries",
    "RowKeys",
    "SeenEntries",
    "StoredEntries",
    "TableReader",
    "age_ids",
    "keys_of",
    "read_stored",
    "see",
]
