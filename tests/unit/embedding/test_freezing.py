# SPDX-License-Identifier: Apache-2.0
"""Frozen tables keep their bits; a rate of 0 moves moments only; both say so where it is saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError, TableError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.state.restoring import restore

pytestmark = pytest.mark.torch_core

SECOND = 1_000_000
RULES = [
    hb.Sgd(lr=0.5),
    hb.Momentum(lr=0.1, l2=0.1, scope="all"),
    hb.Adam(lr=0.1, decay=0.1, scope="catch_up"),
    hb.Ftrl(lr=0.1),
]


def rows_of(table: hb.Table) -> dict[str, Any]:
    return pa.Table.from_batches(table.export()).to_pydict()


def learn(network: nn.Module, ids: list[int], steps: int = 1, time: int | None = None) -> Any:
    sparse = hb.SparseOptimizer(network)
    for _ in range(steps):
        out = network(torch.tensor(ids)) if time is None else network(torch.tensor(ids), time)
        if out.requires_grad:
            (out**2).sum().backward()
            sparse.step()
            sparse.zero_grad()
    return out


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_freezing_a_module_keeps_rows_and_state_and_is_undone_to_the_bit(rule: Any) -> None:
    frozen, free = (hb.Embedding(hb.Table("user", 3, rule=rule)) for _ in range(2))
    for module in (frozen, free):
        learn(module, [1, 2, 3])
        learn(module, [1])
    before = rows_of(frozen.tables[0])
    nn.Sequential(frozen).requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    out = learn(frozen, [1, 2, 99], steps=3)
    assert not out.requires_grad
    assert rows_of(frozen.tables[0]) == before
    assert len(frozen.tables[0]) == 3
    assert torch.equal(out[2], torch.from_numpy(free.tables[0].lookup([99])[0]))
    frozen.requires_grad_(True)
    for module in (frozen, free):
        learn(module, [1, 3], steps=2)
    assert rows_of(frozen.tables[0]) == rows_of(free.tables[0])


def test_a_frozen_table_reads_an_unknown_id_as_its_default_and_counts_no_candidate() -> None:
    table = hb.Table("user", 2, rule=hb.Sgd(), admit=hb.MinCount(2), default=0.5)
    module = hb.Embedding(table).requires_grad_(False)
    assert learn(module, [7, 7, 7]).tolist() == [[0.5, 0.5]] * 3
    assert (len(table), list(table.candidates())) == (0, [])


@pytest.mark.parametrize("kind", ["rows", "all"])
def test_times_counts_and_eviction_go_on_unless_everything_is_frozen(kind: Any) -> None:
    policies = [hb.Ttl(seconds=10), hb.Lfu(1024)]
    table = hb.Table("user", 2, rule=hb.Sgd(), evict=policies)
    module = hb.Embedding(table)
    learn(module, [1, 2], time=0)
    table.frozen = kind
    before = rows_of(table)
    learn(module, [1], time=8 * SECOND)
    after = rows_of(table)
    assert after["value"] == before["value"]
    assert (after == before) == (kind == "all")
    assert table.evict(12 * SECOND) == (1 if kind == "rows" else 0)
    assert rows_of(table)["id"] == ([1] if kind == "rows" else before["id"])


def test_one_frozen_table_of_a_collection_takes_no_gradient_and_the_others_learn_as_alone() -> None:
    def collection() -> hb.EmbeddingCollection:
        tables = [hb.Table(name, 2, rule=hb.Adagrad(lr=0.1)) for name in ("user", "item")]
        return hb.EmbeddingCollection([Feature("user", "user"), Feature("item", "item")], tables)

    frozen, free = collection(), collection()
    batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 3])}
    for module in (frozen, free):
        module.eval()
        for table in module.tables:
            table.find_or_insert([1, 2, 3])
        module.train()
    frozen.tables[0].requires_grad_(False)
    user = rows_of(frozen.tables[0])
    for module in (frozen, free):
        sparse = hb.SparseOptimizer(module)
        module.flat(batch).sum().backward()
        if module is frozen:
            assert torch.count_nonzero(module.rows[0].grad).item() == 2
        sparse.step()
    assert rows_of(frozen.tables[0]) == user
    assert rows_of(frozen.tables[1]) == rows_of(free.tables[1])


def test_a_frozen_table_refuses_an_update_and_unknown_kinds_of_freezing() -> None:
    table = hb.Table("user", 2).requires_grad_(False)
    assert (table.frozen, hb.Table("item", 2).frozen) == ("rows", False)
    with pytest.raises(TableError, match="frozen"):
        table.update(np.array([-1]), np.zeros((1, 2), np.float32))
    with pytest.raises(ConfigError, match="frozen"):
        table.frozen = "values"


@pytest.mark.parametrize("saved", ["rows", "all", False, None])
def test_a_checkpoint_says_what_is_frozen_and_one_that_does_not_leaves_it(
    tmp_path: Path, saved: Any
) -> None:
    table = hb.Table("user", 2)
    table.find_or_insert([1])
    if saved is not None:
        table.frozen = "rows"  # unfrozen again is a state too
        table.frozen = saved
    save(tmp_path, State(tables={"user": table}))
    again = hb.Table("user", 2)
    again.frozen = "rows"
    restore(open_checkpoint(tmp_path), State(tables={"user": again}))
    assert again.frozen == ("rows" if saved is None else saved)
    slots = again.find_or_insert([1, 2])
    assert (slots[1] >= 0) == (not again.frozen)


def test_a_frozen_model_learns_its_dense_part_only() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(hb.Embedding(hb.Table("user", 2)), nn.Linear(2, 1))
    learn(net[0], [1, 2])
    net[0].requires_grad_(False)
    # what is frozen has no gradient: nothing to refuse
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    rows, weights = rows_of(net[0].tables[0]), net[1].weight.detach().clone()
    net(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    assert rows_of(net[0].tables[0]) == rows
    assert not torch.equal(net[1].weight, weights)


MOMENTS = {
    "momentum": (
        hb.Momentum(lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": (hb.Adam(lr=0.1, decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    "rms_prop": (hb.RmsProp(lr=0.1), lambda p: torch.optim.RMSprop(p, lr=0.1)),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_a_rate_of_zero_leaves_values_and_moves_moments_as_torch_does(name: str) -> None:
    rule, make = MOMENTS[name]
    table = hb.Table("user", 2, rule=rule)
    slots = table.find_or_insert([1])
    parameter = nn.Parameter(torch.from_numpy(table.lookup([1])))
    optimizer = make([parameter])
    for lr, grad in ((0.1, 1.0), (0.0, 3.0), (0.1, 0.5)):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.full((1, 2), grad)
        optimizer.step()
        before = table.lookup([1])
        table.update(slots, np.full((1, 2), grad, np.float32), lr=lr)
        assert np.array_equal(table.lookup([1]), before) == (lr == 0)
    np.testing.assert_allclose(table.lookup([1]), parameter.detach().numpy(), rtol=2e-6)


@pytest.mark.parametrize("scope", ["touched", "all", "catch_up"])
def test_ftrl_skips_a_step_whose_rate_is_zero(scope: Any) -> None:
    table, reference = (
        kind("user", 2, rule=hb.Ftrl(lr=0.1, scope=scope))
        for kind in (hb.Table, hb.testing.ReferenceTable)
    )
    for lr in (0.1, 0.0, 0.1):
        for one in (table, reference):
            one.update(one.find_or_insert([1, 2])[:1], np.full((1, 2), 0.5, np.float32), lr=lr)
        assert rows_of(table) == rows_of(reference)
        if lr:
            after = rows_of(table)
        else:
            assert (rows_of(table)["value"], rows_of(table)["state"]) == (
                after["value"],
                after["state"],
            )


def test_a_rule_and_a_schedule_may_have_the_rate_zero() -> None:
    module = hb.Embedding(hb.Table("user", 2, rule=hb.Adam(lr=0.0)))
    before = module.tables[0].lookup([1])
    learn(module, [1])
    assert np.array_equal(module.tables[0].lookup([1]), before)


def test_ftrl_with_another_rate_is_logged_once(caplog: Any) -> None:
    table = hb.Table("user", 1, rule=hb.Ftrl(lr=0.1))
    slots = table.find_or_insert([1])
    with caplog.at_level(logging.WARNING, "hotbed"):
        for lr in (0.1, 0.0, 0.1):
            table.update(slots, np.ones((1, 1), np.float32), lr=lr)
        assert not caplog.records
        for lr in (0.01, 0.001):
            table.update(slots, np.ones((1, 1), np.float32), lr=lr)
    assert ["Ftrl" in record.getMessage() for record in caplog.records] == [True]


def test_a_lookup_in_eval_mode_inserts_nothing_and_its_backward_reaches_the_rows() -> None:
    table = hb.Table("user", 2, rule=hb.Sgd(lr=1.0))
    module, twin = (
        hb.EmbeddingBag(table, "mean"),
        nn.EmbeddingBag(1, 2, mode="mean", include_last_offset=True),
    )
    table.find_or_insert([0])
    twin.weight.data = torch.from_numpy(table.lookup([0]))
    optimizer, sparse = (
        torch.optim.SGD(twin.parameters(), lr=1.0),
        hb.SparseOptimizer(module.eval()),
    )
    module(torch.tensor([0, 7]), torch.tensor([0, 1, 2])).square().sum().backward()
    twin(torch.tensor([0]), torch.tensor([0, 1])).square().sum().backward()
    sparse.step()
    optimizer.step()
    assert len(table) == 1
    assert torch.equal(torch.from_numpy(table.lookup([0])), twin.weight)


def test_a_compiled_lookup_says_why_a_backward_cannot_be_taken() -> None:
    module = hb.Embedding(hb.Table("user", 2))
    compiled = torch.compile(module, backend="aot_eager")
    loss = compiled(torch.tensor([1, 2])).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="one backward"):
        loss.backward()
    module.eval()
    with pytest.raises(ConfigError, match="eval mode"):
        compiled(torch.tensor([1, 2])).square().sum().backward()
    module.requires_grad_(False)
    before = rows_of(module.tables[0])
    compiled(torch.tensor([1, 2])).square().sum().backward()
    assert rows_of(module.tables[0]) == before
