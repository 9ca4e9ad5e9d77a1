# SPDX-License-Identifier: Apache-2.0
"""The eight steps of Rec SDK's chapter: one test a step, and the whole as it is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch.nn import functional

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

pytestmark = pytest.mark.usefixtures("rec_sdk")

TESTS = Path(__file__).resolve().parents[2]
STEPS_AS_WRITTEN = TESTS / "golden" / "mx_rec_steps.py"
SCHEMA = hb.Schema([hb.Id("user"), hb.Id("movie"), hb.Label("like"), hb.Time("timestamp")])
STEPS = 60
BATCH = 512


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mx_rec_steps", STEPS_AS_WRITTEN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(num_rows: int = STEPS * BATCH) -> hb.sources.Source:
    random = np.random.default_rng(0)
    return hb.sources.Memory(
        {
            "user": random.zipf(1.3, num_rows) % 3000,
            "movie": random.integers(0, 300, num_rows),
            "like": random.integers(0, 2, num_rows).astype(np.float32),
            "timestamp": np.arange(num_rows),
        }
    )


def table(name: str = "user", **keywords: Any) -> Any:
    given = {"key_dtype": torch.int64, "dim": 4, "emb_initializer": hb.Normal(std=0.1)}
    return mx.create_table(name=name, **{**given, **keywords})


def adagrad(rate: float = 0.5) -> Any:
    return mx.optimizers.adagrad.create_hash_optimizer(rate)


def rows_of(name: str = "user") -> hb.Table:
    return framework.current().started("test").tables[name]


def of_values(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(1, values.numel() + 1).view_as(values)).sum()


# --- the chapter


def test_the_copy_of_the_steps_is_the_reference(shared_data: Path) -> None:
    licence, _, text = STEPS_AS_WRITTEN.read_text().partition("\n")
    assert licence == "# SPDX-License-Identifier: Apache-2.0"
    assert text == (shared_data.parent / "reference" / "mx_rec_steps.py").read_text()


def by_the_engine(data: hb.sources.Source) -> tuple[str, list[torch.Tensor]]:
    """Learn what `feature_spec_mode` learns, by the engine's own face."""
    rule = hb.Adagrad(0.05, initial_accumulator=0.9)
    init = hb.Normal(std=0.01)
    aging = {"admit": hb.MinCount(2, expire_seconds=3600), "evict": hb.Ttl(seconds=3600)}
    tables = {
        "user": hb.Table("user", 16, rule=rule, init=init, **aging),
        "movie": hb.Table("movie", 16, rule=rule, init=init),
    }
    features = [Feature("user", "user", "none"), Feature("movie", "movie", "none")]
    collection = hb.EmbeddingCollection(features, tables)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    sparse = hb.SparseOptimizer(collection)
    dense = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = EvictionSchedule(tables, step_interval=50)
    for step, batch in enumerate(hb.Dataset(data, SCHEMA, BATCH), 1):
        samples = batch.map_arrays(lambda array: torch.from_numpy(np.array(array)))
        rows = collection(samples)
        scores = net(torch.cat([rows["user"], rows["movie"]], dim=-1)).squeeze(-1)
        loss = functional.binary_cross_entropy_with_logits(scores, samples.labels["like"])
        dense.zero_grad()
        loss.backward()
        sparse.step()
        sparse.zero_grad()
        dense.step()
        schedule.step(step, int(batch.time.max()))
    digest = hb.checkpoints.content_digest(tables)
    assert tables["user"].stats["evicted"] > 0
    assert tables["user"].stats["refused"] > 0
    return digest, list(net.parameters())


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[torch.Tensor]]]:
    """What each program that ends has learned: the digest of its tables, and its parameters."""
    every = []
    close = framework.Framework.close

    def closing(self: framework.Framework) -> None:
        assert self.pipeline is not None
        digest = hb.checkpoints.content_digest(self.pipeline.tables)
        every.append((digest, list(self.models[0].parameters())))
        close(self)

    monkeypatch.setattr(framework.Framework, "close", closing)
    return every


def test_feature_spec_mode_as_written_equals_the_engine(
    steps: ModuleType, learned: list[tuple[str, list[torch.Tensor]]]
) -> None:
    torch.manual_seed(0)
    steps.feature_spec_mode(source(), SCHEMA, STEPS)
    torch.manual_seed(0)
    digest, parameters = by_the_engine(source())
    assert learned[0][0] == digest
    assert all(map(torch.equal, learned[0][1], parameters))


def automatic_by_the_engine(
    train: hb.Dataset, evaluation: hb.Dataset
) -> tuple[str, list[torch.Tensor]]:
    """Learn what `automatic_mode` learns, by the engine's own face."""
    table = hb.Table(
        "cross",
        16,
        rule=hb.Adam(0.001, eps_hat=True),
        admit=hb.MinCount(2, expire_seconds=3600),
        evict=hb.Ttl(seconds=3600),
        init=hb.Normal(std=0.01),
    )
    collection = hb.EmbeddingCollection([Feature("cross", "cross", "none")], [table])
    out = torch.nn.Linear(16, 1)
    sparse = hb.SparseOptimizer(collection)
    dense = torch.optim.Adam(out.parameters(), lr=1e-3)

    def forward(batch: hb.Batch) -> torch.Tensor:
        ids = batch.ids["user"].values * 1_000_003 + batch.ids["movie"].values
        (rows,) = collection.pool([hb.Ids(ids)], batch.time)[1]
        return out(rows).squeeze(-1)

    for _ in range(2):
        collection.train()
        for batch in train:
            samples = batch.map_arrays(lambda array: torch.from_numpy(np.array(array)))
            loss = functional.binary_cross_entropy_with_logits(
                forward(samples), samples.labels["like"]
            )
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
        collection.eval()
        with torch.no_grad():
            for batch in evaluation:
                forward(batch.map_arrays(lambda array: torch.from_numpy(np.array(array))))
    return hb.checkpoints.content_digest({"cross": table}), list(out.parameters())


def test_automatic_mode_as_written_equals_the_engine(
    steps: ModuleType,
    learned: list[tuple[str, list[torch.Tensor]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = hb.Dataset(source(8 * BATCH), SCHEMA, BATCH)
    evaluation = hb.Dataset(source(3 * BATCH), SCHEMA, BATCH)
    torch.manual_seed(0)
    steps.automatic_mode(train, evaluation)
    assert "cross" in capsys.readouterr().out
    torch.manual_seed(0)
    digest, parameters = automatic_by_the_engine(train, evaluation)
    assert learned[0][0] == digest
    assert all(map(torch.equal, learned[0][1], parameters))


# --- one test a step


def test_step_1_init() -> None:
    with pytest.raises(EnvironmentError, match="not initialized, got a call before init"):
        table()
    mx.init(use_dynamic="False", use_dynamic_expansion="True", max_steps=7)
    options = framework.current().options
    assert (options.use_dynamic, options.use_dynamic_expansion) == (False, True)
    with pytest.raises(EnvironmentError, match="already, got a second call"):
        mx.init()
    mx.terminate_config_initializer()
    mx.terminate_config_initializer()
    mx.init()
    assert framework.current().options.use_dynamic
    assert not framework.current().options.use_dynamic_expansion
    mx.terminate_config_initializer()
    for text in ("true", "TRUE", "1", "", 1, None):
        with pytest.raises(ValueError, match="init: use_dynamic: a Boolean is needed"):
            mx.init(use_dynamic=text)
    with pytest.raises(ConfigError, match=r"got 'use_dynamik'\. Did you mean 'use_dynamic'"):
        mx.init(use_dynamik=True)


BY_ADDRESS = [
    ("adagrad_by_addr", "create_hash_optimizer_by_address"),
    ("gradient_descent_by_addr", "create_hash_optimizer_by_addr"),
    ("gradient_descent_by_addr", "create_hash_optimizer_by_address"),
    ("lazy_adam_by_addr", "create_hash_optimizer_by_address"),
]
OTHERS = [
    ("adagrad", "create_hash_optimizer"),
    ("ftrl", "create_hash_optimizer"),
    ("gradient_descent", "create_hash_optimizer"),
    ("lazy_adam", "create_hash_optimizer"),
]


@pytest.mark.parametrize("expands", [False, True])
def test_step_2_optimizers(expands: bool) -> None:
    with pytest.raises(EnvironmentError, match="before init"):
        adagrad()
    mx.init(use_dynamic_expansion=expands)
    for module, factory in BY_ADDRESS + OTHERS:
        create = getattr(getattr(mx.optimizers, module), factory)
        if expands is ((module, factory) in BY_ADDRESS):
            assert create(learning_rate=torch.tensor(0.25)).rule.lr == 0.25
        else:
            with pytest.raises(ValueError, match="dynamic expansion mode is not compatible"):
                create(learning_rate=0.25)
        with pytest.raises(ValueError, match=r"learning_rate: .*got 11"):
            create(learning_rate=11)


@pytest.mark.parametrize("threshold", [None, -1, 0, 1, 2])
def test_step_3_features(threshold: int | None) -> None:
    """-1 is off; 0 counts, and lets in every id; counts include the current batch."""
    mx.init()
    adagrad()
    user = mx.FeatureSpec("user", access_threshold=threshold)
    batches = mx.get_asc_insert_func([user]).over([{"user": torch.tensor([1, 1, 2])}] * 2)
    own = table()
    mx.start_asc_pipeline()
    first = next(iter(batches))
    mx.sparse_lookup(own, user, batch=first)
    admitted = rows_of().find([1, 2]) >= 0
    assert admitted.tolist() == [True, (threshold or 0) < 2]
    (columns,) = {tuple(batch.schema.names) for batch in rows_of().export()}
    assert ("count" in columns) is (threshold == 0)


def test_step_3_thresholds_below_minus_one_are_errors() -> None:
    for name in ("access_threshold", "eviction_threshold"):
        with pytest.raises(ValueError, match=f"FeatureSpec 'user': {name}: .*got -2"):
            mx.FeatureSpec("user", **{"access_threshold": 0, name: -2})
    with pytest.raises(ValueError, match="access_threshold should be configured before"):
        mx.FeatureSpec("user", eviction_threshold=5)


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "loader", "numpy"])
def test_step_4_data_set(kind: str) -> None:
    """Both sources of keys, and every kind of batch: ids are mapped, labels are there."""
    mx.init()
    sparse = adagrad()
    users = torch.tensor([[1, 2], [2, 3], [5, 5]])
    likes = torch.tensor([1.0, 0.0, 1.0])
    data: Any = [(users, likes)] * 5
    key: Any = 0
    if kind == "dict":
        data = [{"u": users, "like": likes}] * 5
        key = "u"
    if kind == "list":
        data = [[users, likes]] * 5
    if kind == "loader":
        samples = torch.utils.data.TensorDataset(users.repeat(5, 1), likes.repeat(5))
        data = torch.utils.data.DataLoader(samples, batch_size=3)
    if kind == "numpy":
        data = [(users.numpy(), likes.numpy())] * 5
    user = mx.FeatureSpec("user", index_key=key)
    if kind == "dict":
        insert = mx.get_asc_insert_func(tgt_key_specs=user)
    else:
        insert = mx.get_asc_insert_func(args_index_list=[0], table_names=["user"])
    dataset = insert.over(data)
    own = table()
    with pytest.raises(RuntimeError, match="rows exist from step 8 on"):
        next(iter(dataset))
    mx.start_asc_pipeline()
    num_batches = 0
    for batch in dataset:
        rows = mx.sparse_lookup(own, user, batch=batch)
        assert rows.shape == (3, 2, 4)
        assert rows.tolist() == rows_of().lookup(users.flatten()).reshape(3, 2, 4).tolist()
        labels = batch["like"] if kind == "dict" else batch[1]
        assert torch.equal(labels, likes)
        of_values(rows).backward()
        sparse.step()
        num_batches += 1
    assert num_batches == 5
    assert len(rows_of()) == 4
    for wrong in ({}, {"tgt_key_specs": [user], "table_names": ["user"]}, {"args_index_list": [1]}):
        with pytest.raises(RuntimeError, match="one source of keys is needed"):
            mx.get_asc_insert_func(**wrong)


def test_step_5_sparse_tables() -> None:
    mx.init()
    adagrad()
    own = table(device_vocabulary_size=5, host_vocabulary_size=10, init_param=-0.5)
    assert "rows_0" not in dict(own.named_parameters())
    with pytest.raises(RuntimeError, match="rows exist from step 8 on"):
        own.size()
    mx.get_asc_insert_func([mx.FeatureSpec("user")])
    mx.start_asc_pipeline()
    assert (own.size(), own.capacity()) == (0, 15)
    assert rows_of().init == hb.Normal(std=0.05)
    assert rows_of().capacity == 15
    with pytest.raises(EnvironmentError, match="create_table 'item': the pipeline runs already"):
        table("item")


def test_step_6_model_graph() -> None:
    """Several lookups of a table are one native lookup; a lookup takes its part."""
    mx.init()
    sparse = adagrad()
    user = mx.FeatureSpec("user")
    friend = mx.FeatureSpec("friend", table_name="user")
    item = mx.FeatureSpec("item")
    insert = mx.get_asc_insert_func([user, friend, item])
    tables = {name: table(name) for name in ("user", "item")}
    mx.start_asc_pipeline()
    ids = {name: torch.tensor(own) for name, own in (("user", [7, 8]), ("friend", [8, 9]))}
    batch = insert({**ids, "item": torch.tensor([1, 1])})
    rows = mx.sparse_lookup(tables["user"], user, batch=batch)
    both = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
    assert [len(own) for own in both] == [3, 1], "one entry a table"
    others = mx.sparse_lookup(tables["user"], friend, batch=batch, is_grad=False)
    assert not others.requires_grad
    assert torch.equal(rows[1], others[0])
    assert torch.equal(mx.sparse_lookup(tables["user"], user, batch=batch), rows)
    assert len(mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")) == 2
    of_values(rows).backward()
    sparse.step()
    again = mx.sparse_lookup(tables["user"], user, batch=batch)
    assert not torch.equal(again, rows)
    with pytest.raises(ValueError, match="'item': the feature belongs to another table"):
        mx.sparse_lookup(tables["item"], user, batch=batch)
    with pytest.raises(ValueError, match="ids must be a FeatureSpec, got Tensor"):
        mx.sparse_lookup(tables["item"], ids["user"], batch=batch)
    with pytest.raises(ValueError, match="batch must be the one that the data set yielded last"):
        mx.sparse_lookup(tables["item"], item)


@pytest.mark.parametrize("form", ["pairs", "columns", "tensors", "step"])
def test_step_7_gradients(form: str) -> None:
    """Two forward passes before the update are summed, as by a dense table and one optimizer."""
    mx.init(use_dynamic_expansion=True)
    sparse = mx.optimizers.lazy_adam_by_addr.create_hash_optimizer_by_address(0.5)
    user = mx.FeatureSpec("user")
    insert = mx.get_asc_insert_func([user])
    own = table()
    net = torch.nn.Linear(4, 1)
    dense, tables = mx.get_dense_and_sparse_variable(net)
    assert dense == list(net.parameters())
    assert tables == [own]
    mx.start_asc_pipeline()
    weight = torch.from_numpy(rows_of().lookup(np.arange(6))).requires_grad_()
    reference = torch.optim.SparseAdam([weight], lr=0.5)
    passes = 1 if form == "tensors" else 2
    for ids in ([1, 2, 1], [3, 1, 5], [5, 5, 2]):
        loss = torch.zeros(())
        expected = torch.zeros(())
        for number in range(passes):
            own_ids = torch.tensor(ids[number:])
            batch = insert({"user": own_ids})
            loss = loss + of_values(net(mx.sparse_lookup(own, user, batch=batch)))
            rows = functional.embedding(own_ids, weight, sparse=True)
            expected = expected + of_values(net(rows))
        emb = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        addr = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        if form == "step":
            loss.backward()
            sparse.step()
        else:
            grads = torch.autograd.grad(loss, [*emb, *dense])[: len(emb)]
            forms = {"pairs": list(zip(grads, addr, strict=True)), "columns": [grads, addr]}
            forms["tensors"] = [grads[0], addr[0]]
            sparse.apply_gradients(forms[form])
        reference.zero_grad()
        expected.backward()
        reference.step()
        assert mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB") == []
        with pytest.raises(ConfigError, match="addresses of no lookup that waits"):
            sparse.apply_gradients([(emb[0], addr[0])])
        with pytest.raises(ConfigError, match=r"pairs of a gradient and addresses .* got None"):
            sparse.apply_gradients(None)
    learned = rows_of().lookup(np.arange(6))
    assert np.allclose(learned, weight.detach(), atol=1e-6)
    assert rows_of().step == 3


def test_step_8_pipeline() -> None:
    mx.init()
    with pytest.raises(RuntimeError, match="sparse tables"):
        mx.start_asc_pipeline()
    own = table()
    with pytest.raises(RuntimeError, match="sparse optimizer"):
        mx.start_asc_pipeline()
    first = adagrad()
    with pytest.raises(RuntimeError, match="insert function"):
        mx.start_asc_pipeline()
    user = mx.FeatureSpec("user", access_threshold=1, eviction_threshold=9)
    clock = mx.FeatureSpec("t", is_timestamp=True)
    mx.get_asc_insert_func([user])
    with pytest.raises(ValueError, match="eviction_threshold needs the times of the data"):
        mx.start_asc_pipeline()
    framework.current().inserts.clear()
    mx.get_asc_insert_func([clock, user, mx.FeatureSpec("friend", table_name="user")])
    with pytest.raises(ValueError, match=r"'user'.* must be same in one table .*'user'.*'friend'"):
        mx.start_asc_pipeline()
    framework.current().inserts.clear()
    mx.get_asc_insert_func([clock, user, mx.FeatureSpec("item")])
    with pytest.raises(ValueError, match="no table has the name of its table, got 'item'"):
        mx.start_asc_pipeline()
    second = mx.optimizers.lazy_adam.create_hash_optimizer()
    item = table("item", optimizer_list=[second])
    with pytest.raises(ValueError, match=r"'user': .*'Adagrad' and 'LazyAdam'"):
        mx.start_asc_pipeline()
    own.optimizer = first
    mx.start_asc_pipeline()
    assert rows_of("user").rule == first.rule
    assert rows_of("item").rule == second.rule
    assert item.size() == 0
    with pytest.raises(EnvironmentError, match="the pipeline runs already"):
        mx.start_asc_pipeline()
