# SPDX-License-Identifier: Apache-2.0
"""One job on several processes, called ranks: the rows of each table are spread over them.

dense.py      DenseExchange: losses, gradients and buffers of the dense part, added over ranks
exchange.py   TableExchange: the rows of a batch, and their gradients, between ranks
halves.py     the order in which values of grains are added
ids.py        AskedIds and OwnedIds: the ids of a batch whose rows lie on several ranks
placement.py  Placement: which rank owns which rows and computes which grains
ranks.py      Ranks: the processes of a job, and what they send each other
sharded.py    ShardedLookup: the verbs of a lookup over the rows of all ranks
"""

from .dense import DenseExchange
from .exchange import TableExchange
from .halves import joined
from .ids import AskedIds, has_fault
from .placement import Placement
from .ranks import Ranks
from .sharded import ShardedLookup

__all__ = [
    "AskedIds",
    "DenseExchange",
    "Placement",
    "Ranks",
    "ShardedLookup",
    "TableExchange",
    "has_fault",
    "joined",
]
