# SPDX-License-Identifier: Apache-2.0
"""Ages in steps: what a step is, what does not count, and what must not be mixed."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError, PersistError
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

pytestmark = pytest.mark.torch_core

SECOND = 1_000_000


def ids_of(table: hb.Table) -> list[int]:
    return sorted(id for batch in table.export() for id in batch["id"].to_pylist())


def learn(table: hb.Table, *ids: int) -> None:
    slots = table.find_or_insert(ids)
    table.update(slots, np.ones((len(ids), table.dim), np.float32))


def look_up(module: Any, *ids: int, **keywords: Any) -> None:
    module(torch.tensor(ids), **keywords).sum().backward()


def test_a_row_goes_after_so_many_steps_without_it() -> None:
    table = hb.Table("user", dim=1, evict=hb.Ttl(steps=3))
    for step in range(1, 11):
        learn(table, step)
        table.evict()
        assert ids_of(table) == list(range(max(1, step - 2), step + 1))
    assert table.stats["evicted"] == 7
    assert table.evict(now=10**18) == 0, "data time means nothing here"
    assert table.find([9, 7]).tolist()[1] == -1


def test_candidates_expire_by_the_same_clock() -> None:
    admit = hb.MinCount(2, expire_steps=2)
    table = hb.Table("user", dim=1, admit=admit, evict=hb.Ttl(steps=5))
    learn(table, 7)
    learn(table, 1)
    table.evict()
    learn(table, 7)  # step 3, its second occurrence
    learn(table, 2)
    learn(table, 3)
    learn(table, 4)
    table.evict()
    learn(table, 2)  # step 7: the candidate of step 4 is gone
    assert ids_of(table) == [7]
    learn(table, 4)  # step 8: that of step 6 is not
    table.evict()
    assert ids_of(table) == [4]


def test_batches_that_one_step_accumulates_are_one_step() -> None:
    module = hb.Embedding(hb.Table("user", dim=2, evict=hb.Ttl(steps=2)))
    optimizer = hb.SparseOptimizer(module)
    table = module.tables[0]
    for step in range(1, 4):
        for batch in range(5):
            look_up(module, 10 * step + batch)
        optimizer.step()
        optimizer.zero_grad()
        table.evict()
    assert table.step == 3
    assert ids_of(table) == [*range(20, 25), *range(30, 35)]


def test_a_table_of_several_features_and_modules_has_one_step_for_all() -> None:
    table = hb.Table("user", dim=2, evict=hb.Ttl(steps=2))
    pair = hb.EmbeddingCollection([Feature("a", "user"), Feature("b", "user")], {"user": table})
    model = torch.nn.ModuleList([pair, hb.Embedding(table)])
    optimizer = hb.SparseOptimizer(model)
    for step in range(1, 4):
        found = pair({"a": hb.Ids([step]), "b": hb.Ids([10 * step])})
        (found["a"].sum() + found["b"].sum()).backward()
        look_up(model[1], 100 * step)
        optimizer.step()
        optimizer.zero_grad()
        table.evict()
    assert table.step == 3
    assert ids_of(table) == [2, 3, 20, 30, 200, 300]


def test_evaluation_neither_steps_nor_sees() -> None:
    module = hb.Embedding(hb.Table("user", dim=2, evict=hb.Ttl(steps=1)))
    optimizer = hb.SparseOptimizer(module)
    look_up(module, 7)
    optimizer.step()
    optimizer.zero_grad()
    module.eval()
    for _ in range(9):
        module(torch.tensor([7, 8]))
    module.tables[0].evict()
    assert ids_of(module.tables[0]) == [7]
    module.train()
    look_up(module, 9)
    module.eval()
    module(torch.tensor([7]))
    optimizer.step()
    assert module.tables[0].evict() == 1
    assert ids_of(module.tables[0]) == [9]


def test_the_steps_of_a_frozen_table_stand_still() -> None:
    table = hb.Table("user", dim=2, evict=hb.Ttl(steps=2))
    other = hb.Table("item", dim=2)
    model = torch.nn.ModuleList([hb.Embedding(table), hb.Embedding(other)])
    optimizer = hb.SparseOptimizer(model)
    learn(table, 7)
    table.requires_grad_(False)
    for step in range(5):
        model[0](torch.tensor([step]))
        look_up(model[1], step)
        optimizer.step()
        optimizer.zero_grad()
        assert table.evict() == 0
    table.requires_grad_(True)
    learn(table, 8)
    assert table.evict() == 0
    learn(table, 8)
    assert table.evict() == 1


def test_times_are_taken_and_not_used() -> None:
    table = hb.Table("user", dim=2, evict=hb.Ttl(steps=2))
    twin = hb.Table("user", dim=2, evict=hb.Ttl(steps=2))
    for step in range(5):
        for one, time in ((table, None), (twin, (5 - step) * SECOND if step % 2 else None)):
            slots = one.find_or_insert([step], time)
            one.update(slots, np.ones((1, 2), np.float32))
            one.evict(step * SECOND)
    assert list(table.export()) == list(twin.export())
    assert table.scalars() == twin.scalars()


def test_clocks_of_the_tables_of_one_module_may_differ() -> None:
    evictions = {"a": hb.Ttl(steps=1), "b": hb.Ttl(seconds=1), "c": None}
    tables = {name: hb.Table(name, 2, evict=evict) for name, evict in evictions.items()}
    module = hb.EmbeddingCollection([Feature(name, name) for name in tables], tables)
    optimizer = hb.SparseOptimizer(module)
    for step in range(4):
        ids = dict.fromkeys(tables, hb.Ids([step]))
        found = module(hb.Batch(ids=ids, time=np.array([step * SECOND // 2])))
        sum(rows.sum() for rows in found.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for table in tables.values():
        table.evict(3 * SECOND // 2)
    assert [ids_of(table) for table in tables.values()] == [[3], [2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "policies",
    [
        {"evict": hb.Ttl(steps=9), "admit": hb.MinCount(2, expire_seconds=5)},
        {"evict": hb.Ttl(days=9), "admit": hb.MinCount(2, expire_steps=5)},
        {"evict": [hb.Ttl(steps=9), hb.Lfu(1024, half_life_seconds=5)]},
    ],
    ids=["candidates in seconds", "candidates in steps", "half-life"],
)
def test_steps_and_seconds_in_one_table_are_an_error(policies: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"table 'user': .* one clock, got .*steps.* in seconds"):
        hb.Table("user", dim=1, **policies)


def test_policies_that_are_off_have_no_clock() -> None:
    admit = hb.MinCount(2, expire_seconds=-1)
    table = hb.Table("user", dim=1, admit=admit, evict=[hb.Ttl(steps=4), hb.Lru(1024)])
    assert table.clock == "steps"
    assert not table.needs_times
    assert hb.Table("user", dim=1, evict=[hb.Ttl(days=4), hb.Lfu(1024)]).clock == "time"
    assert hb.Table("user", dim=1, evict=[hb.Ttl(steps=-1), hb.Lru(1024)]).clock is None


def test_a_schema_without_times_may_count_steps() -> None:
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    assert hb.make_tables(schema, 4, evict=hb.Ttl(steps=5))["user"].clock == "steps"


@pytest.mark.parametrize("admit", [None, hb.MinCount(2, expire_steps=15)])
def test_evictions_in_slices_take_the_steps_of_their_begin(admit: Any) -> None:
    """Training goes on between slices: the table holds what it holds when evicted at once."""

    def life(slice_rows: int) -> list[Any]:
        rng = np.random.default_rng(0)
        table = hb.Table("t", 2, admit=admit, evict=hb.Ttl(steps=12))
        schedule = EvictionSchedule({"t": table}, step_interval=10, slice_rows=slice_rows)
        swept = False
        for step in range(1, 61):
            learn(table, *(rng.integers(0, 500, 200) + step * 5).tolist())
            schedule.step(step, None)
            swept = swept or schedule.sweeping
        schedule.evict(60, None)
        assert table.stats["evicted"] > 0
        assert swept == (slice_rows < 10**9)
        scalars = table.scalars()
        del scalars["evicted_by"]  # rows of ids that come again before their slice are restarted
        return [list(table.export()), scalars, list(table.candidates())]

    assert life(10**9) == life(100)


def test_candidates_expire_on_schedule_where_no_row_ever_goes() -> None:
    table = hb.Table("user", dim=1, admit=hb.MinCount(9, expire_steps=3))
    schedule = EvictionSchedule({"user": table}, step_interval=1)
    for step in range(1, 5):
        learn(table, step)
        schedule.step(step, None)
    waiting = [id for batch in table.candidates() for id in batch["id"].to_pylist()]
    assert sorted(waiting) == [2, 3, 4]


def test_a_state_dict_of_another_clock_is_refused() -> None:
    modules = [
        hb.Embedding(hb.Table("user", dim=1, evict=evict))
        for evict in (hb.Ttl(steps=5), hb.Ttl(seconds=5))
    ]
    look_up(modules[0], 7)
    look_up(modules[1], 7, time=0)
    for module, other in (modules, reversed(modules)):
        before = list(module.tables[0].export())
        with pytest.raises(PersistError, match="table 'user': its state was trained"):
            module.load_state_dict(other.state_dict())
        assert list(module.tables[0].export()) == before
    fresh = hb.Embedding(hb.Table("user", dim=1, evict=hb.Ttl(steps=5)))
    fresh.load_state_dict(modules[0].state_dict())
    assert fresh.tables[0].scalars() == modules[0].tables[0].scalars()


# --- capacity -------------------------------------------------------------------------------------


def test_a_capacity_is_shown_and_logged_once_and_never_binds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = hb.Table("user", dim=2, capacity=1000)
    table.find_or_insert(np.arange(1000))
    assert "rows=1000, capacity=1000" in repr(table)
    assert table.stats["capacity"] == 1000
    assert caplog.messages == []
    table.find_or_insert(np.arange(3000))
    for _ in range(3):
        assert table.stats["rows"] == 3000
    (message,) = caplog.messages
    assert "table 'user': 3,000 rows, more than its capacity of 1,000" in message
    assert caplog.records[0].levelno == logging.WARNING


def test_a_capacity_changes_nothing_else() -> None:
    tables = [hb.Table("user", dim=2, capacity=capacity) for capacity in (None, 3)]
    for table in tables:
        learn(table, *range(9))
    assert list(tables[0].export()) == list(tables[1].export())
    assert tables[0].scalars() == tables[1].scalars()
    assert "capacity" not in tables[0].config
    assert "capacity" not in tables[0].stats
    assert hb.Table(**tables[1].config).capacity == tables[1].like("item", 4).capacity == 3
