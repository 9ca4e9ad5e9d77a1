# SPDX-License-Identifier: Apache-2.0
"""An endless source over rows in memory, whose clock follows a script."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from hotbed.connectors.live import Live
from hotbed.connectors.memory import Memory
from hotbed.connectors.position import OPENED, PLACE, TICK, Position
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.status import SourceReading, SourceStatus


@dataclass(frozen=True, eq=False)
class FakeStream(Source):
    """An endless source over rows in memory, whose clock follows a script: Kafka without a broker.

    Blocks that are on record in the journal are read as they were decided; the script is used only
    after them.

    Args:
        rows: the rows, as for `hb.sources.Memory`.
        takes: the script: each number is a block of that many rows, 0 is a tick.
        then: the number that is repeated after the script; 0 = ticks for ever.
        ends: stop after the last row, which a real stream never does.
        fails: raise OSError when more than this number of rows were read; None = never.
        commits: the list to which `commit` adds its positions.

    Example:
        >>> stream = FakeStream({"user": [1, 2, 3], "label": [0, 1, 0]}, takes=[2, 0], then=1)
        >>> dataset = hb.Dataset(stream, schema, 2)
    """

    rows: Mapping[str, Any] | pa.Table
    takes: Sequence[int] = ()
    then: int = 100
    ends: bool = False
    fails: int | None = None
    commits: list[Position] = field(default_factory=list)

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        return Memory(self.rows).schema()

    def commit(self, position: Position) -> None:
        self.commits.append(position)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        table = Memory(self.rows).table
        names = table.schema.names
        if plan.columns is not None:
            names = [name for name in names if name in plan.columns]
        state: dict[str, Any] = {"block": 0, "start": 0, "take": None, "row": 0, "now": 0}
        if position is not None and position.state:
            position.require("FakeStream", self)
            state |= position.state
        batches = self._batches(table, names, state, batch_rows, plan.live or Live())

        def status() -> SourceStatus:
            return SourceStatus(table.num_rows - state["start"], is_reached=True)

        return SourceReading(batches, status)

    def _batches(
        self,
        table: pa.Table,
        names: Sequence[str],
        state: dict[str, Any],
        batch_rows: int,
        live: Live,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield the rows after `state`, which follows."""
        script = itertools.chain(self.takes, itertools.repeat(self.then))
        while not (self.ends and state["start"] == table.num_rows):
            if state["take"] is None and not _decide(state, live, script, table.num_rows):
                yield TICK, Position(dict(state))
                continue
            yield OPENED, Position(dict(state))
            block = _block(table, names, state["start"], state["take"])
            yield from self._parts(block, state, batch_rows)

    def _parts(
        self, block: pa.RecordBatch, state: dict[str, Any], batch_rows: int
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield the rest of a block; after its last part, `state` is that of the next block."""
        while state["take"] is not None:
            part = block.slice(state["row"], batch_rows)
            state["row"] += part.num_rows
            if self.fails is not None and state["start"] + state["row"] > self.fails:
                raise OSError(f"the stream broke after {self.fails} rows, as the test asked")
            if state["row"] == block.num_rows:
                state["block"] += 1
                state["start"] = state["take"]
                state["take"] = None
                state["row"] = 0
            yield part, Position(dict(state))


def _decide(state: dict[str, Any], live: Live, script: Iterator[int], num_rows: int) -> bool:
    """Take the block on record, or the script's next, which is put on record; False = a tick."""

    def propose() -> dict[str, Any] | None:
        take = min(next(script), num_rows - state["start"])
        return {"take": state["start"] + take, "now": live.now()} if take else None

    block = live.journal.decide("block", state["block"], propose, dense=True)
    state |= block or {}
    return block is not None


def _block(table: pa.Table, names: Sequence[str], start: int, end: int) -> pa.RecordBatch:
    """Return rows `start` to `end` as one batch, with the place of each."""
    rows = table.slice(start, end - start).combine_chunks()
    places = pa.array([{"row": row} for row in range(start, end)])
    batches: list[pa.RecordBatch] = rows.select(names).append_column(PLACE, places).to_batches()
    return batches[0]
