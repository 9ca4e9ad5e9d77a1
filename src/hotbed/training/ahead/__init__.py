# SPDX-License-Identifier: Apache-2.0
"""The ids of coming batches are mapped to rows while earlier batches train.

cores.py   how reading, mapping and the dense network share the cores
data.py    Ahead: batches whose ids are mapped to rows on a thread of its own
insert.py  Insert: maps a batch right before its step, or the batches of a Dataset ahead
"""

from hotbed.training.ahead.cores import Cores
from hotbed.training.ahead.data import Ahead, depth_for, unwrap
from hotbed.training.ahead.insert import Insert

__all__ = ["Ahead", "Cores", "Insert", "depth_for", "unwrap"]
