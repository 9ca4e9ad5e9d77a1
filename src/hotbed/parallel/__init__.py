# SPDX-License-Identifier: Apache-2.0
"""One job on several processes, called ranks: the rows of each table are spread over them.

dense.py      values of grains that all ranks need, joined
halves.py     the order in which values of grains are added
ids.py        AskedIds and OwnedIds: the ids of a batch whose rows lie on several ranks
launch.py     run a command on several processes, and say why it failed
log_lines.py  the rank in every log line of Hotbed
placement.py  Placement: which rank owns which rows and computes which grains
probe.py      connect the ranks of a job, and measure how fast they reach each other
ranks.py      Ranks: the processes of a job, and what they send each other
sharded.py    ShardedLookup: the verbs of a lookup over the rows of all ranks
shards.py     Shard: the rows that a process holds, for those who write and read states
traffic.py    Traffic and RankWork: what a rank sent, how long it waited, and what it trained
"""

from .dense import joined_over_ranks
from .halves import joined
from .placement import Placement, grains_for
from .ranks import Ranks
from .sharded import ShardedLookup
from .shards import WHOLE, RankShard, Shard
from .traffic import RankWork, Traffic

__all__ = [
    "WHOLE",
    "Placement",
    "RankShard",
    "RankWork",
    "Ranks",
    "Shard",
    "ShardedLookup",
    "Traffic",
    "grains_for",
    "joined",
    "joined_over_ranks",
]
