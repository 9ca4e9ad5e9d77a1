# SPDX-License-Identifier: Apache-2.0
"""What `hb.auto` makes of TorchRec's collections, values and optimizers, and what it refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import (
    LAMB,
    Adagrad,
    Adam,
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import hotbed as hb
from hotbed.data.batch import Batch, Ids
from hotbed.training.auto import Signature, bind, converted, from_kjt, plain_state_dict, to_kjt
from hotbed.training.auto.served import plain_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def config(name: str, key: str, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=4, num_embeddings=25, feature_names=[key], **options
    )


class Scored(nn.Module):
    """The sum of what two collections return for one argument."""

    def __init__(self, *collections: nn.Module) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [collection(features).values().sum(1) for collection in self.collections]
        return self.scale * torch.stack(pooled).sum(0)


def scored(*names: str) -> Scored:
    return Scored(*(EmbeddingBagCollection([config(name, "user")]) for name in names))


def users(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.ones(len(ids)).long())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def moved(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    return hb.auto(model, sgd(model))


def test_tables_have_the_names_of_their_configs() -> None:
    model = scored("t_user", "t_other")
    _, _, report = hb.auto(model, sgd(model), tables={"t_user": {"admit": hb.MinCount(2)}})
    tables = {entry.table.name: entry.table for entry in report.moved}
    assert list(tables) == ["t_user", "t_other"]
    assert tables["t_user"].admit == hb.MinCount(2)


def test_tables_of_one_name_are_named_by_their_paths() -> None:
    model = scored("t_user", "t_user")
    _, _, report = moved(model)
    expected = [f"collections.{number}.embedding_bags.t_user" for number in (0, 1)]
    assert [entry.table.name for entry in report.moved] == expected


def test_a_table_is_named_once() -> None:
    model = scored("t_user")
    path = "collections.0.embedding_bags.t_user"
    with pytest.raises(hb.errors.ConfigError, match="named twice"):
        hb.auto(model, sgd(model), tables={"t_user": {}, path: {}})
    with pytest.raises(hb.errors.ConfigError, match=r"'t_usr'.*'t_user'"):
        hb.auto(model, sgd(model), tables={"t_usr": {}})


def test_new_rows_are_drawn_as_the_config_says() -> None:
    bounds = {"weight_init_min": -0.5, "weight_init_max": 0.5}
    model = Scored(EmbeddingBagCollection([config("a", "user"), config("b", "user", **bounds)]))
    _, _, report = moved(model)
    assert [entry.table.init for entry in report.moved] == [hb.Uniform(0.2), hb.Uniform(0.5)]


def test_a_table_of_half_precision_is_kept_and_named() -> None:
    half = EmbeddingBagCollection([config("t_half", "user", data_type=DataType.FP16)])
    model = Scored(half, EmbeddingBagCollection([config("t_user", "user")]))
    model, _, report = moved(model)
    assert [entry.path for entry in report.kept] == ["collections.0.embedding_bags.t_half"]
    assert model(users(1, 2)).shape == (2,)


def test_weights_travel_in_both_directions() -> None:
    """Those of a plain model load by TorchRec's names, and back into one strictly."""
    plain = scored("t_user")
    model, optimizer, _ = moved(scored("t_user"))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(users(3, 24)), plain(users(3, 24)))
    model(users(3)).sum().backward()
    optimizer.step()
    plain.load_state_dict(plain_state_dict(model), strict=True)
    assert torch.equal(model(users(3, 24)), plain(users(3, 24)))

    optimizer.zero_grad()
    model(users(1_000_000)).sum().backward()
    optimizer.step()
    with pytest.raises(hb.errors.ConfigError, match=r"t_user.*1 other ids, such as 1000000"):
        plain_state_dict(model)


def test_a_wrapped_model_is_refused_with_the_way_out() -> None:
    class Wrapped(DistributedModelParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    wrapped = Wrapped(scored("t_user"))
    with pytest.raises(hb.errors.ConfigError, match=r"DistributedModelParallel.*hb\.shard"):
        hb.auto(wrapped, torch.optim.SGD(nn.Linear(1, 1).parameters()))


def test_a_converted_model_that_is_wrapped_is_refused_with_the_page() -> None:
    """With the planner of TorchRec, and with a plan."""
    model, _, _ = moved(scored("t_user"))
    sharder = EmbeddingBagCollectionSharder()
    of_module = construct_module_sharding_plan(
        scored("t_user").collections[0],
        {"t_user": table_wise(rank=0)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    for plan in (None, ShardingPlan({"collections.0": of_module})):
        with pytest.raises(hb.errors.ConfigError, match=r"DistributedMod.*t_user.*torchrec\.md"):
            DistributedModelParallel(
                model, ShardingEnv.from_local(1, 0), plan=plan, sharders=[sharder]
            )


def test_a_setting_of_a_kernel_without_a_rule_is_refused_and_nothing_is_changed() -> None:
    settings = {"lr": 0.1, "weight_decay": 0.1}
    fused = FusedEmbeddingBagCollection([config("t_user", "user")], torch.optim.Adagrad, settings)
    model = Scored(scored("t_other").collections[0], fused)
    with pytest.raises(hb.errors.ConfigError, match=r"weight_decay=0\.1.*'collections\.1'"):
        hb.auto(model, torch.optim.SGD([model.scale], lr=0.1))
    fused.optimizer_kwargs().pop("weight_decay")
    with pytest.raises(hb.errors.ConfigError, match="in no optimizer that was given"):
        hb.auto(model, torch.optim.SGD([model.scale], lr=0.1))
    assert type(model.collections[1]) is FusedEmbeddingBagCollection
    assert model(users(1, 2)).shape == (2,)
    with pytest.raises(hb.errors.ConfigError, match="got only those of fused collections"):
        hb.auto(model, fused.fused_optimizer())


def test_a_weight_without_values_becomes_a_table_without_rows() -> None:
    """As TorchRec's programs build models that are to be sharded: weights on the meta device."""
    meta = torch.device("meta")
    bounds = {"weight_init_min": -0.5, "weight_init_max": 0.5}
    kind = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    user = EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=25, feature_names=["user"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection([config("t", "user", **bounds)], device=meta)
            self.rows = FusedEmbeddingCollection([user], device=meta, need_indices=True, **kind)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            found = self.rows(features)["user"]
            assert torch.equal(found.weights(), features["user"].values())  # need_indices
            return self.scale * (self.bags(features).values() + found.values()).sum(1)

    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
    model, optimizer, report = hb.auto(model, torch.optim.SGD([model.scale], lr=0.1))
    assert "the tables t, s begin without rows" in str(report)
    model(users(3, 10**12)).sum().backward()
    optimizer.step()
    bags, rows = (entry.table for entry in report.moved)
    assert (len(bags), len(rows)) == (2, 2)
    assert rows.rule == hb.Sgd(0.1)
    assert np.abs(bags.lookup(np.array([10**12]))).max() > 0.2
    lazy = Scored(EmbeddingBagCollection([config("t", "user")], device=meta)).to(meta)
    with pytest.raises(hb.errors.ConfigError, match=r"got 'scale'.*dense_device="):
        hb.auto(lazy, sgd(lazy))


def test_adam_of_a_kernel_moves_only_the_rows_of_a_batch() -> None:
    """FBGEMM has it on a GPU only, so the collection is told that it has it."""
    fused = FusedEmbeddingBagCollection([config("t_user", "user")], torch.optim.SGD, {"lr": 0.1})
    fused._optimizer_type = torch.optim.Adam
    fused.optimizer_kwargs()["beta1"] = 0.8
    model = Scored(fused)
    _, _, report = hb.auto(model, torch.optim.SGD([model.scale], lr=0.1))
    assert report.moved[0].table.rule == hb.Adam(0.1, 0.8, scope="touched")


def pipelined(model: nn.Module, optimizer: Any, kind: Any) -> list[float]:
    """Return the losses of a pipeline of TorchRec over random batches."""
    data = RandomRecDataset(["a", "b"], 8, hash_size=25, num_dense=3, num_batches=5, manual_seed=1)
    pipeline = kind(model, optimizer, torch.device("cpu"))
    steps = iter(data)
    losses = []
    with contextlib.suppress(StopIteration):
        while True:
            losses.append(pipeline.progress(steps)[0].item())
    return losses


@pytest.mark.parametrize("inner", [True, False])
def test_a_pipeline_of_torchrec_trains_a_converted_model(inner: bool) -> None:
    def made() -> tuple[DLRMTrain, Any]:
        torch.manual_seed(1)
        bags = EmbeddingBagCollection([config("t_a", "a"), config("t_b", "b")])
        model = DLRMTrain(DLRM(bags, 3, [4], [4, 1]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    expected = pipelined(*made(), TrainPipelineBase)
    model, optimizer = made()
    _, optimizer, report = hb.auto(model.model if inner else model, optimizer)
    losses = pipelined(model, optimizer, TrainPipelineSparseDist)
    assert len(losses) == 5
    assert np.abs(np.array(losses) / expected - 1).max() <= 1e-6
    assert report.moved[0].table.step == 5


def test_a_plan_is_listed_as_without_effect() -> None:
    constraints = {
        "t_user": ParameterConstraints(
            sharding_types=["row_wise"], compute_kernels=["key_value"], min_partition=8
        )
    }
    model = scored("t_user", "t_other")
    _, _, report = hb.auto(model, sgd(model), plan=constraints)
    effect, disk = report.notes
    assert "t_user (sharding_types=['row_wise'], compute_kernels=['key_value']" in effect
    assert "rows of t_user on a disk" in disk
    assert disk in str(report)

    entry = ParameterSharding(sharding_type="table_wise", compute_kernel="fused", ranks=[0])
    model = scored("t_user")
    plan = ShardingPlan({"collections.0": EmbeddingModuleShardingPlan(t_user=entry)})
    _, _, report = hb.auto(model, sgd(model), plan=plan)
    assert "no effect" in report.notes[0]
    assert "sharding_type=table_wise, compute_kernel=fused, ranks=[0]" in report.notes[0]
    model = scored("t_usr")
    with pytest.raises(hb.errors.ConfigError, match=r"plan: .*'t_user'.*'t_usr'"):
        hb.auto(model, sgd(model), plan=plan)
    with pytest.raises(hb.errors.ConfigError, match="expected a ShardingPlan"):
        hb.auto(model, sgd(model), plan="row_wise")


class Managed(nn.Module):
    """A collection of bags behind managed collisions."""

    def __init__(self) -> None:
        super().__init__()
        tables = [config("t_user", "user")]
        remapping = MCHManagedCollisionModule(
            25, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1
        )
        self.rows = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables),
            ManagedCollisionCollection({"t_user": remapping}, tables),
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.rows(features)[0].values().sum(1)


def test_managed_collisions_become_a_table_of_raw_ids() -> None:
    """Ids that they have met keep their rows, and new ones have rows of their own."""
    model = Managed()
    for _ in range(2):
        model(users(10**12, 7))
    model.eval()
    expected = model(users(10**12, 7)).detach()
    model, _, report = hb.auto(model, sgd(model), batch=users(1, 2))
    assert "evict=hb.Lru(max_rows)" in str(report)
    (table,) = (entry.table for entry in report.moved)
    ids = [id for batch in table.export() for id in batch.column("id").to_pylist()]
    assert sorted(ids) == [7, 10**12]
    assert torch.equal(model(users(10**12, 7)), expected)
    model.train()
    model(users(*range(100, 200)))
    assert len(table) == 102
    state = converted(model)
    assert state is not None
    assert not state.id_graph().obstacles
    with pytest.raises(hb.errors.ConfigError, match="rows of remapped ids"):
        plain_state_dict(model)
    with pytest.raises(RuntimeError, match="rows of raw ids"):
        model.load_state_dict(Managed().state_dict(), strict=False)


def test_an_embedding_behind_managed_collisions_is_not_kept() -> None:
    model = Managed()
    with pytest.raises(hb.errors.ConfigError, match="'t_user', which would be kept"):
        hb.auto(model, sgd(model), tables={"t_user": None})


def keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    parameters = dict(model.named_parameters())
    return KeyedOptimizerWrapper(parameters, lambda values: torch.optim.SGD(values, lr=0.1))


def test_a_combined_optimizer_is_the_list_of_its_optimizers() -> None:
    model = scored("t_user")
    rows = dict(model.collections.named_parameters(prefix="collections"))
    combined = CombinedOptimizer(
        [
            KeyedOptimizerWrapper(rows, lambda values: torch.optim.Adagrad(values, lr=0.2)),
            KeyedOptimizerWrapper(
                {"scale": model.scale}, lambda values: torch.optim.SGD(values, lr=0.1)
            ),
        ]
    )
    _, optimizers, report = hb.auto(model, combined)
    assert [type(optimizer) for optimizer in optimizers] == [hb.CombinedOptimizer, torch.optim.SGD]
    assert [entry.table.rule for entry in report.moved] == [hb.Adagrad(0.2)]


def test_an_optimizer_that_does_more_than_name_parameters_is_refused() -> None:
    model = scored("t_user")
    warmup = WarmupOptimizer(keyed(model), [WarmupStage(WarmupPolicy.LINEAR, 10)])
    with pytest.raises(hb.errors.ConfigError, match=r"WarmupOptimizer.*scheduler of torch"):
        hb.auto(model, warmup)
    apply_optimizer_in_backward(LAMB, model.collections.parameters(), {"lr": 0.1})
    with pytest.raises(hb.errors.ConfigError, match=r"torchrec\.optim\.optimizers\.LAMB.*t_user"):
        hb.auto(model, torch.optim.SGD([model.scale], lr=0.1))


def test_the_name_of_a_kernel_is_its_optimizer() -> None:
    """torchrec.optim.Adam takes no step: TorchRec's sharding puts FBGEMM's Adam in its place."""
    model = scored("t_user", "t_other")
    user, other = model.collections
    apply_optimizer_in_backward(Adam, user.parameters(), {"lr": 0.1, "beta2": 0.9})
    apply_optimizer_in_backward(Adagrad, other.parameters(), {"lr": 0.2, "weight_decay": 0.1})
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    with pytest.raises(hb.errors.ConfigError, match=r"weight_decay=0\.1 at .*t_other\.weight"):
        hb.auto(model, optimizer)
    (weight,) = user.parameters()
    assert isinstance(weight._in_backward_optimizers[0], Adam)
    other.embedding_bags["t_other"].weight._in_backward_optimizers[0]._kwargs.pop("weight_decay")
    _, optimizer, report = hb.auto(model, optimizer)
    rules = [entry.table.rule for entry in report.moved]
    assert rules == [hb.Adam(0.1, beta2=0.9), hb.Adagrad(0.2, 1e-8)]
    model(users(1, 2)).sum().backward()
    optimizer.step()


def test_features_with_their_own_numbers_of_samples_are_refused_by_name() -> None:
    """A loop over them works as in TorchRec; the id graph needs one number."""
    model, _, _ = moved(scored("t_user"))
    features = KeyedJaggedTensor(
        ["user", "movie"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    assert model(features).shape == (2,)
    state = converted(model)
    assert state is not None
    with pytest.raises(hb.errors.ConfigError, match=r"stride_per_key \[2, 1\]"):
        state.id_graph()


class Mixed(nn.Module):
    def forward(
        self, features: KeyedJaggedTensor, liked: JaggedTensor, given: KeyedTensor
    ) -> Tensor:
        return given["age"]


def test_a_signature_names_tensors_by_their_keys() -> None:
    liked = JaggedTensor(torch.tensor([5, 6]), torch.rand(2), lengths=torch.tensor([2, 0]))
    given = KeyedTensor(["age", "place"], [1, 2], torch.rand(2, 3))
    arguments = [users(1, 2), liked, given]
    signature = Signature.of(Mixed(), arguments, {})
    names = "user user_offsets liked liked_offsets liked_weights age place"
    assert signature.names == tuple(names.split())
    assert {leaf.name: leaf.axis for leaf in signature.tensors}["user_offsets"] == "ends"
    leaves = signature.leaves(arguments, {})
    (features, again, tensors), _ = signature.arguments(leaves)
    assert torch.equal(features.values(), torch.tensor([1, 2]))
    assert features["user"].lengths().tolist() == [1, 1]
    assert torch.equal(again.weights(), liked.weights())
    assert torch.equal(tensors.values(), given.values())


def batch() -> Batch:
    return Batch(
        {
            "user": Ids(np.array([7, 8])),
            "liked": Ids(np.array([5, 6]), np.array([0, 2, 2]), np.array([0.5, 2.0], np.float32)),
        },
        num_samples=2,
    )


def test_to_kjt_holds_the_columns_in_the_order_of_the_keys() -> None:
    features = to_kjt(batch(), ["liked", "user"])
    assert features.keys() == ["liked", "user"]
    assert features.values().tolist() == [5, 6, 7, 8]
    assert features.lengths().tolist() == [2, 0, 1, 1]
    assert features.weights().tolist() == [0.5, 2.0, 1.0, 1.0]
    assert to_kjt(batch(), ["user"]).weights_or_none() is None
    with pytest.raises(hb.errors.ConfigError, match="'movie'"):
        to_kjt(batch(), ["movie"])


def test_a_feature_without_a_column_is_named() -> None:
    rows = hb.sources.Memory({"y": [0, 1], "movie": [1, 2]})
    data = hb.Dataset(rows, hb.Schema([hb.Label("y"), hb.Id("movie")]))
    model, optimizer, _ = moved(scored("t_user"))
    message = r"forward: 'features' needs .* \['user'\], got the id columns \['movie'\]\. Add"
    with pytest.raises(hb.errors.ConfigError, match=message):
        hb.RecModel(model, "bce", optimizer).fit(data, progress=False)


def test_from_kjt_is_the_way_back() -> None:
    ids = from_kjt(to_kjt(batch(), ["liked", "user"]))
    assert list(ids) == ["liked", "user"]
    assert isinstance(ids["user"].values, np.ndarray)
    assert ids["user"].offsets.tolist() == [0, 1, 2]
    assert ids["liked"].offsets.tolist() == [0, 2, 2]
    assert ids["liked"].weights.tolist() == [0.5, 2.0]
    with pytest.raises(hb.errors.ConfigError, match="got JaggedTensor"):
        from_kjt(JaggedTensor(torch.arange(2), lengths=torch.ones(2).long()))


def test_columns_become_the_jagged_arguments_of_a_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection([config("t", "user")])

        def forward(self, features: KeyedJaggedTensor, liked: JaggedTensor) -> None: ...

    (features, liked), _ = bind(Model(), batch())
    assert features.keys() == ["user"]
    assert liked.lengths().tolist() == [2, 0]
    assert liked.weights().tolist() == [0.5, 2.0]


class Twice(nn.Module):
    """Looks up the same keys in two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([config("t", "user")])

    def forward(self, first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> Tensor:
        return self.bags(first).values().sum(1) - self.bags(second).values().sum(1)


def test_a_column_of_a_dataset_feeds_two_jagged_arguments_of_a_server() -> None:
    model, _, _ = moved(Twice())
    arguments, _ = bind(model, batch())
    model(*arguments)
    state = converted(model)
    assert state is not None
    assert state.signature is not None
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    columns, parts = plain_model(state, schema).schema(state.signature.names)
    assert [column.name for column in columns.ids] == ["user"]
    assert parts == {
        f"{name}{ending}": ("user", part)
        for name in ("first_user", "second_user")
        for ending, part in (("", "values"), ("_offsets", "ends"))
    }
