# SPDX-License-Identifier: Apache-2.0
"""The ids of a model's lookups before its forward pass, for one collection of tables."""

from .features import IdFeatures, RowsInTurn, calls_of, ids_of_samples
from .report import LookupEntry, LookupReport

__all__ = ["IdFeatures", "LookupEntry", "LookupReport", "RowsInTurn", "calls_of", "ids_of_samples"]
