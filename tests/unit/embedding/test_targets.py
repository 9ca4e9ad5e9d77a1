# SPDX-License-Identifier: Apache-2.0
"""RowTargets: gradients flow to tensors of rows, and updates by these equal SparseOptimizer's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from torch import Tensor

import hotbed as hb
from hotbed.embedding.modules import Feature, RowTargets, targets, update_targets
from hotbed.errors import ConfigError, NonFiniteGradient, RowShapeError

FEATURES = [
    Feature("user", "user", "none"),
    Feature("friend", "user", "mean"),
    Feature("item", "item", "sum"),
]
RATES = {"user": 0.5, "item": 0.25}
Ids = dict[str, hb.Ids]


def collection(rule: hb.Rule | None = None) -> hb.EmbeddingCollection:
    """Return a collection of two tables; ids of users get a row when they come a second time."""
    rule = rule or hb.Adagrad(lr=0.5)
    tables = [
        hb.Table("user", dim=3, rule=rule, admit=hb.MinCount(2), default=0.125),
        hb.Table("item", dim=2, rule=rule),
    ]
    return hb.EmbeddingCollection(FEATURES, tables)


def batches(number: int) -> list[Ids]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(number):
        offsets = torch.tensor([0, 1, 1, 3, 4])
        made.append(
            {
                "user": hb.Ids(torch.from_numpy(random.integers(-3, 3, 4))),
                "friend": hb.Ids(torch.from_numpy(random.integers(-3, 3, 4)), offsets),
                "item": hb.Ids(torch.from_numpy(random.integers(0, 5, 4)), offsets),
            }
        )
    return made


def loss_of(module: hb.EmbeddingCollection, batch: Ids) -> Tensor:
    rows = module(batch)
    return (
        (rows["user"] ** 2).sum() + (rows["friend"] * 3 - 1).pow(2).sum() + rows["item"].exp().sum()
    )


def same_tables(one: hb.EmbeddingCollection, other: hb.EmbeddingCollection) -> bool:
    return all(
        own.step == theirs.step
        and list(own.export()) == list(theirs.export())
        and list(own.candidates()) == list(theirs.candidates())
        for own, theirs in zip(one.tables, other.tables, strict=True)
    )


def trained(module: hb.EmbeddingCollection, per_step: int = 1, *, by_backward: bool) -> None:
    """Train by targets: their gradients come from `backward`, or from `autograd.grad`."""
    targets = RowTargets({"user": 9})
    module.flow = targets
    every = batches(8)
    for start in range(0, len(every), per_step):
        loss = torch.stack([loss_of(module, b) for b in every[start : start + per_step]]).sum()
        rows = [target.rows for target in targets.waiting]
        if by_backward:
            loss.backward()
            grads = [own.grad for own in rows]
        else:
            grads = list(torch.autograd.grad(loss, rows))
        assert len(rows) == 2 * per_step
        pairs = [(t, g) for t, g in zip(targets.waiting, grads, strict=True) if g is not None]
        update_targets(pairs[::-1], RATES)
        targets.waiting.clear()


@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("by_backward", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        hb.Sgd(),
        hb.Adagrad(),
        hb.Adam(),
        hb.Adam(scope="catch_up"),
        hb.Ftrl(l1=0.01),
        hb.Momentum(scope="all"),
    ],
    ids=str,
)
def test_updates_by_targets_equal_those_of_the_optimizer(
    rule: hb.Rule, by_backward: bool, per_step: int
) -> None:
    module = collection(rule)
    trained(module, per_step, by_backward=by_backward)
    other = collection(rule)
    optimizer = hb.SparseOptimizer(other)
    optimizer.set_learning_rates(RATES)
    every = batches(8)
    for start in range(0, len(every), per_step):
        for batch in every[start : start + per_step]:
            loss_of(other, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_tables(module, other)
    assert module.tables[0].stats["refused"] > 0


def test_a_target_holds_the_distinct_rows_and_their_slots() -> None:
    module = collection()
    module.tables[0].find_or_insert([7, 7])
    module.flow = targets = RowTargets({"user": 5})
    ids = hb.Ids(torch.tensor([7, 8, 7]))
    module({"user": ids, "friend": ids, "item": ids})
    user, item = targets.waiting
    assert user.table is module.tables[0]
    assert user.rows.is_leaf
    assert user.rows.requires_grad
    slots = user.slots.numpy()
    assert sorted(slots[:2]) == sorted(module.tables[0].find([7, 8]))
    assert user.rows[:2].tolist() == module.tables[0].gather(slots[:2]).tolist()
    assert user.rows[2:].tolist() == [[0.0] * 3] * 3
    assert slots[2:].tolist() == [-1, -1, -1]
    assert len(item.rows) == 2


def test_a_refused_id_has_no_slot_and_takes_no_update() -> None:
    module = collection()
    module.flow = targets = RowTargets()
    ids = hb.Ids(torch.tensor([7]))
    empty = hb.Ids(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    rows = module({"user": ids, "friend": empty, "item": ids})
    user = targets.waiting[0]
    assert user.slots.tolist() == [-1]
    assert rows["user"].tolist() == user.rows.tolist() == [[0.125] * 3]
    (grad,) = torch.autograd.grad(rows["user"].sum(), [user.rows])
    assert grad.tolist() == [[1.0] * 3]
    update_targets([(user, grad)], RATES)
    assert len(module.tables[0]) == 0
    assert module.tables[0].step == 1
    assert module.tables[1].step == 0, "a table without a gradient is left alone"


@pytest.mark.parametrize("number", [1, 9000])
def test_fixed_ids_take_no_update(number: int) -> None:
    """Large batches are cut into ranges."""
    module = collection()
    module.flow = targets = RowTargets()
    targets.fixed["item"] = [7, 8]
    ids = torch.cat([torch.tensor([7]), torch.arange(100, 100 + number)])
    item = hb.Ids(ids)
    rows = module({"user": item, "friend": item, "item": item})
    table = module.tables[1]
    slots = targets.waiting[1].slots
    assert sorted(slots.tolist()) == sorted([-1, *table.find(ids[1:])])
    before = table.lookup([7, 100])
    rows["item"].sum().backward()
    update_targets([(target, target.rows.grad) for target in targets.waiting], RATES)
    after = table.lookup([7, 100])
    assert (after[0] == before[0]).all()
    assert (after[1] != before[1]).all()


def test_evaluation_and_lookups_without_gradients_add_no_target() -> None:
    module = collection()
    module.flow = targets = RowTargets()
    (batch,) = batches(1)
    with torch.no_grad():
        module(batch)
    module.eval()
    before = [table.scalars() for table in module.tables]
    module(batch)
    assert not targets.waiting
    assert [table.scalars() for table in module.tables] == before


def test_a_gradient_that_is_not_finite_changes_no_table() -> None:
    module = collection()
    trained(module, by_backward=True)
    module.flow = targets = RowTargets()
    module(batches(1)[0])
    before = [list(table.export()) for table in module.tables]
    grads = [torch.ones_like(target.rows) for target in targets.waiting]
    grads[1][0, 0] = torch.nan
    with pytest.raises(NonFiniteGradient, match=r"table 'item': the gradient of id \d"):
        update_targets(list(zip(targets.waiting, grads, strict=True)), RATES)
    assert [list(table.export()) for table in module.tables] == before
    assert [table.step for table in module.tables] == [8, 8]


def test_rows_that_were_evicted_meanwhile_take_no_update() -> None:
    table = hb.Table("user", dim=2, evict=hb.Ttl(seconds=10))
    module = hb.EmbeddingCollection([Feature("user", "user", "none")], [table])
    module.flow = targets = RowTargets()
    ids = {"user": hb.Ids(torch.tensor([1]))}
    module.pool([ids["user"]], np.zeros(1, np.int64))
    table.evict(60_000_000)
    table.find_or_insert([2], 60_000_000)
    before = list(table.export())
    (target,) = targets.waiting
    update_targets([(target, torch.ones_like(target.rows))], {"user": 1.0})
    assert list(table.export()) == before


def test_a_batch_above_the_static_size_is_an_error_with_the_size_needed() -> None:
    module = collection()
    module.flow = RowTargets({"item": 2})
    ids = hb.Ids(torch.tensor([1, 2, 3]))
    with pytest.raises(RowShapeError, match=r"table 'item': .* static size of 2, got 3"):
        module({"user": ids, "friend": ids, "item": ids})


def test_wrong_gradients_are_rejected() -> None:
    module = collection()
    module.flow = targets = RowTargets()
    module(batches(1)[0])
    target = targets.waiting[0]
    with pytest.raises(RowShapeError, match="must have the shape of its rows"):
        update_targets([(target, torch.ones(1, 3))], RATES)
    grad = torch.ones_like(target.rows)
    with pytest.raises(ConfigError, match="twice"):
        update_targets([(target, grad), (target, grad)], RATES)


def test_weights_that_require_a_gradient_are_rejected() -> None:
    module = collection()
    module.flow = RowTargets()
    ids = hb.Ids(torch.tensor([1]), torch.tensor([0, 1]), torch.ones(1, requires_grad=True))
    with pytest.raises(ConfigError, match="weights of ids take no gradient"):
        module({"user": hb.Ids(torch.tensor([1])), "friend": ids, "item": ids})


def test_a_loop_without_updates_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    module = collection()
    module.flow = RowTargets()
    (batch,) = batches(1)
    for _ in range(targets.MANY_PASSES):
        module(batch)
    assert not caplog.messages
    module(batch)
    module(batch)
    assert len(caplog.messages) == 1
    assert "256 forward passes wait for an update" in caplog.text


def test_a_pass_without_a_gradient_of_a_table_leaves_its_rate() -> None:
    module = collection()
    module.flow = targets = RowTargets()
    ids = hb.Ids(torch.tensor([7]))
    for _ in range(2):
        module({"user": ids, "friend": hb.Ids(torch.tensor([8])), "item": ids})
    users, items = [targets.waiting[number::2] for number in range(2)]
    before = module.tables[1].lookup([7])
    update_targets([(t, torch.ones_like(t.rows)) for t in (*users, items[0])], RATES)
    assert (module.tables[1].lookup([7]) != before).all()
