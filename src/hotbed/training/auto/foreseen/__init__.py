# SPDX-License-Identifier: Apache-2.0
"""The ids of a model's lookups before its forward pass, for one collection of tables.

features.py  the ids of a model's lookups as the features of a batch
picture.py   the picture of a step: what happens before the forward pass, and what in it
report.py    the report of a model's lookups
"""

from .features import IdFeatures, RowsInTurn, calls_of, ids_of_samples
from .report import LookupEntry, LookupReport

__all__ = ["IdFeatures", "LookupEntry", "LookupReport", "RowsInTurn", "calls_of", "ids_of_samples"]
