# SPDX-License-Identifier: Apache-2.0
"""The seam of lookups: who implements its verbs can keep the rows elsewhere, with equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import pyarrow as pa
import torch
from halves import Halves
from torch import Tensor

import hotbed as hb
from hotbed.embedding.lookups import Feature, LocalLookup, Lookup, Plan, Plans, WantedRows
from hotbed.embedding.modules import RowTargets, update_targets
from hotbed.embedding.table import MapQueue, Table
from hotbed.errors import ConfigError, NonFiniteGradient

# --- a table for each rule and scope, policy and type of rows

RULES = (
    hb.Sgd,
    hb.Momentum,
    hb.Nesterov,
    hb.Adagrad,
    hb.RowwiseAdagrad,
    hb.RmsProp,
    hb.Adam,
    hb.Ftrl,
)
POLICIES: dict[str, dict[str, Any]] = {
    "count": {"admit": hb.MinCount(3)},
    "count of batches": {"admit": hb.MinCount(2, once_a_batch=True)},
    "counts in a sketch": {"admit": hb.MinCount(3, sketch_bytes=65_536)},
    "few counts": {"admit": hb.MinCount(3, max_candidates=1024)},
    "counts in little memory": {"admit": hb.MinCount(3, admission_bytes=65_536)},
    "counts that expire": {"admit": hb.MinCount(3, expire_seconds=7)},
    "counts that expire by step": {"admit": hb.MinCount(3, expire_steps=7)},
    "probability": {"admit": hb.Probability(0.3)},
    "age": {"evict": hb.Ttl(seconds=7)},
    "age in steps": {"evict": hb.Ttl(steps=7)},
    "recency": {"evict": hb.Lru(1024)},
    "frequency": {"evict": hb.Lfu(1024)},
    "frequency that ages": {"evict": hb.Lfu(1024, half_life_seconds=9)},
    "all together": {"admit": hb.MinCount(2), "evict": [hb.Ttl(seconds=20), hb.Lru(1024)]},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "evict": hb.Lru(1024)},
}
POOLINGS = ("sum", "mean", "max", "none")


def tables() -> list[Table]:
    settings = dict(POLICIES)
    for rule in RULES:
        for scope in ("touched", "catch_up", "all"):
            settings[f"{rule.__name__} {scope}"] = {"rule": rule(lr=0.1, l2=0.01, scope=scope)}
    return [Table(name, dim=3, **settings[name]) for name in settings]


def modules(every: list[Table]) -> torch.nn.ModuleList:
    """Return a collection of all tables, and one with four poolings that shares three of them."""
    features = [
        Feature(table.name, table.name, POOLINGS[number % 4]) for number, table in enumerate(every)
    ]
    few = [table for table in every if table.name in ("count", "age", "frequency that ages")]
    shared = [Feature(f"{few[0].name} again", few[0].name, "max")]
    shared += [Feature(table.name, table.name, "mean") for table in few]
    return torch.nn.ModuleList(
        [hb.EmbeddingCollection(features, every), hb.EmbeddingCollection(shared, few)]
    )


def batches(num_batches: int) -> list[hb.Batch]:
    random = np.random.default_rng(0)
    names = [feature.name for module in modules(tables()) for feature in module.features]
    every = []
    for number in range(num_batches):
        ids = {}
        for name in names:
            offsets = torch.from_numpy(np.concatenate([[0], random.integers(0, 4, 12).cumsum()]))
            size = int(offsets[-1])
            values = np.where(
                random.random(size) < 0.5,
                random.integers(0, 40, size),
                random.integers(-(2**63), 2**63 - 1, size),
            )
            weights = None
            if name in ("age", "probability"):
                weights = torch.from_numpy(random.random(size, dtype=np.float32))
            ids[name] = hb.Ids(torch.from_numpy(values), offsets, weights)
        time = torch.from_numpy(number * 1_000_000 + random.integers(0, 1_000_000, 12))
        every.append(hb.Batch(ids=ids, time=time, num_samples=12))
    return every


def learn(
    every: list[Table], lookup: Lookup, evicted: Sequence[Table], every_batch: list[hb.Batch]
) -> list[Tensor]:
    """Learn from the batches, and return the results of all lookups.

    Ids are mapped in the lookup, or in a queue and then looked up at once or in two grains; every
     third update adds the gradients of two batches. The norm of gradients is a result, too.
    """
    network = modules(every)
    for module in network:
        module.lookup = lookup
    optimizer = hb.SparseOptimizer(network)
    queue = MapQueue()
    results = []
    for number, batch in enumerate(every_batch):
        loss = torch.zeros(())
        for module in network:
            inputs = module.inputs_of(batch)
            runs: list[tuple[list[hb.Ids], Plan | None]] = [(inputs, None)]
            if number % 3:
                ends = (5, len(batch)) if number % 3 == 2 else ()
                asked = lookup.ask(
                    WantedRows(
                        batch.time,
                        queue=queue,
                        grain_ends=ends,
                        layouts=(module.layout,),
                        inputs=[inputs],
                    )
                )
                asked.wait()
                grains = [inputs]
                if ends:
                    grains = [[ids[:5] for ids in inputs], [ids[5:] for ids in inputs]]
                (plans,) = lookup.take(asked, [[grain] for grain in grains])
                runs = list(zip(grains, plans, strict=True))
            for of_run, of_plan in runs:
                flat, sequences = module.pool(of_run, batch.time, of_plan)
                results += [flat.detach(), *(rows.detach() for rows in sequences)]
                loss = loss + ((flat - 1) ** 2).sum() + sum((rows**3).sum() for rows in sequences)
        loss.backward()
        for module in network:
            sums = module.gradients.take(keeps=True)
            assert sums is not None
            results.append(torch.from_numpy(sums.mapped.squares(sums)))
        if number % 3 == 1:
            continue
        torch.nn.utils.clip_grad_value_(network.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 9:
            for table in evicted:
                table.evict(None if table.clock == "steps" else (number - 1) * 1_000_000)
    queue.close()
    return results


def state(parts: Sequence[Table]) -> dict[str, Any]:
    """Return the contents of a table that consists of `parts`."""
    scalars = [table.scalars() for table in parts]
    of_half = 256 // len(parts)  # partitions
    total = {
        name: sum(each[name] for each in scalars) for name in ("admitted", "refused", "evicted")
    }
    shared = {name: [each[name] for each in scalars] for name in ("step", "calls", "watermark")}
    return {
        "rows": pa.Table.from_batches([batch for table in parts for batch in table.export()]),
        "candidates": [
            batch
            for number, table in enumerate(parts)
            for batch in table.candidates()
            if batch["partition"][0].as_py() // of_half == number
        ],
        "sketch": [batch for table in parts for batch in table.sketch()],
        **total,
        **{name: set(values) for name, values in shared.items()},
    }


def test_a_lookup_over_two_halves_has_the_bits_of_one_table_for_every_rule_and_policy() -> None:
    whole = tables()
    every_batch = batches(50)
    expected = learn(whole, LocalLookup(), whole, every_batch)
    low = tables()
    high = tables()
    results = learn(low, Halves({table.name: table for table in high}), [*low, *high], every_batch)
    for number, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, other), f"result {number}"
    for table, *halves in zip(whole, low, high, strict=True):
        assert state(halves) == state([table]), table.name
        assert all(map(len, halves)), f"{table.name}: a half without rows proves nothing"
    stats = {table.name: table.stats for table in whole}
    assert all(stats[name]["evicted"] for name in ("age", "age in steps", "recency", "frequency"))
    assert stats["count"]["refused"]


def small(lookup: Lookup | None = None) -> tuple[hb.EmbeddingCollection, list[Table]]:
    """Return a collection of two tables, over halves or `lookup`, and all its tables."""
    layout = [hb.Table("user", dim=2), hb.Table("item", dim=2, rule=hb.Adam(lr=0.1))]
    high = {table.name: table.like(table.name, 2) for table in layout}
    module = hb.EmbeddingCollection(
        [Feature("user", "user", "none"), Feature("item", "item", "none")], layout
    )
    module.lookup = lookup or Halves(high)
    return module, layout if lookup else [layout[0], high["user"], layout[1], high["item"]]


def ids_of(*values: int) -> dict[str, hb.Ids]:
    """Return these ids for both features, a bag each."""
    offsets = torch.arange(len(values) + 1)
    return {name: hb.Ids(torch.tensor(values), offsets) for name in ("user", "item")}


def test_a_gradient_that_is_not_finite_is_named_and_no_half_is_updated() -> None:
    module, parts = small()
    rows = module(ids_of(*range(40)))
    scale = torch.ones(40, 2)
    scale[7, 1] = torch.inf
    (rows["item"] * scale).sum().backward()
    before = [(list(table.export()), table.step) for table in parts]
    with pytest.raises(NonFiniteGradient, match="table 'item': the gradient of id 7"):
        hb.SparseOptimizer(module).step()
    assert [(list(table.export()), table.step) for table in parts] == before


def test_row_targets_work_over_any_lookup() -> None:
    states = []
    for lookup in (None, LocalLookup()):
        module, parts = small(lookup)
        module.flow = targets = RowTargets({"user": 50})
        targets.fixed["item"] = [3, 39]
        for _ in range(3):
            rows = module(ids_of(*range(40), 7))
            ((rows["user"] ** 2).sum() + (rows["item"] ** 3).sum()).backward()
            waiting = [(target, target.rows.grad) for target in targets.waiting]
            update_targets(waiting, {"user": 0.5, "item": 0.25})
            targets.waiting.clear()
        size = len(parts) // 2
        states.append([state(parts[start : start + size]) for start in (0, size)])
    assert states[0] == states[1]


def test_targets_of_modules_in_two_places_are_updated_together() -> None:
    states = []
    for lookup in (None, LocalLookup()):
        here, of_here = small(LocalLookup())
        elsewhere, of_elsewhere = small(lookup)
        targets = RowTargets({"user": 50})
        for module in (here, elsewhere):
            module.flow = targets
            (module(ids_of(*range(40)))["item"] ** 3).sum().backward()
        waiting = [(target, target.rows.grad) for target in targets.waiting]
        update_targets(waiting, {"item": 0.25})
        size = len(of_elsewhere) // 2
        parts = [of_here[:1], of_here[1:], of_elsewhere[:size], of_elsewhere[size:]]
        states.append([state(tables) for tables in parts])
    assert states[0] == states[1]


def test_a_map_of_a_queue_can_be_waited_for_counted_and_taken_back() -> None:
    module, parts = small()
    queue = MapQueue()
    plans = Plans(ids_of(*range(40)))
    plans.ask([module], WantedRows(queue=queue))
    plans.wait()
    assert plans.statistics()["user"]["rows"] == 40
    assert plans.left() == [module]
    plans.take_back()
    queue.close()
    assert [len(table) for table in parts] == [0] * 4


def test_ids_that_one_module_looked_up_stay_and_those_of_the_others_are_taken_back() -> None:
    (first, of_first), (second, of_second) = small(LocalLookup()), small(LocalLookup())
    queue = MapQueue()
    plans = Plans(ids_of(*range(40)))
    plans.ask([first, second], WantedRows(queue=queue))
    plans.wait()
    inputs = first.inputs_of(plans)
    first.pool(inputs, plan=plans.take(first, inputs))
    plans.take_back()
    queue.close()
    assert [len(table) for table in (*of_first, *of_second)] == [40, 40, 0, 0]


def test_a_lookup_rejects_ids_that_another_one_mapped() -> None:
    module, _ = small()
    loss = module(ids_of(1, 2))["user"].sum()
    module.lookup = LocalLookup()
    with pytest.raises(ConfigError, match="expected ids that it mapped itself, got HalfIds"):
        loss.backward()
