# SPDX-License-Identifier: Apache-2.0
"""What a join of streams holds open, in a checkpoint: Arrow files, which are not published.

A full holds all rows, a delta those that came since its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from hotbed.connectors.join.states import TIME
from hotbed.connectors.live import SavedRows
from hotbed.persist.container.format import CheckpointWriter, Link, Reader
from hotbed.persist.container.manifest import OpenRowsEntry


def write_open_rows(writer: CheckpointWriter, rows: SavedRows) -> OpenRowsEntry:
    """Write what is open as files of a checkpoint; return their entry in the manifest."""
    files: dict[str, str] = {}
    for log in rows.opened:
        file = f"open_rows/{log}.arrow"
        if writer.write_batches(file, rows.batches(log)):
            files[log] = file
    return OpenRowsEntry(opened=dict(rows.opened), oldest=rows.oldest, files=files)


def read_open_rows(reader: Reader) -> SavedRows | None:
    """Return what a join of streams held open in a state; None without one."""
    entry = reader.manifest.open_rows
    if entry is None:
        return None
    return _ReadRows(reader.links, entry.opened, entry.oldest)


@dataclass(frozen=True)
class _ReadRows:
    """What was open in a state: a full first, then deltas."""

    links: tuple[Link, ...]
    opened: Mapping[str, int]
    oldest: int

    def batches(self, log: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a log that are still needed, in the order of their arrival."""
        for link in self.links:
            entry = link.manifest.open_rows
            if entry is None or log not in entry.files:
                continue
            for batch in link.batches(entry.files[log]):
                times = batch.column(TIME).to_numpy()
                rows = batch.filter(pa.array(times >= self.oldest))
                if rows.num_rows:
                    yield rows
