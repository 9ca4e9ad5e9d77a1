# SPDX-License-Identifier: Apache-2.0
"""A module with tables as any other: state_dict carries the rows, deepcopy copies them, and it says
what it holds.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.embedding.modules import state as states
from hotbed.errors import ConfigError, PersistError, RowShapeError

pytestmark = pytest.mark.torch_core

TABLES: dict[str, dict[str, Any]] = {
    "plain": {"rule": hb.RowwiseAdagrad(lr=0.1)},
    "stateless": {"rule": hb.Sgd(lr=0.1)},
    "catch_up": {"rule": hb.Adam(lr=0.1, decay=0.1, scope="catch_up"), "admit": hb.MinCount(3)},
    "sketch": {"admit": hb.MinCount(3, sketch_bytes=1 << 16), "evict": hb.Ttl(seconds=9)},
    "aged": {
        "admit": hb.MinCount(2, expire_seconds=5),
        "evict": [hb.Ttl(seconds=9), hb.Lfu(1024, half_life_seconds=4)],
    },
    "half": {"rule": hb.Adam(lr=0.1), "dtype": "bfloat16"},
}


def everything(table: hb.Table) -> Any:
    rows, candidates = pa.Table.from_batches(table.export()).to_pydict(), list(table.candidates())
    return rows, candidates, table.scalars()


class Net(nn.Module):
    """Two modules that share the table `item`, and a tower."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        user, item = (hb.Table(name, 3, **keywords) for name in ("user", "item"))
        self.pair = hb.EmbeddingCollection(
            [Feature("user", "user"), Feature("item", "item")], [user, item]
        )
        self.item = hb.Embedding(item)
        self.tower = nn.Linear(9, 1)

    def forward(self, ids: torch.Tensor, time: int) -> torch.Tensor:
        batch = hb.Batch(
            {"user": hb.Ids(ids), "item": hb.Ids(ids % 7)}, time=np.full(len(ids), time)
        )
        both = [self.pair.flat(batch), self.item(ids % 7, np.full(len(ids), time))]
        out: torch.Tensor = self.tower(torch.cat(both, dim=1))
        return out

    def tables(self) -> list[hb.Table]:
        return self.pair.tables


def train(net: Net, steps: range) -> None:
    dense, sparse = torch.optim.SGD(hb.dense_parameters(net), lr=0.1), hb.SparseOptimizer(net)
    for step in steps:
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 20, 8))
        net(ids, step * 1_000_000).square().sum().backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("keywords", TABLES.values(), ids=TABLES)
def test_a_loaded_state_dict_goes_on_to_the_same_bits(
    tmp_path: Path, keywords: dict[str, Any]
) -> None:
    net, again = Net(**keywords), Net(**keywords)
    train(net, range(12))
    train(again, range(90, 93))  # what is there before is gone after
    torch.save(net.state_dict(), tmp_path / "net.pt")
    again.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    for one, other in zip(net.tables(), again.tables(), strict=True):
        assert everything(one) == everything(other)
    for model in (net, again):
        train(model, range(12, 16))
    for one, other in zip(net.tables(), again.tables(), strict=True):
        assert everything(one) == everything(other)


def test_the_best_state_of_a_loop_is_kept_value_by_value(tmp_path: Path) -> None:
    net = Net()
    train(net, range(3))
    before = [everything(table) for table in net.tables()]
    best = {key: value.detach().cpu().clone() for key, value in net.state_dict().items()}
    other = {key: value.to("cpu") for key, value in copy.deepcopy(net.state_dict()).items()}
    for state in (best, other):
        train(net, range(3, 6))
        torch.save(state, tmp_path / "best.pt")
        for kept in (state, torch.load(tmp_path / "best.pt", weights_only=True)):
            net.load_state_dict(kept)
            assert [everything(table) for table in net.tables()] == before


def test_a_table_of_two_modules_is_carried_once() -> None:
    net = Net()
    train(net, range(3))
    state = net.state_dict()
    pair, item = (
        state[f"{name}._extra_state"]["tables"]["item"]["rows"]["value"]
        for name in ("pair", "item")
    )
    assert pair.data_ptr() == item.data_ptr()


def test_rows_that_are_missing_unexpected_or_of_another_shape_are_refused() -> None:
    module = hb.Embedding(hb.Table("user", 2))
    module(torch.tensor([1, 2]))
    before = everything(module.tables[0])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "_extra_state"'):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight"'):
        module.load_state_dict({**module.state_dict(), "weight": torch.zeros(2, 2)})
    for other, error in (
        (hb.Table("user", 3), RowShapeError),
        (hb.Table("user", 2, rule=hb.Adam()), PersistError),
        (hb.Table("user", 2, rule=hb.Momentum()), PersistError),  # state of the same width
        (hb.Table("item", 2), PersistError),
    ):
        with pytest.raises(error, match="got"):
            module.load_state_dict(hb.Embedding(other).state_dict())
    assert everything(module.tables[0]) == before


def test_a_state_dict_beyond_the_limit_names_what_saves_it(monkeypatch: Any) -> None:
    module = hb.Embedding(hb.Table("user", 2))
    module(torch.arange(100))
    monkeypatch.setattr(states.Carrier, "state_dict_limit", 1000)
    with pytest.raises(PersistError, match=r"RecModel\.save"):
        module.state_dict()


def test_a_model_saves_and_restores_without_rows_as_tensors(
    tmp_path: Path, monkeypatch: Any
) -> None:
    schema = hb.Schema([hb.Label("click"), hb.Id("item")])
    data = hb.sources.Memory({"click": np.array([0, 1, 1]), "item": np.array([1, 2, 3])})

    def model() -> hb.RecModel:
        return hb.RecModel(
            hb.models.DNN(schema, hb.make_tables(schema, dim=2), hidden=[2]), "bce", "adam"
        )

    trained = model()
    trained.fit(hb.Dataset(data, schema, 3), progress=False)
    monkeypatch.setattr(states, "table_state", None)
    trained.save(tmp_path / "saved")
    model().restore(tmp_path / "saved")


def test_a_deep_copy_has_rows_of_its_own_and_learns_apart() -> None:
    net = Net(rule=hb.Adam(lr=0.1))
    train(net, range(3))
    net.pair.tables[0].requires_grad_(False)
    twin = copy.deepcopy(net)
    assert twin.pair.tables[1] is twin.item.tables[0]
    before = [everything(table) for table in net.tables()]
    assert [everything(table) for table in twin.tables()] == before
    train(twin, range(3, 6))
    assert [everything(table) for table in net.tables()] == before
    train(net, range(3, 6))
    assert [everything(table) for table in net.tables()] == [
        everything(table) for table in twin.tables()
    ]
    assert len({id(parameter) for one in (net, twin) for parameter in one.parameters()}) == 2 * len(
        list(net.parameters())
    )


def test_a_copied_optimizer_steps_the_copied_tables() -> None:
    module = hb.Embedding(hb.Table("user", 2, rule=hb.Sgd(lr=1.0)))
    twin, sparse = copy.deepcopy((module, hb.SparseOptimizer(module)))
    twin(torch.tensor([1])).sum().backward()
    first = module.tables[0].lookup([1])
    sparse.step()
    assert np.array_equal(module.tables[0].lookup([1]), first)
    assert np.array_equal(twin.tables[0].lookup([1]), first - 1)


def test_an_averaged_model_averages_dense_parameters_over_rows_that_are_given_to_it() -> None:
    net = Net()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        train(net, range(step, step + 1))
        average.update_parameters(net)
    for own, newest in zip(average.module.tables(), net.tables(), strict=True):
        own.load(newest.export())
        assert np.array_equal(own.lookup(np.arange(20)), newest.lookup(np.arange(20)))
    assert not torch.equal(average.module.tower.weight, net.tower.weight)
    assert average.eval()(torch.arange(5), 0).shape == (5, 1)


def test_modules_with_tables_do_not_pickle() -> None:
    with pytest.raises(ConfigError, match="state_dict"):
        pickle.dumps(Net())


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_one_torch_optimizer_over_everything_is_refused_before_anything_changes(make: Any) -> None:
    net = Net()
    optimizer = make(net.parameters(), lr=0.1)
    net(torch.tensor([1, 2]), 0).sum().backward()
    before, weight = (
        [everything(table) for table in net.tables()],
        net.tower.weight.detach().clone(),
    )
    with pytest.raises(ConfigError, match=r"hb\.dense_parameters.*hb\.SparseOptimizer"):
        optimizer.step()
    assert [everything(table) for table in net.tables()] == before
    assert torch.equal(net.tower.weight, weight)


def test_parameters_and_modules_say_what_they_hold() -> None:
    net = Net(rule=hb.Adagrad(lr=0.1))
    train(net, range(1))
    rows = len(net.tables()[0])
    assert repr(net.pair.rows[0]).startswith(f"TableRows('user': {rows} rows, 'item': ")
    assert "TableRows" in repr(hb.SparseOptimizer(net).param_groups)
    text = repr(net)
    assert f"user: sum of Table('user', dim=3, rows={rows}, rule=Adagrad(lr=0.1" in text
    assert "item: Table('item', dim=3" in text
    net.requires_grad_(False)
    assert "frozen='rows'" in repr(net)


@pytest.mark.parametrize("convert", ["half", "double"])
def test_a_conversion_says_that_rows_stay_float32(convert: str) -> None:
    module = hb.Embedding(hb.Table("user", 2))
    with pytest.warns(UserWarning, match="rows stay float32"):
        getattr(module, convert)()
    assert module(torch.tensor([1])).dtype is torch.float32
    module.to("cpu").float()


def test_two_tables_of_one_name_are_refused_by_name() -> None:
    tables = [hb.Table("user", 2), hb.Table("user", 3)]
    with pytest.raises(ConfigError, match="'user'"):
        hb.SparseOptimizer(nn.ModuleList([hb.Embedding(table) for table in tables]))
    with pytest.raises(ConfigError, match="'user'"):
        hb.EmbeddingCollection([Feature("user", "user")], tables)


# torch asks for it where a graph breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weights_of_ids_take_the_gradient_that_torch_gives_them(pooling: str) -> None:
    ids, offsets = torch.tensor([1, 2, 2, 0]), torch.tensor([0, 3, 3, 4])
    table = hb.Table("user", 3)
    table.find_or_insert(np.arange(3))
    bag = hb.EmbeddingBag(table, pooling)
    twin = nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(table.lookup(np.arange(3))), mode="sum", include_last_offset=True
    )
    mine, theirs = (torch.tensor([0.5, 2.0, -1.0, 3.0], requires_grad=True) for _ in range(2))
    counts = torch.tensor([[3.0], [1.0], [1.0]]) if pooling == "mean" else 1.0
    (twin(ids, offsets, per_sample_weights=theirs) / counts).square().sum().backward()
    bag(ids, offsets, mine).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    mine.grad = None
    bag.requires_grad_(False)
    torch.compile(bag, backend="aot_eager")(ids, offsets, mine).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_empty_table_exports_a_batch_without_rows() -> None:
    for keywords in TABLES.values():
        table = hb.Table("user", 3, **keywords)
        empty = pa.Table.from_batches(table.export())
        table.find_or_insert([1, 1, 1], None if not table.needs_times else 0)
        assert empty.num_rows == 0
        assert not len(table) or empty.schema == pa.Table.from_batches(table.export()).schema
