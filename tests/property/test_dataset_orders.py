# SPDX-License-Identifier: Apache-2.0
"""Whatever the cuts, batch size, shuffle and bad rows: each row once, and any position resumes
exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.connectors import Position, Source
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.data import Dataset, Dense, Id, Schema

pytestmark = pytest.mark.core
SCHEMA = Schema([Id("row"), Dense("x")])


@dataclass(frozen=True)
class Cut(Source):
    """Rows 0 .. n - 1, cut into batches of `sizes` in turn; a resumed reader cuts elsewhere. `bad`
    rows have no x.
    """

    n: int
    sizes: tuple[int, ...]
    bad: frozenset[int] = frozenset()

    def schema(self) -> pa.Schema:
        return pa.schema([("row", pa.int64()), ("x", pa.float64())])

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        row, step = (position["row"] if position else 0), 0
        while row < self.n:
            stop = min(self.n, row + self.sizes[step % len(self.sizes)])
            x = [None if i in self.bad else float(i) for i in range(row, stop)]
            yield (
                pa.record_batch({"row": pa.array(range(row, stop)), "x": x}, schema=self.schema()),
                Position({"row": stop}),
            )
            row, step = stop, step + 1


sources = st.builds(
    Cut,
    n=st.integers(0, 80),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    bad=st.frozensets(st.integers(0, 80), max_size=10),
)


def rows(dataset: Any) -> list[list[int]]:
    return [batch.ids["row"].values.tolist() for batch in dataset]


@settings(max_examples=3 * settings.default.max_examples)
@given(
    source=sources,
    batch_size=st.integers(1, 30),
    shuffle=st.integers(0, 60),
    cache=st.booleans(),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_every_order_is_exact(
    source: Cut, batch_size: int, shuffle: int, cache: bool, epoch: int, data: st.DataObject
) -> None:
    def make() -> Dataset:
        return Dataset(
            source, SCHEMA, batch_size, shuffle, on_error="skip", prefetch=0, cache=cache
        )

    batches = list(make().epoch(epoch))
    expected = [row for row in range(source.n) if row not in source.bad]
    assert sorted(row for batch in rows(batches) for row in batch) == expected
    if shuffle <= 1 and not (cache and shuffle):
        assert [row for batch in rows(batches) for row in batch] == expected
    assert all(batch.num_samples == batch_size for batch in batches[:-1])
    if batches:
        at = data.draw(st.integers(0, len(batches) - 1))
        position = json.dumps(batches[at].position.to_json())
        resumed = make().resume(position)
        assert rows(resumed) == rows(batches[at + 1 :])
        assert rows(resumed) == rows(make().epoch(epoch + 1))
