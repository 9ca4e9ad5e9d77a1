# SPDX-License-Identifier: Apache-2.0
"""Promises that every table keeps: the reference, the native one, and each of its policies alone
and together.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from on_disk import on_disk

import hotbed as hb
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import evictions
from hotbed.errors import RowShapeError, TableFull
from hotbed.persist.state.digest import content_digest
from hotbed.testing import TABLE_CHECKS, ReferenceTable, check_table

pytestmark = pytest.mark.core

SECOND = 1_000_000


def make_on_disk(*arguments: Any, rule: Any = None, **keywords: Any) -> hb.Table:
    """A table with few rows in memory; scope "catch_up" has the bits of "all", which it refuses."""
    if rule is not None and rule.scope == "all":
        rule = replace(rule, scope="catch_up")
    return hb.Table(*arguments, rule=rule, **{"tier": on_disk(3_000), **keywords})


TABLES = [
    pytest.param(lambda *a, **k: hb.Table(*a, **k), id="native"),
    pytest.param(make_on_disk, id="on_disk"),
    pytest.param(ReferenceTable, id="reference"),
]
NAMES = {"Table", "ReferenceTable"}
"""The classes of `TABLES`."""
Make = Callable[..., Any]


def ids_of_partition(p: int, n: int) -> np.ndarray:
    ids = np.arange(n * 400)
    return ids[partition(ids) == p][:n].astype(np.int64)


def rows_of(table: Any) -> pa.Table:
    return pa.Table.from_batches(list(table.export()))


def test_every_kind_of_table_is_held_to_its_promises() -> None:
    """A new class with a table's verbs that is not among `TABLES` fails by its name."""
    texts = [file.read_text() for file in Path(hb.__file__).parent.rglob("*.py")]
    kinds = {
        node.name
        for text in texts
        if "def find_or_insert" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any(getattr(part, "name", "") == "find_or_insert" for part in node.body)
    }
    assert kinds == NAMES
    assert {
        type(make("user", 2)).__name__ for (make,) in (table.values for table in TABLES)
    } == NAMES


@pytest.mark.parametrize("check", TABLE_CHECKS, ids=lambda check: check.__name__.strip("_"))
@pytest.mark.parametrize("make", TABLES)
def test_every_table_keeps_the_promise(make: Make, check: Callable[[Make], None]) -> None:
    check(make)


def test_check_table_finds_a_table_that_breaks_a_promise() -> None:
    class FoldsIds(ReferenceTable):
        def find_or_insert(self, ids: Any, time: Any = None) -> np.ndarray:
            return super().find_or_insert(np.abs(np.asarray(ids)), time)

    with pytest.raises(AssertionError):
        check_table(FoldsIds)


@pytest.mark.parametrize("make", TABLES)
class TestAdmission:
    def test_min_count_is_inclusive_and_counts_each_occurrence(self, make: Make) -> None:
        table = make("user", 2, admit=hb.MinCount(3))
        assert (table.find_or_insert(np.array([1, 1, 2])) == -1).all()
        assert (table.find_or_insert(np.array([1, 2])) >= 0).tolist() == [True, False]

    def test_a_coefficient_multiplies_each_occurrence(self, make: Make) -> None:
        table = make("user", 2, admit=hb.MinCount(6, coefficient=3))
        assert (table.find_or_insert(np.array([1, 2, 2])) >= 0).tolist() == [False, True, True]

    @pytest.mark.parametrize("sketch_bytes", [None, 1 << 22])
    def test_once_a_batch_counts_batches(self, make: Make, sketch_bytes: int | None) -> None:
        admit = hb.MinCount(6, coefficient=3, sketch_bytes=sketch_bytes, once_a_batch=True)
        table = make("user", 2, admit=admit)
        assert (table.find_or_insert(np.array([1, 1, 1, 2])) == -1).all()
        assert (table.find_or_insert(np.array([1, 3, 3])) >= 0).tolist() == [True, False, False]

    @pytest.mark.parametrize("admits", [0, 2])
    def test_once_a_batch_counts_rows_by_batches_too(self, make: Make, admits: int) -> None:
        admit = hb.MinCount(admits, once_a_batch=True)
        table = make("user", 2, admit=admit, evict=hb.Lfu(1024))
        for ids in ([5, 5, 5], [5], [5, 5]):
            table.find_or_insert(np.array(ids))
        assert pa.Table.from_batches(table.export())["count"].to_pylist() == [3]

    @pytest.mark.parametrize("count", [None, -1, 0, 1])
    def test_off_zero_and_one_admit_all(self, make: Make, count: int | None) -> None:
        table = make("user", 2, admit=hb.MinCount(count))
        assert (table.find_or_insert(np.array([5, -1])) >= 0).all()

    def test_reads_do_not_count(self, make: Make) -> None:
        table = make("user", 2, admit=hb.MinCount(2))
        for _ in range(5):
            table.find(np.array([1]))
            table.lookup(np.array([1]))
        assert table.find_or_insert(np.array([1]))[0] == -1

    def test_a_sketch_admits_no_later_than_the_exact_map(self, make: Make) -> None:
        exact, sketch = (
            make("user", 2, admit=hb.MinCount(3)),
            make("user", 2, admit=hb.MinCount(3, sketch_bytes=1 << 18)),
        )
        random = np.random.default_rng(0)
        for _ in range(20):
            ids = random.zipf(1.3, 50).astype(np.int64) % 300
            assert (sketch.find_or_insert(ids) >= 0)[exact.find_or_insert(ids) >= 0].all()

    def test_a_large_sketch_counts_exactly(self, make: Make) -> None:
        table, ids = (
            make("user", 2, admit=hb.MinCount(3, sketch_bytes=1 << 22)),
            np.arange(-100, 100),
        )
        assert [(table.find_or_insert(ids) >= 0).sum() for _ in range(3)] == [0, 0, 200]

    def test_candidates_stay_within_their_bound(self, make: Make) -> None:
        table = make("user", 2, admit=hb.MinCount(100, max_candidates=1024))
        for start in range(0, 20_000, 2_000):
            table.find_or_insert(np.arange(start, start + 2_000))
        assert sum(b.num_rows for b in table.candidates() if "id" in b.schema.names) <= 1024

    def test_a_full_map_of_candidates_halves_counts_and_drops_zeros(self, make: Make) -> None:
        table, (a, b, c) = (
            make("user", 2, admit=hb.MinCount(10, max_candidates=512)),
            ids_of_partition(3, 3),
        )
        table.find_or_insert(np.repeat([a, b], [9, 1]))
        table.find_or_insert(np.array([c]))  # 9 -> 4, 1 -> 0
        assert table.find_or_insert(np.repeat(a, 5))[0] == -1
        assert table.find_or_insert(np.array([a]))[0] >= 0
        assert table.find_or_insert(np.repeat(b, 9))[0] == -1
        assert table.find_or_insert(np.array([b]))[0] >= 0

    def test_a_candidate_not_seen_for_long_is_forgotten(self, make: Make) -> None:
        table = make("user", 2, admit=hb.MinCount(2, expire_seconds=10), evict=hb.Ttl(days=1))
        table.find_or_insert(np.array([1, 2]), np.array([0, 5 * SECOND]))
        table.evict(12 * SECOND)
        assert (table.find_or_insert(np.array([1, 2]), 13 * SECOND) >= 0).tolist() == [False, True]

    def test_probability_is_a_function_of_the_id_and_its_count(self, make: Make) -> None:
        ids = np.arange(2_000)
        one, two = (
            make("user", 1, admit=hb.Probability(0.3)),
            make("user", 1, admit=hb.Probability(0.3)),
        )
        first = one.find_or_insert(ids) >= 0
        assert 0.25 < first.mean() < 0.35
        assert ((two.find_or_insert(ids[::-1]) >= 0)[::-1] == first).all()
        assert 0.45 < (one.find_or_insert(ids) >= 0).mean() < 0.57  # 1 - 0.7^2
        other_seed = make("user", 1, admit=hb.Probability(0.3), seed=1)
        assert ((other_seed.find_or_insert(ids) >= 0) != first).any()

    def test_probability_zero_refuses_and_one_admits_all(self, make: Make) -> None:
        assert (
            make("user", 1, admit=hb.Probability(0.0)).find_or_insert(np.arange(50)) == -1
        ).all()
        assert (make("user", 1, admit=hb.Probability(1.0)).find_or_insert(np.arange(50)) >= 0).all()


@pytest.mark.parametrize("make", TABLES)
class TestEviction:
    def test_ttl_is_inclusive(self, make: Make) -> None:
        table = make("user", 1, evict=hb.Ttl(seconds=10))
        table.find_or_insert(np.array([1, 2]), np.array([0, 1]))
        assert table.evict(10 * SECOND) == 1
        assert (table.find(np.array([1, 2])) >= 0).tolist() == [False, True]

    def test_the_watermark_never_falls(self, make: Make) -> None:
        table = make("user", 1, evict=hb.Ttl(seconds=10))
        table.evict(100 * SECOND)
        table.find_or_insert(np.array([1]), 95 * SECOND)
        assert table.evict(50 * SECOND) == 0
        assert table.evict(105 * SECOND) == 1

    def test_a_late_event_does_not_move_last_seen_back(self, make: Make) -> None:
        table = make("user", 1, evict=hb.Ttl(seconds=10))
        table.find_or_insert(np.array([1]), 50 * SECOND)
        table.find_or_insert(np.array([1, 1]), np.array([3, 1]))
        assert table.evict(59 * SECOND) == 0
        assert table.evict(60 * SECOND) == 1

    def test_an_id_that_comes_late_has_a_row_until_the_next_evict(self, make: Make) -> None:
        table = make("user", 1, rule=hb.Sgd(lr=1.0), evict=hb.Ttl(seconds=10))
        table.evict(100 * SECOND)
        slots = table.find_or_insert(np.array([1]), 5 * SECOND)
        table.update(slots, np.ones((1, 1), np.float32))
        learned = table.lookup(np.array([1]))
        assert (table.find_or_insert(np.array([1]), 6 * SECOND) == table.find(np.array([1]))).all()
        assert (table.lookup(np.array([1])) == learned).all()
        assert table.evict(100 * SECOND) == 1
        assert table.find(np.array([1]))[0] == -1

    @pytest.mark.parametrize("seconds", [None, -1])
    def test_a_ttl_that_is_off_evicts_nothing(self, make: Make, seconds: float | None) -> None:
        table = make("user", 1, evict=hb.Ttl(seconds=seconds))
        table.find_or_insert(np.array([1]))
        assert table.evict(2**62) == 0

    def test_a_ttl_of_zero_evicts_what_is_not_newer_than_the_watermark(self, make: Make) -> None:
        table = make("user", 1, evict=hb.Ttl(seconds=0))
        table.find_or_insert(np.array([1, 2, 3]), np.array([9, 10, 11]))
        assert table.evict(10) == 2
        assert (table.find(np.array([1, 2, 3])) >= 0).tolist() == [False, False, True]

    def test_lru_drops_the_row_seen_longest_ago_then_the_smallest_id(self, make: Make) -> None:
        table, ids = make("user", 1, evict=hb.Lru(1024)), ids_of_partition(3, 7)
        table.find_or_insert(ids[:4], np.array([40, 10, 10, 30]))
        table.find_or_insert(ids[4:6], 50)
        assert (table.find(ids) >= 0).tolist() == [True, False, False, True, True, True, False]
        table.find_or_insert(ids[3:4], 60)
        table.find_or_insert(ids[6:], 61)
        assert (table.find(ids) >= 0).tolist() == [False, False, False, True, True, True, True]

    def test_lru_without_times_goes_by_the_order_of_batches(self, make: Make) -> None:
        table, ids = make("user", 1, evict=hb.Lru(1024)), ids_of_partition(200, 5)
        for i in (0, 1, 2, 3, 0, 4):
            table.find_or_insert(ids[i : i + 1])
        assert (table.find(ids) >= 0).tolist() == [True, False, True, True, True]

    def test_lfu_drops_the_row_seen_least_then_the_smallest_id(self, make: Make) -> None:
        table, ids = make("user", 1, evict=hb.Lfu(1024)), ids_of_partition(3, 6)
        table.find_or_insert(np.repeat(ids[:4], [3, 1, 2, 2]))
        table.find_or_insert(ids[4:5])
        assert (table.find(ids[:5]) >= 0).tolist() == [True, False, True, True, True]
        table.find_or_insert(np.repeat(ids[4:], 3))
        assert (table.find(ids) >= 0).tolist() == [True, False, False, True, True, True]

    def test_lfu_with_a_half_life_forgets_old_fame(self, make: Make) -> None:
        table, ids = (
            make("user", 1, evict=hb.Lfu(1024, half_life_seconds=1)),
            ids_of_partition(3, 5),
        )
        table.find_or_insert(np.repeat(ids[:1], 100), 0)
        table.find_or_insert(ids[1:4], 20 * SECOND)
        table.find_or_insert(ids[4:], 21 * SECOND)
        assert (table.find(ids) >= 0).tolist() == [False, True, True, True, True]

    def test_rows_of_the_current_batch_are_no_victims(self, make: Make) -> None:
        table, ids = make("user", 1, evict=hb.Lru(1024)), ids_of_partition(9, 8)
        table.find_or_insert(ids[:4], np.array([1, 2, 3, 4]))
        slots = table.find_or_insert(np.concatenate([ids[4:7], ids[:1]]), 0)
        assert (slots >= 0).all()
        assert (table.find(ids) >= 0).tolist() == [
            True,
            False,
            False,
            False,
            True,
            True,
            True,
            False,
        ]

    def test_a_table_never_holds_more_than_max_rows(self, make: Make) -> None:
        table, random = make("user", 1, evict=hb.Lru(1024)), np.random.default_rng(0)
        for _ in range(10):
            table.find_or_insert(random.integers(0, 5_000, 60))
            assert len(table) <= 1024

    def test_an_evicted_row_loses_its_value_and_state(self, make: Make) -> None:
        table, ids = (
            make("user", 2, rule=hb.Adagrad(lr=1.0), evict=hb.Lru(1024)),
            ids_of_partition(3, 5),
        )
        fresh = table.lookup(ids)
        table.update(table.find_or_insert(ids[:1]), np.ones((1, 2), np.float32))
        table.find_or_insert(ids[1:])
        assert (table.lookup(ids) == fresh).all()
        table.update(table.find_or_insert(ids[:1]), np.full((1, 2), 2, np.float32))
        assert np.allclose(table.lookup(ids[:1]), fresh[:1] - 1.0)

    def test_ttl_and_lru_work_together(self, make: Make) -> None:
        table, ids = (
            make("user", 1, evict=[hb.Lru(1024), hb.Ttl(seconds=10)]),
            ids_of_partition(3, 6),
        )
        table.find_or_insert(ids[:4], np.array([1, 2, 3, 4]) * SECOND)
        table.find_or_insert(ids[4:5], 5 * SECOND)
        assert table.evict(12 * SECOND) == 1
        assert (table.find(ids) >= 0).tolist() == [False, False, True, True, True, False]


def test_lru_and_lfu_together_are_an_error() -> None:
    with pytest.raises(hb.errors.ConfigError, match="Lru and Lfu"):
        evictions([hb.Lru(2048), hb.Lfu(2048)])
    with pytest.raises(hb.errors.ConfigError, match="evict"):
        hb.Table("user", dim=1, evict=[hb.Lru(2048), hb.Lfu(2048)])


@pytest.mark.parametrize("make", TABLES)
class TestRows:
    def test_an_absent_id_reads_its_initial_row_without_admission_and_the_default_with(
        self, make: Make
    ) -> None:
        ids = np.array([3, -1])
        table, admitting, always = (
            make("user", 3, default=0.25),
            make("user", 3, admit=hb.MinCount(2), default=0.25),
            make("user", 3, default=0.25, always_default=True),
        )
        assert (always.lookup(ids) == 0.25).all()
        assert (table.lookup(ids) == table.gather(table.find_or_insert(ids))).all()
        assert (admitting.lookup(ids) == 0.25).all()
        always.find_or_insert(ids[:1])
        assert (always.lookup(ids[:1]) == table.lookup(ids[:1])).all()
        assert (always.lookup(ids[1:]) == 0.25).all()
        assert (table.gather(np.array([-1, -1])) == 0.25).all()

    def test_the_order_of_arrival_does_not_matter(self, make: Make) -> None:
        ids = np.arange(-50, 50)
        one, two = make("user", 4, init=hb.Normal()), make("user", 4, init=hb.Normal())
        one.find_or_insert(ids)
        for i in np.random.default_rng(0).permutation(ids):
            two.find_or_insert(np.array([i]))
        assert rows_of(one).equals(rows_of(two))

    @pytest.mark.parametrize("dim", [1, 2, 17, 1000])
    def test_every_width_works(self, make: Make, dim: int) -> None:
        table, ids = make("user", dim, rule=hb.Sgd(lr=1.0)), np.array([1, 2, 1])
        before, grads = table.lookup(ids), np.arange(3 * dim, dtype=np.float32).reshape(3, dim)
        table.update(table.find_or_insert(ids), grads)
        expected = before[:2] - np.stack([grads[0] + grads[2], grads[1]])
        assert (table.lookup(ids[:2]) == expected).all()

    def test_part_of_a_table_can_be_exported(self, make: Make) -> None:
        table, ids = make("user", 2), np.arange(3_000)
        table.find_or_insert(ids)
        got = pa.Table.from_batches(list(table.export(range(16, 48))))["id"].to_numpy()
        assert sorted(got.tolist()) == ids[(partition(ids) >= 16) & (partition(ids) < 48)].tolist()

    @pytest.mark.parametrize(
        "policies",
        [
            {"admit": hb.MinCount(3)},
            {"admit": hb.MinCount(3, sketch_bytes=1 << 18)},
            {"admit": hb.Probability(0.4), "evict": hb.Lfu(2048)},
            {"evict": [hb.Ttl(seconds=3), hb.Lru(2048)], "rule": hb.Adam(scope="catch_up")},
            {"evict": hb.Lfu(2048, half_life_seconds=2), "rule": hb.Momentum(scope="all")},
        ],
        ids=str,
    )
    def test_a_loaded_table_goes_on_as_the_one_it_was_saved_from(
        self, make: Make, policies: dict[str, Any]
    ) -> None:
        random, one = np.random.default_rng(1), make("user", 3, **policies)

        def learn(table: Any, step: int, ids: np.ndarray, grads: np.ndarray) -> None:
            table.update(table.find_or_insert(ids, step * SECOND // 2), grads)
            if step % 4 == 3:
                table.evict(step * SECOND // 2)

        batches = [
            (i, random.zipf(1.1, 250) % 9_000, random.normal(size=(250, 3)).astype("f4"))
            for i in range(20)
        ]
        for batch in batches[:10]:
            learn(one, *batch)
        two = make("user", 3, **policies)
        two.load(one.export())
        two.load_candidates(one.candidates())
        two.load_scalars(one.scalars())
        for batch in batches[10:]:
            learn(one, *batch)
            learn(two, *batch)
        assert len(one) > 0
        assert rows_of(one).equals(rows_of(two))


REFUSED_POLICIES: dict[str, dict[str, Any]] = {
    "ttl": {"evict": hb.Ttl(seconds=1)},
    "ttl and lru": {"evict": [hb.Ttl(seconds=1), hb.Lru(1024)]},
    "expiring counts": {
        "admit": hb.MinCount(2, expire_seconds=1),
        "evict": [hb.Ttl(seconds=1), hb.Lru(1024)],
    },
    "expiring sketch": {
        "admit": hb.MinCount(2, expire_seconds=1, admission_bytes=1 << 18),
        "evict": [hb.Ttl(seconds=1), hb.Lfu(1024)],
    },
    "lru": {"evict": hb.Lru(1024)},
}


def state_of(table: hb.Table) -> tuple[Any, ...]:
    """What a table holds and counts, expired rows that were not swept included."""
    stats = {name: count for name, count in table.stats.items() if "bytes" not in name}
    return content_digest({"user": table}), stats, table.scalars(), table.min_count


@pytest.mark.parametrize("policy", REFUSED_POLICIES)
@pytest.mark.parametrize("tier", [hb.Ram(), on_disk(400)], ids=["ram", "disk"])
def test_a_batch_that_is_refused_changes_nothing(tier: Any, policy: str) -> None:
    """Neither rows that have expired and are not swept, nor counts, nor whether ids have times."""
    keywords = REFUSED_POLICIES[policy]
    if isinstance(tier, hb.Ram) and policy == "ttl":
        return  # it refuses no batch
    refused, spared = (hb.Table("user", 4, tier=tier, **keywords) for _ in range(2))
    many = np.repeat(np.arange(100_000, 102_000), 2)
    for number, table in enumerate((refused, spared)):
        for start in range(2):
            early = np.repeat(np.arange(60 * start, 60 * start + 60), 2)
            if number == 0:
                before = state_of(table)
                refuse(table, np.concatenate([early, many]), (100 + start) * SECOND)
                assert state_of(table) == before
            table.find_or_insert(early, (10 + start) * SECOND)
            table.find_or_insert(np.arange(200, 230), (10 + start) * SECOND)  # these wait
        table.evict(100 * SECOND, range(0))  # the watermark moves; nothing is swept yet
    before = state_of(refused)
    refuse(refused, np.concatenate([np.arange(300), many]), 100 * SECOND)
    with pytest.raises(RowShapeError):
        refused.find_or_insert(np.arange(3), np.zeros(2, np.int64))
    assert state_of(refused) == before
    for table in (refused, spared):
        table.find_or_insert(np.arange(200, 240), 100 * SECOND)
        table.evict(100 * SECOND)
    assert state_of(refused) == state_of(spared)


def refuse(table: hb.Table, ids: np.ndarray, time: int) -> None:
    with pytest.raises(TableFull):
        table.find_or_insert(ids, time)
