# SPDX-License-Identifier: Apache-2.0
"""One job on several processes, called ranks: the rows of each table are spread over them.

dense.py      values of grains that all ranks need, joined
halves.py     the order in which values of grains are added
ids.py        AskedIds and OwnedIds: the ids of a batch whose rows lie on several ranks
placement.py  Placement: which rank owns which rows and computes which grains
ranks.py      Ranks: the processes of a job, and what they send each other
sharded.py    ShardedLookup: the verbs of a lookup over the rows of all ranks
"""

from .dense import joined_over_ranks
from .halves import joined
from .placement import Placement, grains_for
from .ranks import Ranks
from .sharded import ShardedLookup

__all__ = ["Placement", "Ranks", "ShardedLookup", "grains_for", "joined", "joined_over_ranks"]
