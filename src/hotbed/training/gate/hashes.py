# SPDX-License-Identifier: Apache-2.0
"""Hashes of events, which are the same in every process and in every run."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.batch import Batch, Ids
from hotbed.training.step.reading import host

Hashes = NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)


def event_hashes(batch: Batch) -> Hashes:
    """Return a hash of the ids, dense columns and time of each sample, uint64 [n].

    Labels are left out: an event whose label is corrected later has the same hash.
    """
    num_samples = batch.num_samples
    hashes = np.zeros(num_samples, np.uint64)
    for name, ids in batch.ids.items():
        hashes = _joined(hashes, _of_samples(ids, id_hashes(name, ids)))
    for values in batch.dense.values():
        numbers = np.asarray(host(values), np.float32).reshape(num_samples, -1)
        for column in numbers.T:
            hashes = _joined(hashes, np.ascontiguousarray(column).view(np.uint32))
    if batch.time is not None:
        hashes = _joined(hashes, np.asarray(host(batch.time), np.int64).view(np.uint64))
    return hashes


def id_hashes(name: str, ids: Ids) -> Hashes:
    """Return a hash of each id of the column `name`, uint64 [m]."""
    salt = np.uint64(zlib.crc32(name.encode()) * int(_ODD) % 2**64)
    return scattered(np.asarray(host(ids.values), np.int64).view(np.uint64) ^ salt)


def scattered(values: Hashes) -> Hashes:
    """Return a hash of each 64-bit number."""
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _of_samples(ids: Ids, hashes: Hashes) -> Hashes:
    """Return the sum of the hashes of the ids of each sample."""
    if ids.offsets is None:
        return hashes
    offsets = np.asarray(host(ids.offsets))
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    sums: Hashes = totals[offsets[1:]] - totals[offsets[:-1]]
    return sums


def _joined(hashes: Hashes, values: NDArray[Any]) -> Hashes:
    """Return hashes of samples with one more value each."""
    return scattered(hashes * _ODD + values.astype(np.uint64))
