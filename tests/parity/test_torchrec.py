# SPDX-License-Identifier: Apache-2.0
"""Models of TorchRec learn the same before and after `hb.auto`, and are served as they score.

The reference is TorchRec's own module with torch's optimizers, or with FBGEMM's fused kernel.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from forked import ranks_of
from schedule import in_soak
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.mlp import MLP
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import hotbed as hb
from hotbed.persist import content_digest, open_checkpoint
from hotbed.training.auto import from_kjt

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's own
]

SIZES = {"user": 50, "movie": 90, "liked": 90}
DIM = 8
NUM_DENSE = 3
STEPS = 100


def bags(
    pooling: PoolingType = PoolingType.SUM, is_weighted: bool = False, spare_rows: int = 0
) -> Any:
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=size + spare_rows,
            feature_names=keys,
            pooling=pooling,
        )
        for name, size, keys in (("t_user", 50, ["user"]), ("t_movie", 90, ["movie", "liked"]))
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def sequences(need_indices: bool = False) -> Any:
    tables = [
        EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=size, feature_names=keys)
        for name, size, keys in (("s_user", 50, ["user"]), ("s_movie", 90, ["movie", "liked"]))
    ]
    return EmbeddingCollection(tables=tables, need_indices=need_indices)


class Pooled(nn.Module):
    """A collection of bags below one layer."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.rows = collection
        self.head = nn.Linear(NUM_DENSE + 3 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features).values()
        return self.head(torch.cat([dense, rows], dim=1)).squeeze(1)


class Padded(nn.Module):
    """A collection of sequences, each padded to three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences()
        self.head = nn.Linear(NUM_DENSE + 3 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        padded = [torch.tanh(rows[key].to_padded_dense(3)).sum(1) for key in SIZES]
        return self.head(torch.cat([dense, *padded], dim=1)).squeeze(1)


def odd_rows(rows: JaggedTensor) -> JaggedTensor:
    """Return rows of which those of even ids are zero; `weights` has the ids (need_indices)."""
    is_odd = rows.weights() % 2 == 1
    return JaggedTensor(values=rows.values() * is_odd.unsqueeze(1), lengths=rows.lengths())


class Everything(nn.Module):
    """Weighted bags, weights by position, sequences with ids, and both ways to regroup features."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = bags(is_weighted=True)
        self.placed = FeatureProcessedEmbeddingBagCollection(
            bags(is_weighted=True), PositionWeightedModuleCollection(dict.fromkeys(SIZES, 4))
        )
        self.sequences = sequences(need_indices=True)
        self.regroup = KTRegroupAsDict([["user", "liked"], ["movie"]], ["a", "b"])
        self.head = nn.Linear(NUM_DENSE + 9 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        weighted = self.regroup([self.weighted(features)])
        placed = KeyedTensor.regroup([self.placed(features)], [["liked"], ["movie", "user"]])
        rows = self.sequences(features)
        padded = [odd_rows(rows[key]).to_padded_dense(2).sum(1) for key in SIZES]
        parts = [dense, weighted["a"], weighted["b"], *placed, *padded]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]


def batches(num: int, *, weighted: bool = False, num_samples: int = 16) -> Iterator[Batch]:
    """Batches with bags of no to three ids."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num):
        lengths = torch.randint(0, 4, (3, num_samples), generator=generator)
        values = torch.cat(
            [
                torch.randint(0, size, (int(of_key.sum()),), generator=generator)
                for size, of_key in zip(SIZES.values(), lengths, strict=True)
            ]
        )
        weights = torch.rand(len(values), generator=generator) if weighted else None
        features = KeyedJaggedTensor(list(SIZES), values, weights, lengths=lengths.view(-1))
        dense = torch.rand(num_samples, NUM_DENSE, generator=generator)
        yield dense, features, torch.rand(num_samples, generator=generator).round()


def raw(features: KeyedJaggedTensor) -> Any:
    """Return the features with ids that are far apart."""
    ids = features.values() * 10**12 + 7
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


def losses(
    model: nn.Module, optimizers: list[Any], steps: int, change: Any = None, **options: Any
) -> np.ndarray:
    """Return the losses of so many steps; `change`: what is done to the ids first."""
    model.train()
    every = []
    for dense, features, labels in batches(steps, **options):
        if change is not None:
            features = change(features)
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(dense, features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        every.append(loss.item())
    return np.array(every)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sum": lambda: Pooled(bags()),
    "mean": lambda: Pooled(bags(PoolingType.MEAN)),
    "weights": lambda: Pooled(bags(is_weighted=True)),
    "sequences": Padded,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.05)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
    "rowwise": lambda model: [
        RowWiseAdagrad(model.rows.parameters(), lr=0.05, eps=1e-8),
        torch.optim.SGD(model.head.parameters(), lr=0.1),
    ],
}
CASES = [f"{model} {optimizer}" for model in MODELS for optimizer in OPTIMIZERS]
QUICK = {"sum adagrad", "mean sgd", "weights rowwise", "sequences adam"}


@pytest.mark.parametrize("case", in_soak(CASES, quick=QUICK))
def test_losses_are_those_of_torchrec(case: str) -> None:
    kind, rule = case.split()
    torch.manual_seed(1)
    plain = MODELS[kind]()
    model = copy.deepcopy(plain)
    weighted = kind == "weights"
    expected = losses(plain, OPTIMIZERS[rule](plain), STEPS, weighted=weighted)
    model, optimizers, _ = hb.auto(model, OPTIMIZERS[rule](model))
    result = losses(model, optimizers, STEPS, weighted=weighted)
    assert abs(result / expected - 1).max() <= 1e-6
    assert expected[-30:].mean() < expected[:30].mean()


@pytest.mark.soak
def test_rowwise_adagrad_in_the_backward_pass_is_that_of_fbgemms_kernel() -> None:
    """TorchRec's own idiom: rows learn in the backward pass, dense parameters in the loop."""
    settings = {"lr": 0.05, "eps": 1e-8}
    torch.manual_seed(1)
    model = Pooled(bags())
    fused = Pooled(
        FusedEmbeddingBagCollection(
            tables=model.rows.embedding_bag_configs(),
            optimizer_type=RowWiseAdagrad,
            optimizer_kwargs=settings,
        )
    )
    fused.load_state_dict(model.state_dict(), strict=False)
    head = torch.optim.SGD(fused.head.parameters(), lr=0.1)
    expected = losses(fused, [head], STEPS)

    apply_optimizer_in_backward(RowWiseAdagrad, model.rows.parameters(), settings)
    dense = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    }
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model, optimizer, report = hb.auto(model, keyed)
    assert [entry.table.rule for entry in report.moved] == 2 * [hb.RowwiseAdagrad(**settings)]
    result = losses(model, [optimizer], STEPS)
    assert abs(result / expected - 1).max() <= 1e-6


KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rowwise": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}),
}
"""FBGEMM has no Adam for a CPU."""


@pytest.mark.parametrize("name", in_soak(KERNELS, quick={"rowwise"}))
def test_a_fused_collection_learns_as_its_kernel_does(name: str) -> None:
    """Also if it is converted after some steps: the state of the kernel is carried over."""
    kind, settings = KERNELS[name]

    def made() -> tuple[Pooled, Any]:
        torch.manual_seed(1)
        fused = FusedEmbeddingBagCollection(
            tables=bags().embedding_bag_configs(),
            optimizer_type=kind,
            optimizer_kwargs=settings,
            is_weighted=True,
        )
        model = Pooled(fused)
        keyed = KeyedOptimizerWrapper(
            dict(model.head.named_parameters()), lambda values: torch.optim.SGD(values, lr=0.1)
        )
        return model, CombinedOptimizer([fused.fused_optimizer(), keyed])

    plain, optimizer = made()
    losses(plain, [optimizer], 20, weighted=True)
    expected = losses(plain, [optimizer], STEPS, weighted=True)
    model, optimizer = made()
    losses(model, [optimizer], 20, weighted=True)
    _, optimizer, _ = hb.auto(model, optimizer)
    result = losses(model, [optimizer], STEPS, weighted=True)
    assert type(model.rows) is EmbeddingBagCollection
    assert abs(result / expected - 1).max() <= 1e-6


class Managed(nn.Module):
    """Bags behind managed collisions, below one layer."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        collection = bags(spare_rows=5)
        configs = collection.embedding_bag_configs()
        modules = {config.name: make(config.num_embeddings) for config in configs}
        self.rows = ManagedCollisionEmbeddingBagCollection(
            collection, ManagedCollisionCollection(modules, configs)
        )
        self.head = nn.Linear(NUM_DENSE + 3 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)[0].values()
        return self.head(torch.cat([dense, rows], dim=1)).squeeze(1)


def sorted_ids(num_rows: int) -> Any:
    return MCHManagedCollisionModule(
        num_rows, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1
    )


def test_managed_collisions_learn_as_in_torchrec_where_no_id_is_evicted() -> None:
    torch.manual_seed(1)
    plain = Managed(sorted_ids)
    every_id = KeyedJaggedTensor(
        list(SIZES),
        torch.cat([torch.arange(size) for size in SIZES.values()]),
        lengths=torch.tensor(list(SIZES.values())),
    )
    for _ in range(2):
        plain(torch.rand(1, NUM_DENSE), raw(every_id))  # each id is given its row
    model = copy.deepcopy(plain)
    expected = losses(plain, OPTIMIZERS["sgd"](plain), STEPS, change=raw)
    model, optimizers, _ = hb.auto(model, OPTIMIZERS["sgd"](model))
    result = losses(model, optimizers, STEPS, change=raw)
    assert abs(result / expected - 1).max() <= 1e-6


def test_hashed_collisions_learn_as_a_row_for_each_id() -> None:
    """TorchRec trains them on a GPU only. The reference has dense ids and equal first rows."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule  # it warns

    cpu = torch.device("cpu")
    torch.manual_seed(1)
    plain = Pooled(bags())
    model = Managed(lambda size: HashZchManagedCollisionModule(size, cpu, total_num_buckets=1))
    model.head.load_state_dict(plain.head.state_dict())
    for weight in plain.rows.parameters():
        nn.init.constant_(weight, 0.1)
    first_rows = {name: {"init": hb.Constant(0.1)} for name in ("t_user", "t_movie")}
    model, optimizers, report = hb.auto(model, OPTIMIZERS["adagrad"](model), tables=first_rows)
    assert not any(len(entry.table) for entry in report.moved)
    expected = losses(plain, OPTIMIZERS["adagrad"](plain), STEPS)
    result = losses(model, optimizers, STEPS, change=raw)
    assert abs(result / expected - 1).max() <= 1e-6
    assert [len(entry.table) for entry in report.moved] == [50, 90]


def test_conversion_after_steps_in_the_backward_pass_changes_nothing() -> None:
    """The accumulators of the rows are carried over, and a schedule moves their rate."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = Pooled(bags())
        apply_optimizer_in_backward(RowWiseAdagrad, model.rows.parameters(), {"lr": 0.05})
        return model, torch.optim.SGD(model.head.parameters(), lr=0.1)

    plain, head = made()
    expected = [losses(plain, [head], 10), losses(plain, [head], 10)]
    model, optimizer = made()
    before = losses(model, [optimizer], 10)
    model, optimizer, _ = hb.auto(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05, 0.05]
    result = [before, losses(model, [optimizer], 10)]
    assert np.abs(np.array(result) / np.array(expected) - 1).max() <= 1e-6


def test_mapping_ahead_changes_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed")

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = Pooled(bags())
        model, (optimizer,), _ = hb.auto(model, OPTIMIZERS["adam"](model))
        return model, optimizer

    model, optimizer = made()
    expected = losses(model, [optimizer], 6)
    model, optimizer = made()
    ahead = []
    for dense, features, labels in hb.Ahead(list(batches(6)), model, torch_threads=1):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels)
        loss.backward()
        optimizer.step()
        ahead.append(loss.item())
    assert "no batch is mapped ahead" not in caplog.text
    assert np.array_equal(ahead, expected)


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    """Columns of lists, some of them empty, and their weights."""
    draw = np.random.default_rng(3)
    columns: dict[str, Any] = {
        "dense": draw.random((48, NUM_DENSE)).tolist(),
        "clicked": draw.integers(0, 2, 48).tolist(),
    }
    types: dict[str, Any] = {"dense": pl.List(pl.Float32)}
    for key, size in SIZES.items():
        columns[key] = [draw.integers(0, size, draw.integers(0, 4)).tolist() for _ in range(48)]
        columns[f"{key}_weights"] = [draw.random(len(ids)).tolist() for ids in columns[key]]
        types |= {key: pl.List(pl.Int64), f"{key}_weights": pl.List(pl.Float32)}
    return pl.DataFrame(columns, schema_overrides=types)


class Towers(nn.Module):
    """A tower of a user and one of movies, whose product is the score."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        self.query = MLP(DIM + NUM_DENSE, [16, 4])
        self.candidate = MLP(2 * DIM, [16, 4])

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        rows = self.bags(sparse_features)
        query = self.query(torch.cat([rows["user"], dense_features], dim=1))
        candidate = self.candidate(torch.cat([rows["movie"], rows["liked"]], dim=1))
        return (query * candidate).sum(1)


SERVED: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "dlrm": lambda: DLRM(bags(), NUM_DENSE, [16, DIM], [16, 1]),
    "dcn": lambda: DLRM_DCN(bags(), NUM_DENSE, [16, DIM], [16, 1], 2, 4),
    "projection": lambda: DLRM_Projection(bags(), NUM_DENSE, [16, DIM], [16, 1], [16], [16]),
    "towers": Towers,
    "managed": lambda: Managed(sorted_ids),
    "deepfm": lambda: SimpleDeepFMNN(NUM_DENSE, bags(), 20, 3),
}


@pytest.mark.parametrize("name", in_soak(SERVED, quick={"everything"}))
def test_scores_of_a_server_are_those_of_the_model(
    name: str, rows: pl.DataFrame, tmp_path: Path
) -> None:
    """A model that learns from a Dataset, is saved, resumed, evaluated, exported and served."""
    is_weighted = name == "everything"
    dense = "dense" if name in ("everything", "managed") else "dense_features"
    ids = [hb.Id(key, weights=f"{key}_weights" if is_weighted else None) for key in SIZES]
    schema = hb.Schema([hb.Label("clicked"), hb.Dense(dense, width=NUM_DENSE), *ids])
    rows = rows.rename({"dense": dense}) if dense != "dense" else rows
    data = hb.Dataset(hb.sources.Memory(rows), schema, batch_size=16)

    def made() -> hb.RecModel:
        torch.manual_seed(1)
        model = SERVED[name]()
        model, optimizer, _ = hb.auto(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
        return hb.RecModel(model, "bce", optimizer, metrics=["auc"])

    straight = made()
    straight.fit(data, epochs=1, progress=False)
    straight.save(tmp_path / "state")
    loss = straight.evaluate(data)["loss"]
    straight.fit(data, epochs=1, progress=False)
    resumed = made()
    resumed.restore(tmp_path / "state")
    resumed.fit(data, epochs=1, progress=False)
    expected = straight.predict(data)
    assert np.array_equal(resumed.predict(data), expected)
    assert resumed.evaluate(data)["loss"] < loss

    resumed.export(tmp_path / "exported")
    session = hb.InferenceSession(tmp_path / "exported")
    names = [dense, *SIZES, *(f"{key}_weights" for key in SIZES if is_weighted)]
    scores = session.predict({column: rows[column].to_list() for column in names})
    assert np.abs(scores - expected).max() <= 1e-6


@pytest.mark.soak
def test_a_loop_over_a_pipeline_is_resumed_evaluated_and_served(tmp_path: Path) -> None:
    """As TorchRec's example of a DLRM: rows begin on the meta device and learn in a pipeline."""
    keys = list(SIZES)

    def batches_of(seed: int) -> Iterator[Any]:
        return iter(
            RandomRecDataset(
                keys, 16, hash_size=50, num_dense=NUM_DENSE, num_batches=5, manual_seed=seed
            )
        )

    def program() -> tuple[DLRMTrain, Any, TrainPipelineSparseDist]:
        torch.manual_seed(1)
        configs = bags().embedding_bag_configs()
        rows = EmbeddingBagCollection(configs, device=torch.device("meta"))
        train = DLRMTrain(DLRM(rows, NUM_DENSE, [16, DIM], [16, 1]))
        apply_optimizer_in_backward(RowWiseAdagrad, rows.parameters(), {"lr": 0.05})
        keyed = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(train.named_parameters())),
            lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        )
        _, optimizer, _ = hb.auto(train.model, keyed)
        return train, optimizer, TrainPipelineSparseDist(train, optimizer, torch.device("cpu"))

    def run(pipeline: TrainPipelineSparseDist, seed: int) -> list[float]:
        steps = batches_of(seed)
        losses = []
        with contextlib.suppress(StopIteration):
            while True:
                losses.append(pipeline.progress(steps)[0].item())
        return losses

    train, optimizer, pipeline = program()
    run(pipeline, 1)
    torch.save({"model": train.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    expected = run(pipeline, 2)
    train, optimizer, pipeline = program()
    saved = torch.load(tmp_path / "a", weights_only=True)
    train.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert run(pipeline, 2) == expected

    train.eval()
    with torch.no_grad():
        evaluated = run(pipeline, 2)
    assert np.mean(evaluated) < np.mean(expected)
    batch = next(batches_of(3))
    scores = train.model(batch.dense_features, batch.sparse_features).detach().numpy()
    hb.RecModel(train.model).export(tmp_path / "exported")
    columns: dict[str, Any] = {"dense_features": batch.dense_features.tolist()}
    for key in keys:
        ids = batch.sparse_features[key]
        columns[key] = [bag.tolist() for bag in torch.split(ids.values(), ids.lengths().tolist())]
    served = hb.InferenceSession(tmp_path / "exported").predict(columns)
    assert np.abs(np.reshape(served, scores.shape) - scores).max() <= 1e-6


DOORS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "grains": lambda _: ({"grains": 4}, {}),
    "compile": lambda _: ({"compile": hb.Compile(backend="aot_eager")}, {}),
    "disk": lambda folder: ({}, {"tier": hb.Ssd(folder, ram_rows=60)}),
}
"""Of each door, the arguments of RecModel and the keywords of the tables."""


@pytest.mark.parametrize("door", in_soak(DOORS, quick={"grains"}))
def test_a_model_learns_alike_through_every_door(
    door: str, rows: pl.DataFrame, tmp_path: Path
) -> None:
    ids = [hb.Id(key, weights=f"{key}_weights") for key in SIZES]
    schema = hb.Schema([hb.Label("clicked"), hb.Dense("dense", width=NUM_DENSE), *ids])
    # grains take rows in another order, unless all are in one batch
    batch_size = 16 if door == "disk" else 48
    data = hb.Dataset(hb.sources.Memory(rows), schema, batch_size=batch_size)

    def scores(options: dict[str, Any], keywords: dict[str, Any]) -> np.ndarray:
        torch.manual_seed(1)
        model: Any = Everything()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        paths = [path for path, module in model.named_modules() if hasattr(module, "max_norm")]
        tables = dict.fromkeys(paths, keywords)
        model, optimizer, _ = hb.auto(model, optimizer, tables=tables)
        ranker = hb.RecModel(model, "bce", optimizer, **options)
        ranker.fit(data, epochs=3, progress=False)
        return ranker.predict(data)

    expected = scores({}, {})
    result = scores(*DOORS[door](tmp_path))
    assert np.abs(result - expected).max() <= (0 if door == "disk" else 1e-6)


def learned_from_own_batches(folder: str, first: int, last: int, begun: str = "") -> list[float]:
    """Learn steps of a loop in which each rank has its own part of 24 samples; save the third and
    the last.
    """
    rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.manual_seed(1)
    model = Pooled(bags())
    model, optimizer, report = hb.auto(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
    loop = hb.shard(model, optimizer, grains=4)
    tables = {entry.table.name: entry.table for entry in report.moved}
    parts = {"dense": optimizer.dense, "sparse": optimizer.sparse}
    state = hb.checkpoints.State(model, tables, parts, shard=loop.shard)
    if begun:
        hb.checkpoints.restore(open_checkpoint(begun), state)

    def own() -> Iterator[hb.Batch]:
        samples = slice(24 // num_ranks * rank, 24 // num_ranks * (rank + 1))
        for dense, features, labels in itertools.islice(batches(last, num_samples=24), first, last):
            batch = hb.Batch(from_kjt(features), {"dense": dense}, {"clicked": labels})
            yield batch.map_arrays(np.asarray)[samples]

    def loss_of(part: hb.Batch) -> Tensor:
        labels = part.labels["clicked"]
        return nn.functional.binary_cross_entropy_with_logits(model(part), labels)

    every = []
    for step, batch in enumerate(loop.joined(own()), first + 1):
        optimizer.zero_grad()
        every.append(loop.backward(batch, loss_of).item())
        optimizer.step()
        if step in (3, last):
            hb.checkpoints.save(f"{folder}/{step}", state)
    return every


def test_own_batches_of_ranks_are_one_batch_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks that resume from the state of one process."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    expected = learned_from_own_batches(f"{tmp_path}/one", 0, 6)
    begun = f"{tmp_path}/one/3"
    three = ranks_of(learned_from_own_batches, 3, f"{tmp_path}/three", 3, 6, begun)
    assert three == [expected[3:]] * 3
    digests = {content_digest(open_checkpoint(f"{tmp_path}/{name}/6")) for name in ("one", "three")}
    assert len(digests) == 1
