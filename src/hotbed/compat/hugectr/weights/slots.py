# SPDX-License-Identifier: Apache-2.0
"""SlotsOfKeys: which slot the keys of a localized embedding were read for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.weights.rows import batches
from hotbed.data.batch import Batch
from hotbed.embedding.init import Constant
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.rule import Sgd
from hotbed.embedding.table import Table
from hotbed.parallel import Shard

_UNKNOWN = 0.0


class SlotsOfKeys:
    """Keeps the slot of each key, for files of a localized embedding whose slots share keys.

    A key that is read for several slots has the one that it was read for last, as in HugeCTR.

    Args:
        columns: the Id column of each slot.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._slots = Table("slots", 1, rule=Sgd(), init=Constant(_UNKNOWN))
        self._lock = threading.Lock()  # batches come from the reading thread

    def __call__(self, batch: Batch) -> Batch:
        """Keep the slots of the keys of a batch."""
        for slot, name in enumerate(self._columns):
            keys = batch.ids[name].values
            if (self.of(keys) != slot).any():
                self.keep(keys, np.repeat(slot, len(keys)))
        return batch

    def keep(self, keys: NDArray[Any], slots: NDArray[Any]) -> None:
        """Keep the slots of keys."""
        with self._lock:
            self._slots.load(batches(keys, slots.reshape(-1, 1)))

    def gather(self, shard: Shard) -> None:
        """Keep what other ranks have kept, on the first one; all ranks call this together."""
        with self._lock:
            self._slots.load(shard.collected(self._slots.export(range(PARTITIONS))))

    def of(self, keys: NDArray[Any]) -> NDArray[np.float32]:
        """Return the slot of each key, [n]; 0 for a key that was not read."""
        with self._lock:
            return self._slots.lookup(keys)[:, 0]
