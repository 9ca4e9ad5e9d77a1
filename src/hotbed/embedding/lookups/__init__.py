# SPDX-License-Identifier: Apache-2.0
"""The lookup of a batch: from ids to rows and results, from gradients to updates.

Nothing here knows of autograd.

host_ids.py  ids and gradients, checked and moved to the host
layout.py    FeatureLayout: which features are looked up in which tables, how results lie
local.py     LocalLookup: the four verbs over tables of this process
lookup.py    Lookup: who performs the four verbs of a batch
mapped.py    MappedIds: the distinct ids of a batch, and their gradients summed by id
plan.py      Plans: ids that were mapped before the network looks them up
"""

from .host_ids import HostIds
from .layout import Buckets, Feature, FeatureLayout, Group
from .local import GrainSums, LocalIds, LocalLookup, grain_sums, joined_sums
from .lookup import Lookup, Pooled
from .mapped import MappedIds, Sums
from .plan import Plan, Plans, statistics_after

__all__ = [
    "Buckets",
    "Feature",
    "Group",
    "FeatureLayout",
    "GrainSums",
    "HostIds",
    "LocalIds",
    "LocalLookup",
    "Lookup",
    "MappedIds",
    "Plan",
    "Plans",
    "Pooled",
    "Sums",
    "grain_sums",
    "joined_sums",
    "statistics_after",
]
