# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded TorchRec models become rows, and rows become weights of plain ones.

`written_by_ranks` wrote `tests/golden/torchrec_checkpoint` on two ranks, with TorchRec 1.8.0.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import ranks_of
from torch import Tensor, distributed, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import hotbed as hb
from hotbed.training.auto import load_plain_state, plain_state_dict

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

GOLDEN = Path(__file__).parents[1] / "golden" / "torchrec_checkpoint"
ROWS = {"row": 14, "table": 10, "column": 8, "mean": 6}
"""Rows of the table of each feature, which is named for how it is sharded."""


def dlrm(tables: list[str], device: str = "cpu") -> DLRM:
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(
            name=f"t_{key}", embedding_dim=8, num_embeddings=ROWS[key], feature_names=[key]
        )
        for key in tables
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    return DLRM(bags, 3, [8, 8], [8, 1])


def made(tables: list[str], device: str = "cpu") -> DLRM:
    """A model whose rows learn in the backward pass; all but "column" by row-wise Adagrad."""
    model = dlrm(tables, device)
    for key in tables:
        weight = model.sparse_arch.embedding_bag_collection.embedding_bags[f"t_{key}"].weight
        kind = torch.optim.Adagrad if key == "column" else RowWiseAdagrad
        apply_optimizer_in_backward(kind, [weight], {"lr": 0.1, "eps": 1e-6})
    return model


def dense_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(parameters, lambda values: torch.optim.Adagrad(values, lr=0.1))


def batch_of(number: int, tables: list[str]) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Eight samples with bags of no to two ids."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 3, (len(tables), 8), generator=generator)
    values = [
        torch.randint(0, ROWS[key], (int(of_key.sum()),), generator=generator)
        for key, of_key in zip(tables, lengths, strict=True)
    ]
    features = KeyedJaggedTensor(tables, torch.cat(values), lengths=lengths.view(-1))
    dense = torch.rand(8, 3, generator=generator)
    return dense, features, torch.rand(8, generator=generator).round()


def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
    dense, features, labels = batch
    optimizer.zero_grad()
    logits = model(dense, features).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def written_by_ranks(folder: str, tables: list[str], steps: int, more: int) -> dict[str, Any]:
    """Learn steps of a sharded model, save it, and learn more; return what it had and lost."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = made(tables)
    kinds = {
        "row": row_wise(),
        "table": table_wise(rank=1),
        "column": column_wise(ranks=[0, 1]),
        "mean": column_wise(ranks=[1, 0]),
    }
    of_module = construct_module_sharding_plan(
        model.sparse_arch.embedding_bag_collection,
        {f"t_{key}": kinds[key] for key in tables},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    plan = ShardingPlan({"sparse_arch.embedding_bag_collection": of_module})
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[EmbeddingBagCollectionSharder()]
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer(model)])
    for number in range(steps):
        step(model, optimizer, batch_of(2 * number + rank, tables))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    shards = {**_shards(state["model"]), **_shards_of_state(state["optimizer"]["state"])}
    with torch.no_grad():
        scores = model(*batch_of(100, tables)[:2]).squeeze(1).tolist()
    losses = [
        step(model, optimizer, batch_of(2 * number + rank, tables))
        for number in range(steps, steps + more)
    ]
    distributed.destroy_process_group()
    return {"shards": shards, "scores": scores, "losses": losses}


def _shards(values: Any) -> dict[str, list[Any]]:
    """Return where the parts of this rank begin, and their numbers."""
    shards = {}
    for key, value in values.items():
        if hasattr(value, "local_shards"):
            shards[key] = [
                (tuple(part.metadata.shard_offsets), part.tensor.detach().numpy().copy())
                for part in value.local_shards()
            ]
    return shards


def _shards_of_state(state: Any) -> dict[str, list[Any]]:
    shards: dict[str, list[Any]] = {}
    for values in state.values():
        shards |= _shards(values)
    return shards


def whole(shards: list[dict[str, list[Any]]], end: str) -> np.ndarray:
    """Return the tensor whose key has this end, put together from the parts of both ranks."""
    parts = [
        part
        for of_rank in shards
        for key, of_key in of_rank.items()
        if key.endswith(end)
        for part in of_key
    ]
    shape = np.max([np.add(start, values.shape) for start, values in parts], axis=0)
    tensor = np.full(shape, np.nan, np.float32)
    for start, values in parts:
        tensor[
            tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))
        ] = values
    return tensor


def rows_of(table: hb.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and the optimizer state of all rows, in the order of ids."""
    batches = list(table.export())
    ids = np.concatenate([batch.column("id").to_numpy() for batch in batches])
    columns = []
    for name in ("value", "state"):
        lists = [batch.column(name).to_pylist() for batch in batches]
        columns.append(np.array([row for of_batch in lists for row in of_batch], np.float32))
    order = np.argsort(ids)
    assert np.array_equal(ids[order], np.arange(len(ids)))
    return columns[0][order], columns[1][order]


def converted(tables: list[str], device: str = "cpu") -> tuple[nn.Module, Any, dict[str, hb.Table]]:
    model = made(tables, device)
    model, optimizer, report = hb.auto(model, dense_optimizer(model))
    return model, optimizer, {entry.table.name: entry.table for entry in report.moved}


@pytest.mark.soak
def test_training_continues_from_what_two_ranks_of_torchrec_have_saved(tmp_path: Path) -> None:
    tables = ["row", "table", "column"]
    results = ranks_of(written_by_ranks, 2, str(tmp_path / "saved"), tables, 5, 3)
    shards = [result["shards"] for result in results]
    expected = np.mean([result["losses"] for result in results], axis=0)
    for device in ("cpu", "meta"):
        model, optimizer, rows = converted(tables, device)
        load_plain_state(model, tmp_path / "saved", optimizer)
        for name, table in rows.items():
            values, state = rows_of(table)
            assert np.array_equal(values, whole(shards, f"{name}.weight"))
            accumulators = whole(shards, f"{name}.momentum1")
            assert np.array_equal(state, accumulators.reshape(len(values), -1))
        losses = [step(model, optimizer, joined(number, tables)) for number in range(5, 8)]
        assert np.abs(np.array(losses) / expected - 1).max() <= 1e-6


def rows_of_rank(folder: str, tables: list[str]) -> dict[str, int]:
    """Load a checkpoint on one of several ranks; return how many rows of each table it holds."""
    model, optimizer, rows = converted(tables)
    hb.shard(model, optimizer, grains=2)
    load_plain_state(model, folder, optimizer)
    return {name: len(table) for name, table in rows.items()}


@pytest.mark.soak
def test_ranks_share_the_rows_of_a_checkpoint() -> None:
    first, second = ranks_of(rows_of_rank, 2, str(GOLDEN), list(ROWS))
    for key, num_rows in ROWS.items():
        name = f"t_{key}"
        assert first[name] + second[name] == num_rows
        assert min(first[name], second[name]) > 0


def joined(number: int, tables: list[str]) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """The batches of both ranks as one."""
    parts = [batch_of(2 * number + rank, tables) for rank in (0, 1)]
    values, lengths = [], []
    for key in tables:
        for _, features, _ in parts:
            values.append(features[key].values())
            lengths.append(features[key].lengths())
    features = KeyedJaggedTensor(tables, torch.cat(values), lengths=torch.cat(lengths))
    return torch.cat([parts[0][0], parts[1][0]]), features, torch.cat([parts[0][2], parts[1][2]])


SCORES = [
    -0.0016365349292755127,
    0.009944392368197441,
    0.022658944129943848,
    0.04646579921245575,
    0.08752772212028503,
    0.01498146541416645,
    0.01745455339550972,
    0.014103378169238567,
]
"""Of the sharded model, for batch 100."""


def read(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of the kept checkpoint."""
    values = {key: torch.empty(shape)}
    dcp.load(values, checkpoint_id=GOLDEN, no_dist=True)
    return values[key].numpy()


def test_a_checkpoint_of_two_ranks_is_read_row_by_row() -> None:
    """Rows in parts of rows and of columns, row-wise and full accumulators, and dense state."""
    model, optimizer, rows = converted(list(ROWS))
    loaded = load_plain_state(model, GOLDEN, optimizer)
    for key, num_rows in ROWS.items():
        end = f"sparse_arch.embedding_bag_collection.embedding_bags.t_{key}.weight"
        values, state = rows_of(rows[f"t_{key}"])
        assert np.array_equal(values, read(f"model.{end}", (num_rows, 8)))
        shape = {"column": (num_rows, 8), "mean": (2 * num_rows,)}.get(key, (num_rows,))
        accumulators = read(f"optimizer.state.{end}.t_{key}.momentum1", shape)
        if key == "mean":  # one for each half of a row, of the same width
            accumulators = accumulators.reshape(2, num_rows).mean(axis=0)
        assert np.array_equal(state, accumulators.reshape(num_rows, -1))
        assert state.any()
    with torch.no_grad():
        scores = model(*batch_of(100, list(ROWS))[:2]).squeeze(1)
    assert np.abs(scores.numpy() - SCORES).max() <= 1e-6
    assert [table.slots for table in loaded.tables] == 4 * [("sum",)]
    parameter = model.over_arch.model[1].weight
    accumulator = read("optimizer.state.over_arch.model.1.weight.sum", tuple(parameter.shape))
    assert np.array_equal(optimizer.dense.state[parameter]["sum"].numpy(), accumulator)
    assert loaded.with_state == loaded.dense
    assert not loaded.unused


ADAM = {"lr": 0.05, "betas": (0.8, 0.99)}


def plain_program() -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """An unsharded model of TorchRec below one of its optimizers."""
    model = dlrm(["row", "table"])
    parameters = dict(model.named_parameters())
    return model, KeyedOptimizerWrapper(parameters, lambda values: torch.optim.Adam(values, **ADAM))


@pytest.mark.parametrize("when", ["before", "after"])
def test_states_of_an_unsharded_model_and_its_optimizer_continue(when: str) -> None:
    """Loaded by torch before `hb.auto`, or by names after it."""
    tables = ["row", "table"]
    plain, keyed = plain_program()
    for number in range(4):
        step(plain, keyed, batch_of(number, tables))
    saved = copy.deepcopy({"model": plain.state_dict(), "optimizer": keyed.state_dict()})
    expected = [step(plain, keyed, batch_of(number, tables)) for number in range(4, 8)]
    model, optimizer = plain_program()
    if when == "before":
        optimizer.init_state()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model, optimizer, _ = hb.auto(model, optimizer)
    if when == "after":
        loaded = load_plain_state(model, saved, optimizer)
        assert [table.step for table in loaded.tables] == [4, 4]
    losses = [step(model, optimizer, batch_of(number, tables)) for number in range(4, 8)]
    assert np.abs(np.array(losses) / expected - 1).max() <= 1e-6


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    plain = dlrm(["row", "table"])
    model, optimizer, _ = hb.auto(*plain_program())
    before = copy.deepcopy(plain_state_dict(model))
    state = plain.state_dict()
    row = "sparse_arch.embedding_bag_collection.embedding_bags.t_row.weight"

    def refused(message: str, source: Any, error: type[Exception] = hb.errors.ConfigError) -> None:
        with pytest.raises(error, match=message):
            load_plain_state(model, source, optimizer)
        after = plain_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)

    refused(
        r"t_row.weight: expected the shape \[14, 8\] of float32, got \[2, 8\]",
        {**state, row: state[row][:2]},
    )
    refused(r"of float32, got \[14, 8\] of float16", {**state, row: state[row].half()})
    refused("t_row.weight: expected one key that ends with its name, got none", {"a": 1})
    refused(r"got \['ema\..*t_row.weight', 'model\.", {"ema": state, "model": state})
    wrong = {f"state.{row}.exp_avg": torch.zeros(14, 8), **state}
    refused(r"all of its optimizer state, got none of \['exp_avg_sq'\]", wrong)
    wrong[f"state.{row}.exp_avg_sq"] = torch.zeros(14)
    refused(r"expected \[14, 8\] of float32 at 'state.*got \[14\]", wrong)
    wrong[f"state.{row}.exp_avg_sq"] = torch.zeros(14, 8)
    refused("give steps=", wrong)
    for step in ("x", -1, 0.5, torch.zeros(2)):
        refused("whole number of updates at 'state.*step'", {**wrong, f"state.{row}.step": step})
    infinite = torch.zeros(10, 8).index_fill(0, torch.tensor([9]), torch.inf)
    table = row.replace("t_row", "t_table")  # after another one
    finite = hb.errors.RowShapeError
    refused("'t_table'.* finite numbers, got inf for id 9", {**state, table: infinite}, finite)
    for slot in ("exp_avg", "exp_avg_sq"):
        infinite_state = {f"state.{table}.exp_avg": torch.zeros(10, 8)}
        infinite_state |= {f"state.{table}.exp_avg_sq": torch.zeros(10, 8)}
        infinite_state |= {f"state.{table}.step": 3, f"state.{table}.{slot}": infinite}
        refused("'t_table'.* got inf for id 9", {**state, **infinite_state}, finite)
    with pytest.raises(hb.errors.ConfigError, match=r"load_plain_state\.steps: .*got -1"):
        load_plain_state(model, state, optimizer, steps=-1)
    refused(
        r"a number in 'optimizer\.state\.0\.exp_avg'",
        {"model": state, "optimizer": {"state": {0: {"exp_avg": 1}}}},
    )
    refused("without a file '.metadata'", tmp_path)
    refused("expected a folder of torch.distributed.checkpoint or a state_dict", 3)
    torn = shutil.copytree(GOLDEN, tmp_path / "torn")
    (torn / ".metadata").write_bytes(b"torn")
    refused("torn: its '.metadata' cannot be read", torn, hb.errors.FormatError)
    with pytest.raises(hb.errors.ConfigError, match="without a table of it"):
        load_plain_state(plain, state)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_a_torn_file_of_a_checkpoint_is_named_and_nothing_is_changed(
    name: str, tmp_path: Path
) -> None:
    model, optimizer, _ = converted(list(ROWS))
    before = copy.deepcopy(plain_state_dict(model))
    torn = shutil.copytree(GOLDEN, tmp_path / "torn")
    content = (torn / name).read_bytes()
    for size in (0, 100, len(content) - 1):
        (torn / name).write_bytes(content[:size])
        with pytest.raises(hb.errors.FormatError, match=r"torn: the value .* cannot be read"):
            load_plain_state(model, torn, optimizer)
        after = plain_state_dict(model)
        assert all(torch.equal(before[key], after[key]) for key in before)


class Renamed(nn.Module):
    """The rows of a model at another path."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.rows = collection
        self.head = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.head(self.rows(features).values())


def test_keys_are_matched_by_their_ends_and_rows_by_the_name_of_their_table() -> None:
    tables = ["row", "table"]
    plain = made(tables)
    dense, features, _ = batch_of(1, tables)
    model, _, _ = converted(tables)
    load_plain_state(model, DLRMTrain(plain).state_dict())
    assert torch.equal(model(dense, features), plain(dense, features))

    renamed = Renamed(made(tables).sparse_arch.embedding_bag_collection)
    other, _, _ = hb.auto(renamed, torch.optim.SGD(renamed.head.parameters(), lr=0.1))
    loaded = load_plain_state(
        other, {**plain.state_dict(), **nn.ModuleDict({"head": renamed.head}).state_dict()}
    )
    collection = plain.sparse_arch.embedding_bag_collection
    assert torch.equal(other.rows(features).values(), collection(features).values())
    assert "over_arch.model.1.bias" in loaded.unused
