# SPDX-License-Identifier: Apache-2.0
"""A cache gives the rows of the version that is asked for, whatever it holds, and never holds more
than it may.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import hotbed as hb
from hotbed.config import describe
from hotbed.serving.cache import Policy
from hotbed.testing import FakeStore

pytestmark = pytest.mark.core

EXTREMES = [-1, -2, 0, -(2**63), 2**63 - 1]
IDS = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 60), st.integers(-(2**63), 2**63 - 1))
REQUEST = st.tuples(st.lists(IDS, max_size=40), st.lists(IDS, max_size=40))
DIMS = {"narrow": 1, "wide": 9}
FEATURES = [("a", "narrow", "none"), ("b", "wide", "none")]
TABLES = {
    "narrow": hb.Table("narrow", DIMS["narrow"], default=0.25, always_default=True),
    "wide": hb.Table("wide", DIMS["wide"], init=hb.Uniform(0.1)),
}


class CacheMachine(RuleBasedStateMachine):
    """A cache over versions of dicts: every row that comes is compared with the dict of its
    version.
    """

    policy: ClassVar[Policy] = "lru"

    @initialize(
        max_bytes=st.sampled_from([800, 2_000, 20_000, 9 << 20]),
        hot=st.lists(IDS, max_size=30, unique=True),
        preload=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, max_bytes: int, hot: list[int], preload: float) -> None:
        self.store = FakeStore(
            {name: dict[str, Any](describe(table.config)) for name, table in TABLES.items()}
        )
        self.store.hottest = {"wide": hot}
        self.rows: dict[str, dict[int, list[float]]] = {name: {} for name in DIMS}
        self.now, self.max_bytes = 0, max_bytes
        self.change(([3], list(range(20))), [])
        self.cache = hb.EmbeddingCache(
            self.store, "fake", max_bytes, self.policy, preload=preload, deadline_seconds=60
        )
        self.lookups = [self.cache.lookup(self.store.versions[0], FEATURES)]

    def change(self, written: tuple[list[int], list[int]], removed: list[int]) -> None:
        """What the next version says, as a new dict."""
        self.now += 1
        self.rows = {name: dict(rows) for name, rows in self.rows.items()}
        for (name, dim), ids in zip(DIMS.items(), written, strict=True):
            for one in removed:
                self.rows[name].pop(one, None)
            self.rows[name] |= {
                one: [float(one % 1009), *[float(self.now)] * (dim - 1)][:dim] for one in ids
            }
            if dim == 1:
                self.rows[name] |= {one: [float(self.now)] for one in ids}
        self.store.publish(self.rows)

    @rule(written=REQUEST, removed=st.lists(IDS, max_size=10))
    def publish(self, written: tuple[list[int], list[int]], removed: list[int]) -> None:
        self.change(written, removed)
        self.lookups.append(self.cache.lookup(self.store.versions[-1], FEATURES))

    @rule(which=st.integers(0, 9))
    def open_again(self, which: int) -> None:
        """Sessions of one version may be several, also of one that is past."""
        which %= len(self.lookups)
        self.lookups[which] = self.cache.lookup(self.store.versions[which], FEATURES)

    @rule(which=st.integers(0, 5), request=REQUEST)
    def ask(self, which: int, request: tuple[list[int], list[int]]) -> None:
        """The newest version as a rule; any before it, too."""
        self.check(-1 if which > 1 else which % len(self.lookups), request)

    @rule(
        requests=st.lists(st.tuples(st.integers(0, 9), REQUEST), min_size=2, max_size=6),
        written=REQUEST,
    )
    def ask_from_threads_while_a_version_comes(
        self, requests: list[Any], written: tuple[list[int], list[int]]
    ) -> None:
        known = len(self.lookups)
        self.change(written, [])
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(self.check, max(0, known - 1 - which // 6), one)
                for which, one in requests
            ]
            opened = pool.submit(self.cache.lookup, self.store.versions[-1], FEATURES)
            asked += [pool.submit(self.check, known - 1, one) for _, one in requests]
            for one in asked:
                one.result()
        self.lookups.append(opened.result())

    @rule(request=REQUEST)
    def ask_a_silent_store(self, request: tuple[list[int], list[int]]) -> None:
        """Rows are those of the version, or read as absent; these are told and not kept."""
        self.store.silent = True
        lookup = self.cache.lookup(self.store.versions[-1], FEATURES)
        looked = lookup({"a": ids(request[0][:9]), "b": ids(request[1][:9])}, 9)
        self.store.silent = False
        lookup._retries.answered()  # all lookups of the version would wait for its next retry
        late = [
            {
                one
                for one, row in zip(asked, rows, strict=True)
                if row.tolist() != self.expected(-1, name, one)
            }
            for name, asked, rows in zip(
                DIMS, (one[:9] for one in request), looked.sequences, strict=True
            )
        ]
        assert sum(map(len, late)) <= looked.late
        for name, wrong in zip(DIMS, late, strict=True):
            for one in wrong:
                place = request[list(DIMS).index(name)].index(one)
                row = looked.sequences[list(DIMS).index(name)][place]
                assert row.tolist() == TABLES[name].lookup(np.array([one]))[0].tolist()

    def check(self, which: int, request: tuple[list[int], list[int]]) -> None:
        n = max(map(len, request))
        bags = {name: ids(one, n) for name, one in zip("ab", request, strict=True)}
        looked = self.lookups[which](bags, n)
        assert looked.late == 0
        for name, asked, rows in zip(DIMS, request, looked.sequences, strict=True):
            assert rows.tolist() == [self.expected(which, name, one) for one in asked]

    def expected(self, which: int, name: str, one: int) -> list[float]:
        row = (
            self.store.versions[which if which >= 0 else len(self.lookups) - 1].rows[name].get(one)
        )
        found = (
            TABLES[name].lookup(np.array([one]))[0] if row is None else np.array(row, np.float32)
        )
        plain: list[float] = found.tolist()
        return plain

    @invariant()
    def it_holds_no_more_than_it_may(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.num_bytes <= self.max_bytes
            assert self.cache.num_rows * (16 + 4) <= self.max_bytes


def ids(values: list[int], num_samples: int = 9) -> hb.Ids:
    """One bag that holds all, the other samples without ids."""
    offsets = np.full(num_samples + 1, len(values), np.int64)
    offsets[0] = 0
    return hb.Ids(np.array(values, np.int64), offsets)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_row_is_that_of_its_version_and_memory_stays_bounded(policy: Policy) -> None:
    machine = type("Machine", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=settings.default.max_examples // 2, stateful_step_count=20),
    )
