# SPDX-License-Identifier: Apache-2.0
"""RecModel trains models that `hb.auto` converted: fit, streams, policies, checkpoints, predictions.

The models are plain PyTorch: ids that the forward pass computes, two embeddings of one weight, and
a dict of columns.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from table_bits import bits_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]

NUM_ROWS, BATCH = 640, 64
SECOND = 1_000_000
POLICIES = {"admit": hb.MinCount(2), "evict": hb.Ttl(seconds=150)}


@dataclass(frozen=True)
class Case:
    """A model, the raw columns that it learns from, and how they become its arguments.

    Attributes:
        name: of a file of `models/`.
        columns: of the schema, without Time.
        loss: as RecModel takes it.
        grows: paths of the modules whose ids exceed the rows that they began with.
    """

    name: str
    columns: list[Any]
    loss: str
    grows: tuple[str, ...]

    def module(self) -> ModuleType:
        path = Path(__file__).parent / "models" / f"{self.name}.py"
        spec = importlib.util.spec_from_file_location(self.name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def network(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        module = self.module()
        network = module.make_model()
        return network, module.make_optimizer(network)

    def converted(self, **tables: Any) -> tuple[nn.Module, hb.CombinedOptimizer]:
        network, optimizer, _ = hb.auto(*self.network(), tables)
        return network, optimizer

    def model(self, **tables: Any) -> hb.RecModel:
        network, optimizer = self.converted(**tables)
        return hb.RecModel(network, self.loss, optimizer)

    def with_policies(self) -> hb.RecModel:
        return self.model(**dict.fromkeys(self.grows, POLICIES))

    def raw(self, *, grows: bool) -> dict[str, Any]:
        """Return events, one a second; where it `grows`, ids come from ranges that move on."""
        random = np.random.default_rng(3)
        raw: dict[str, Any] = {"t": np.arange(NUM_ROWS) * SECOND}
        moves_on = np.arange(NUM_ROWS) // 4 if grows else np.zeros(NUM_ROWS, np.int64)
        for column in self.columns:
            if isinstance(column, hb.Id):
                size, length = SIZES[column.name]
                ids = random.integers(0, size, (NUM_ROWS, length)) + moves_on[:, None]
                if column.name == "seconds":
                    ids = raw["t"][:, None] + size
                raw[column.name] = list(ids) if length > 1 else ids[:, 0]
            elif isinstance(column, hb.Dense):
                raw[column.name] = random.normal(size=NUM_ROWS).astype(np.float32)
            else:
                raw[column.name] = random.integers(0, 2, NUM_ROWS).astype(np.float32)
        return raw

    def dataset(self, *, grows: bool = True) -> hb.Dataset:
        source = hb.sources.Memory(self.raw(grows=grows))
        schema = hb.Schema([*self.columns, hb.Time("t", unit="us")])
        return hb.Dataset(source, schema, BATCH, prefetch=0)

    def items(self, *, grows: bool = True) -> list[tuple[Any, Tensor]]:
        """Return the batches of the dataset as (data, label): tuples, or dicts of columns."""
        columns = self.raw(grows=grows)
        raw = {name: torch.from_numpy(np.stack(values)) for name, values in columns.items()}
        names = [column.name for column in self.columns]
        batches = []
        for start in range(0, NUM_ROWS, BATCH):
            parts = {name: raw[name][start : start + BATCH] for name in names}
            label = parts.pop(names[-1])
            takes_dict = self.name in ("keyword_arguments", "module_dict")
            batches.append((parts if takes_dict else tuple(parts.values()), label))
        return batches


# Of each id column: the number of ids, and how many a sample has.
SIZES = {
    "city": (20, 1),
    "device": (4, 1),
    "seconds": (10**7, 1),
    "query": (200, 4),
    "title": (200, 6),
    "user": (290, 1),
    "item": (140, 1),
}

CASES = [
    Case(
        "computed_ids",
        [hb.Id("city"), hb.Id("device"), hb.Id("seconds"), hb.Label("clicked")],
        "bce",
        ("crossed",),
    ),
    Case(
        "weight_sharing",
        [hb.Id("query"), hb.Id("title", pooling="none"), hb.Label("relevance")],
        "mse",
        ("query",),
    ),
    Case(
        "keyword_arguments",
        [hb.Id("item"), hb.Id("user"), hb.Dense("price"), hb.Label("rating")],
        "mse",
        ("item_embedding", "user_embedding"),
    ),
    Case(
        "module_dict",
        [
            *(hb.Id(name) for name in ("user", "item", "city", "device")),
            *(hb.Dense(name) for name in ("price", "age")),
            hb.Label("clicked"),
        ],
        "bce",
        ("embeddings.user", "embeddings.item"),
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SOAK = pytest.mark.soak


def bits(model: hb.RecModel) -> dict[str, Any]:
    """Return everything that a model has learned."""
    learned: dict[str, Any] = copy.deepcopy(dense_state(model.network))
    for name, table in model.tables.items():
        learned[name] = bits_of(table.export())
        learned[f"{name} candidates"] = bits_of(table.candidates())
        learned[f"{name} scalars"] = table.scalars()
    return learned


def assert_same_bits(model: hb.RecModel, other: hb.RecModel) -> None:
    expected = bits(other)
    for name, value in bits(model).items():
        same = (
            torch.equal(value, expected[name])
            if torch.is_tensor(value)
            else (value == expected[name])
        )
        assert same, name


def sizes_of(model: hb.RecModel) -> dict[str, int]:
    return {name: len(table) for name, table in model.tables.items()}


# --- learning ------------------------------------------------------------------------------------


@every_case
def test_fit_learns_what_a_plain_loop_over_the_plain_model_learns(case: Case) -> None:
    plain, optimizer = case.network()
    loss_of = nn.functional.binary_cross_entropy_with_logits
    if case.loss == "mse":
        loss_of = nn.functional.mse_loss
    for data, label in case.items(grows=False) * 2:
        optimizer.zero_grad()
        scores = plain(**data) if case.name == "keyword_arguments" else None
        if scores is None:
            scores = plain(*data) if isinstance(data, tuple) else plain(data)
        loss_of(scores, label).backward()
        optimizer.step()
    model = case.model()
    model.fit(case.dataset(grows=False), epochs=2, progress=False)
    for path, module in plain.named_modules():
        if path in model.tables:
            rows = model.tables[path].lookup(np.arange(module.num_embeddings))
            weight = module.weight.detach()
            torch.testing.assert_close(torch.from_numpy(rows), weight, rtol=1e-5, atol=1e-6)
    own = dense_state(model.network)
    for name, value in own.items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@every_case
def test_tuples_and_dicts_teach_what_a_dataset_does(case: Case) -> None:
    of_dataset = case.model()
    of_dataset.fit(case.dataset(), progress=False)
    of_items = case.model()
    of_items.fit(case.items(), progress=False)
    assert_same_bits(of_items, of_dataset)
    expected = of_dataset.predict(case.dataset())
    np.testing.assert_array_equal(of_items.predict(case.items()), expected)
    measured = of_items.evaluate(case.items())
    assert measured == of_dataset.evaluate(case.dataset())
    assert_same_bits(of_items, of_dataset)  # nothing was learned


@every_case
def test_tables_take_new_ids_from_a_stream(case: Case) -> None:
    model = case.model()
    before = sizes_of(model)
    model.online_train(case.dataset(), progress=False)
    after = sizes_of(model)
    assert {name for name in after if after[name] > before[name]} >= set(case.grows)


@every_case
def test_ids_are_admitted_and_evicted_by_table(case: Case) -> None:
    model = case.with_policies()
    first = sizes_of(model)
    evict = hb.callbacks.Evict(step_interval=1)
    model.online_train(case.dataset(), evict, progress=False)
    for name in case.grows:
        stats = model.tables[name].stats
        assert stats["refused"] > 0  # seen once
        assert stats["admitted"] > 0
        assert stats["evicted"] >= first[name] // 2  # rows that the weight had, too
    others = set(model.tables) - set(case.grows)
    assert all(model.tables[name].stats["evicted"] == 0 for name in others)


def test_times_are_a_column_of_a_dataset_or_an_argument_of_the_model() -> None:
    case = CASES[0]
    models = []
    for times, data in ((None, case.dataset()), ("t", case.dataset()), ("seconds", case.items())):
        network, optimizer = case.network()
        policies = {path: {"evict": hb.Ttl(seconds=150)} for path in case.grows}
        network, optimizer, _ = hb.auto(network, optimizer, policies, times=times)
        model = hb.RecModel(network, case.loss, optimizer)
        evict = hb.callbacks.Evict(seconds_interval=100)
        model.online_train(data, evict, progress=False)
        models.append(model)
    assert models[0].tables["crossed"].stats["evicted"] > 0
    assert_same_bits(models[1], models[0])
    assert sizes_of(models[2]) == sizes_of(models[0])


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=SOAK) for case in CASES[:3]), CASES[3]],
    ids=lambda case: case.name,
)
def test_a_resumed_stream_that_is_mapped_ahead_has_the_bits_of_one_that_is_neither(
    case: Case, tmp_path: Path
) -> None:
    def life(root: Path, data: Any, max_steps: int | None = None) -> hb.RecModel:
        model = case.with_policies()
        callbacks = [
            hb.callbacks.Checkpoint(root, every_steps=2),
            hb.callbacks.Evict(step_interval=2),
            hb.callbacks.LearningRate(hb.schedules.Cosine(10)),
        ]
        model.online_train(
            data, callbacks, max_steps=max_steps, progressive="training", progress=False
        )
        return model

    whole = life(tmp_path / "whole", case.dataset())
    for max_steps in (3, 7, None):
        ahead = hb.Ahead(case.dataset(), torch_threads=1)
        parts = life(tmp_path / "parts", ahead, max_steps)
    assert_same_bits(parts, whole)


@every_case
def test_a_saved_model_is_restored_and_loaded(case: Case, tmp_path: Path) -> None:
    model = case.model()
    model.fit(case.dataset(), progress=False)
    model.save(tmp_path)
    restored = case.model().restore(tmp_path)
    network, _ = case.converted()
    loaded = hb.load(tmp_path, network=network)
    for other in (restored, loaded):
        assert_same_bits(other, model)
        np.testing.assert_array_equal(other.predict(case.dataset()), model.predict(case.dataset()))
    for each in (model, restored, loaded):
        each.fit(case.dataset(), progress=False)
    assert_same_bits(restored, model)
    assert_same_bits(loaded, model)


@pytest.mark.parametrize(
    ("case", "is_delta"),
    [
        pytest.param(CASES[0], False, marks=SOAK),
        pytest.param(CASES[1], True, marks=SOAK),
        # test_converted.py serves a published model in each run
        pytest.param(CASES[3], True, marks=SOAK),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_versions_have_the_scores_of_the_model(
    case: Case, is_delta: bool, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime absent")

    def build() -> hb.RecModel:
        network, optimizer = case.network()
        if is_delta:  # idle rows do not move, so that changes alone are published
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        network, optimizer, _ = hb.auto(network, optimizer)
        return hb.RecModel(network, case.loss, optimizer)

    out = tmp_path / "published"
    publish = hb.PublishDirectory(out, keep=9)
    save = hb.callbacks.Checkpoint(
        tmp_path / "state", every_steps=4, publish=publish, wait=True, full_every=9
    )
    model = build()
    model.online_train(case.dataset(), save, progress=False)
    versions = [version.manifest for version in hb.Follower(out).poll()]
    if is_delta:
        assert [version.version for version in versions] == [4, 8, 10]
        assert [version.kind for version in versions] == ["full", "delta", "delta"]
    else:  # the newest full is all that a server needs
        assert [version.version for version in versions] == [10]
    raw = case.raw(grows=True)
    columns = {column.name: raw[column.name] for column in case.columns[:-1]}
    scores = hb.InferenceSession(out).predict(columns)
    np.testing.assert_allclose(scores, model.predict(case.dataset()), rtol=1e-5, atol=1e-6)
    alone = build()
    alone.online_train(case.dataset(), progress=False)
    assert_same_bits(model, alone)


# --- the optimizer -------------------------------------------------------------------------------


def test_a_scheduler_over_the_optimizer_is_followed_and_restored(tmp_path: Path) -> None:
    case = CASES[0]

    def life(root: Path, steps: range) -> tuple[hb.RecModel, list[float]]:
        network, optimizer = case.converted()
        model = hb.RecModel(network, case.loss, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        if steps.start:
            model.restore(root)
            scheduler.load_state_dict(torch.load(root / "scheduler.pt"))
        rates = []
        for number, item in enumerate(case.items()):
            if number in steps:
                model.step(item)
                scheduler.step()
                rates.append(model.table_learning_rates["crossed"])
        model.save(root)
        torch.save(scheduler.state_dict(), root / "scheduler.pt")
        return model, rates

    whole, rates = life(tmp_path / "whole", range(8))
    _, first = life(tmp_path / "parts", range(3))
    parts, later = life(tmp_path / "parts", range(3, 8))
    assert first + later == rates
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4, 25e-5, 25e-5, 125e-6, 125e-6]
    assert parts.dense_learning_rate == whole.dense_learning_rate == 125e-6
    assert_same_bits(parts, whole)


def test_rates_of_tables_and_dense_parameters_are_set_apart() -> None:
    model = CASES[0].model()
    items = CASES[0].items()
    model.table_learning_rates = {"crossed": 0.5}
    model.dense_learning_rate = 0.25
    before = bits(model)
    model.step(items[0])
    assert model.table_learning_rates["crossed"] == 0.5
    assert model.table_learning_rates["mixed"] == 1e-3
    assert model.dense_learning_rate == 0.25
    learned = bits(model)
    moves = learned["output.bias"] - before["output.bias"]
    assert moves.abs().item() == pytest.approx(0.25, rel=1e-3)


def sparse_and_dense(network: Any) -> list[torch.optim.Optimizer]:
    """Put the embeddings into SparseAdam, as torch asks for, and other parameters into Adam."""
    embeddings = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    for module in embeddings:
        module.sparse = True
    weights = [module.weight for module in embeddings]
    held = {id(weight) for weight in weights}
    others = [parameter for parameter in network.parameters() if id(parameter) not in held]
    return [torch.optim.SparseAdam(weights, lr=0.05), torch.optim.Adam(others, lr=0.01)]


def test_several_optimizers_train_and_are_restored(tmp_path: Path) -> None:
    case = CASES[0]
    plain, _ = case.network()
    optimizers = sparse_and_dense(plain)
    for (city, device, seconds), label in case.items(grows=False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scores = plain(city, device, seconds)
        nn.functional.binary_cross_entropy_with_logits(scores, label).backward()
        for optimizer in optimizers:
            optimizer.step()

    def build() -> hb.RecModel:
        network, _ = case.network()
        network, converted, _ = hb.auto(network, sparse_and_dense(network))
        return hb.RecModel(network, case.loss, converted)

    model = build()
    assert model.table_learning_rates["crossed"] == 0.05
    assert model.dense_learning_rate == 0.01
    model.fit(case.dataset(grows=False), progress=False)
    for name, table in model.tables.items():
        weight = plain.get_submodule(name).weight.detach()
        rows = torch.from_numpy(table.lookup(np.arange(len(weight))))
        torch.testing.assert_close(rows, weight, rtol=1e-5, atol=1e-6)
    model.table_learning_rates = 0.02
    model.save(tmp_path)
    restored = build().restore(tmp_path)
    assert restored.table_learning_rates["crossed"] == 0.02
    for each in (model, restored):
        each.fit(case.dataset(), progress=False)
    assert_same_bits(restored, model)


def test_optimizers_that_cannot_be_two_parts_are_refused() -> None:
    network, _ = CASES[0].network()
    embeddings = [network.crossed.weight, network.mixed.weight]
    held = {id(weight) for weight in embeddings}
    others = [weight for weight in network.parameters() if id(weight) not in held]
    optimizers = [torch.optim.SGD(embeddings, lr=0.1), torch.optim.Adam(others)]
    network, converted, _ = hb.auto(network, optimizers)
    with pytest.raises(ConfigError, match=r"the tables \['single', 'hours'\] learn and need"):
        hb.RecModel(network, "bce", converted[0])
    converted[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match=r"hold dense parameters here, got \['SGD', 'Adam'\]"):
        hb.RecModel(network, "bce", converted)
