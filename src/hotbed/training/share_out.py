# SPDX-License-Identifier: Apache-2.0
"""Which features of a fit each of several ranks reads, and what they compare of the data."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors import Concat, Memory, Prepared, Source
from hotbed.connectors.file_identity import FileIdentity
from hotbed.connectors.files import FileSource
from hotbed.connectors.source import Slice, TableJoin
from hotbed.data.dataset import Dataset
from hotbed.objects import Identity, is_url
from hotbed.parallel import Requirement
from hotbed.training.run import Callbacks, Goal, Observer
from hotbed.training.step.fetcher import Fetcher
from hotbed.training.step.learner import SelfUpdating, StepLearner

SHOWN_ROWS = 256
"""Rows in memory that are compared, evenly spread."""

SAME_DATA = Requirement(
    "read the same data, each some of its rows",
    "Give each rank the same files or rows, schema, batch_size, order and seed.",
)


def own_grains(
    goal: Goal, callbacks: Callbacks, observer: Observer | None, learner: StepLearner | SelfUpdating
) -> range | None:
    """Return the grains whose ids and dense columns this rank reads in a fit; None = those of all.

    Raises:
        ConfigError: on every rank: they would read parts of different data.
    """
    shard = learner.shard
    if shard.size == 1 or goal.online:
        return None
    data = goal.dataset
    rows = None
    if isinstance(data, Dataset) and data.can_share_out and learner.own_grains is not None:
        rows = identity_of(data.source)
    # tables on a disk fetch rows of coming batches by the ids of all grains
    fetches = Fetcher.of(learner.network) is not None
    reads_all = rows is None or fetches or observer is not None or callbacks.reads_features
    if shard.any(reads_all):
        return None
    assert isinstance(data, Dataset), "its rows are known"
    settings = {
        "rows": rows,
        "schema": data.schema.to_json(),
        "batch_size": data.batch_size,
        "drop_last": data.drop_last,
        "shuffle and seed": (data.shuffle, data.seed),
    }
    shard.check_equal(settings, SAME_DATA)
    return learner.own_grains


def identity_of(source: Source) -> Any:
    """Return plain values that differ where the rows do, as far as some of them show.

    Of a file these are its size, and a digest of its first and last 64 KiB; of an object its size
    and its tag. None = not known.
    """
    if isinstance(source, Memory):
        return _shown_rows(source)
    if isinstance(source, Prepared):
        return [source.num_rows(), source.settings]
    if isinstance(source, FileSource):
        files = []
        for file in source.files():
            name = os.path.basename(file)
            if is_url(file):
                there = Identity.of(file)
                files.append([name, there.size, there.mark])
            else:
                identity = FileIdentity.of(file, os.path.getsize(file))
                files.append([name, identity.size, identity.digest])
        return [source.settings, files]
    if isinstance(source, Slice):
        return _of_all([source.source], source.start, source.stop)
    if isinstance(source, TableJoin):
        return _of_all([source.source, source.table], source.on, source.table_on)
    if isinstance(source, Concat):
        return _of_all(source.sources)
    return None


def _of_all(sources: Any, *arguments: Any) -> Any:
    parts = [identity_of(source) for source in sources]
    return None if None in parts else [*parts, *arguments]


def _shown_rows(source: Memory) -> Any:
    table = source.table
    places = np.unique(np.linspace(0, table.num_rows - 1, SHOWN_ROWS, dtype=np.int64))
    rows = pa.concat_tables([table.slice(place, 1) for place in places])
    digest = 0
    for column in rows.columns:  # as text, since Python has no object for some values
        values = column.combine_chunks()
        text = values.to_string(window=SHOWN_ROWS, container_window=SHOWN_ROWS)
        digest = zlib.crc32(text.encode(errors="surrogatepass"), digest)
    types = [f"{column.name}: {column.type}" for column in table.schema]
    return [table.num_rows, types, digest]
