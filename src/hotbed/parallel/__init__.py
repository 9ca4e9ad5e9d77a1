# SPDX-License-Identifier: Apache-2.0
"""One job on several processes, called ranks: the rows of each table are spread over them.

calls.py        RankCall: what a rank asks the others to do together, and from where
connections.py  connect the ranks of a job, and see that messages pass
counters.py     the counters of tables, added over ranks
decoding.py     SharedDecoding: several ranks decode the messages that the first one reads
dense.py        DensePart: what the grains of a step leave of the dense part, joined
envelope.py     Envelope: messages of several parts of a step, which go to the other ranks together
exchange.py     TableExchange: the rows of a batch, and their gradients, between ranks
forecast/       predict memory, bytes and seconds of a step on several ranks
hosts.py        Hosts and HostMail: by which ranks of their hosts messages go to others
ids.py          AskedIds and OwnedIds: the ids of a batch whose rows lie on several ranks
log_lines.py    the rank in every log line of Hotbed, and in warnings
own_batches.py  OwnBatchLookup: the verbs of a lookup for ranks that each have a batch of their own
placement.py    Placement: which rank owns which rows and computes which grains
probe.py        measure how fast the ranks of a job reach each other
ranks.py        Ranks: the processes of a job, and what they send each other
roll_call.py    which ranks are gone, or have left a call by an error
sharded.py      ShardedLookup: the verbs of a lookup over the rows of all ranks
shards.py       Shard: the rows that a process holds, for those who write and read states
software.py     the software of a process, which all ranks must have alike
traffic.py      Traffic and RankWork: what a rank sent, how long it waited, and what it trained
world.py        the number of processes that train, and whether and how they may
"""

from .calls import at
from .counters import Counters, sum_counters
from .decoding import SharedDecoding
from .dense import DenseExchange, DensePart, LocalDense, RankDense, joined
from .exchange import TableExchange
from .own_batches import OwnBatchLookup, reduced
from .placement import Placement
from .ranks import FAULT, Ranks, Requirement, digest_of, portable, together
from .sharded import ShardedLookup
from .shards import WHOLE, RankShard, Shard, edits_of
from .software import digest_of_files
from .traffic import RankWork

__all__ = [
    "FAULT",
    "WHOLE",
    "Counters",
    "DensePart",
    "DenseExchange",
    "LocalDense",
    "OwnBatchLookup",
    "Placement",
    "RankDense",
    "RankShard",
    "RankWork",
    "Ranks",
    "Requirement",
    "Shard",
    "SharedDecoding",
    "ShardedLookup",
    "TableExchange",
    "at",
    "digest_of",
    "digest_of_files",
    "edits_of",
    "joined",
    "portable",
    "reduced",
    "sum_counters",
    "together",
]
