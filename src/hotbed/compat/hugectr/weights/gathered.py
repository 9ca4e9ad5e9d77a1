# SPDX-License-Identifier: Apache-2.0
"""GatheredRows: the rows of a table that several ranks share, for files that one of them writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Table
from hotbed.parallel import Shard

_SPAN = 16
"""Partitions that are gathered at a time."""


class GatheredRows:
    """The rows of a table of all ranks, in a file of the first one, which reads them as a table's.

    Args:
        table: has the rows of this rank.
        shard: of the ranks, which make this together.
        path: of the file.
    """

    def __init__(self, table: Table, shard: Shard, path: Path) -> None:
        self.name = table.name
        self.dim = table.dim
        self.rule = table.rule
        self.step = table.step
        self.state_width = table.state_width
        self._path = path
        self._num_rows = 0
        with pa.OSFile(str(path), "wb") if shard.is_first else pa.BufferOutputStream() as file:
            self._gather(table, shard, file)

    def __len__(self) -> int:
        return self._num_rows

    def export(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows as `Table.export` does."""
        if self._num_rows:
            with pa.OSFile(str(self._path)) as file:
                yield from pa.ipc.open_stream(file)

    def _gather(self, table: Table, shard: Shard, file: pa.NativeFile) -> None:
        stream = None
        for first in range(0, PARTITIONS, _SPAN):
            batches = list(shard.collected(table.export(range(first, first + _SPAN))))
            with shard.together():
                for batch in batches:
                    stream = stream or pa.ipc.new_stream(file, batch.schema)
                    stream.write_batch(batch)
                    self._num_rows += batch.num_rows
        if stream is not None:
            stream.close()


Rows = Table | GatheredRows
"""The rows of one process, or of all ranks."""
