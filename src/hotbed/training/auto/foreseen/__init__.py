# SPDX-License-Identifier: Apache-2.0
"""The ids of a model's lookups before its forward pass.

called.py    the lookups of a converted model that is called with whole batches
features.py  the ids of a model's lookups as the features of a batch
moved.py     the lookups of a converted model in a step by grains
report.py    the report of a model's lookups
"""

from .features import IdFeatures, calls_of
from .report import LookupEntry, lookup_report

__all__ = ["IdFeatures", "LookupEntry", "calls_of", "lookup_report"]
