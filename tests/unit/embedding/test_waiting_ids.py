# SPDX-License-Identifier: Apache-2.0
"""Ids that wait for admission: counted in bounded memory, never too little, and never forgotten
before their time.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.config import build
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import Admission, sketch_layout
from hotbed.errors import ConfigError, FormatError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import restore

pytestmark = pytest.mark.core

LITTLE = 1 << 16  # counts 8 ids of a partition exactly
DAY = 86_400_000_000
CROWD = np.arange(60_000)[partition(np.arange(60_000)) == 3]


def waiting(admit: Any, ids: np.ndarray = CROWD, **policies: Any) -> hb.Table:
    """Return a table in which ids were seen once."""
    table = hb.Table("user", 2, admit=admit, **policies)
    table.find_or_insert(ids, 0 if policies else None)
    return table


def state_of(table: hb.Table) -> list[Any]:
    return [list(table.export()), list(table.candidates()), list(table.sketch()), table.scalars()]


@settings(suppress_health_check=list(HealthCheck))
@given(
    count=st.sampled_from([2, 3, 5, 40, 300]),
    coefficient=st.integers(1, 3),
    memory=st.sampled_from([1 << 16, 1 << 18, 3 << 18]),
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 120), st.integers(1, 3)), max_size=25
    ),
)
def test_no_id_is_admitted_later_than_its_exact_count_says(
    count: int, coefficient: int, memory: int, steps: list[tuple[int, int, int]]
) -> None:
    table = hb.Table("user", 1, admit=hb.MinCount(count, coefficient, admission_bytes=memory))
    counts: Counter[int] = Counter()
    for start, num_ids, times in steps:
        ids = np.repeat(CROWD[start : start + num_ids], times)
        counts.update(ids.tolist())
        admitted = table.find_or_insert(ids) >= 0
        due = [counts[id] * coefficient >= count for id in ids.tolist()]
        assert admitted[due].all()


@settings(suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 4), st.integers(-3, 0)),
        max_size=30,
    )
)
def test_a_sketch_forgets_no_id_before_it_expires(steps: list[tuple[int, int, int, int]]) -> None:
    """An id waits as long as an exact dict lets it, and its sightings may come late."""
    admit = hb.MinCount(4, expire_seconds=5, admission_bytes=LITTLE)
    table = hb.Table("user", 1, admit=admit)
    exact: dict[int, tuple[int, int]] = {}  # count, last seen
    now = 0
    for start, num_ids, pause, late in steps:
        now += pause
        seen = max(0, now + late)
        ids = CROWD[start : start + num_ids]
        admitted = table.find_or_insert(ids, seen * 1_000_000) >= 0
        for id, has_row in zip(ids.tolist(), admitted.tolist(), strict=True):
            before, last = exact.get(id, (0, seen))
            exact[id] = (before + 1, max(last, seen))
            assert has_row or before + 1 < 4
            if has_row:  # from here on the row counts
                exact[id] = (4, 10**9)
        table.evict(now * 1_000_000)
        exact = {id: own for id, own in exact.items() if now - own[1] < 5}


def test_a_tail_of_millions_is_admitted_at_its_second_sighting() -> None:
    """Above the 1,048,576 ids at which counts were halved before."""
    table = hb.Table("user", 1, admit=hb.MinCount(2))
    table.find_or_insert(np.arange(1_000))
    for ids in np.arange(10_000, 1_310_000).reshape(13, -1):
        table.find_or_insert(ids)
    assert (table.find_or_insert(np.arange(1_000)) >= 0).all()
    assert table.stats["sketched_partitions"] == 0
    assert len(table) == 1_000


@pytest.mark.parametrize("admit", [hb.MinCount(2), hb.MinCount(2, expire_seconds=9)], ids=repr)
def test_waiting_ids_stay_within_their_memory(admit: hb.MinCount) -> None:
    bound = 1 << 20
    policy = hb.MinCount(2, expire_seconds=admit.expire_seconds, admission_bytes=bound)
    table = hb.Table("user", 1, admit=policy)
    most = 0
    for ids in np.arange(300_000).reshape(30, -1):
        table.find_or_insert(ids, 0)
        most = max(most, table.stats["candidate_bytes"])
    assert 0.98 * bound < most <= bound
    assert table.stats["sketched_partitions"] == 256
    # stated in docs/embedding.md: an id that is new is taken for one that waits at this rate
    layout = sketch_layout(policy)
    assert layout is not None
    expected = (1 - np.exp(-300_000 / 256 / layout.width)) ** 4
    early = (table.find_or_insert(np.arange(-20_000, 0), 0) >= 0).mean()
    assert early < 2 * expected + 0.01


def test_a_waiting_id_takes_29_to_43_bytes() -> None:
    table = hb.Table("user", 1, admit=hb.MinCount(2))
    sizes = []
    for ids in np.arange(600_000).reshape(60, -1):
        table.find_or_insert(ids)
        sizes.append(table.stats["candidate_bytes"] / (ids[-1] + 1))
    assert min(sizes[20:]) > 28.8
    assert max(sizes[20:]) < 43.3


def test_the_beginning_of_estimates_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="hotbed")
    table = waiting(hb.MinCount(2, admission_bytes=LITTLE), CROWD[:8])
    assert table.stats["sketched_partitions"] == 0
    assert not caplog.records
    for _ in range(3):
        table.find_or_insert(CROWD[:20])
    assert table.stats["sketched_partitions"] == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'user'" in message
    assert "admission_bytes=65,536" in message


def test_a_module_logs_that_estimates_begin(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    table = hb.Table("user", 2, admit=hb.Probability(0.0, admission_bytes=LITTLE))
    hb.Embedding(table)(torch.from_numpy(CROWD))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


SAVED = {
    "counts": hb.MinCount(3, admission_bytes=LITTLE),
    "wide counts": hb.MinCount(300, coefficient=70, admission_bytes=LITTLE),
    "expiring": hb.MinCount(3, expire_seconds=4 * 86_400, admission_bytes=LITTLE),
    "probability": hb.Probability(0.2, admission_bytes=LITTLE),
}


def learn(table: hb.Table, day: int) -> None:
    random = np.random.default_rng(day)
    ids = CROWD[random.integers(0, len(CROWD), 120)]
    slots = table.find_or_insert(ids, day * DAY)
    table.update(slots, random.normal(size=(len(ids), 2)).astype(np.float32))
    table.evict(day * DAY)


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("way", ["checkpoint", "copy", "state_dict"])
def test_a_loaded_sketch_counts_on_bit_for_bit(kind: str, way: str, tmp_path: Path) -> None:
    table = hb.Table("user", 2, admit=SAVED[kind], evict=hb.Ttl(days=3))
    other = hb.Table("user", 2, admit=SAVED[kind], evict=hb.Ttl(days=3))
    for day in range(10):
        learn(table, day)
    assert table.stats["sketched_partitions"] == 1
    if way == "checkpoint":
        save(tmp_path, State(tables={"user": table}))
        restore(open_checkpoint(tmp_path), State(tables={"user": other}))
    elif way == "copy":
        other = copy.deepcopy(table)
    else:
        pytest.importorskip("torch")
        hb.Embedding(other).load_state_dict(hb.Embedding(table).state_dict())
    assert state_of(table) == state_of(other)
    for day in range(10, 20):
        learn(table, day)
        learn(other, day)
    assert state_of(table) == state_of(other)
    assert content_digest({"user": table}) == content_digest({"user": other})


@pytest.mark.parametrize("memory", [1 << 16, 1 << 18, 1 << 22])
@pytest.mark.parametrize("count", [2, 4, 500])
def test_memory_and_threshold_may_change_at_a_resume_and_no_count_is_lost(
    memory: int, count: int, tmp_path: Path
) -> None:
    table = hb.Table("user", 2, admit=hb.MinCount(4, admission_bytes=LITTLE * 2))
    for _ in range(3):
        table.find_or_insert(CROWD[:40])
    save(tmp_path, State(tables={"user": table}))
    other = hb.Table("user", 2, admit=hb.MinCount(count, admission_bytes=memory))
    restore(open_checkpoint(tmp_path), State(tables={"user": other}))
    admitted = other.find_or_insert(CROWD[:40]) >= 0
    assert admitted.all() == (count <= 4)


def test_exact_counts_become_a_sketch_where_they_are_loaded_into_less_memory() -> None:
    table = waiting(hb.MinCount(2), CROWD[:100])
    other = hb.Table("user", 2, admit=hb.MinCount(2, admission_bytes=LITTLE))
    other.load_candidates(table.candidates())
    assert other.stats["sketched_partitions"] == 1
    assert (other.find_or_insert(CROWD[:100]) >= 0).all()


def test_a_threshold_that_rises_admits_no_id_late() -> None:
    """Cells of two bits count to three; more stands for any number."""
    table = waiting(hb.MinCount(2, admission_bytes=LITTLE))
    table.set_min_count(10)
    sightings = 1
    while (table.find_or_insert(CROWD[:5]) < 0).any():
        sightings += 1
    assert sightings < 10


def test_states_of_earlier_versions_keep_their_bound_and_its_meaning(tmp_path: Path) -> None:
    """With `max_candidates`, a full map halves its counts."""
    admit = hb.MinCount(3, max_candidates=2_560)
    table = waiting(admit, np.repeat(CROWD[:10], 2))
    folder = save(tmp_path, State(tables={"user": table})).folder
    assert '"max_candidates": 2560' in (Path(folder) / "MANIFEST.json").read_text()
    saved = open_checkpoint(tmp_path).manifest.tables[0]
    other = hb.Table("user", 2, admit=hb.MinCount(3, max_candidates=2_560))
    assert saved.sketch is None
    restore(open_checkpoint(tmp_path), State(tables={"user": other}))
    other.find_or_insert(CROWD[20:21])  # 2 -> 1
    assert (other.find_or_insert(CROWD[:10]) < 0).all()
    assert other.stats["sketched_partitions"] == 0


@pytest.mark.parametrize(
    "damage, problem",
    [
        ({"bits": pa.array([4], pa.uint8())}, "a cell must have 2 bits"),
        ({"generation": pa.array([1], pa.uint8())}, "a sketch has 1 generations"),
        ({"newest": pa.array([1.0])}, "must be int64"),
        ({"partition": None}, "are missing"),
    ],
)
def test_a_damaged_sketch_is_refused_by_name(
    damage: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    table = waiting(hb.MinCount(2, admission_bytes=LITTLE))
    (batch,) = table.sketch()
    columns = {name: batch.column(name) for name in batch.schema.names} | damage
    wrong = pa.record_batch({name: own for name, own in columns.items() if own is not None})
    table.sketch = lambda: iter([wrong])  # type: ignore[method-assign]
    save(tmp_path, State(tables={"user": table}))
    other = hb.Table("user", 2, admit=table.admit)
    with pytest.raises(FormatError, match=rf"sketch\.arrow: .*{problem}"):
        restore(open_checkpoint(tmp_path), State(tables={"user": other}))


@pytest.mark.parametrize("days", [(1, 10), (10, 1), (3, 10, 1)])
@pytest.mark.parametrize("evict", [hb.Ttl(days=5), [hb.Ttl(days=5), hb.Lru(1024)]], ids=repr)
def test_the_age_of_a_row_begins_at_its_newest_sighting(days: tuple[int, ...], evict: Any) -> None:
    """Also if the id was refused then, and admitted at a late event; exact counts know it."""
    table = hb.Table("item", 2, admit=hb.MinCount(len(days)), evict=evict)
    for day in days:
        table.find_or_insert(np.array([7]), time=day * DAY)
    assert pa.Table.from_batches(table.export())["last_seen"].to_pylist() == [10 * DAY]
    table.find_or_insert(np.array([7]), time=2 * DAY)  # a late event never ages a row
    assert table.evict(int(14.9 * DAY)) == 0
    assert table.evict(15 * DAY) == 1


def test_memory_is_set_by_a_job_and_by_make_tables() -> None:
    job = build({"kind": "min_count", "count": 2, "admission_bytes": LITTLE}, Admission)
    assert job == hb.MinCount(2, admission_bytes=LITTLE)
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
    tables = hb.make_tables(schema, 2, admit=hb.MinCount(2), overrides={"user": {"admit": job}})
    for table in tables.values():
        table.find_or_insert(CROWD)
    assert [table.stats["sketched_partitions"] for table in tables.values()] == [1, 0]


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: hb.MinCount(2, admission_bytes=1000), "MinCount.admission_bytes: must be"),
        (lambda: hb.Probability(0.5, admission_bytes=1 << 39), "Probability.admission_bytes: must"),
        (
            lambda: hb.MinCount(2, admission_bytes=1 << 20, max_candidates=512),
            "MinCount.admission_bytes: one bound is enough, got 1048576 with max_candidates=512",
        ),
        (
            lambda: hb.Probability(0.5, admission_bytes=1 << 20, sketch_bytes=1 << 16),
            "Probability.admission_bytes: one bound is enough",
        ),
    ],
)
def test_wrong_memory_is_an_error_that_names_it(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
