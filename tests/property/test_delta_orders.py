# SPDX-License-Identifier: Apache-2.0
"""G3: what is served is the full and its deltas in order, whatever arrives in which order, how
often, and from which run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

from on_disk import on_disk

import hotbed as hb
from hotbed.errors import DeltaGap, ForkedLineage
from hotbed.persist.container.format import Link, Saved, open_checkpoint
from hotbed.persist.state.chain import Replica, compact
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import continues, restore
from hotbed.testing.values import values_digest

IDS = st.integers(0, 40).map(lambda n: [-(2**63), 2**63 - 1, -1, 0, 1][n] if n < 5 else n * 7919)
BATCHES = st.lists(IDS, min_size=0, max_size=12)
# what a run does between two saves: learn these ids, drop those, move event time on by so much
STEPS = st.lists(
    st.tuples(BATCHES, st.lists(IDS, max_size=4), st.integers(0, 6)), min_size=1, max_size=6
)
SETTINGS = settings(
    max_examples=settings.default.max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
POLICIES: list[dict[str, Any]] = [
    {"rule": hb.Adagrad(lr=0.1), "evict": hb.Ttl(seconds=5)},
    {"rule": hb.Adam(lr=0.1), "admit": hb.MinCount(2), "evict": hb.Ttl(seconds=9)},
    {"rule": hb.RowwiseAdagrad(lr=0.1), "evict": hb.Lru(1024), "dtype": "bfloat16"},
    {"rule": hb.Adagrad(lr=0.1), "evict": hb.Ttl(steps=2), "tier": on_disk(ram_rows=16)},
]


class Run:
    """A run that saves after each of its steps; it remembers each saved state's digests."""

    def __init__(self, where: Path, policies: dict[str, Any], begin: Saved | None = None) -> None:
        self.where, self.policies, self.last = where, policies, begin
        self.table = self.make()
        self.links: list[Link] = []
        self.values: dict[str, str] = {}
        self.contents: dict[str, str] = {}
        self.now = 0
        if begin is not None:
            restore(open_checkpoint(begin.folder), State(tables={"t": self.table}))
        self.table.track(saved=begin is not None)

    def make(self) -> hb.Table:
        return hb.Table("t", 2, **self.policies)

    def step(self, ids: list[int], gone: list[int], later: int, *, full: bool) -> None:
        self.now += later * 1_000_000
        batch = np.array(ids, np.int64)
        slots = self.table.find_or_insert(batch, self.now)
        self.table.update(slots, np.tile(np.float32([0.5, -1]), (len(batch), 1)))
        self.table.remove(np.array(gone, np.int64))
        self.table.evict(self.now)
        state = State(tables={"t": self.table}, version=self.table.step)
        self.last = write(self.where, capture(state, changes=not full), 99, self.last)
        link = open_checkpoint(self.last.folder).links[-1]
        self.links.append(link)
        self.values[link.manifest.digest] = values_digest({"t": self.table})
        self.contents[link.manifest.digest] = content_digest({"t": self.table})

    def go(self, steps: Any, every: int) -> Run:
        for number, (ids, gone, later) in enumerate(steps):
            self.step(ids, gone, later, full=number % every == 0)
        return self


@SETTINGS
@given(st.sampled_from(POLICIES), STEPS, st.integers(1, 4))
def test_a_chain_holds_what_the_run_held_and_so_does_its_compaction(
    policies: Any, steps: Any, every: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), policies).go(steps, every)
        for link in run.links:
            loaded = run.make()
            reader = open_checkpoint(link.store.path(link.folder))
            restore(reader, State(tables={"t": loaded}))
            digest = link.manifest.digest
            assert content_digest({"t": loaded}) == run.contents[digest]
            assert values_digest(reader) == run.values[digest]
        whole = save(Path(folder) / "whole", State(tables={"t": run.table}))
        held = content_digest(open_checkpoint(folder))
        assert held == content_digest(open_checkpoint(whole.folder))
        compact(folder)
        assert content_digest(open_checkpoint(folder)) == held
        assert len(open_checkpoint(folder).links) == 1


@SETTINGS
@given(st.sampled_from(POLICIES), STEPS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_run_that_starts_again_saves_only_what_changed_since(
    policies: Any, steps: Any, restarts: list[bool]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = (Run(Path(folder) / name, policies) for name in ("whole", "parts"))
        for number, (ids, gone, later) in enumerate(steps):
            if number and restarts[number]:
                before = parts
                parts = Run(before.where, policies, before.last)
                parts.now = before.now
                assert continues(open_checkpoint(parts.where), {"t": parts.table})
            for run in (whole, parts):
                run.step(ids, gone, later, full=not number)
            reader = open_checkpoint(parts.where)
            assert content_digest(reader) == content_digest(open_checkpoint(whole.where))
            assert len(reader.links) == number + 1
            if number:
                rows = [batch.column("id").to_pylist() for batch in reader.newest_link.parts("t")]
                assert {id for part in rows for id in part} <= {*ids}


@SETTINGS
@given(st.sampled_from(POLICIES), STEPS, STEPS, st.integers(1, 4), st.integers(0, 99), st.data())
def test_a_replica_holds_a_state_of_a_run_after_any_arrivals(
    policies: Any, steps: Any, more: Any, every: int, branch: int, data: Any
) -> None:
    """Arrivals in any order, with duplicates and gaps, from a run and one that branched off: each
    is applied, known or refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), policies).go(steps, every)
        begin = run.links[branch % len(run.links)]
        saved = Saved(
            begin.store.path(begin.folder), begin.manifest.digest, 0, 0, "", tuple(begin.chain)
        )
        other = Run(Path(folder), policies, begin=saved).go(more, every)
        links = [*run.links, *other.links]
        values = {**run.values, **other.values}
        order = data.draw(
            st.lists(st.sampled_from(range(len(links))), max_size=24).map(lambda o: o)
        )
        replica, held, taken = Replica(), None, set[str]()
        for link in [links[number] for number in order] + run.links[-1:] + other.links:
            digest, chain = (link.manifest.digest, [one.digest for one in link.manifest.chain])
            if digest in taken:
                assert not replica.apply(link)
            elif link.manifest.kind == "full" or (
                held is not None and link.manifest.parent == held
            ):
                assert replica.apply(link)
                held = digest
                taken |= {digest, *chain}
            elif held is None or held in chain:
                with pytest.raises(DeltaGap):
                    replica.apply(link)
            else:
                with pytest.raises(ForkedLineage):
                    replica.apply(link)
            assert replica.lineage.digest == held
            if held is not None:
                assert values_digest(replica.tables) == values[held]


@SETTINGS
@given(st.sampled_from(POLICIES), STEPS, st.data())
def test_legal_orders_with_duplicates_end_at_the_newest_state(
    policies: Any, steps: Any, data: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), policies).go(steps, every=99)
        replica = Replica()
        for number in range(len(run.links)):
            for again in data.draw(st.lists(st.integers(0, number), max_size=3)):
                replica.apply(run.links[again]) if again < number else None
            assert replica.apply(run.links[number])
        assert values_digest(replica.tables) == values_digest({"t": run.table})
