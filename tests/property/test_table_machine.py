# SPDX-License-Identifier: Apache-2.0
"""The native table does what the reference table does, whatever is asked of it in whatever order."""

from __future__ import annotations

from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from on_disk import on_disk

import hotbed as hb
from hotbed.embedding.hashing import partition
from hotbed.errors import NonFiniteGradient, TableError, TableFull
from hotbed.persist import content_digest
from hotbed.testing import ReferenceTable

pytestmark = pytest.mark.core

SECOND = 1_000_000
CROWD = np.arange(60_000)[np.isin(partition(np.arange(60_000)), (3, 200))]
CROWDED = CROWD[:24].tolist()
EXTREMES = [-1, -2, 0, -(2**63), 2**63 - 1, -(2**63) + 1, 1]
IDS = st.one_of(
    st.sampled_from(EXTREMES), st.sampled_from(CROWDED), st.integers(-(2**63), 2**63 - 1)
)
BATCH = st.lists(IDS, max_size=12).map(lambda ids: np.array(ids, np.int64))

RULES = {
    "sgd": hb.Sgd(lr=0.1),
    "momentum": hb.Momentum(lr=0.1, l2=0.01),
    "nesterov": hb.Nesterov(lr=0.1, clip=1.0),
    "adagrad": hb.Adagrad(lr=0.1, l1=0.01),
    "rowwise_adagrad": hb.RowwiseAdagrad(lr=0.1),
    "rms_prop": hb.RmsProp(lr=0.01, scope="all", l2=0.1),
    "adam": hb.Adam(lr=0.01, scope="catch_up", decay=0.01),
    "ftrl": hb.Ftrl(lr=0.1, l1=0.1, scope="catch_up"),
}

POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "min_count": {"admit": hb.MinCount(3, coefficient=2), "default": 0.5},
    "min_count_bounded": {
        "admit": hb.MinCount(9, coefficient=4, max_candidates=512, expire_seconds=5)
    },
    "min_count_in_little_memory": {"admit": hb.MinCount(7, coefficient=2, admission_bytes=1 << 18)},
    "candidates_in_little_memory": {
        "admit": hb.MinCount(3, admission_bytes=1 << 18, expire_seconds=4),
        "evict": hb.Ttl(seconds=9),
    },
    "probability_in_little_memory": {
        "admit": hb.Probability(0.2, admission_bytes=1 << 18),
        "evict": hb.Lfu(1024),
    },
    "min_count_sketch": {"admit": hb.MinCount(3, sketch_bytes=1 << 16)},
    "min_count_of_batches": {
        "admit": hb.MinCount(4, coefficient=2, once_a_batch=True),
        "evict": hb.Lfu(1024),
    },
    "admit_all_but_count": {"admit": hb.MinCount(0), "default": 0.5},
    "probability": {"admit": hb.Probability(0.4, max_candidates=512)},
    "probability_sketch": {
        "admit": hb.Probability(0.3, sketch_bytes=1 << 16),
        "evict": hb.Lfu(1024),
    },
    "ttl": {"evict": hb.Ttl(seconds=4)},
    "lru": {"evict": hb.Lru(1024)},
    "lfu": {"evict": hb.Lfu(1024), "admit": hb.MinCount(2)},
    "lfu_half_life": {"evict": hb.Lfu(1024, half_life_seconds=2)},
    "ttl_and_lfu": {
        "evict": [hb.Ttl(seconds=5), hb.Lfu(1024)],
        "admit": hb.MinCount(4, coefficient=3, max_candidates=256),
    },
    "ttl_and_lru": {"evict": [hb.Ttl(seconds=6), hb.Lru(1024)], "admit": hb.MinCount(2)},
    "ttl_of_steps": {"evict": hb.Ttl(steps=3)},
    "steps_and_lru": {
        "evict": [hb.Ttl(steps=5), hb.Lru(1024)],
        "admit": hb.MinCount(3, coefficient=2, max_candidates=512, expire_steps=2),
    },
    "candidates_of_steps": {"admit": hb.MinCount(4, expire_steps=3), "evict": hb.Lfu(1024)},
}


LOADED = ["state", "last_seen", "count", "score", "updated"]


def rows_of(table: Any) -> dict[str, Any]:
    return pa.Table.from_batches(table.export()).to_pydict()


class TableMachine(RuleBasedStateMachine):
    """Drives a native and a reference table side by side; subclasses fix the policies."""

    keywords: ClassVar[dict[str, Any]] = {}

    @initialize(dim=st.sampled_from([1, 3, 16]), seed=st.integers(0, 3))
    def start(self, dim: int, seed: int) -> None:
        self.make = dict(self.keywords, dim=dim, seed=seed)
        self.native: Any = hb.Table("user", **self.make)
        self.reference = ReferenceTable("user", **self.make)
        self.dim, self.now = dim, 0
        self.bounded = any(isinstance(p, hb.Lru | hb.Lfu) for p in self.reference.policies)
        self.aged = self.keywords.get("evict") == hb.Lfu(1024, half_life_seconds=2)
        self.timed = bool(self.reference.policies) or "admit" in self.keywords

    def times(self, n: int, lateness: int) -> Any:
        """Times around now; with aged counts one a batch and all different, since equal sums may
        round differently.
        """
        self.now += 700_003
        if not self.timed:
            return None
        if self.reference.clock == "steps" and lateness % 2:
            return None  # such a table takes both, and uses neither
        if self.aged:
            return self.now
        return self.now - np.random.default_rng(lateness).integers(0, 1 + lateness * SECOND, n)

    def both(self, ids: np.ndarray, lateness: int) -> tuple[Any, Any] | None:
        times = self.times(len(ids), lateness)
        try:
            expected = self.reference.find_or_insert(ids, times)
        except TableFull:
            with pytest.raises(TableFull):
                self.native.find_or_insert(ids, times)
            return None
        got = self.native.find_or_insert(ids, times)
        assert ((got >= 0) == (expected >= 0)).all()
        assert len(set(got[got >= 0].tolist())) == len(set(ids[got >= 0].tolist()))
        return got, expected

    @rule(
        ids=BATCH,
        lateness=st.integers(0, 8),
        seed=st.integers(0, 2**16),
        lr=st.sampled_from([None, 0.0, 0.01, 0.5]),
    )
    def learn(self, ids: np.ndarray, lateness: int, seed: int, lr: float | None) -> None:
        slots = self.both(ids, lateness)
        if self.native.frozen:
            with pytest.raises(TableError):
                self.native.update(np.empty(0, np.int64), np.empty((0, self.dim), np.float32))
        elif slots is not None:
            grads = np.random.default_rng(seed).normal(size=(len(ids), self.dim)).astype(np.float32)
            self.native.update(slots[0], grads, lr=lr)
            self.reference.update(slots[1], grads, lr=lr)

    @rule(ids=BATCH, lateness=st.integers(0, 8))
    def insert(self, ids: np.ndarray, lateness: int) -> None:
        self.both(ids, lateness)

    @rule(start=st.integers(-(2**62), 2**62), n=st.integers(50, 300))
    def grow(self, start: int, n: int) -> None:
        self.both(start + np.arange(60 if self.bounded else n, dtype=np.int64), 0)

    @rule(ids=BATCH)
    def read(self, ids: np.ndarray) -> None:
        got = self.native.find(ids)
        expected = self.reference.find(ids)
        assert ((got >= 0) == (expected >= 0)).all()
        assert (self.native.gather(got) == self.reference.gather(expected)).all()
        assert (self.native.lookup(ids) == self.reference.lookup(ids)).all()

    @rule(ids=BATCH, bad=st.sampled_from([np.nan, np.inf, -np.inf]))
    def learn_from_a_bad_gradient(self, ids: np.ndarray, bad: float) -> None:
        slots = self.native.find(ids)
        grads = np.ones((len(ids), self.dim), np.float32)
        if (slots >= 0).any() and not self.native.frozen:
            grads[np.flatnonzero(slots >= 0)[-1], -1] = bad
            with pytest.raises(NonFiniteGradient):
                self.native.update(slots, grads)

    @rule(frozen=st.sampled_from([False, False, "rows", "all"]))
    def freeze(self, frozen: Any) -> None:
        self.native.frozen = self.reference.frozen = frozen

    @rule()
    def crowd(self) -> None:
        """More ids of two partitions than these may keep."""
        self.both(np.array(CROWDED, np.int64), 0)

    @rule(start=st.integers(0, 300), lateness=st.integers(0, 8))
    def flood(self, start: int, lateness: int) -> None:
        """More waiting ids of two partitions than little memory counts exactly."""
        self.both(CROWD[start : start + 90], lateness)

    @rule(ahead=st.integers(-3, 4))
    def evict(self, ahead: int) -> None:
        now = self.now + ahead * SECOND
        assert self.native.evict(now) == self.reference.evict(now)

    @rule(ids=BATCH)
    def remove(self, ids: np.ndarray) -> None:
        assert self.native.remove(ids) == self.reference.remove(ids)

    @rule()
    def export(self) -> None:
        got, expected = rows_of(self.native), rows_of(self.reference)
        assert set(got) == set(expected)
        for name, column in expected.items():
            if name == "score":
                np.testing.assert_allclose(got[name], column, rtol=1e-12)
            else:
                assert got[name] == column, name

    @rule()
    def save_and_load(self) -> None:
        fresh = hb.Table("user", **self.make)
        fresh.load(self.native.export())
        fresh.load_candidates(self.native.candidates())
        fresh.load_sketch(self.native.sketch())
        fresh.load_scalars(self.native.scalars())
        self.native = fresh

    @rule(ids=BATCH, columns=st.sets(st.sampled_from(LOADED)), seed=st.integers(0, 2**16))
    def load(self, ids: np.ndarray, columns: set[str], seed: int) -> None:
        """Load new values for some rows, and for new ids, with some of the columns of an export."""
        draw = np.random.default_rng(seed)
        rows = pa.concat_batches(list(self.reference.export()))
        rows = rows.select(["id", "value", *sorted(columns & set(rows.schema.names))])
        rows = rows.filter(pa.array(draw.random(rows.num_rows) < 0.7))
        values = draw.normal(size=rows.num_rows * self.dim).astype(np.float32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values), self.dim)
        batches = [rows.set_column(1, "value", lists)]
        if not self.timed:  # else such rows need times
            values = draw.normal(size=len(ids) * self.dim).astype(np.float32)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values), self.dim)
            batches.append(pa.record_batch({"id": pa.array(ids), "value": lists}))
        self.native.load(batches)
        self.reference.load(batches)

    @rule(step=st.integers(0, 40))
    def move_step(self, step: int) -> None:
        """Take the step and the rates of another table, as a warm start does."""
        if self.reference.clock != "steps":
            rates = [[1, 0.1]] if step else []
            self.native.load_scalars({**self.native.scalars(), "step": step, "rates": rates})
            self.reference.step = step

    @invariant()
    def sizes_agree(self) -> None:
        if hasattr(self, "native"):
            assert len(self.native) == len(self.reference)

    @invariant()
    def reasons_of_evictions_agree(self) -> None:
        if hasattr(self, "native"):
            stats = self.native.stats
            reasons = self.reference.evicted
            assert {reason: stats[f"evicted_{reason}"] for reason in reasons} == reasons
            assert stats["evicted"] == sum(reasons.values())


def run(keywords: dict[str, Any], examples: int) -> None:
    machine = type("Machine", (TableMachine,), {"keywords": keywords})
    quick = settings(
        max_examples=examples * settings.default.max_examples // 12,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to look into a failure
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_does_what_the_reference_does(name: str) -> None:
    run({"rule": RULES[name]}, examples=3)


# each rule takes its turn
@pytest.mark.parametrize(("name", "rule"), list(zip(POLICIES, cycle(RULES), strict=False)))
def test_every_policy_does_what_the_reference_does(name: str, rule: str) -> None:
    run({"rule": RULES[rule], **POLICIES[name]}, examples=5)


@pytest.mark.parametrize("scope", ["touched", "all", "catch_up"])
def test_policies_and_scopes_work_together(scope: Any) -> None:
    run({"rule": hb.Momentum(lr=0.1, l2=0.05, scope=scope), **POLICIES["ttl_and_lru"]}, examples=3)


@pytest.mark.parametrize(
    ("rule", "policy", "ram_rows"),
    [
        ("adam", "ttl_and_lfu", 90),
        ("ftrl", "none", 300),
        ("adagrad", "lfu_half_life", 90),
        ("sgd", "none", 300),
    ],
)
def test_tables_on_a_disk_do_what_the_reference_does(rule: str, policy: str, ram_rows: int) -> None:
    run({"rule": RULES[rule], "tier": on_disk(ram_rows), **POLICIES[policy]}, examples=3)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_with_every_policy_does_what_the_reference_does(name: str, policy: str) -> None:
    run({"rule": RULES[name], **POLICIES[policy]}, examples=20)


EXPIRING = [
    "candidates_in_little_memory",
    "min_count_bounded",
    "ttl",
    "ttl_of_steps",
    "ttl_and_lfu",
    "ttl_and_lru",
    "steps_and_lru",
    "candidates_of_steps",
]


@pytest.mark.parametrize("name", EXPIRING)
def test_a_sweep_changes_nothing_however_late_it_comes(name: str) -> None:
    """A table that sweeps at once, and one that sweeps a few partitions now and then, as steps and
    checkpoints do. Some events are older than any row may be.
    """
    for seed in range(6):
        draw = np.random.default_rng(seed)
        at_once, bit_by_bit = (
            hb.Table("user", 2, rule=RULES["adagrad"], **POLICIES[name]) for _ in "12"
        )
        now = 1_700_000_000 * SECOND
        for _ in range(40):
            now += int(draw.integers(0, 2 * SECOND))
            ids = np.concatenate([draw.integers(0, 60, 30), draw.choice(CROWD[:400], 40)])
            times = now - draw.integers(0, int(draw.choice([1, 12])) * SECOND, len(ids))
            for table in (at_once, bit_by_bit):
                table.update(table.find_or_insert(ids, times), np.ones((len(ids), 2), np.float32))
            if draw.random() < 0.3:
                at_once.evict(now)
                bit_by_bit.sweep()  # as a schedule does before the next eviction
                bit_by_bit.evict(now, range(0))
            if draw.random() < 0.5:
                first = int(draw.integers(0, 256))
                bit_by_bit.sweep(range(first, min(256, first + 100)))
            assert len(at_once) == len(bit_by_bit)
        for table in (at_once, bit_by_bit):
            table.sweep()
        assert content_digest({"user": at_once}) == content_digest({"user": bit_by_bit})
        assert at_once.stats["evicted"] > 0 or name == "min_count_bounded"
