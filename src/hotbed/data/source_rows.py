# SPDX-License-Identifier: Apache-2.0
"""SourceRows: the rows of one reading of a source, and what the source knows meanwhile."""

from __future__ import annotations

from hotbed.connectors import Position, Source
from hotbed.connectors.position import Batches
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.status import UNKNOWN, SourceStatus, ended, status_of


class SourceRows:
    """The rows of one reading of a source, and its status."""

    def __init__(self) -> None:
        self._batches: Batches | None = None  # of an endless source

    @property
    def status(self) -> SourceStatus:
        """What an endless source knows now."""
        return UNKNOWN if self._batches is None else status_of(self._batches)

    def read(
        self, source: Source, position: Position | None, batch_rows: int, plan: ReadPlan
    ) -> Batches:
        """Yield what `source.read` yields."""
        batches = source.read(position, batch_rows, plan)
        if source.endless:
            self._batches = batches
        with ended(batches):
            yield from batches
