# SPDX-License-Identifier: Apache-2.0
"""A snapshot is the table of its moment, whatever happens while it is read; changes since the last
one rebuild it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_disk import on_disk

import hotbed as hb
from hotbed.embedding.hashing import partition
from hotbed.errors import ConfigError, PersistError, TableFull

pytestmark = pytest.mark.core

SECOND = 1_000_000
CROWDED = [int(i) for i in np.arange(6_000) if partition([i])[0] in (3, 200)][:24]
IDS = st.one_of(st.sampled_from([-1, 0, -(2**63), 2**63 - 1]), st.sampled_from(CROWDED))
BATCH = st.lists(IDS, max_size=10).map(lambda ids: np.array(ids, np.int64))
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "admission": {"admit": hb.MinCount(3)},
    "sketch": {"admit": hb.MinCount(2, sketch_bytes=1 << 16)},
    "memory": {"admit": hb.MinCount(3, admission_bytes=1 << 16, expire_seconds=6)},
    "ttl": {"evict": hb.Ttl(seconds=4), "admit": hb.MinCount(2, expire_seconds=6)},
    "steps": {"evict": hb.Ttl(steps=2), "admit": hb.MinCount(2, expire_steps=3)},
    "lru": {"evict": hb.Lru(1024)},
    "lfu": {"evict": [hb.Ttl(seconds=6), hb.Lfu(1024, half_life_seconds=3)]},
    "half": {"dtype": "bfloat16", "evict": hb.Ttl(seconds=4)},
    "on_disk": {"tier": on_disk(20), "evict": [hb.Ttl(seconds=6), hb.Lru(1024)]},
    "halves_on_disk": {"tier": on_disk(20), "dtype": "float16", "evict": hb.Lfu(1024)},
}
WORK = st.lists(
    st.tuples(
        st.sampled_from(["learn", "learn", "crowd", "evict", "sweep", "remove", "look"]), BATCH
    ),
    max_size=12,
)


class Life:
    """Does things to a table, as training would."""

    def __init__(self, table: Any) -> None:
        self.table, self.now, self.n = table, 0, 0

    def __call__(self, what: str, ids: np.ndarray) -> None:
        with contextlib.suppress(TableFull):
            self._do(what, ids)

    def _do(self, what: str, ids: np.ndarray) -> None:
        self.now, self.n = self.now + 700_003, self.n + 1
        table = self.table
        if what == "learn":
            slots = table.find_or_insert(ids, self.now)
            table.update(
                slots, np.random.default_rng(self.n).normal(size=(len(ids), 3)).astype(np.float32)
            )
        elif what == "crowd":  # fills partitions, so that Lru and Lfu must evict
            table.find_or_insert(np.arange(900 * self.n, 900 * self.n + 400), self.now)
        elif what == "evict":
            table.evict(self.now)
        elif what == "sweep":
            table.evict(self.now, range(100))
        elif what == "remove":
            table.remove(ids)
        else:
            table.lookup(ids)


def state_of(batches: Any) -> dict[str, Any]:
    batches = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(batches).to_pydict() if batches else {}


def everything(table: Any) -> tuple[Any, ...]:
    waiting = (state_of(table.candidates()), list(table.sketch()))
    return state_of(table.export()), waiting, table.scalars()


@pytest.mark.parametrize("kind", list(TABLES))
@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=list(HealthCheck))
@given(
    before=WORK,
    between=WORK,
    meanwhile=WORK,
    order=st.permutations(range(4)),
    changes=st.booleans(),
)
def test_a_snapshot_is_the_table_of_its_moment(
    kind: str, before: Any, between: Any, meanwhile: Any, order: list[int], changes: bool
) -> None:
    table = hb.Table("t", 3, **TABLES[kind])
    table.track()
    life = Life(table)
    for step in before:
        life(*step)
    with table.snapshot() as first:
        base = list(first.rows())
    for step in between:
        life(*step)
    snapshot = table.snapshot(changes)
    rows, waiting, _ = everything(table)
    parts = [range(64 * i, 64 * i + 64) for i in order]
    found: list[pa.RecordBatch] = []
    gone: list[pa.RecordBatch] = []
    for i, part in enumerate(parts):  # training goes on between the parts
        for step in meanwhile[i::4]:
            life(*step)
        found += snapshot.rows(part)
        gone += snapshot.removed(part)
    waiting_then = (state_of(snapshot.candidates()), list(snapshot.sketch()))
    snapshot.close(saved=True)
    other = hb.Table("t", 3, **TABLES[kind])
    if changes:
        other.load(base)
        for batch in gone:
            other.remove(batch.column("id").to_numpy())
    other.load(found)
    assert state_of(other.export()) == rows
    assert waiting_then == waiting


@settings(suppress_health_check=list(HealthCheck))
@given(
    work=st.lists(WORK, min_size=1, max_size=5),
    fates=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_a_snapshot_that_was_not_saved_gives_its_changes_back(work: Any, fates: list[bool]) -> None:
    table = hb.Table("t", 3, evict=[hb.Ttl(seconds=6), hb.Lru(1024)])
    table.track()
    with table.snapshot():
        pass
    life, copy = Life(table), hb.Table("t", 3, evict=[hb.Ttl(seconds=6), hb.Lru(1024)])
    for steps, saved in zip(work, [*fates[: len(work) - 1], True], strict=False):
        for step in steps:
            life(*step)
        snapshot = table.snapshot(changes=True)
        rows, gone = list(snapshot.rows()), list(snapshot.removed())
        snapshot.close(saved=saved)
        if saved:
            for batch in gone:
                copy.remove(batch.column("id").to_numpy())
            copy.load(rows)
    with table.snapshot() as last:
        assert state_of(copy.export()) == state_of(last.rows())


def test_only_what_changed_is_in_the_changes() -> None:
    table = hb.Table("t", 2)
    table.find_or_insert(np.arange(10_000))
    table.track()
    with table.snapshot(changes=True) as first:
        assert first.num_rows >= 10_000
    table.update(table.find(np.array([5, 7])), np.ones((2, 2), np.float32))
    table.lookup(np.arange(100))
    table.remove(np.array([9]))
    with table.snapshot(changes=True) as second:
        assert sorted(state_of(second.rows())["id"]) == [5, 7]
        assert state_of(second.removed())["id"] == [9]
    with table.snapshot(changes=True) as third:
        assert (third.num_rows, state_of(third.rows()), state_of(third.removed())) == (0, {}, {})


def test_a_picture_taken_on_another_thread_while_training_runs_is_that_of_its_moment() -> None:
    table = hb.Table("t", 4, evict=hb.Ttl(seconds=3))
    table.track()
    life = Life(table)
    life.now = 0
    ids = np.arange(60_000)
    table.find_or_insert(ids, 0)
    snapshot = table.snapshot()
    expected = state_of(table.export())
    found: list[pa.RecordBatch] = []
    reader = threading.Thread(target=lambda: found.extend(snapshot.rows()))
    reader.start()
    draw = np.random.default_rng(0)
    while reader.is_alive():
        batch = draw.integers(0, 90_000, 2_000)
        slots = table.find_or_insert(batch, life.now)
        table.update(slots, np.ones((len(batch), 4), np.float32))
        life.now += 500_000
        table.evict(life.now)
    reader.join()
    snapshot.close(saved=True)
    assert state_of(found) == expected


def test_rules_that_move_idle_rows_refuse_deltas_and_give_whole_pictures() -> None:
    table = hb.Table("t", 2, rule=hb.Adam(lr=0.1, scope="catch_up", decay=0.01))
    with pytest.raises(ConfigError, match="catch_up"):
        table.track()
    for _ in range(3):
        table.update(table.find_or_insert(np.arange(50)), np.ones((50, 2), np.float32))
    table.update(table.find_or_insert(np.arange(5)), np.ones((5, 2), np.float32))
    with table.snapshot() as snapshot:
        expected = state_of(table.export())
        table.update(table.find_or_insert(np.arange(50)), np.ones((50, 2), np.float32))
        assert state_of(snapshot.rows()) == expected


def test_a_second_snapshot_waits_for_the_first() -> None:
    table = hb.Table("t", 2)
    with table.snapshot(), pytest.raises(PersistError, match="one snapshot at a time"):
        table.snapshot()
    table.snapshot().close(saved=True)
