# SPDX-License-Identifier: Apache-2.0
"""Histories and counts that a model keeps, the same code in training and in serving.

columns.py  History and Count: what is declared, and how entries lie in rows
rule.py     the rule of time: what rows see, and what they leave
"""

from hotbed.data.histories.columns import Count, EntryKind, History, KeptByKey, SeenEntries, age_ids
from hotbed.data.histories.rule import (
    LEARNED_UNTIL,
    NEVER,
    LeftEntries,
    RowKeys,
    StoredEntries,
    TableReader,
    keys_of,
    newest_times,
    read_stored,
    row_of_time,
    see,
)

__all__ = [
    "LEARNED_UNTIL",
    "NEVER",
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
    "newest_times",
    "read_stored",
    "row_of_time",
    "see",
]
