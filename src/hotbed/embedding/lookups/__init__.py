# SPDX-License-Identifier: Apache-2.0
"""The lookup of a batch: from ids to rows and results, from gradients to updates.

Nothing here knows of autograd.

host_ids.py  ids and gradients, checked and moved to the host
layout.py    FeatureLayout: which features are looked up in which tables, how results lie
local.py     LocalLookup: the verbs over tables of this process
lookup.py    Lookup: where the rows of a network are, and who performs the verbs of a batch
mapped.py    MappedIds: the distinct ids of a batch, and their gradients summed by id
plan.py      Plan: the ids of a batch that were mapped before a module looks them up
plans.py     Plans: the ids of a batch of a network, which are asked for before it looks them up
"""

from .host_ids import HostIds
from .layout import Buckets, Feature, FeatureLayout, Group
from .local import (
    GrainSums,
    LocalIds,
    LocalLookup,
    NativeIds,
    NativeLookup,
    grain_sums,
    joined_sums,
    native_ids,
    step_without_ids,
)
from .lookup import Lookup, Pooled, RowMemory, new_rows, update_parts
from .mapped import MappedIds, Sums
from .plan import Asked, Plan, Statistics, WantedRows
from .plans import Plans

__all__ = [
    "Asked",
    "Buckets",
    "Feature",
    "FeatureLayout",
    "GrainSums",
    "Group",
    "HostIds",
    "LocalIds",
    "LocalLookup",
    "Lookup",
    "MappedIds",
    "NativeIds",
    "NativeLookup",
    "Plan",
    "Plans",
    "Pooled",
    "RowMemory",
    "WantedRows",
    "Statistics",
    "Sums",
    "grain_sums",
    "joined_sums",
    "native_ids",
    "new_rows",
    "step_without_ids",
    "update_parts",
]
