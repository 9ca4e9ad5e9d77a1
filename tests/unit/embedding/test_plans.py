# SPDX-License-Identifier: Apache-2.0
"""Ids that are mapped ahead of the forward pass give the same bits as ids that it maps itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from on_disk import on_disk
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.lookups import Plan, Plans, WantedRows
from hotbed.embedding.modules import Feature, Flow, FlowModule, TableModule, with_flow
from hotbed.embedding.table import MapQueue
from hotbed.errors import ConfigError, TableFull

FEATURES = [
    Feature("user", "user"),
    Feature("item", "item", "mean"),
    Feature("seen", "item", "none"),
]


def collection(**policies: Any) -> hb.EmbeddingCollection:
    make: dict[str, Any] = {"rule": hb.Adagrad(lr=0.1), **policies}
    tables = [hb.Table("user", dim=3, **make), hb.Table("item", dim=2, **make)]
    return hb.EmbeddingCollection(FEATURES, tables)


def batches(num: int = 6) -> list[hb.Batch]:
    random = np.random.default_rng(0)
    made = []
    for number in range(num):
        ids = {"user": hb.Ids(torch.from_numpy(random.integers(0, 9, 5)))}
        for name in ("item", "seen"):
            offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, 5))])
            values = random.integers(-7, 7, offsets[-1])
            ids[name] = hb.Ids(torch.from_numpy(values), torch.from_numpy(offsets))
        time = torch.full((5,), number * 1_000_000)
        made.append(hb.Batch(ids=ids, time=time, num_samples=5))
    return made


def contents(module: TableModule) -> list[Any]:
    return [
        (list(table.export()), list(table.candidates()), table.scalars()) for table in module.tables
    ]


class Recorder(Flow):
    """Counts lookups, and those with a plan."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.plans: list[bool] = []

    def pool(
        self, module: FlowModule, inputs: Sequence[hb.Ids], time: Any, plan: Plan | None
    ) -> tuple[Tensor, list[Tensor]]:
        self.plans.append(plan is not None)
        return self.flow.pool(module, inputs, time, plan)


def learn(
    module: hb.EmbeddingCollection,
    prepare: Callable[[hb.Batch], hb.Batch],
    network: Callable[[hb.Batch], Tensor] | None = None,
) -> tuple[list[Tensor], list[bool]]:
    """Learn all batches; return the results of lookups, and whether each used a plan."""
    optimizer = hb.SparseOptimizer(module)
    recorder = Recorder(module.flow)
    results = []
    with with_flow(recorder, [module]):
        for batch in map(prepare, batches()):
            if network is None:
                rows = torch.cat([part.reshape(-1) for part in module(batch).values()])
            else:
                rows = network(batch)
            results.append(rows.detach())
            (rows**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return results, recorder.plans


@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"admit": hb.MinCount(2), "evict": hb.Ttl(seconds=2)},
        {"admit": hb.MinCount(2, expire_steps=2), "evict": hb.Ttl(steps=2)},
        {"evict": hb.Lru(1024)},
        {"rule": hb.Adam(scope="catch_up")},
    ],
    ids=["plain", "admission and age", "in steps", "recency", "catch up"],
)
def test_mapping_ahead_changes_no_bit(policies: dict[str, Any]) -> None:
    ahead, alone = collection(**policies), collection(**policies)
    planned, used = learn(ahead, hb.Insert(ahead))
    expected, unused = learn(alone, lambda batch: batch)
    assert used == [False, True, True, True, True, True], "the first lookup shows what is looked up"
    assert not any(unused)
    assert all(map(torch.equal, planned, expected))
    assert contents(ahead) == contents(alone)


def test_map_and_pool_of_a_module_equal_its_lookup() -> None:
    ahead, alone = collection(), collection()
    batch = batches(1)[0]
    inputs = ahead.inputs_of(batch)
    plans = Plans(batch.ids)
    plans.ask([ahead], WantedRows(batch.time))
    plan = plans.take(ahead, inputs)
    assert plan is not None
    assert len(ahead.tables[0]) == len(np.unique(batch.ids["user"].values))
    flat, (seen,) = ahead.pool(inputs, batch.time, plan)
    expected = alone(batch)
    assert torch.equal(flat, torch.cat([expected["user"], expected["item"]], dim=1))
    assert torch.equal(seen, expected["seen"])


@pytest.mark.parametrize("ends", ["left", "refused ahead", "refused at once"])
@pytest.mark.parametrize("tier", [hb.Ram(), on_disk(1100)], ids=["ram", "disk"])
def test_a_batch_that_is_never_learned_says_nothing_of_times(tier: Any, ends: str) -> None:
    """Nor do rows that had no time keep that of the batch."""
    table = hb.Table("user", dim=2, evict=hb.Lru(1024), tier=tier)
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(10, np.float32)), 2)
    table.load([pa.record_batch({"id": np.arange(5), "value": values})])
    table.undated = True
    module = hb.EmbeddingCollection([Feature("user", "user")], [table])
    before = contents(module)
    plans = Plans({"user": hb.Ids(np.arange(9 if ends == "left" else 3000))})
    time = np.array(7)
    if ends == "refused at once":
        with pytest.raises(TableFull):
            plans.ask([module], WantedRows(time))
    else:
        queue = MapQueue()
        plans.ask([module], WantedRows(time, queue=queue))
        assert table.scalars()["timed"]
        with pytest.raises(TableFull) if ends == "refused ahead" else nullcontext():
            plans.wait()
        plans.take_back()
        queue.close()
    assert contents(module) == before
    module({"user": hb.Ids(np.arange(7))})
    assert table.scalars()["timed"] is False
    assert table.undated


def test_a_network_that_changes_ids_looks_up_what_it_made() -> None:
    def shifted(module: hb.EmbeddingCollection) -> Callable[[hb.Batch], Tensor]:
        def network(batch: hb.Batch) -> Tensor:
            ids = {**batch.ids, "user": hb.Ids(batch.ids["user"].values + 100)}
            return module.flat(replace(batch, ids=ids))

        return network

    ahead, alone = collection(), collection()
    planned, used = learn(ahead, hb.Insert(ahead), shifted(ahead))
    expected, _ = learn(alone, lambda batch: batch, shifted(alone))
    assert not any(used)
    assert all(map(torch.equal, planned, expected))
    assert contents(ahead) == contents(alone)


def test_a_batch_that_is_looked_up_twice_is_counted_twice() -> None:
    def twice(module: hb.EmbeddingCollection) -> Callable[[hb.Batch], Tensor]:
        return lambda batch: module.flat(batch) + module.flat(batch)

    policies = {"admit": hb.MinCount(3)}
    ahead, alone = collection(**policies), collection(**policies)
    _, used = learn(ahead, hb.Insert(ahead), twice(ahead))
    learn(alone, lambda batch: batch, twice(alone))
    assert not any(used)
    assert contents(ahead) == contents(alone)


def test_modules_that_share_a_table_map_in_their_forward() -> None:
    first = collection()
    second = hb.EmbeddingCollection(FEATURES, first.tables)
    insert = hb.Insert(nn.ModuleList([first, second]))
    for batch in map(insert, batches()):
        recorder = Recorder(first.flow)
        with with_flow(recorder, [first, second]):
            first.flat(batch)
            second.flat(batch)
        assert recorder.plans == [False, False]


def test_evaluation_takes_no_plan_and_inserts_nothing() -> None:
    module = collection()
    insert = hb.Insert(module)
    first, second = batches(2)
    module.flat(insert(first))
    module.eval()
    before = contents(module)
    module.flat(insert(second))
    assert contents(module) == before


def test_a_plan_that_nobody_takes_is_logged_and_the_last(caplog: pytest.LogCaptureFixture) -> None:
    module = collection()
    insert = hb.Insert(module)
    first, second, third, fourth = batches(4)
    module.flat(insert(first))
    insert(second)
    with caplog.at_level(logging.WARNING, "hotbed"):
        module.flat(insert(third))
    assert "tables user, item: the network did not look up" in caplog.text
    recorder = Recorder(module.flow)
    with with_flow(recorder, [module]):
        module.flat(insert(fourth))
    assert recorder.plans == [False]


def test_with_flow_gives_each_module_its_flow_back() -> None:
    module = collection()
    flow = module.flow
    with pytest.raises(RuntimeError, match="stop"), with_flow(Recorder(flow), [module]):
        raise RuntimeError("stop")
    assert module.flow is flow


def test_insert_of_data_says_how_data_are_mapped() -> None:
    data: Any = batches(1)
    with pytest.raises(ConfigError, match=r"expected a torch module.* got list\. .*dataset\.map"):
        hb.Insert(data)
