# SPDX-License-Identifier: Apache-2.0
"""Deltas: what applies to what, what stays, one full from a chain, and what people ask about
checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from on_disk import on_disk

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.cli.checkpoints import print_difference
from hotbed.errors import DeltaGap, ForkedLineage, FormatError, PersistError
from hotbed.persist.container.check.manifest import unsealed
from hotbed.persist.container.format import CheckpointWriter, Saved, open_checkpoint
from hotbed.persist.container.manifest import sealed
from hotbed.persist.container.retention import retain
from hotbed.persist.container.store import LocalStore, open_store
from hotbed.persist.state.chain import Replica, compact
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.digest import content_digest, part_digests
from hotbed.persist.state.restoring import restore
from hotbed.persist.upkeep.inspect import describe_checkpoint, diff, verify
from hotbed.persist.upkeep.warm_starts import warm_start
from hotbed.testing.values import values_digest

RULE = hb.Adagrad(lr=0.1)


def learn(table: hb.Table, ids: Any, time: int | None = None) -> None:
    slots = table.find_or_insert(np.asarray(ids, np.int64), time)
    table.update(slots, np.full((len(slots), table.dim), 0.5, np.float32))


def tracked(name: str = "t", **keywords: Any) -> hb.Table:
    table = hb.Table(name, 2, rule=RULE, **keywords)
    table.track()
    return table


def run(
    where: Any, steps: int, table: hb.Table, keep: int = 1, parent: Saved | None = None
) -> list[Saved]:
    """A full and deltas: step k learns ids 10 k .. 10 k + 30 and removes id 10 k."""
    saves: list[Saved] = []
    for step in range(steps):
        learn(table, range(step * 10, step * 10 + 30))
        table.remove(np.array([step * 10], np.int64))
        state = State(tables={table.name: table}, counters={"steps": step}, version=step)
        changes = parent is not None or bool(saves)
        saves.append(write(where, capture(state, changes), keep, saves[-1] if saves else parent))
    return saves


def test_a_delta_holds_only_what_changed_and_removed_ids(tmp_path: Path) -> None:
    table = tracked()
    learn(table, range(1000))
    first = write(tmp_path, capture(State(tables={"t": table})))
    learn(table, [5, 7, 2000])
    table.remove(np.array([9], np.int64))
    write(tmp_path, capture(State(tables={"t": table}), changes=True), parent=first)
    told = describe_checkpoint(tmp_path)["tables"][0]
    assert (told["rows"], told["changed"], told["removed"]) == (1000, 3, 1)


def test_nothing_but_evictions_makes_a_delta(tmp_path: Path) -> None:
    table = tracked(evict=hb.Ttl(seconds=10))
    learn(table, range(100), time=0)
    learn(table, range(50), time=9_000_000)
    state = State(tables={"t": table})
    first = write(tmp_path, capture(state))
    assert table.evict(10_000_000) == 50
    write(tmp_path, capture(state, changes=True), parent=first)
    assert describe_checkpoint(tmp_path)["tables"][0]["removed"] == 50
    other = hb.Table("t", 2, rule=RULE, evict=hb.Ttl(seconds=10))
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    assert content_digest({"t": other}) == content_digest({"t": table})
    assert list(other.export()) == list(table.export())


def test_reasons_of_evictions_outlive_a_full_and_a_delta_and_make_no_difference(
    tmp_path: Path,
) -> None:
    tables = [tracked(evict=hb.Ttl(seconds=10)) for _ in range(2)]
    for number, table in enumerate(tables):
        learn(table, range(100), time=0)
        first = write(tmp_path / str(number), capture(State(tables={"t": table})))
        if number == 0:  # one table loses its ids by a call, the other one by their time
            table.remove(np.arange(100))
        table.evict(10_000_000)
        write(tmp_path / str(number), capture(State(tables={"t": table}), changes=True), 1, first)
    readers = [open_checkpoint(tmp_path / str(number)) for number in range(2)]
    counts = []
    for reader in readers:
        other = hb.Table("t", 2, rule=RULE, evict=hb.Ttl(seconds=10))
        restore(reader, State(tables={"t": other}))
        counts.append([other.stats[f"evicted_{reason}"] for reason in ("removed", "expired")])
    assert counts == [[100, 0], [0, 100]]
    assert content_digest(readers[0]) == content_digest(readers[1])
    assert part_digests(readers[0]) == part_digests(readers[1])


def test_a_save_in_the_middle_of_a_sweep_holds_no_expired_row(tmp_path: Path) -> None:
    table = tracked(evict=hb.Ttl(seconds=10))
    learn(table, range(100), time=0)
    state = State(tables={"t": table})
    first = write(tmp_path, capture(state))
    learn(table, range(100, 120), time=9_000_000)
    table.evict(10_000_000, partitions=range(40))  # most expired rows have not been swept yet
    write(tmp_path, capture(state, changes=True), parent=first)
    reader = open_checkpoint(tmp_path)
    assert sum(batch.num_rows for batch in reader.rows("t")) == 20
    other = hb.Table("t", 2, rule=RULE, evict=hb.Ttl(seconds=10))
    restore(reader, State(tables={"t": other}))
    assert content_digest({"t": other}) == content_digest({"t": table})
    assert verify(tmp_path)["links"] == 2


def test_growth_admission_eviction_and_deltas_work_together_and_readmitted_ids_start_anew(
    tmp_path: Path,
) -> None:
    def make() -> hb.Table:
        return hb.Table("t", 2, rule=RULE, admit=hb.MinCount(2), evict=hb.Ttl(seconds=10))

    table, saves = make(), []
    table.track()
    initial = hb.Table("t", 2, rule=RULE)
    for step in range(8):
        now = step * 4_000_000
        # each id is seen in two steps, and then no more
        ids = np.arange(step * 500, step * 500 + 1000)
        learn(table, np.repeat(ids, 2) if step % 3 == 0 else ids, now)
        if step == 7:  # ids of the first step, long gone, come again
            assert (table.find(np.arange(400)) == -1).all()
            slots = table.find_or_insert(np.repeat(np.arange(400), 2), now)
            np.testing.assert_array_equal(table.gather(slots[::2]), initial.lookup(np.arange(400)))
        table.evict(now)
        state = State(tables={"t": table}, version=step)
        saves.append(
            write(
                tmp_path / "run",
                capture(state, changes=step > 0),
                parent=saves[-1] if saves else None,
            )
        )
        other = make()
        restore(open_checkpoint(tmp_path / "run"), State(tables={"t": other}))
        assert content_digest({"t": other}) == content_digest({"t": table})
        whole = save(tmp_path / "whole", state)
        assert content_digest(open_checkpoint(whole.folder)) == content_digest(
            open_checkpoint(tmp_path / "run")
        )
    assert describe_checkpoint(tmp_path / "run")["tables"][0]["removed"] > 0


@pytest.mark.parametrize(
    "evict",
    [
        hb.Lru(1024),
        hb.Lfu(1024),
        hb.Lfu(1024, half_life_seconds=3),
        [hb.Ttl(seconds=3), hb.Lru(1024)],
    ],
)
def test_bounded_tables_have_deltas_too(tmp_path: Path, evict: Any) -> None:
    table, saves = tracked(evict=evict), []
    draw = np.random.default_rng(0)
    for step in range(10):
        learn(table, np.unique(draw.integers(0, 3000, 240)), step * 1_000_000)
        saves.append(
            write(
                tmp_path,
                capture(State(tables={"t": table}), step > 0),
                parent=saves[-1] if saves else None,
            )
        )
    other = hb.Table("t", 2, rule=RULE, evict=evict)
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    assert content_digest({"t": other}) == content_digest({"t": table})
    for one in (table, other):
        learn(one, np.arange(5000, 5060), 9_000_000)
    assert content_digest({"t": other}) == content_digest({"t": table})


def test_deltas_of_a_table_that_counts_steps_hold_its_clock(tmp_path: Path) -> None:
    def make() -> hb.Table:
        admit = hb.MinCount(2, expire_steps=3)
        return hb.Table("t", 2, rule=RULE, admit=admit, evict=hb.Ttl(steps=4))

    table, saves = make(), []
    table.track()
    draw = np.random.default_rng(0)
    for step in range(20):
        learn(table, draw.integers(0, 60, 30))
        if step % 3 == 2:
            table.evict(partitions=range(40))  # a save may come in the middle of a sweep
        captured = capture(State(tables={"t": table}), step > 0)
        saves.append(write(tmp_path, captured, parent=saves[-1] if saves else None))
    scalars = describe_checkpoint(tmp_path)["tables"][0]["scalars"]
    assert scalars["watermark_step"] == 18
    assert scalars["watermark"] == -(2**63), "no time that a version could have learned until"
    other = make()
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    replica = Replica()
    assert replica.apply(open_checkpoint(tmp_path))
    assert values_digest(replica.tables) == values_digest({"t": table})
    for step in range(9):
        assert content_digest({"t": other}) == content_digest({"t": table})
        for one in (table, other):
            learn(one, range(step, step + 9))
            one.evict()
    assert table.stats["evicted"] > 20


def test_a_table_does_not_resume_by_another_clock(tmp_path: Path) -> None:
    steps, seconds = hb.Ttl(steps=5), hb.Ttl(seconds=5)
    for saved, here in ((steps, seconds), (seconds, steps)):
        table = tracked(evict=saved)
        learn(table, range(20), 0)
        save(tmp_path, State(tables={"t": table}))
        reader = open_checkpoint(tmp_path)
        other = hb.Table("t", 2, rule=RULE, evict=here)
        with pytest.raises(PersistError, match=r"'t': its state was trained .* by a warm start"):
            restore(reader, State(tables={"t": other}))
        assert len(other) == 0
        warm_start({"t": other}, reader, now=1_000_000)
        learn(other, [99], 1_000_000)
        assert [other.evict(5_999_999) for _ in range(2)] == [0, 0]
        for _ in range(4):
            learn(other, [99], 6_000_000)
        assert other.evict(6_000_000) == 20
    restore(reader, State(tables={"t": (same := tracked(evict=hb.Ttl(seconds=9)))}))
    assert len(same) == 20


def test_rows_without_ages_count_as_seen_when_a_table_begins_to_count_steps(tmp_path: Path) -> None:
    table = tracked()
    for _ in range(7):
        learn(table, range(20))
    save(tmp_path, State(tables={"t": table}))
    other = hb.Table("t", 2, rule=RULE, evict=hb.Ttl(steps=3), capacity=5)
    restore(open_checkpoint(tmp_path), State(tables={"t": other}))
    evicted = []
    for _ in range(3):
        learn(other, [0])
        evicted.append(other.evict())
    assert evicted == [0, 0, 19]


def test_a_warm_start_with_state_brings_the_steps_of_rows(tmp_path: Path) -> None:
    old = tracked("t", evict=hb.Ttl(steps=5))
    for step in range(9):
        learn(old, [step])
    save(tmp_path, State(tables={"t": old}))
    evicted = []
    for optimizer_state in (False, True):
        new = hb.Table("t", 2, rule=RULE, evict=hb.Ttl(steps=5))
        warm_start({"t": new}, open_checkpoint(tmp_path), optimizer_state=optimizer_state)
        evicted.append(new.evict())
    assert evicted == [0, old.evict()] == [0, 4]


def test_tables_whose_rule_moves_idle_rows_have_fulls_only() -> None:
    with pytest.raises(hb.errors.ConfigError, match="Save full checkpoints"):
        hb.Table("t", 2, rule=hb.Adam(scope="catch_up")).track()


def test_gaps_forks_and_duplicates_are_told_apart(tmp_path: Path) -> None:
    saves = run(tmp_path / "run", 4, table := tracked())
    links = [open_checkpoint(saved.folder).links[-1] for saved in saves]
    replica = Replica()
    with pytest.raises(DeltaGap, match="no state yet"):
        replica.apply(links[1])
    assert replica.apply(links[0])
    with pytest.raises(DeltaGap, match="1 deltas before it are missing"):
        replica.apply(links[2])
    assert [replica.apply(link) for link in links] == [False, True, True, True]
    assert [replica.apply(link) for link in links] == [False] * 4
    assert values_digest(replica.tables) == values_digest({"t": table})
    other = hb.Table("t", 2, rule=RULE)  # a run that went on from the second state
    restore(open_checkpoint(saves[1].folder), State(tables={"t": other}))
    other.track()
    forked = run(tmp_path / "run", 1, other, parent=saves[1])
    before = values_digest(replica.tables)
    with pytest.raises(ForkedLineage, match="branched off"):
        replica.apply(open_checkpoint(forked[0].folder).links[-1])
    assert values_digest(replica.tables) == before
    full = save(tmp_path / "run", State(tables={"t": other}, parent=forked[0].digest), keep=9)
    assert replica.apply(open_checkpoint(full.folder))
    assert values_digest(replica.tables) == values_digest({"t": other})
    late = write(tmp_path / "run", capture(State(tables={"t": table}), changes=True), 9, saves[-1])
    with pytest.raises(ForkedLineage):
        replica.apply(open_checkpoint(late.folder).links[-1])
    assert not replica.apply(links[-1])


def test_a_replica_takes_a_whole_chain_where_the_delta_alone_does_not_fit(tmp_path: Path) -> None:
    run(tmp_path, 4, table := tracked())
    replica = Replica()
    assert replica.apply(open_checkpoint(tmp_path))
    assert values_digest(replica.tables) == values_digest({"t": table})


def test_a_bad_delta_leaves_a_replica_as_it_was(tmp_path: Path) -> None:
    saves = run(tmp_path, 2, tracked())
    replica = Replica()
    replica.apply(open_checkpoint(saves[0].folder))
    before = values_digest(replica.tables)
    part = next(Path(saves[1].folder).rglob("removed*.arrow"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"removed-000-255\.arrow: torn"):
        replica.apply(open_checkpoint(saves[1].folder))
    assert values_digest(replica.tables) == before


def test_compaction_gives_one_full_of_the_same_content_and_the_run_goes_on(tmp_path: Path) -> None:
    saves = run(tmp_path, 4, table := tracked())
    digest, replica = content_digest(open_checkpoint(tmp_path)), Replica()
    replica.apply(open_checkpoint(tmp_path))
    made = compact(tmp_path)
    assert made is not None
    reader = open_checkpoint(tmp_path)
    assert (reader.manifest.kind, len(reader.links), content_digest(reader)) == ("full", 1, digest)
    assert compact(tmp_path) is None
    follower = Replica()
    follower.apply(reader)
    learn(table, range(5))
    after = write(
        tmp_path, capture(State(tables={"t": table}, version=9), changes=True), 1, saves[-1]
    )
    link = open_checkpoint(after.folder).links[-1]
    # one that took the deltas, and one that took the compacted full
    for one in (replica, follower):
        assert one.apply(link)
        assert values_digest(one.tables) == values_digest({"t": table})


def test_compaction_does_not_overtake_a_save(tmp_path: Path, monkeypatch: Any) -> None:
    saves = run(tmp_path, 2, table := tracked())
    real = LocalStore.draft

    def racing(store: LocalStore, joined: str | None = None) -> Any:
        monkeypatch.undo()
        draft = real(store)
        draft.discard()
        write(tmp_path, capture(State(tables={"t": table}), changes=True), 1, saves[-1])
        return real(store)

    monkeypatch.setattr(LocalStore, "draft", racing)
    with pytest.raises(PersistError, match="became the newest meanwhile"):
        compact(tmp_path)
    assert open_checkpoint(tmp_path).manifest.kind == "delta"


def test_retention_keeps_fulls_with_their_deltas(tmp_path: Path) -> None:
    table, saves = tracked(), []
    for step in range(9):
        learn(table, range(step, step + 5))
        full = step % 3 == 0
        saves.append(
            write(
                tmp_path,
                capture(State(tables={"t": table}), not full),
                2,
                saves[-1] if saves else None,
            )
        )
    names = [Path(saved.folder).name for saved in saves]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == names[3:]
    for name in names[3:]:
        open_checkpoint(tmp_path / name).verify()
    retain(open_store(tmp_path), keep=1)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == names[6:]


def test_retention_never_takes_what_the_newest_state_rests_on(tmp_path: Path) -> None:
    saves = run(tmp_path, 3, table := tracked())
    save(tmp_path, State(tables={"t": table}), keep=9)  # a user's own save under the same path
    learn(table, range(3))
    newest = write(tmp_path, capture(State(tables={"t": table}), True), 1, saves[-1])
    retain(open_store(tmp_path), keep=1)
    assert [link.folder for link in newest.chain[:3]] == [Path(one.folder).name for one in saves]
    open_checkpoint(tmp_path).verify()


def test_retention_lets_an_unreadable_checkpoint_lie_until_it_is_old(tmp_path: Path) -> None:
    first, second = (Path(save(tmp_path, State(), keep=9).folder) for _ in range(2))
    (second / "MANIFEST.json").write_text("torn")
    save(tmp_path, State(), keep=2)
    assert (first.exists(), second.exists()) == (True, True)
    save(tmp_path, State(), keep=1)
    assert (first.exists(), second.exists()) == (False, False)


def test_verify_tells_the_digests_and_refuses_rows_out_of_order(tmp_path: Path) -> None:
    run(tmp_path, 3, tracked())
    told = verify(tmp_path)
    assert told["content_digest"] == content_digest(open_checkpoint(tmp_path))
    assert (told["links"], told["kind"]) == (3, "delta")
    table = hb.Table("t", 2)
    learn(table, range(10))
    reader = open_checkpoint(save(tmp_path / "b", State(tables={"t": table})).folder)
    with CheckpointWriter(tmp_path / "c") as writer:
        (part,) = reader.entry("t").parts
        (batch,) = reader.newest_link.batches(part.file)
        writer.write_batches(part.file, [batch.take(list(range(9, -1, -1)))])
        writer.commit(replace(reader.manifest, dense=None))
    with pytest.raises(FormatError, match="rows out of order"):
        verify(tmp_path / "c")


def test_describe_tells_tables_positions_and_histograms(tmp_path: Path) -> None:
    table = hb.Table(
        "t", 2, rule=RULE, admit=hb.MinCount(2), evict=hb.Ttl(seconds=9), init=hb.Constant(3.0)
    )
    table.find_or_insert(np.array([1, 1, 2, 2, 3]), 5)
    state = State(
        network=nn.Linear(2, 1),
        tables={"t": table},
        positions={"train": {"row": 5}},
        counters={"steps": 4},
    )
    save(tmp_path, state)
    told = describe_checkpoint(tmp_path)
    assert (told["positions"], told["counters"]) == ({"train": {"row": 5}}, {"steps": 4})
    assert told["dense"] == {"tensors": 2, "parameters": 3}
    (one,) = told["tables"]
    assert (one["rows"], one["candidates"], one["removed"]) == (2, 1, 0)
    assert one["norms"] == [{"from": 4.0, "to": 8.0, "rows": 2}]  # |(3, 3)| = 4.24


def test_diff_of_equal_runs_passes_over_the_clock_of_a_followed_position(tmp_path: Path) -> None:
    def saved(name: str, position: dict[str, Any]) -> Any:
        return save(tmp_path / name, State(positions={"stream": position})).folder

    a = saved("a", {"block": 1, "row": 2, "now": 1_700_000_000_000_000, "at": {"now": 1}})
    b = saved("b", {"block": 1, "row": 2, "now": 1_800_000_000_000_000, "at": {"now": 2}})
    c = saved("c", {"block": 1, "row": 3, "now": 1_800_000_000_000_000, "at": {"now": 2}})
    assert diff(a, b)["same"]
    difference = diff(b, c)
    assert not difference["same"]
    expected = [{"stream": {"block": 1, "row": row, "at": {}}} for row in (2, 3)]
    assert difference["positions"] == expected


def test_diff_tells_rows_and_tensors(tmp_path: Path) -> None:
    network, table = nn.Linear(2, 1).bfloat16(), tracked()
    learn(table, range(10))
    state = State(network=network, tables={"t": table, "gone": hb.Table("gone", 2)})
    a = save(tmp_path / "a", state).folder
    assert diff(a, save(tmp_path / "b", state).folder)["same"]
    table.remove(np.array([1, 2], np.int64))
    learn(table, [3, 50])
    with torch.no_grad():
        network.weight += 2
    told = diff(a, save(tmp_path / "b", State(network=network, tables={"t": table}), keep=1).folder)
    assert not told["same"]
    assert told["tables"]["gone"] is None
    assert {k: told["tables"]["t"][k] for k in ("added", "removed", "changed")} == {
        "added": 1,
        "removed": 2,
        "changed": 1,
    }
    assert 0 < told["tables"]["t"]["largest"] <= 0.1
    assert set(told["dense"]) == {"network/weight"}
    assert told["dense"]["network/weight"] == pytest.approx(2, abs=0.01)


def test_difference_of_states_with_equal_rows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tracked("t")
    learn(table, range(5))
    trees: list[Any] = [
        {"callbacks": {"evict.0": {"step": step}, "a.0": {"n": 1}}} for step in (1, 2)
    ]
    for name, tree in zip("ab", trees, strict=True):
        random = {"cpu": torch.tensor([ord(name)])}
        save(tmp_path / name, State(tables={"t": table}, progress=tree, random=random))
    difference = diff(tmp_path / "a", tmp_path / "b")
    assert not difference["same"]
    assert difference["others"] == ["progress.callbacks.evict.0", "random.cpu"]
    print_difference(difference)
    printed = " ".join(capsys.readouterr().out.split())
    assert "all rows and tensors are equal" in printed
    assert "other parts that differ: progress.callbacks.evict.0, random.cpu" in printed
    table.update(np.array([0]), np.ones((1, 2), np.float32))
    save(tmp_path / "c", State(tables={"t": table}))
    others = diff(tmp_path / "a", tmp_path / "c")["others"]
    assert {"tables.t.step", "progress.callbacks.evict.0"} <= set(others)


def test_a_warm_start_takes_rows_under_new_names(tmp_path: Path) -> None:
    old = {name: tracked(name) for name in ("v1_user", "v1_item", "other")}
    for table in old.values():
        learn(table, range(20))
    save(tmp_path, State(tables=old))
    new = {name: hb.Table(name, 2, rule=RULE) for name in ("user", "item", "fresh")}
    found = warm_start(
        new, open_checkpoint(tmp_path), rename=[(r"v1_(.*)", r"\1"), (r"nothing", "x")]
    )
    assert found == {"user": "v1_user", "item": "v1_item"}
    ids = np.arange(20)
    np.testing.assert_array_equal(new["user"].lookup(ids), old["v1_user"].lookup(ids))
    assert (len(new["fresh"]), new["user"].step) == (0, 0)
    state = [
        value
        for batch in new["user"].export()
        for value in batch.column("state").flatten().to_pylist()
    ]
    assert set(state) == {RULE.initial_accumulator}
    assert warm_start({"user": new["user"]}, open_checkpoint(tmp_path), {"other": "user"}) == {
        "user": "other"
    }


def test_a_warm_start_with_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    old = tracked("old")
    learn(old, range(20))
    save(tmp_path, State(tables={"old": old}))
    new = hb.Table("new", 2, rule=RULE)
    warm_start({"new": new}, open_checkpoint(tmp_path), {"old": "new"}, optimizer_state=True)
    for table in (old, new):
        learn(table, range(20))
    np.testing.assert_array_equal(new.lookup(np.arange(20)), old.lookup(np.arange(20)))
    assert new.step == old.step


MOVING = [
    hb.Adam(lr=0.1, decay=0.1),
    hb.Momentum(lr=0.1),
    hb.Adagrad(lr=0.1, l2=0.05),
    hb.Ftrl(lr=0.1, l1=0.01),
]
"""Rules that move rows without a gradient, all but Ftrl."""


@pytest.mark.parametrize("rule", MOVING, ids=lambda rule: type(rule).__name__)
def test_rows_of_a_warm_start_are_up_to_date_in_every_scope(rule: Any, tmp_path: Path) -> None:
    """Whatever the table did before: rows that it has, and that lag behind, keep what they learned."""
    settings: list[tuple[Any, Any]] = [
        ("all", hb.Ram()),
        ("catch_up", hb.Ram()),
        ("catch_up", on_disk(30)),
        ("catch_up", on_disk(1000)),
    ]
    read: list[list[Any]] = []
    for scope, tier in settings:
        moving = replace(rule, scope=scope)
        old, new = (hb.Table(name, 2, rule=moving, tier=tier) for name in ("old", "new"))
        learn(old, range(20))
        for number in range(5):
            learn(old, range(15, 20 + number))
            learn(new, range(10 + 10 * number, 22 + 10 * number))
        new.lookup(np.arange(12, 14))
        others = np.arange(30, 60)
        before = new.lookup(others)
        folder = tmp_path / f"{scope} {tier}".replace("/", "-")
        save(folder, State(tables={"old": old}))
        warm_start({"new": new}, open_checkpoint(folder), {"old": "new"}, optimizer_state=True)
        ids = np.arange(24)
        np.testing.assert_array_equal(new.lookup(ids), old.lookup(ids))
        np.testing.assert_array_equal(new.lookup(others), before)
        for table in (old, new):
            learn(table, range(5))
        np.testing.assert_array_equal(new.lookup(ids), old.lookup(ids))
        learn(new, range(2))
        read.append([new.step, new.lookup(np.arange(70)), *flat_rows_of(new)])
    for other in read[1:]:
        for got, expected in zip(other, read[0], strict=True):
            np.testing.assert_array_equal(got, expected)


def flat_rows_of(table: hb.Table) -> list[Any]:
    rows = pa.Table.from_batches(table.export()).sort_by("id")
    return [np.array(rows.column(name).to_pylist()) for name in ("id", "value", "state")]


def test_a_warm_start_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    old = {name: tracked(name) for name in ("a", "b")}
    for table in old.values():
        learn(table, range(20))
    save(tmp_path, State(tables=old))
    reader, wide = open_checkpoint(tmp_path), hb.Table("b", 3)
    with pytest.raises(PersistError, match="'b' has dim 3, got dim 2"):
        warm_start({"a": (first := hb.Table("a", 2)), "b": wide}, reader)
    assert (len(first), len(wide)) == (0, 0)
    with pytest.raises(PersistError, match=r"two tables become 'x', got 'a' and 'b'"):
        warm_start({}, reader, [("a|b", "x")])
    with pytest.raises(PersistError, match="not a rule to rename by"):
        warm_start({}, reader, [("a", r"\2")])
    with pytest.raises(PersistError, match="has the rule sgd, got the state of adagrad"):
        warm_start({"a": hb.Table("a", 2, rule=hb.Sgd())}, reader, optimizer_state=True)
    timed = hb.Table("a", 2, evict=hb.Ttl(seconds=5))
    with pytest.raises(PersistError, match=r"needs times, got none in 'a'\. Give now="):
        warm_start({"a": timed}, reader)
    warm_start({"a": timed}, reader, now=1_000_000)
    assert (timed.evict(5_999_999), timed.evict(6_000_000)) == (0, 20)


def test_members_of_a_newer_writer_are_kept_by_compaction(tmp_path: Path) -> None:
    run(tmp_path, 2, tracked())
    folder = tmp_path / "checkpoint-00000002"
    plain = json.loads((folder / "MANIFEST.json").read_text())
    plain["newer"] = {"a": 1}
    plain["tables"][0]["newer"] = [2]
    plain["tables"][0]["scalars"]["newer"] = 3
    text, _ = sealed(plain)
    (folder / "MANIFEST.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "CURRENT").write_text(f"{folder.name} {digest}\n")
    full = compact(tmp_path)
    assert full is not None
    written = json.loads((Path(full.folder) / "MANIFEST.json").read_text())
    assert written["newer"] == {"a": 1}
    assert written["tables"][0]["newer"] == [2]
    assert written["tables"][0]["scalars"]["newer"] == 3
    assert open_checkpoint(tmp_path).manifest.to_json() == written


def test_a_manifest_comes_back_from_json_as_it_was() -> None:
    root = Path(__file__).parents[2] / "golden" / "checkpoint_2"
    for path in sorted(root.rglob("MANIFEST.json")):
        manifest = unsealed(path.read_bytes(), str(path))
        plain = json.loads(path.read_text())
        written = manifest.to_json()
        assert written == plain
        assert list(written) == list(plain)
