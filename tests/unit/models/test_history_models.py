# SPDX-License-Identifier: Apache-2.0
"""DIN, DIEN and BST: the formulas of their papers, over plain `nn.Embedding` and Python loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed import config
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError, RowShapeError

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
DIM = 4
LENGTH = 3
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("shop"),
        hb.Id("tags", pooling="mean"),
        hb.Id("items", table="item", pooling="none", max_length=50),
        hb.Id("shops", table="shop", pooling="none"),
        hb.Id("searched", table="item", pooling="none"),
        hb.Dense("price"),
    ]
)
# items and shops are one history, entry by entry; searches are another
HISTORIES = [{"items": "item", "shops": "shop"}, {"searched": "item"}]
MODELS: dict[str, dict[str, Any]] = {
    "DIN": {"attention_hidden": (6,), "activation": "relu"},
    "DIN softmax": {"attention_hidden": (6,), "attention_activation": "prelu", "softmax": True},
    "DIN dot": {"attention": "dot"},
    "DIN decay": {"attention": "decay", "half_life": 1.5},
    "DIEN": {"activation": "prelu"},
    "BST": {"num_layers": 2, "dropout": 0.0},
    "BST mean": {"pooling": "mean"},
}


def make(name: str, length: int = LENGTH, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, dim=DIM, rule=hb.Adam(lr=0.05), init=hb.Normal(0.5))
    kind = getattr(hb.models, name.split()[0])
    settings = {"histories": HISTORIES, "length": length, "hidden": (8,), **MODELS[name]}
    model: nn.Module = kind(SCHEMA, tables, **settings | changes)
    return model


def bags(lengths: np.ndarray, ids: np.ndarray) -> hb.Ids:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return hb.Ids(ids[: offsets[-1]], offsets.astype(np.int64))


def batch(n: int, seed: int = 0) -> hb.Batch:
    """n samples; some histories are empty, some are longer than LENGTH."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 20, (7, 10 * n + 1))
    clicked, searched = draw.integers(0, 2 * LENGTH + 1, (2, n))
    arrays = hb.Batch(
        ids={
            "user": hb.Ids(ids[0, :n]),
            "item": hb.Ids(ids[1, :n]),
            "shop": hb.Ids(ids[2, :n]),
            "tags": bags(draw.integers(0, 3, n), ids[3]),
            "items": bags(clicked, ids[4]),
            "shops": bags(clicked, ids[5]),
            "searched": bags(searched, ids[6]),
        },
        dense={"price": draw.random(n, dtype=np.float32)},
        labels={"y": draw.integers(0, 2, n).astype(np.float32)},
        num_samples=n,
    )
    return arrays.map_arrays(torch.from_numpy)


class Plain:
    """What a model must compute, sample by sample, over copies of its rows and weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows = {}
        for table in model.inputs.features.collection.tables:
            values = torch.from_numpy(table.lookup(np.arange(20))).clone()
            self.rows[table.name] = nn.Embedding(20, DIM, _weight=values)

    def __call__(self, samples: hb.Batch) -> Tensor:
        return torch.stack([self.logit(samples[i : i + 1]) for i in range(len(samples))])

    def logit(self, sample: hb.Batch) -> Tensor:
        tags = self.rows["tags"](sample.ids["tags"].values)
        flat = [
            self.row(sample, "user", "user"),
            self.row(sample, "item", "item"),
            self.row(sample, "shop", "shop"),
            tags.mean(0) if len(tags) else torch.zeros(DIM),
            sample.dense["price"],
        ]
        target = [torch.cat([flat[1], flat[2]]), flat[1]]
        items = self.rows["item"](sample.ids["items"].values[-LENGTH:])
        shops = self.rows["shop"](sample.ids["shops"].values[-LENGTH:])
        searched = self.rows["item"](sample.ids["searched"].values[-LENGTH:])
        for number, history in enumerate([torch.cat([items, shops], dim=1), searched]):
            flat.append(
                POOLED[type(self.model).__name__](self.model, number, target[number], history)
            )
        hidden = self.model.mlp(torch.cat(flat).unsqueeze(0))
        logit: Tensor = self.model.head.linear(hidden)[0, 0]
        return logit

    def row(self, sample: hb.Batch, feature: str, table: str) -> Tensor:
        row: Tensor = self.rows[table](sample.ids[feature].values)[0]
        return row


def din(model: nn.Module, number: int, target: Tensor, history: Tensor) -> Tensor:
    pooling = model.poolings[number]
    if not len(history):
        return torch.zeros_like(target)
    if model.attention == "decay":
        weights = 0.5 ** (torch.arange(len(history)).flip(0) / 1.5)
        return weights @ history / weights.sum()
    if model.attention == "dot":
        scores = pooling.key(history) @ pooling.query(target) / len(target) ** 0.5
        return torch.softmax(scores, 0) @ pooling.value(history)
    pairs = [torch.cat([target, h, target - h, target * h]) for h in history]
    weights = pooling.unit(torch.stack(pairs))[:, 0]
    if pooling.softmax:
        weights = torch.softmax(weights, 0)
    return sum(w * h for w, h in zip(weights, history, strict=True))  # type: ignore[return-value]


def dien(model: nn.Module, number: int, target: Tensor, history: Tensor) -> Tensor:
    evolution, state = model.evolutions[number], torch.zeros_like(target)
    if not len(history):
        return state
    states = evolution.extract(history.unsqueeze(0))[0][0]
    attention = torch.softmax(states @ evolution.relate.weight @ target, 0)
    gru = evolution.evolve
    for share, x in zip(attention, states, strict=True):
        reset_x, keep_x, new_x = (gru.weight_ih @ x + gru.bias_ih).chunk(3)
        reset_h, keep_h, new_h = (gru.weight_hh @ state + gru.bias_hh).chunk(3)
        update = share * torch.sigmoid(-(keep_x + keep_h))
        candidate = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        state = (1 - update) * state + update * candidate
    return state


def bst(model: nn.Module, number: int, target: Tensor, history: Tensor) -> Tensor:
    transformer = model.transformers[number]
    rows = torch.stack([target, *history.flip(0)]) + transformer.positions[: len(history) + 1]
    for layer in transformer.layers:
        rows = torch_layer(layer)(rows)
    return rows[0] if model.pooling == "target" else rows.mean(0)


def torch_layer(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """torch's transformer layer, with the weights of ours."""
    same = nn.TransformerEncoderLayer(2 * DIM, 2, 8 * DIM, 0.0, F.leaky_relu, batch_first=True)
    if layer.first.in_features == DIM:
        same = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.0, F.leaky_relu, batch_first=True)
    query, key, value, output = layer.attention.projections
    projections = {
        "in_proj_weight": torch.cat([query.weight, key.weight, value.weight]),
        "in_proj_bias": torch.cat([query.bias, key.bias, value.bias]),
        "out_proj.weight": output.weight,
        "out_proj.bias": output.bias,
    }
    weights = {f"self_attn.{name}": value for name, value in projections.items()}
    parts = {"linear1": layer.first, "linear2": layer.second}
    parts |= {"norm1": layer.norms[0], "norm2": layer.norms[1]}
    for name, part in parts.items():
        weights |= {f"{name}.{key}": value for key, value in part.named_parameters()}
    return lambda rows: torch.func.functional_call(same, weights, (rows.unsqueeze(0),))[0]


POOLED: dict[str, Callable[..., Tensor]] = {"DIN": din, "DIEN": dien, "BST": bst}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_formula_of_its_paper(name: str) -> None:
    model, samples = make(name), batch(40)
    model(samples)  # inserts every id
    model.eval()
    plain = Plain(model)
    with torch.no_grad():
        torch.testing.assert_close(model(samples), plain(samples), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_rows_get_the_gradients_of_plain_embeddings(name: str) -> None:
    model, samples = make(name), batch(40)
    model(samples)
    model.eval()  # no dropout, and the statistics of Dice stay
    plain = Plain(copy.deepcopy(model))
    for run in (model, plain):
        F.binary_cross_entropy_with_logits(run(samples), samples.labels["y"]).backward()
    before = {t.name: t.lookup(np.arange(20)) for t in model.inputs.features.collection.tables}
    hb.SparseOptimizer(model).step()
    for table in model.inputs.features.collection.tables:
        rows = plain.rows[table.name]
        optimizer = torch.optim.Adam(rows.parameters(), lr=0.05)
        optimizer.step()
        moved = np.abs(table.lookup(np.arange(20)) - before[table.name]).max(1) > 0
        found = torch.from_numpy(table.lookup(np.arange(20))[moved])
        # Adam divides by the gradient's size: tiny gradients would count as much as large ones
        large = (rows.weight.grad[moved].abs() > 1e-5).all(1)
        torch.testing.assert_close(
            found[large], rows.weight.detach()[moved][large], rtol=1e-4, atol=1e-4
        )
        assert large.sum() > 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_padding_never_leaks(name: str, training: bool) -> None:
    """The same weights read histories with 10 more places of padding: the same logits, gradients."""
    samples, results = batch(40).map_arrays(lambda array: array), []
    for length in (2 * LENGTH, 2 * LENGTH + 10):
        model = make(name, length)
        if results:
            weights = {key: value.clone() for key, value in results[0][0].items()}
            for key, value in dense_state(model).items():
                if key.endswith("positions"):
                    value = value.detach().clone()
                    value[: len(weights[key])] = weights[key]
                    weights[key] = value
            model.load_state_dict(weights, strict=False)
        initial = {key: value.detach().clone() for key, value in dense_state(model).items()}
        logits = model.train(training)(samples)
        F.binary_cross_entropy_with_logits(logits, samples.labels["y"]).backward()
        gradients = [p.grad for name, p in model.named_parameters() if "positions" not in name]
        results.append((initial, logits.detach(), gradients))
    (_, short, short_gradients), (_, long, long_gradients) = results
    torch.testing.assert_close(long, short, rtol=1e-5, atol=1e-6)
    for left, right in zip(long_gradients, short_gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_a_history_matters_where_the_paper_says_so(name: str) -> None:
    model, samples = make(name, 2 * LENGTH), batch(40)
    if hasattr(model, "transformers"):  # positions start small
        for transformer in model.transformers:
            nn.init.normal_(transformer.positions)
    model(samples)
    turned = {}
    for feature in ("items", "shops", "searched"):
        ids = samples.ids[feature]
        pieces = [
            ids.values[a:b].flip(0) for a, b in zip(ids.offsets, ids.offsets[1:], strict=False)
        ]
        turned[feature] = hb.Ids(torch.cat(pieces), ids.offsets)
    other = hb.Batch(samples.ids | turned, samples.dense, samples.labels, num_samples=40)
    model.eval()
    with torch.no_grad():
        difference = (model(other) - model(samples)).abs().max()
    if name.startswith("DIN") and name != "DIN decay":
        assert difference < 1e-5
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_batch_of_any_size_gives_one_float32_logit_a_sample(
    name: str, n: int, autocast: bool
) -> None:
    model, samples = make(name), batch(n)
    for training in (True, False):
        model.train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(samples)
        assert logits.shape == (n,)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient_also_where_all_histories_are_empty(name: str) -> None:
    model, samples = make(name), batch(40)
    nothing = hb.Ids(torch.zeros(0, dtype=torch.int64), torch.zeros(41, dtype=torch.int64))
    empty = hb.Batch(
        samples.ids | dict.fromkeys(("items", "shops", "searched"), nothing),
        samples.dense,
        num_samples=40,
    )
    for one in (samples, empty):
        model.zero_grad()
        model(one).square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad is not None for p in hb.dense_parameters(model))
    model.zero_grad()
    model(samples).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_mapped_ahead_to_the_same_bits(name: str) -> None:
    results = []
    for ahead in (False, True):
        model = make(name)
        insert, optimizer = hb.Insert(model), hb.SparseOptimizer(model)
        for step in range(3):
            samples = batch(20, step)
            if ahead:
                samples = insert(samples)
                assert step == 0 or samples.plans.left()  # a plan that the lookup takes
            logits = model(samples)
            logits.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(logits.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_describes_itself_and_is_built_again(name: str) -> None:
    model = make(name)
    spec = config.describe(model)
    given = {"schema": SCHEMA, "tables": hb.make_tables(SCHEMA, dim=DIM)}
    again = config.build(spec, nn.Module, "model", given)
    assert type(again) is type(model)
    assert config.describe(again) == spec
    shapes = [{key: v.shape for key, v in dense_state(one).items()} for one in (model, again)]
    assert shapes[0] == shapes[1]


# torch's compiler looks at the states that nn.GRU returns
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name",
    [
        "DIN",
        "DIN dot",
        pytest.param("DIEN", marks=pytest.mark.soak),
        pytest.param("BST", marks=pytest.mark.soak),
    ],
)
def test_a_compiled_model_gives_the_logits_and_gradients_of_the_plain_one(name: str) -> None:
    results = []
    for compiled in (False, True):
        model = make(name)
        run = model
        if compiled:  # torch's compiler leaves nn.GRU as it is
            run = torch.compile(model, backend="aot_eager", fullgraph=name != "DIEN")
        for seed in (0, 1):
            logits = run(batch(16, seed))
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


def test_the_length_is_that_of_the_columns_where_it_is_not_given() -> None:
    tables = hb.make_tables(SCHEMA, dim=DIM)
    schema = hb.Schema([column for column in SCHEMA.columns if column.name in ("item", "items")])
    model = hb.models.DIN(schema, tables, histories={"items": "item"})
    assert model.inputs.lengths == [50]


@pytest.mark.parametrize("name", ["DIN dot", "DIN decay"])
def test_histories_without_a_length_are_read_whole(name: str) -> None:
    whole, long = make(name, None), make(name, 2 * LENGTH)  # type: ignore[arg-type]
    samples = batch(20)
    assert whole.inputs.lengths == [None, None]
    torch.testing.assert_close(whole(samples), long(samples))
    cut = make(name, 1)(samples)
    assert not torch.allclose(cut, long(samples), atol=1e-4)


def test_wrong_settings_are_config_errors_that_say_what_to_do() -> None:
    tables = hb.make_tables(SCHEMA, dim=DIM)
    other_dim = hb.make_tables(SCHEMA, dim=DIM, overrides={"shop": {"dim": 6}})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"histories": {"tags": "item"}}, r"histories: expected Id columns .* got 'tags'"),
        ({"histories": {"itmes": "item"}}, r"got 'itmes'\. The schema has \['items', 'shops'"),
        ({"histories": {"items": "price"}}, r"histories\.items: the target .* got 'price'"),
        ({"histories": {"items": "searched"}}, r"histories\.items: the target .* got 'searched'"),
        ({"histories": {}}, "histories: no column, got {}"),
        ({"histories": []}, r"histories: no column, got \[\]"),
        ({"histories": {"items": "item"}}, "'shops'|shops: this model takes no sequence features"),
        ({"length": 0}, "length: must be at least 1"),
        ({"length": None}, "length: not given, and column 'shops' has no max_length"),
        ({"attention": "sum"}, "attention: unknown value"),
        ({"attention": "decay", "half_life": 0.0}, "half_life: must be above 0"),
        ({"attention_activation": "dice"}, "'dice' would count padding"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            hb.models.DIN(SCHEMA, tables, **{"histories": HISTORIES, "length": 3, **settings})
    crossed = [{"items": "shop", "shops": "item"}, {"searched": "item"}]
    with pytest.raises(ConfigError, match="must have the same dim, got 4 and 6"):
        hb.models.DIN(SCHEMA, other_dim, histories=crossed, length=3)
    with pytest.raises(ConfigError, match="num_heads: must divide the dim of a history, got 3"):
        hb.models.BST(SCHEMA, tables, histories=HISTORIES, length=3, num_heads=3)


def test_columns_of_one_history_must_have_the_same_entries() -> None:
    model, samples = make("DIN"), batch(8)
    one_more = bags(np.full(8, 2), np.zeros(20, np.int64)).map_arrays(torch.from_numpy)
    wrong = hb.Batch(samples.ids | {"shops": one_more}, samples.dense, num_samples=8)
    with pytest.raises(RowShapeError, match="columns 'items' and 'shops' are one history"):
        model(wrong)
