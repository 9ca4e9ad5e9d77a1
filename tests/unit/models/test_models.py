# SPDX-License-Identifier: Apache-2.0
"""Models: shapes, formulas, learning, small batches, descriptions; all on real tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed import config
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError
from hotbed.models import losses

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Label("z"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("other_item", table="item"),
        hb.Id("genres", pooling="mean"),
        hb.Dense("price"),
        hb.Dense("vector", width=3),
    ]
)
IDS_ONLY = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
DENSE_ONLY = hb.Schema([hb.Label("y"), hb.Dense("price"), hb.Dense("vector", width=3)])
SMALL = {"hidden": (8, 8)}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "LR": ("LR", {}),
    "FM": ("FM", {}),
    "DNN": ("DNN", SMALL),
    "DNN batch norm": ("DNN", {**SMALL, "batch_norm": True, "dropout": 0.4}),
    "WideDeep": ("WideDeep", SMALL),
    "DeepFM": ("DeepFM", SMALL),
    "DCN": ("DCN", SMALL),
    "DCN cross only": ("DCN", {"hidden": ()}),
    "DCNv2": ("DCNv2", SMALL),
    "DCNv2 stacked": ("DCNv2", {**SMALL, "structure": "stacked"}),
    "DCNv2 low rank": ("DCNv2", {**SMALL, "low_rank": 2, "num_experts": 3}),
    "DCNv2 cross only": ("DCNv2", {"hidden": (), "structure": "stacked"}),
    "DLRM": ("DLRM", {**SMALL, "bottom": (8,)}),
    "DLRM cat": ("DLRM", {**SMALL, "interaction": "cat", "bottom": ()}),
    "AutoInt": ("AutoInt", {"width": 8}),
    "AutoInt with a perceptron": ("AutoInt", {**SMALL, "width": 8, "num_layers": 1}),
    "FinalMLP": ("FinalMLP", {**SMALL, "num_heads": 2, "context": ["user", "vector"]}),
    "FinalMLP without gates": ("FinalMLP", {**SMALL, "gate_hidden": None}),
    "MaskNet": ("MaskNet", {**SMALL, "block_width": 8, "num_blocks": 2}),
    "MaskNet serial": ("MaskNet", {**SMALL, "structure": "serial"}),
    "QNN": ("QNN", {"batch_norm": True, "dropout": 0.1}),
    "RankMixer": ("RankMixer", {"part_width": 2}),
    "MMoE": ("MMoE", {"num_experts": 3, "expert_hidden": (8,), "tower_hidden": (4,)}),
    "PLE": ("PLE", {"levels": ((8,), (8,)), "tower_hidden": ()}),
    "ESMM": ("ESMM", SMALL),
    "AITM": ("AITM", SMALL),
}
TWO_LABELS = ("MMoE", "PLE", "ESMM", "AITM")


def make(name: str, schema: hb.Schema = SCHEMA, dim: int = 4, seed: int = 0) -> torch.nn.Module:
    """A model over fresh tables, dense weights from the seed."""
    torch.manual_seed(seed)
    cls, keywords = MODELS[name]
    tables = hb.make_tables(schema, dim=dim, rule=hb.Adam(lr=0.05), init=hb.Normal(0.1))
    return getattr(hb.models, cls)(schema, tables, **keywords)


def batch(n: int, seed: int = 0) -> hb.Batch:
    """n samples whose labels depend on user and price."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 4, n)  # some bags are empty
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    user, price = random.integers(-5, 5, n), random.random(n, dtype=np.float32)
    y = (user + price > 0).astype(np.float32)
    arrays = hb.Batch(
        ids={
            "user": hb.Ids(user),
            "item": hb.Ids(random.integers(0, 50, n)),
            "other_item": hb.Ids(random.integers(0, 50, n)),
            "genres": hb.Ids(random.integers(0, 9, offsets[-1]), offsets),
        },
        dense={"price": price, "vector": random.random((n, 3), dtype=np.float32)},
        labels={"y": y, "z": 1.0 - y},
        num_samples=n,
    )
    return arrays.map_arrays(torch.from_numpy)


def by_label(outputs: object) -> Mapping[str, torch.Tensor]:
    return outputs if isinstance(outputs, dict) else {"y": outputs}


def train_step(model: torch.nn.Module, samples: hb.Batch) -> float:
    outputs = by_label(model(samples))
    loss = losses.MultiTask({label: losses.BCE() for label in outputs})(outputs, samples.labels)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_any_size_gives_one_float32_logit_a_sample(name: str) -> None:
    model = make(name)
    for n, autocast, training in product([0, 1, 5], [False, True], [True, False]):
        samples = batch(n)
        model.train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = by_label(model(samples))
        assert set(outputs) == ({"y", "z"} if name in TWO_LABELS else {"y"})
        assert all(
            logits.shape == (n,) and logits.dtype == torch.float32 for logits in outputs.values()
        )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "ESMM"])
def test_first_predictions_lie_around_the_base_rate(name: str) -> None:
    model, samples = make(name).eval(), batch(5)
    rates = {"y": 0.02, "z": 0.5}
    before = by_label(model(samples))
    hb.models.set_base_rate(model, rates if name in TWO_LABELS else rates["y"])
    for label, logits in by_label(model(samples)).items():
        logit = np.log(rates[label] / (1 - rates[label]))
        torch.testing.assert_close(logits, before[label] + logit)


def test_first_predictions_of_events_lie_around_their_shares_of_all_samples() -> None:
    model, samples = make("ESMM").eval(), batch(300)
    for head in model.heads.values():
        torch.nn.init.zeros_(head.linear.weight)
    hb.models.set_base_rate(model, {"y": 0.02, "z": 0.004})
    for label, share in {"y": 0.02, "z": 0.004}.items():
        predicted = torch.sigmoid(model(samples)[label])
        torch.testing.assert_close(predicted, torch.full((300,), share))


@pytest.mark.parametrize(
    ("network", "rate", "message"),
    [
        (make("ESMM"), {"y": 0.02, "z": 0.5}, r"base_rate\.z: must be below .* got 0.5 after 0.02"),
        (make("ESMM"), {"z": 0.5}, r"base_rate\.z: must be below .* got 0.5 after None"),
        (make("ESMM"), {"y": 0.02, "x": 0.01}, "needs an output 'x' whose bias is known, got ESMM"),
        (torch.nn.Linear(1, 1), 0.1, "needs an output whose bias is known, got Linear"),
        (make("LR"), {"z": 0.1}, "needs an output 'z' whose bias is known, got LR"),
        (make("LR"), 1.0, "above 0 and below 1, got 1.0"),
    ],
)
def test_a_base_rate_that_cannot_be_set_is_refused(network: Any, rate: Any, message: str) -> None:
    with pytest.raises(hb.errors.ConfigError, match=message):
        hb.models.set_base_rate(network, rate)


@pytest.mark.parametrize("name", MODELS)
def test_every_dense_parameter_and_every_table_gets_a_gradient(name: str) -> None:
    model = make(name)
    train_step(model, batch(64))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad.numel() > 8)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns(name: str) -> None:
    model = make(name)
    dense, sparse = torch.optim.Adam(hb.dense_parameters(model), 0.02), hb.SparseOptimizer(model)
    first = None
    for step in range(40):
        loss = train_step(model, batch(256, seed=step))
        first = first or loss
        dense.step()
        sparse.step()
        dense.zero_grad()
        sparse.zero_grad()
    model.eval()
    test = batch(2000, seed=999)
    with torch.no_grad():
        logits = by_label(model(test))["y"]
    auc = hb.metrics.AUC()
    auc.update(torch.sigmoid(logits), test.labels["y"])
    assert loss < first
    assert auc.eval() > 0.9


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_effect_of_the_place_where_an_item_was_shown(name: str) -> None:
    """Of the first place, of a missing one, and without places there is none."""
    samples = batch(4)
    places = {"shown": torch.tensor([0.0, 2.0, -1.0, 1.0])}
    shown = replace(samples, dense={**samples.dense, **places})
    for form in ("additive", "factor"):
        column = hb.DisplayPosition("shown", form=form, size=3)
        schema = hb.Schema([*SCHEMA.columns, column])
        model = make(name, schema).eval()
        effects = torch.tensor([-1.0, 2.0]).unsqueeze(1).expand_as(model.position.effects)
        model.position.effects.data.copy_(effects)
        before = by_label(model(samples))
        for label, logits in by_label(model(shown)).items():
            effect = torch.tensor([0.0, 2.0, 0.0, -1.0])
            expected = before[label] + effect
            if form == "factor":
                looked = torch.tensor(
                    [1.0, torch.sigmoid(effect[1]), 1.0, torch.sigmoid(effect[3])]
                )
                expected = torch.logit(torch.sigmoid(before[label]) * looked)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_of_torch_makes_a_model_reproducible(name: str) -> None:
    first, second = (by_label(make(name, seed=5).eval()(batch(7)))["y"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_describes_itself_and_is_built_again(name: str) -> None:
    model = make(name)
    spec = config.describe(model)
    given = {"schema": SCHEMA, "tables": hb.make_tables(SCHEMA, dim=4)}
    again = config.build(spec, torch.nn.Module, "model", given)
    assert type(again) is type(model)
    assert config.describe(again) == spec
    shapes = [
        {key: value.shape for key, value in dense_state(one).items()} for one in (model, again)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "name", ["LR", "DNN", "WideDeep", "DCN", "DCNv2", "FinalMLP without gates", "QNN", "RankMixer"]
)
def test_schemas_with_only_ids_or_only_dense_columns_work(name: str) -> None:
    for schema in (IDS_ONLY, DENSE_ONLY):
        assert make(name, schema)(batch(3)).shape == (3,)


@pytest.mark.parametrize("kind", ["LR", "FM", "DeepFM"])
def test_linear_weights_of_numbers_begin_at_zero(kind: str) -> None:
    network = getattr(hb.models, kind)(SCHEMA, hb.make_tables(SCHEMA, dim=4))
    assert not network.linear.dense_weights.any()


@pytest.mark.parametrize("name", ["FM", "DeepFM", "DLRM", "DLRM cat", "AutoInt", "MaskNet"])
def test_models_that_multiply_fields_need_no_dense_columns(name: str) -> None:
    assert make(name, IDS_ONLY)(batch(3)).shape == (3,)


def test_a_compiled_model_gives_the_logits_and_gradients_of_the_plain_one() -> None:
    results = []
    for compiled in (False, True):
        model = make("DCNv2", seed=1)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        logits = run(batch(16))
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


# --- formulas -------------------------------------------------------------------------------------


def test_fm_is_bias_weights_and_pairs() -> None:
    model, samples = make("FM", IDS_ONLY), batch(9)
    torch.nn.init.normal_(model.linear.bias)
    logits = model(samples)  # inserts every id
    model.eval()
    rows = model.inputs.collection(samples)
    weights = model.linear.collection(samples)
    pairs = sum((rows[a] * rows[b]).sum(1) for a, b in combinations(["user", "item"], 2))
    torch.testing.assert_close(
        logits, model.linear.bias + sum(w.squeeze(1) for w in weights.values()) + pairs
    )


def test_first_order_weights_live_in_tables_of_their_own() -> None:
    model = make("DeepFM")
    linear, deep = model.linear.collection.tables, model.inputs.collection.tables
    assert {(table.name, table.dim) for table in linear} == {
        ("user.linear", 1),
        ("item.linear", 1),
        ("genres.linear", 1),
    }
    assert all(table.rule == deep[0].rule for table in linear)


def test_the_size_of_dcnv2_is_that_of_the_published_model() -> None:
    """BARS' Frappe DCNv2 has 458,391 parameters with 5,406 rows of dim 10 (its ids and one unknown
    a field).
    """
    fields = [hb.Id(f"f{i}") for i in range(10)]
    schema = hb.Schema([hb.Label("y"), *fields])
    model = hb.models.DCNv2(
        schema, hb.make_tables(schema, dim=10), num_cross_layers=4, dropout=0.4, batch_norm=True
    )
    dense = sum(p.numel() for p in hb.dense_parameters(model))
    cross, mlp, norms, head = (
        4 * (100 * 100 + 100),
        100 * 400 + 2 * 400 * 400 + 3 * 400,
        3 * 800,
        501,
    )
    assert dense == cross + mlp + norms + head
    assert (458_391 - dense) % 10 == 0


def test_mmoe_mixes_experts_by_the_gate_of_each_task() -> None:
    model, samples = make("MMoE").eval(), batch(6)
    flat = model.inputs(samples)
    outputs = model(samples)
    for task in ("y", "z"):
        gate = torch.softmax(model.gates[task](flat), dim=1)
        mixed = sum(gate[:, i : i + 1] * expert(flat) for i, expert in enumerate(model.experts))
        torch.testing.assert_close(outputs[task], model.heads[task](model.towers[task](mixed)))


def test_dlrm_dot_joins_pairs_and_the_bottom_output() -> None:
    model, samples = make("DLRM").eval(), batch(6)
    flat = model.inputs(samples)
    dense = model.bottom(flat[:, model.inputs.embedding_dim :])
    fields = [dense, *flat[:, : model.inputs.embedding_dim].split(4, dim=1)]
    pairs = [(fields[i] * fields[j]).sum(1, keepdim=True) for i in range(5) for j in range(i)]
    torch.testing.assert_close(
        model(samples), model.head(model.top(torch.cat([dense, *pairs], dim=1)))
    )


# --- bad configuration ----------------------------------------------------------------------------


def test_wrong_settings_are_config_errors_that_say_what_to_do() -> None:
    tables = hb.make_tables(SCHEMA, dim=4)
    mixed = hb.make_tables(SCHEMA, dim=4, overrides={"user": {"dim": 6}})
    sequence = hb.Schema([hb.Label("y"), hb.Id("history", table="item", pooling="none")])
    seen = hb.History("seen", of=["item", "at"], by="user", length=3)
    aged = hb.Schema([hb.Label("y"), hb.Time("at"), hb.Id("user"), hb.Id("item"), seen])
    empty = hb.Schema([hb.Label("y")])
    cases = [
        (lambda: hb.models.DCNv2(SCHEMA, tables, structure="serial"), "structure: unknown value"),  # type: ignore[arg-type]
        (lambda: hb.models.DLRM(SCHEMA, tables, interaction="sum"), "interaction: unknown value"),  # type: ignore[arg-type]
        (
            lambda: hb.models.MMoE(SCHEMA, tables, tasks=("y", "income")),
            r"tasks: .*got \['income'\]",
        ),
        (lambda: hb.models.MMoE(SCHEMA, tables, num_experts=0), "num_experts"),
        (lambda: hb.models.PLE(SCHEMA, tables, levels=((8,), ())), "PLE.levels: each level has"),
        (lambda: hb.models.PLE(SCHEMA, tables, task_experts=0), "PLE.task_experts: must be"),
        (lambda: hb.models.PLE(SCHEMA, tables, tasks=("y", "y")), "tasks: a label stands twice"),
        (lambda: hb.models.AITM(SCHEMA, tables, hidden=()), "AITM.hidden: a tower has at least"),
        (lambda: hb.models.AITM(SCHEMA, tables, tasks=("y",)), "tasks: events that follow each"),
        (
            lambda: hb.models.FinalMLP(SCHEMA, tables, context=["shop"]),
            r"context: not a feature of this model, got \['shop'\]. Use some of user, item",
        ),
        (lambda: hb.models.FinalMLP(SCHEMA, tables, num_heads=3), "num_heads: must divide both"),
        (lambda: hb.models.AutoInt(SCHEMA, tables, width=5), "num_heads: must divide the width"),
        (lambda: hb.models.MaskNet(SCHEMA, tables, structure="stacked"), "structure: unknown"),  # type: ignore[arg-type]
        (
            lambda: hb.models.RankMixer(SCHEMA, tables, groups=[["user"], ["item", "user"]]),
            "groups: each feature must be in one group",
        ),
        (
            lambda: hb.models.FM(SCHEMA, mixed),
            r"FM: all fields must have the same dim, got dims \[4, 6\]",
        ),
        (lambda: hb.models.DNN(SCHEMA, {}), "no table for column 'user'"),
        (lambda: hb.models.LR(SCHEMA, {}), "no table for column 'user'"),
        (
            lambda: hb.models.DNN(sequence, {"item": tables["item"]}),
            "history: this model takes no sequence features",
        ),
        (
            lambda: hb.models.DIN(aged, hb.make_tables(aged, dim=4), histories={"seen": "item"}),
            "seen_at: this model takes no sequence features, .*Take the Time column out",
        ),
        (lambda: hb.models.DNN(empty, {}), "no features"),
        (
            lambda: hb.models.DNN(SCHEMA, tables, dropout=1.5),
            "dropout: must be a finite number >= 0 and < 1",
        ),
        (
            lambda: hb.models.DCN(SCHEMA, tables, num_cross_layers=0),
            "num_cross_layers: must be at least 1",
        ),
    ]
    for build, message in cases:
        with pytest.raises(ConfigError, match=message):
            build()


def test_tables_of_another_type_are_config_errors_that_say_what_to_give() -> None:
    """Each way in which networks look up rows takes a mapping; a collection takes a list, too."""
    tables = hb.make_tables(SCHEMA, dim=4)
    history = hb.Id("seen", table="item", pooling="none", max_length=3)
    with_history = hb.Schema([*SCHEMA.columns, history])
    graph = {
        "inputs": [{"input": "flat", "name": "f", "columns": ["user"]}],
        "layers": [{"layer": "logit_head", "name": "h", "inputs": ["f"]}],
        "outputs": {"y": "h", "z": "h"},
    }
    builds: list[Callable[[Any], Any]] = [
        lambda wrong: hb.models.DNN(SCHEMA, wrong),
        lambda wrong: hb.models.LR(SCHEMA, wrong),
        lambda wrong: hb.models.DIN(with_history, wrong, histories={"seen": "item"}),
        lambda wrong: hb.models.Graph(SCHEMA, wrong, graph),
    ]
    for wrong in (None, 16, "user", tables["user"], list(tables.values()), list(tables)):
        for build in builds:
            with pytest.raises(ConfigError, match=r"tables: expected a mapping .* hb\.make_tables"):
                build(wrong)
        if not isinstance(wrong, list | str):
            with pytest.raises(ConfigError, match=r"tables: expected a mapping .* or a list"):
                hb.EmbeddingCollection(SCHEMA, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 16, "user", hb.Table])
def test_what_is_no_table_is_a_config_error_that_names_it(value: Any) -> None:
    tables = {**hb.make_tables(SCHEMA, dim=4), "user": value}
    builds: list[Callable[[], Any]] = [
        lambda: hb.models.DNN(SCHEMA, tables),
        lambda: hb.models.LR(SCHEMA, tables),
        lambda: hb.EmbeddingCollection(SCHEMA, tables),
    ]
    for build in builds:
        with pytest.raises(ConfigError, match=r"tables\.user: expected a Table, got"):
            build()
    with pytest.raises(ConfigError, match=r"tables\.0: expected a Table, got"):
        hb.EmbeddingCollection(SCHEMA, [value])
    for module in (hb.Embedding, hb.EmbeddingBag):
        with pytest.raises(ConfigError, match=rf"{module.__name__}\.table: expected a Table, got"):
            module(value)


def test_tables_of_different_dims_feed_the_models_that_only_concatenate() -> None:
    tables = hb.make_tables(SCHEMA, dim=4, overrides={"user": {"dim": 6}})
    model = hb.models.DCNv2(SCHEMA, tables, hidden=(8,))
    assert model.inputs.output_dim == 6 + 4 + 4 + 4 + 1 + 3
    assert model(batch(3)).shape == (3,)
