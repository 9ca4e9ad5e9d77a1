# SPDX-License-Identifier: Apache-2.0
"""Networks from descriptions: the same JSON back, the same bits from it, every mistake with its
place.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError
from hotbed.models import Graph, layers
from hotbed.models.graph.description import KeyPlace, Node
from hotbed.models.graph.inputs import GraphInputs
from hotbed.models.graph.kinds import LAYERS, NUM_ROWS, inferred
from hotbed.pictures.boxes import Box, placed

SCHEMA = hb.Schema(
    [
        hb.Label("clicked"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("genres", pooling="mean"),
        hb.Id("history", table="item", pooling="none"),
        hb.Dense("price"),
        hb.Dense("vector", width=3),
    ]
)
DCN: dict[str, Any] = {
    "inputs": [
        {"input": "flat", "name": "ids", "columns": ["user", "item", "genres"]},
        {"input": "dense", "name": "numbers", "columns": ["price", "vector"]},
        {
            "input": "sequence",
            "name": "past",
            "column": "history",
            "length": 4,
            "outputs": ["past", "mask"],
        },
        {
            "input": "fields",
            "name": "wide",
            "columns": ["genres", "user"],
            "suffix": "linear",
            "dim": 1,
        },
    ],
    "layers": [
        {
            "layer": "logit_head",
            "name": "logit",
            "inputs": ["deep", "crosses", "summed", "numbers", "lengths"],
        },
        {
            "layer": "gru",
            "name": "read",
            "inputs": ["past"],
            "outputs": ["states", "last"],
            "hidden_size": 3,
        },
        {"layer": "concat", "name": "lengths", "inputs": ["mask", "last"]},
        {"layer": "dot_interaction", "name": "summed", "inputs": ["wide"]},
        {"layer": "mlp", "name": "deep", "inputs": ["ids"], "hidden": [8, 8], "dropout": 0.5},
        {"layer": "cross_net", "name": "crosses", "inputs": ["ids"], "num_layers": 2},
    ],
    "outputs": {"clicked": "logit"},
}


def columns(n: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    user = random.integers(0, 20, n)
    price = random.random(n)
    return {
        "clicked": (user / 20 + price > 1).astype(int),
        "user": user,
        "item": random.integers(0, 20, n),
        "genres": [random.integers(0, 5, k).tolist() for k in random.integers(0, 3, n)],
        "history": [random.integers(0, 20, k).tolist() for k in random.integers(0, 7, n)],
        "price": price,
        "vector": random.random((n, 3)).tolist(),
    }


def dataset(n: int = 256, seed: int = 0) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(columns(n, seed)), SCHEMA, batch_size=64)


def model(description: Any) -> hb.RecModel:
    torch.manual_seed(3)
    tables = hb.make_tables(SCHEMA, dim=4, rule=hb.Adagrad(lr=0.05), seed=1)
    return hb.RecModel(Graph(SCHEMA, tables, description), "bce", "adam", metrics={"auc"})


def losses(of: hb.RecModel) -> list[float]:
    torch.manual_seed(0)
    history = of.fit(dataset(), epochs=2, progress=False)
    return [point.loss for point in history.points]


def test_a_network_gives_back_its_description_and_that_learns_the_same_bits(tmp_path: Path) -> None:
    first = model(DCN)
    plain = first.network.to_json()
    assert json.dumps(plain) == json.dumps(DCN)
    file = tmp_path / "net.json"
    file.write_text(json.dumps(plain, indent=3))
    before = losses(first)
    assert before == losses(model(file))
    assert before == losses(model(file.read_text()))
    assert before[-1] < before[0]


def test_a_checkpoint_holds_the_description_not_the_path(tmp_path: Path) -> None:
    file = tmp_path / "net.json"
    file.write_text(json.dumps(DCN))
    trained = model(file)
    trained.fit(dataset(), progress=False)
    trained.save(tmp_path / "model")
    file.unlink()
    loaded = hb.load(tmp_path / "model")
    assert json.dumps(loaded.network.to_json()) == json.dumps(DCN)
    assert np.array_equal(loaded.predict(dataset()), trained.predict(dataset()))


def test_an_exported_network_scores_as_in_training(tmp_path: Path) -> None:
    trained = model(DCN)
    trained.fit(dataset(), progress=False)
    trained.export(tmp_path / "served")
    rows = columns(50, seed=5)
    del rows["clicked"]
    served = hb.InferenceSession(tmp_path / "served").predict(rows)
    expected = trained.predict(dataset(50, seed=5))
    assert np.abs(served - expected).max() <= 1e-6


# --- mistakes -------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "inputs": [
        {"input": "flat", "name": "x", "columns": ["user", "item"]},
        {"input": "dense", "name": "numbers", "columns": ["price"]},
    ],
    "layers": [
        {"layer": "mlp", "name": "deep", "inputs": ["x"], "hidden": [8, 4]},
        {"layer": "slice", "name": "cut", "inputs": ["deep"], "outputs": ["a", "b"]},
        {"layer": "add", "name": "sum", "inputs": ["a", "b"]},
        {"layer": "logit_head", "name": "logit", "inputs": ["sum", "numbers"]},
    ],
    "outputs": {"clicked": "logit"},
}
SMALL["layers"][1]["ranges"] = [[0, 3], [1, 4]]
GONE = object()


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The small network with another value at a path."""
    description = copy.deepcopy(SMALL)
    node: Any = description
    for key in path[:-1]:
        node = node[key]
    if to is GONE:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return description


def built(description: Any, schema: hb.Schema = SCHEMA) -> Graph:
    return Graph(schema, hb.make_tables(schema, dim=4), description)


LAYER = {"name": "deep", "inputs": ["x"]}
MISTAKES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("extra",), 1, 'extra: unknown key, got "extra". Use one of inputs'),
    (("layers",), GONE, 'layers: missing key, got ["inputs", "outputs"]'),
    (("layers",), [], "layers: not a list with entries, got []"),
    (("layers", 1), 3, "layers[1]: not an object, got 3"),
    (("layers", 0, "layer"), "mpl", 'layers[0].layer: unknown layer, got "mpl". Did you mean'),
    (("layers", 0, "layer"), GONE, "layers[0].layer: missing key"),
    (("layers", 0, "name"), "a.b", 'layers[0].name: not a name, got "a.b"'),
    (
        ("layers", 0),
        {**SMALL["layers"][0], "name": "keys", "outputs": ["deep"]},
        "layers[0].name: a name that torch's modules use",
    ),
    (("layers", 2, "name"), "x", "layers[2].name: a name that description.inputs[0] has already"),
    (
        ("layers", 0, "hiden"),
        [8],
        'layers[0].hiden: unknown key of mlp, got "hiden". Did you mean \'hid',
    ),
    (
        ("layers", 0, "hidden"),
        [8, "x"],
        "layers[0].hidden[1]: wrong value, got 'x' (str). Give int",
    ),
    (("layers", 0, "hidden"), GONE, "layers[0].hidden: missing key of mlp"),
    (("layers", 0, "hidden"), [0], "layers[0]: MLP: a width is below 1"),
    (("layers", 0, "in_features"), 9, "layers[0].in_features: the inputs need 8, got 9"),
    (("layers", 0, "weight_init"), "xavier", "layers[0].weight_init: wrong value, got 'xavier'"),
    (("layers", 2, "weight_init"), "zeros", "layers[2].weight_init: add has no weights"),
    (("layers", 0, "inputs"), [], "layers[0].inputs: not a list of names, got []"),
    (("layers", 0, "inputs"), ["x", "numbers"], 'layers[0].inputs: mlp takes x, got ["x", "numb'),
    (("layers", 2, "inputs"), ["a", "c"], 'layers[2].inputs[1]: unknown tensor, got "c"'),
    (
        ("layers", 2, "inputs"),
        ["a", "x"],
        "layers[2].inputs: add does not take these shapes, got a [n, 3], x [n, 8]. Add: expected tensors of one shape",
    ),
    (
        ("layers", 0),
        {"layer": "dot_interaction", **LAYER},
        "layers[0].inputs: dot_interaction does not take these shapes, got x [n, 8]",
    ),
    (("layers", 0), {"layer": "fm_interaction", **LAYER}, "The result would not have a row"),
    (
        ("layers", 0, "inputs"),
        ["sum"],
        "layers[0]: the layer needs its own output, got deep -> cut -> sum -> deep",
    ),
    (("layers", 1, "outputs"), ["a"], 'layers[2].inputs[1]: unknown tensor, got "b"'),
    (
        ("layers", 1, "ranges"),
        [[0, 3]],
        'layers[1].outputs: another number of outputs than slice has, which is 1, got ["a", "b"]',
    ),
    (
        ("layers", 1, "ranges"),
        [[0, 3], [3, 9]],
        "layers[1].inputs: slice does not take these shapes",
    ),
    (
        ("layers", 1, "outputs"),
        ["a", "x"],
        "layers[1].outputs[1]: a name that description.inputs[0]",
    ),
    (("layers", 3, "inputs"), ["sum"], 'inputs[1]: nothing takes its output, got ["numbers"]'),
    (("inputs", 0, "input"), "flatt", 'inputs[0].input: unknown input, got "flatt". Did you mean'),
    (
        ("inputs", 0, "columns"),
        ["usr"],
        "inputs[0].columns[0]: not a column of the schema with the role Id, got \"usr\". Did you mean 'user'?",
    ),
    (
        ("inputs", 0, "columns"),
        ["price"],
        "inputs[0].columns[0]: not a column of the schema with the role Id",
    ),
    (("inputs", 0, "columns"), ["user", "user"], "inputs[0].columns[1]: a column that comes twice"),
    (("inputs", 0, "columns"), ["history"], "inputs[0].columns[0]: a column with pooling 'none'"),
    (("inputs", 0, "dim"), 3, "inputs[0].dim: a dim without a suffix, got 3"),
    (("inputs", 1, "suffix"), "a", "inputs[1].suffix: unknown key of dense"),
    (("inputs", 0, "outputs"), ["x", "y"], "inputs[0].outputs: flat has one output"),
    (("outputs",), {}, "outputs: not an object with entries"),
    (("outputs", "bought"), "logit", 'outputs.bought: not a label of the schema, got "bought"'),
    (("outputs", "clicked"), "lgit", "outputs.clicked: unknown tensor"),
    (
        ("layers", 3),
        {"layer": "concat", "name": "logit", "inputs": ["sum", "numbers"]},
        'outputs.clicked: not [n] or [n, 1], got "logit [n, 4]"',
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES, ids=[str(m[0]) for m in MISTAKES])
def test_a_mistake_is_told_with_its_place(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(changed(*path, to=value))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "inputs": [1,]\n}', "net.json: not JSON at line 2 column 15"),
        ("[]", "net.json: not an object, got []"),
        ('{"layers": 1, "layers": 2}', 'net.json: a key appears twice in one object, got "layers"'),
        ('{"layers": NaN}', 'net.json: not a number of JSON, got "NaN"'),
        ('{"layers": 1}', "net.json: inputs: missing key"),
    ],
)
def test_a_file_that_is_not_a_description_is_rejected(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        built("net.json")
    assert str(error.value).startswith(message)
    with pytest.raises(ConfigError, match=r"^gone\.json: cannot be read"):
        built("gone.json")
    with pytest.raises(ConfigError, match=r"^description: not JSON values"):
        built({"inputs": {1}})


def test_tables_beside_need_one_dim_for_each_suffix() -> None:
    wide = {"input": "fields", "name": "wide", "columns": ["user"], "suffix": "linear", "dim": 1}
    description = copy.deepcopy(SMALL)
    description["inputs"] += [wide, {**wide, "name": "other", "dim": 2}]
    description["layers"][3]["inputs"] = ["sum", "numbers", "flat", "flat2"]
    for name, source in (("flat", "wide"), ("flat2", "other")):
        description["layers"].append({"layer": "reshape", "name": name, "inputs": [source]})
    with pytest.raises(ConfigError, match=r"inputs\[3\].dim: not the dim of 'wide'"):
        built(description)
    description["inputs"][3]["suffix"] = "second"
    network = built(description)
    tables = {table.name: table.dim for one in network.inputs.collections for table in one.tables}
    assert tables == {"user": 4, "item": 4, "user.linear": 1, "user.second": 2}


@given(st.data())
def test_inputs_are_the_columns_that_they_name(data: st.DataObject) -> None:
    pooled = st.lists(st.sampled_from(["user", "item", "genres"]), min_size=1, unique=True)
    chosen = {name: data.draw(pooled) for name in ("first", "second", "third")}
    kinds = {"first": "flat", "second": "flat", "third": "fields"}
    entries = [{"input": kinds[name], "name": name, "columns": chosen[name]} for name in chosen]
    entries.append({"input": "dense", "name": "numbers", "columns": ["vector", "price"]})
    past = {"input": "sequence", "name": "past", "column": "history", "length": 4}
    entries.append({**past, "outputs": ["rows", "mask"]})
    nodes = []
    for entry in entries:
        keys = {
            key: value for key, value in entry.items() if key in ("columns", "column", "length")
        }
        names = entry.get("outputs", [entry["name"]])
        place = KeyPlace("inputs")
        nodes.append(Node(entry["input"], entry["name"], (), tuple(names), keys, place))
    tables = hb.make_tables(SCHEMA, dim=4)
    inputs = GraphInputs(SCHEMA, tables, nodes)
    batch = next(iter(dataset(16))).map_arrays(torch.as_tensor)
    tensors = inputs(batch)
    rows = hb.EmbeddingCollection(SCHEMA, tables)(batch)
    for name in ("first", "second"):
        expected = torch.cat([rows[column] for column in chosen[name]], dim=1)
        assert torch.equal(tensors[name], expected)
    third = torch.stack([rows[column] for column in chosen["third"]], dim=1)
    assert torch.equal(tensors["third"], third)
    price = batch.dense["price"].unsqueeze(1)
    assert torch.equal(tensors["numbers"], torch.cat([batch.dense["vector"], price], dim=1))
    padded = layers.PadSequence(4)(rows["history"], batch.ids["history"].offsets)
    assert torch.equal(tensors["rows"], padded[0])
    assert torch.equal(tensors["mask"], padded[1])


def test_an_id_is_counted_once_however_many_inputs_take_it() -> None:
    description = copy.deepcopy(SMALL)
    again = {"input": "flat", "name": "again", "columns": ["item", "user"]}
    description["inputs"].append(again)
    description["layers"][3]["inputs"].append("again")
    tables = hb.make_tables(SCHEMA, dim=4, admit=hb.MinCount(2))
    network = Graph(SCHEMA, tables, description)
    batch = next(iter(dataset(64))).map_arrays(torch.as_tensor)
    users, counts = np.unique(columns(64)["user"], return_counts=True)
    network(batch)
    assert len(tables["user"]) == (counts >= 2).sum() < len(users)


def test_initializers_set_weights_and_biases() -> None:
    description = changed("layers", 0, to={**SMALL["layers"][0], "weight_init": "uniform"})
    description["layers"][0]["bias_init"] = "uniform"
    description["layers"][3]["weight_init"] = "zeros"
    network = built(description)
    first = network.layers["deep"][0]
    for values, bound in ((first.weight, 1 / 16), (first.bias, 1 / 8)):
        assert 0.5 * bound < values.abs().max() <= bound
    assert not network.layers["logit"].linear.weight.any()
    torch.manual_seed(0)
    spreads = {}
    for name in ("xavier_normal", "xavier_uniform"):
        wide = {**SMALL["layers"][0], "hidden": [400, 4], "weight_init": name}
        first = built(changed("layers", 0, to=wide)).layers["deep"][0]
        spreads[name] = first.weight.detach().std().item()
    for spread in spreads.values():
        assert spread == pytest.approx((2 / 408) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("name", "weight_spread", "bias_spread", "bias_bound"),
    [
        ("fan_in_uniform", (1 / 24) ** 0.5, (1 / 24) ** 0.5, (1 / 8) ** 0.5),
        ("fan_in_normal", (1 / 8) ** 0.5, (1 / 8) ** 0.5, 5 * (1 / 8) ** 0.5),
        # a normal distribution that is cut at twice its deviation has 0.88 of it
        ("fan_out_normal", 0.88 / 20, 0.88 / 20, 2 / 20),
    ],
)
def test_initializers_follow_inputs_or_outputs_of_the_weight(
    name: str, weight_spread: float, bias_spread: float, bias_bound: float
) -> None:
    torch.manual_seed(0)
    keys = {"hidden": [400, 4], "weight_init": name, "bias_init": name}
    first = built(changed("layers", 0, to={**SMALL["layers"][0], **keys})).layers["deep"][0]
    assert first.weight.shape == (400, 8)
    assert first.weight.detach().std().item() == pytest.approx(weight_spread, rel=0.1)
    assert first.bias.detach().std().item() == pytest.approx(bias_spread, rel=0.1)
    assert first.bias.detach().abs().max() <= bias_bound


def test_a_summary_lists_layers_and_draws_them(tmp_path: Path) -> None:
    trained = model(DCN)
    text = trained.summary(picture=tmp_path / "net.svg")
    assert "logit" in text
    assert "[n, 4, 4] [n, 4]" in text
    picture = (tmp_path / "net.svg").read_text()
    assert picture.startswith("<svg")
    for name in ("deep", "crosses", "mask [n, 4]", "clicked", "suffix linear"):
        assert name in picture
    ids = hb.Schema([hb.Label("clicked"), hb.Id("user")])
    plain = hb.RecModel(hb.models.LR(ids, hb.make_tables(ids, dim=1)), "bce")
    with pytest.raises(ConfigError, match=r"summary\.picture: only networks of hb\.models\.Graph"):
        plain.summary(picture=tmp_path / "lr.svg")


def test_a_report_shows_the_layers(tmp_path: Path) -> None:
    trained = model(DCN)
    history = trained.fit(dataset(), progress=False)
    page = tmp_path / "report.html"
    hb.report.write_report(page, {"train": history}, summary=trained.summary())
    assert trained.network.picture() in page.read_text()


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=2, max_size=14))
def test_boxes_and_lines_of_a_picture_keep_apart(sources: list[list[int]]) -> None:
    boxes = []
    for number, numbers in enumerate(sources):
        names = [str(one % number) for one in numbers] if number else []
        lines = [("name", "x" * (1 + 7 * number % 30)), *[("text", "y")] * (number % 3)]
        boxes.append(Box(str(number), "layer", lines, names))
    places = placed(boxes)
    assert sum(place.box is not None for place in places) == len(boxes)
    for one, other in itertools.combinations(places, 2):
        apart_x = abs(one.x - other.x) >= (one.width + other.width) / 2
        apart_y = one.y + one.height <= other.y or other.y + other.height <= one.y
        assert apart_x or apart_y
    tops = {place.box.name: place.y for place in places if place.box}
    bottoms = {place.box.name: place.y + place.height for place in places if place.box}
    for box in boxes:
        assert all(bottoms[source] < tops[box.name] for source in box.sources)


def test_a_job_takes_a_description_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(SMALL))
    spec: dict[str, Any] = {
        "schema": {"columns": SCHEMA.to_json()["columns"]},
        "train": {"kind": "csv", "path": "clicks.csv"},
        "model": {"kind": "graph", "description": str(file)},
        "tables": {"dim": 4},
    }
    of_file = hb.Job.from_json(spec).rec_model(SCHEMA)
    spec["model"]["description"] = SMALL
    of_keys = hb.Job.from_json(spec).rec_model(SCHEMA)
    assert of_file.network.to_json() == of_keys.network.to_json() == SMALL
    spec["model"]["description"] = changed("layers", 0, "hiden", to=[8])
    with pytest.raises(ConfigError, match=r"^job\.model\.description\.layers\[0\]\.hiden: unknown"):
        hb.Job.from_json(spec).rec_model(SCHEMA)
    file.write_text(json.dumps(spec["model"]["description"]))
    spec["model"]["description"] = str(file)
    with pytest.raises(ConfigError, match=r"graph\.json: layers\[0\]\.hiden: unknown"):
        hb.Job.from_json(spec).rec_model(SCHEMA)


def test_labels_are_a_tensor_or_a_dict_as_the_schema_has_them() -> None:
    two = hb.Schema([*SCHEMA.columns, hb.Label("bought")])
    batch = next(iter(dataset(8))).map_arrays(torch.as_tensor)
    assert built(SMALL)(batch).shape == (8,)
    assert {name: v.shape for name, v in built(SMALL, two)(batch).items()} == {"clicked": (8,)}
    both = changed("outputs", to={"clicked": "logit", "bought": "logit"})
    assert list(built(both, two)(batch)) == ["clicked", "bought"]


# --- any graph ------------------------------------------------------------------------------------

# of a tensor [n, width]: kind and parameters of layers that take it and give such a tensor
UNARY: list[dict[str, Any]] = [
    {"layer": "linear", "out_features": 3},
    {"layer": "mlp", "hidden": [2, 5], "activation": "tanh"},
    {"layer": "cross_net", "num_layers": 1},
    {"layer": "cross_net_v2", "num_layers": 2, "projection_dim": 2},
    {"layer": "relu"},
    {"layer": "elu", "alpha": 0.5},
    {"layer": "batch_norm"},
    {"layer": "layer_norm"},
    {"layer": "dropout", "rate": 0.25},
    {"layer": "weight_multiply", "dim": 2},
    {"layer": "scale", "axis": 0, "factor": 2},
    {"layer": "gather", "indices": [0, 0]},
    {"layer": "reduce_sum", "axis": 1, "keepdim": True},
]
SEVERAL: list[dict[str, Any]] = [{"layer": "concat"}, {"layer": "group_dense", "widths": [2, 3]}]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Any description: layers over random tensors before them, listed in any order."""
    inputs = [
        {"input": "flat", "name": "x", "columns": ["user", "item"]},
        {"input": "dense", "name": "numbers", "columns": ["vector", "price"]},
    ]
    tensors = ["x", "numbers"]
    unused = set(tensors)
    layers: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 6))):
        spec = copy.deepcopy(draw(st.sampled_from(UNARY + SEVERAL)))
        taken = [draw(st.sampled_from(tensors))]
        name = f"layer{number}"
        made = [name]
        if spec["layer"] == "concat":
            taken = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
        if spec["layer"] == "group_dense":
            made = [f"{name}.first", f"{name}.last"]
            spec["outputs"] = made
        spec = {"layer": spec.pop("layer"), "name": name, "inputs": taken, **spec}
        layers.append(dict(draw(st.permutations(list(spec.items())))))
        unused = unused - set(taken) | set(made)
        tensors += made
    layers.append({"layer": "logit_head", "name": "logit", "inputs": sorted(unused)})
    description = {
        "inputs": draw(st.permutations(inputs)),
        "layers": draw(st.permutations(layers)),
        "outputs": {"clicked": "logit"},
    }
    return dict(draw(st.permutations(list(description.items()))))


def weights(description: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    return {name: values.tolist() for name, values in dense_state(built(description)).items()}


@given(graphs())
def test_any_network_gives_back_its_description_and_its_weights(description: Any) -> None:
    network = built(description)
    assert json.dumps(network.to_json()) == json.dumps(description)
    assert weights(description) == weights(network.to_json())
    batch = next(iter(dataset(16))).map_arrays(torch.as_tensor)
    network.eval()
    tensors = network.inputs(batch)
    for node in description["layers"] * len(description["layers"]):  # until all have run
        if set(node["inputs"]) <= set(tensors):
            outputs = network.layers[node["name"]](*[tensors[name] for name in node["inputs"]])
            names = node.get("outputs", [node["name"]])
            tensors |= zip(names, outputs if "outputs" in node else [outputs], strict=True)
    assert torch.equal(network(batch), tensors["logit"])
    for name, values in tensors.items():
        sizes = ", ".join(["n", *map(str, values.shape[1:])])
        assert network.shapes[name] == f"[{sizes}]"


@given(graphs(), st.data())
def test_a_mistake_in_any_network_names_its_place(description: Any, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(description["layers"]) - 1))
    layer = description["layers"][number]
    place = f"description.layers[{number}]"
    mistake = data.draw(st.sampled_from(["input", "key", "kind", "name", "cycle", "gone", "dead"]))
    if mistake == "input":
        entry = data.draw(st.integers(0, len(layer["inputs"]) - 1))
        layer["inputs"][entry] = "nothing"
        place += f".inputs[{entry}]"
    elif mistake == "key":
        layer["strange"] = 1
        place += ".strange"
    elif mistake == "kind":
        layer["layer"] += "x"
        place += ".layer"
    elif mistake == "name":
        layer["name"] = "x"
        place += ".name"
    elif mistake == "cycle":
        layer["inputs"][0] = layer.get("outputs", [layer["name"]])[0]
        place = "needs its own output"
    elif mistake == "gone":
        key = data.draw(st.sampled_from(["layer", "name", "inputs"]))
        del layer[key]
        place += f".{key}"
    else:
        description["layers"].append({"layer": "relu", "name": "dead", "inputs": ["x"]})
        place = f"description.layers[{len(description['layers']) - 1}]"
    with pytest.raises(ConfigError) as error:
        built(description)
    assert place in str(error.value)


# --- the layers -----------------------------------------------------------------------------------

# kind: shapes of inputs, parameters, shapes of outputs; the samples are left out
BUILDS: dict[str, tuple[list[Any], dict[str, Any], list[Any]]] = {
    "linear": ([(8,)], {"out_features": 3}, [(3,)]),
    "logit_head": ([(8,), (2,)], {}, [()]),
    "mlp": ([(8,)], {"hidden": [4, 3]}, [(3,)]),
    "group_dense": ([(8,)], {"widths": [4, 3]}, [(4,), (3,)]),
    "batch_norm": ([(8,)], {}, [(8,)]),
    "layer_norm": ([(5, 8)], {"eps": 1e-3}, [(5, 8)]),
    "dropout": ([(8,)], {"rate": 0.5}, [(8,)]),
    "relu": ([(8,)], {}, [(8,)]),
    "prelu": ([(8,)], {"init": 0.1}, [(8,)]),
    "elu": ([(8,)], {"alpha": 2}, [(8,)]),
    "gelu": ([(8,)], {}, [(8,)]),
    "silu": ([(8,)], {}, [(8,)]),
    "tanh": ([(8,)], {}, [(8,)]),
    "sigmoid": ([(8,)], {}, [(8,)]),
    "leaky_relu": ([(8,)], {"negative_slope": 0.1}, [(8,)]),
    "dice": ([(5, 8)], {"learned": False}, [(5, 8)]),
    "softmax": ([(5, 8), (5, 8)], {"factor": 0.5}, [(5, 8)]),
    "cross_net": ([(8,)], {"num_layers": 2}, [(8,)]),
    "cross_net_v2": ([(8,)], {"num_layers": 2, "projection_dim": 3}, [(8,)]),
    "cross_net_mix": ([(8,)], {"num_layers": 2, "rank": 3}, [(8,)]),
    "dot_interaction": ([(4,), (3, 4)], {"with_dense": True, "padding": True}, [(11,)]),
    "fm_interaction": ([(3, 4)], {}, [()]),
    "fm_order2": ([(12,)], {"dim": 4}, [(4,)]),
    "quadratic_net": ([(8,)], {"num_layers": 2, "num_rows": 3}, [(8,)]),
    "interacting_layer": ([(3, 4)], {"width": 6, "num_heads": 2}, [(3, 6)]),
    "field_norm": ([(3, 4)], {}, [(3, 4)]),
    "mask_block": ([(8,), (6,)], {"out_features": 3}, [(3,)]),
    "feature_gate": ([(8,), (2,)], {"hidden": [4]}, [(8,)]),
    "bilinear_product": ([(8,), (4,)], {"num_heads": 2}, [()]),
    "token_mixing": ([(2, 8)], {}, [(2, 8)]),
    "token_feed_forward": ([(2, 8)], {"hidden": 16}, [(2, 8)]),
    "add": ([(8,), (8,)], {}, [(8,)]),
    "sub": ([(8,), (8,)], {}, [(8,)]),
    "elementwise_multiply": ([(8,), (8,)], {}, [(8,)]),
    "weight_multiply": ([(8,)], {"dim": 3}, [(24,)]),
    "matrix_multiply": ([(2, 8), (8, 3)], {}, [(2, 3)]),
    "scale": ([(8,)], {"axis": 0, "factor": 2}, [(16,)]),
    "reduce_sum": ([(3, 8)], {"axis": 2}, [(3,)]),
    "reduce_mean": ([(3, 8)], {"keepdim": True}, [(1, 8)]),
    "cast": ([(8,)], {"dtype": "float16"}, [(8,)]),
    "slice": ([(8,)], {"ranges": [[0, 3], [2, 8]]}, [(3,), (6,)]),
    "concat": ([(3, 8), (3, 2)], {"axis": 2}, [(3, 10)]),
    "reshape": ([(12,)], {"leading_dim": 4, "time_steps": 3}, [(3, 4)]),
    "gather": ([(8,)], {"indices": [7, 0]}, [(2,)]),
    "fused_reshape_concat": ([(5, 8), (5, 2)], {}, [(4, 10), (10,)]),
    "fused_reshape_concat_general": ([(5, 8), (5, 2)], {}, [(5, 10)]),
    "sequence_mask": ([(1,), (1,)], {"length_from": 2, "length_to": 5}, [(1, 2, 5)]),
    "attention_pooling": ([(8,), (5, 8), (5,)], {"hidden": [4]}, [(8,)]),
    "multi_head_attention": ([(5, 8)] * 3, {"num_heads": 2, "width": 8}, [(5, 8)]),
    "attention_scores": ([(5, 8), (3, 8)], {"num_heads": 2}, [(2, 5, 3)]),
    "attention_sum": ([(2, 5, 3), (3, 8)], {}, [(5, 8)]),
    "transformer_layer": ([(5, 8), (5,)], {"num_heads": 4}, [(5, 8)]),
    "gru": ([(5, 8)], {"hidden_size": 3}, [(5, 3), (3,)]),
    "augru": ([(5, 8), (5,)], {"hidden_size": 3}, [(5, 3), (3,)]),
    "expert_mixture": ([(3,), (3, 8)], {}, [(8,)]),
    "information_transfer": ([(8,), (8,)], {}, [(8,)]),
    "joint_logit": ([(), ()], {}, [()]),
}
FLATTENED = {"fused_reshape_concat": 4, "fused_reshape_concat_general": 5}  # rows of a sample
# layers that read a batch or packed rows, are part of an input, or of mlp
WITHOUT_A_NAME = {
    "DecayedMean",
    "DotAttentionPooling",
    "FeatureInputs",
    "History",
    "HistoryInputs",
    "LinearTerm",
    "PadSequence",
    "PositionTerm",
    "ReLUDropout",
    "xavier_",
}


@pytest.mark.parametrize("kind", BUILDS)
def test_a_layer_is_built_from_its_keys_and_the_shapes_of_its_inputs(kind: str) -> None:
    inputs, parameters, outputs = BUILDS[kind]
    names = [f"x{number}" for number in range(len(inputs))]
    shapes = {name: (NUM_ROWS, *shape) for name, shape in zip(names, inputs, strict=True)}
    results = tuple(f"y{number}" for number in range(len(outputs)))
    node = Node(kind, "layer", tuple(names), results, parameters, KeyPlace("layer"))
    expected = [(NUM_ROWS, *shape) for shape in outputs]
    if kind in FLATTENED:
        expected[0] = (FLATTENED[kind] * NUM_ROWS, *outputs[0][1:])
    assert list(inferred(node, shapes).values()) == expected


def test_gru_is_that_of_torch_with_its_last_state_as_a_row() -> None:
    ours = layers.GRU(3, 5)
    theirs = torch.nn.GRU(3, 5, batch_first=True)
    theirs.load_state_dict(ours.gru.state_dict())
    x = torch.randn(4, 6, 3)
    states, last = theirs(x)
    for mine, expected in zip(ours(x), (states, last[0]), strict=True):
        assert torch.equal(mine, expected)


def test_every_layer_has_a_name() -> None:
    assert sorted(LAYERS) == sorted(BUILDS)
    named = {kind.layer.__name__ for kind in LAYERS.values()}
    assert set(layers.__all__) - named == WITHOUT_A_NAME
