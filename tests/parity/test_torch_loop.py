# SPDX-License-Identifier: Apache-2.0
"""Tables work in a plain PyTorch loop as dense embeddings would: each test trains both, and they
agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.embedding.modules.gradients import RowGradients
from hotbed.errors import NonFiniteGradient

pytestmark = pytest.mark.torch_core

NUM_IDS, DIM = 12, 4


class Sparse(nn.Module):
    """Two features over two tables, and a tower."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.tables = {name: hb.Table(name, dim=DIM, rule=rule) for name in ("user", "item")}
        self.rows = hb.EmbeddingCollection(
            [Feature("user", "user"), Feature("item", "item", "mean")], self.tables
        )
        self.tower = nn.Sequential(nn.Linear(2 * DIM, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, hb.Ids]) -> Tensor:
        out: Tensor = self.tower(self.rows.flat(batch)).squeeze(1)
        return out


class Dense(nn.Module):
    """The same model on nn.EmbeddingBag, its rows copied from the tables."""

    def __init__(self, sparse: Sparse) -> None:
        super().__init__()
        first = {
            n: torch.from_numpy(t.lookup(np.arange(NUM_IDS))) for n, t in sparse.tables.items()
        }
        self.user = nn.EmbeddingBag.from_pretrained(
            first["user"], freeze=False, mode="sum", include_last_offset=True
        )
        self.item = nn.EmbeddingBag.from_pretrained(
            first["item"], freeze=False, mode="mean", include_last_offset=True
        )
        self.tower = copy.deepcopy(sparse.tower)

    def forward(self, batch: dict[str, hb.Ids]) -> Tensor:
        bags = [
            self.user(batch["user"].values, batch["user"].offsets),
            self.item(batch["item"].values, batch["item"].offsets),
        ]
        out: Tensor = self.tower(torch.cat(bags, dim=1)).squeeze(1)
        return out

    def tables(self) -> list[nn.Parameter]:
        return [self.user.weight, self.item.weight]


def batches(steps: int = 20, n: int = 6) -> list[tuple[dict[str, hb.Ids], Tensor]]:
    random, out = np.random.default_rng(0), []
    for _ in range(steps):
        batch = {}
        for name in ("user", "item"):
            offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, n))])
            batch[name] = hb.Ids(
                torch.from_numpy(random.integers(0, NUM_IDS, offsets[-1])),
                torch.from_numpy(offsets),
            )
        out.append((batch, torch.from_numpy(random.integers(0, 2, n)).float()))
    return out


def loss_of(model: nn.Module, batch: dict[str, hb.Ids], label: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch), label)


def agree(sparse: Sparse, dense: Dense) -> None:
    for table, rows in zip(sparse.tables.values(), dense.tables(), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(table.lookup(np.arange(NUM_IDS))), rows.detach(), rtol=1e-4, atol=1e-5
        )
    for mine, its in zip(sparse.tower.parameters(), dense.tower.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def pair(
    rule: Any, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[Any, ...]:
    """(sparse model, dense model, the optimizers of each: towers by Sgd, rows by the rule)."""
    torch.manual_seed(0)
    sparse = Sparse(rule)
    dense = Dense(sparse)
    mine = [torch.optim.SGD(hb.dense_parameters(sparse), lr=0.1), hb.SparseOptimizer(sparse)]
    its = [torch.optim.SGD(dense.tower.parameters(), lr=0.1), optimizer(dense.tables())]
    return sparse, dense, mine, its


def adagrad() -> tuple[Any, ...]:
    return pair(hb.Adagrad(lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2))


def test_a_plain_loop_trains_as_dense_embeddings_do() -> None:
    sparse, dense, mine, its = adagrad()
    for batch, label in batches():
        losses = []
        for model, optimizers in ((sparse, mine), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, batch, label)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    agree(sparse, dense)


def test_dense_parameters_are_all_but_the_rows() -> None:
    model = Sparse(hb.Sgd())
    assert {id(p) for p in hb.dense_parameters(model)} == {id(p) for p in model.tower.parameters()}


def test_learning_rate_schedulers_drive_the_tables() -> None:
    sparse, dense, mine, its = pair(hb.Sgd(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5))
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizers[1], gamma=0.8)
        for optimizers in (mine, its)
    ]
    for batch, label in batches():
        for model, optimizers in ((sparse, mine), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, batch, label).backward()
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert mine[1].param_groups[0]["lr"] == pytest.approx(0.5 * 0.8**20)
    agree(sparse, dense)


def test_gradients_accumulate_over_micro_batches() -> None:
    sparse, dense, mine, its = adagrad()
    for k, (batch, label) in enumerate(batches()):
        for model, optimizers in ((sparse, mine), (dense, its)):
            (loss_of(model, batch, label) / 4).backward()
            if k % 4 == 3:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert sparse.tables["user"].step == 5
    agree(sparse, dense)


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_sees_the_gradients_of_rows(kind: str) -> None:
    sparse, dense, mine, its = pair(hb.Sgd(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5))
    for batch, label in batches():
        for model, optimizers in ((sparse, mine), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (10 * loss_of(model, batch, label)).backward()
            if kind == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
    agree(sparse, dense)


def test_one_optimizer_step_for_two_backward_passes_through_one_forward() -> None:
    sparse, dense, mine, its = adagrad()
    batch, label = batches(1)[0]
    for model, optimizers in ((sparse, mine), (dense, its)):
        loss = loss_of(model, batch, label)
        loss.backward(retain_graph=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    agree(sparse, dense)


def test_zero_grad_forgets_what_waits() -> None:
    sparse, _, mine, _ = adagrad()
    batch, label = batches(1)[0]
    before = {name: list(table.export()) for name, table in sparse.tables.items()}
    loss_of(sparse, batch, label).backward()
    mine[1].zero_grad()
    mine[1].step()
    assert all(table.step == 0 for table in sparse.tables.values())
    loss_of(sparse, batch, label)
    # rows were inserted,
    assert before != {name: list(table.export()) for name, table in sparse.tables.items()}
    for table in sparse.tables.values():  # none has learned
        ids = np.concatenate([batch["id"].to_numpy() for batch in table.export()])
        fresh = hb.Table(table.name, dim=DIM).lookup(ids)
        assert (table.lookup(ids) == fresh).all()


def test_a_gradient_scaler_unscales_and_skips_steps_that_overflow() -> None:
    sparse, dense, mine, its = pair(hb.Sgd(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for k, (batch, label) in enumerate(batches(12)):
        for model, optimizers, scaler in ((sparse, mine, scalers[0]), (dense, its, scalers[1])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, batch, label) * (torch.inf if k == 5 else 1.0)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    agree(sparse, dense)


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("combines", [False, True], ids=["sparse", "combined"])
def test_a_scale_that_a_device_copies_late_is_waited_for(
    combines: bool, unscales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GradScaler's copies to pinned memory are, which run when the device comes to them."""
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Stream:
        def synchronize(self) -> None:
            while late:
                copy, values = late.pop()
                copy.copy_(values)

    def get(replicator: Any, device: torch.device) -> torch.Tensor:
        copies = replicator._per_device_tensors
        if device not in copies:
            copies[device] = torch.full_like(replicator.master, torch.nan)
            late.append((copies[device], replicator.master.clone()))
        return copies[device]

    add = RowGradients.add

    def add_of_device(gradients: RowGradients, *args: Any) -> None:
        gradients._device = torch.device("cuda")
        add(gradients, *args)

    def rows_after_a_step() -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.EmbeddingBag(50, 4) if combines else hb.Embedding(hb.Table("t", dim=4))
        if combines:
            net, optimizer, _ = hb.auto(net, torch.optim.SGD(net.parameters(), lr=0.1))
        else:
            optimizer = hb.SparseOptimizer(net)
        ids = torch.arange(6)[:, None] if combines else torch.arange(6)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(net(ids).square().sum() + net(ids).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return net(ids).detach()

    expected = rows_after_a_step()
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.grad_scaler._MultiDeviceReplicator, "get", get)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
        patch.setattr(RowGradients, "add", add_of_device)
        assert torch.equal(rows_after_a_step(), expected)
    assert not late


def test_without_a_scaler_an_overflow_is_an_error_and_training_goes_on_after_zero_grad() -> None:
    sparse, dense, mine, its = adagrad()
    for k, (batch, label) in enumerate(batches(6)):
        for model, optimizers in ((sparse, mine), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss_of(model, batch, label) * (torch.nan if k == 2 else 1.0)).backward()
            if k == 2:
                if model is sparse:
                    with pytest.raises(NonFiniteGradient):
                        optimizers[1].step()
                continue
            for optimizer in optimizers:
                optimizer.step()
    agree(sparse, dense)


def test_autocast_gives_fp32_rows_and_trains() -> None:
    sparse, dense, mine, its = adagrad()
    for batch, label in batches():
        for model, optimizers in ((sparse, mine), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch)
            nn.functional.binary_cross_entropy_with_logits(logits.float(), label).backward()
            for optimizer in optimizers:
                optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse.rows.flat(batches(1)[0][0]).dtype == torch.float32
    agree(sparse, dense)


def test_rows_in_lower_precision_downstream_send_back_their_gradient() -> None:
    table = hb.Table("user", dim=2, rule=hb.Sgd(lr=1.0), init=hb.Zeros())
    bag = hb.EmbeddingBag(table)
    (bag(torch.tensor([[1, 2]])).bfloat16() * 2).sum().backward()
    hb.SparseOptimizer(bag).step()
    assert table.lookup([1, 2]).tolist() == [[-2.0, -2.0]] * 2


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_and_trains_as_the_eager_one() -> None:
    eager, dense, mine, its = adagrad()
    compiled, _, other, _ = adagrad()
    graph: Any = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for batch, label in batches(6):
        for model, optimizers in ((eager, mine), (graph, other), (dense, its)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, batch, label).backward()
            for optimizer in optimizers:
                optimizer.step()
    agree(eager, dense)
    agree(compiled, dense)


def test_the_optimizers_state_dict_carries_rates_and_schedules() -> None:
    _, _, mine, _ = pair(hb.Sgd(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5))
    mine[1].param_groups[0]["lr"] = 0.125
    fresh = hb.SparseOptimizer(Sparse(hb.Sgd(lr=0.5)))
    fresh.load_state_dict(mine[1].state_dict())
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.param_groups[0]["tables"] == ["user", "item"]


def test_a_table_in_two_modules_steps_once_with_the_sum() -> None:
    table = hb.Table("user", dim=2, rule=hb.Adagrad(lr=1.0), init=hb.Zeros())
    model = nn.ModuleDict({"bag": hb.EmbeddingBag(table), "rows": hb.Embedding(table)})
    optimizer = hb.SparseOptimizer(model)
    (3 * model["bag"](torch.tensor([[5, 6]])) + model["rows"](torch.tensor([5]))).sum().backward()
    optimizer.step()
    assert table.step == 1
    assert table.lookup([5, 6]).tolist() == [[-1.0, -1.0]] * 2
    accumulators = np.concatenate(
        [np.stack(b["state"].to_numpy(zero_copy_only=False)) for b in table.export()]
    )
    assert sorted(accumulators[:, 0].tolist()) == [9.0, 16.0]


def test_rows_evicted_between_forward_and_step_take_no_gradient_and_no_other_row_takes_theirs() -> (
    None
):
    table = hb.Table("user", dim=1, rule=hb.Sgd(lr=1.0), init=hb.Zeros(), evict=hb.Lru(1024))
    bag = hb.EmbeddingBag(table)
    optimizer = hb.SparseOptimizer(bag)
    first, second = torch.arange(20).view(-1, 1), torch.arange(1_000, 1_020).view(-1, 1)
    loss = 5 * bag(first).sum()
    # far more than the table holds: all of `first` goes
    for chunk in torch.arange(2_000, 12_000).view(-1, 20):
        bag(chunk.view(-1, 1))
    assert (table.find(first.view(-1)) == -1).all()
    loss = loss + 7 * bag(second).sum()
    loss.backward()
    optimizer.step()
    found = torch.from_numpy(table.find(second.view(-1)) >= 0)
    rows = torch.from_numpy(table.lookup(second.view(-1)))[:, 0]
    assert torch.equal(rows, torch.where(found, -7.0, 0.0))
    everything = np.concatenate([batch["value"].flatten().to_numpy() for batch in table.export()])
    assert set(everything.tolist()) <= {0.0, -7.0}


def test_an_id_admitted_by_a_later_micro_batch_takes_no_gradient_from_when_it_was_refused() -> None:
    table = hb.Table("user", dim=1, rule=hb.Sgd(lr=1.0), init=hb.Zeros(), admit=hb.MinCount(2))
    bag, ids = hb.EmbeddingBag(table), torch.tensor([[7]])
    (5 * bag(ids)).sum().backward()
    (3 * bag(ids)).sum().backward()
    hb.SparseOptimizer(bag).step()
    assert table.lookup([7]).item() == -3.0
