# SPDX-License-Identifier: Apache-2.0
"""Whole graphs of HugeCTR: embeddings, losses, optimizers, names."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import (
    DataReaderSparseParam,
    DenseLayer,
    EmbeddingCollectionConfig,
    EmbeddingTableConfig,
    Graph,
    GroupDenseLayer,
    Input,
    Layer_t,
    Optimizer_t,
    OptParams,
    SparseEmbedding,
    Update_t,
)
from hotbed.compat.hugectr.json.graph import write_graph
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.reader import Columns
from hotbed.compat.hugectr.translate import Translation, named_columns, translate
from hotbed.errors import ConfigError

TYPE = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
ADAM = OptParams()


def embedding(name: str, bottom: str, dim: int, **arguments: Any) -> SparseEmbedding:
    values = {"combiner": "sum", **arguments}
    return SparseEmbedding(
        TYPE, embedding_vec_size=dim, sparse_embedding_name=name, bottom_name=bottom, **values
    )


def layer(kind: Layer_t, bottoms: Any, tops: Any, **arguments: Any) -> DenseLayer:
    return DenseLayer(kind, bottoms, tops, **arguments)


def one_fc(bottom: str, num_output: int = 1) -> list[DenseLayer]:
    return [layer(Layer_t.InnerProduct, bottom, "logit", num_output=num_output)]


BCE = layer(Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], "loss")


def built(translation: Translation) -> hb.models.Graph:
    return hb.models.Graph(translation.schema, translation.tables, translation.description)


def first_batch(translation: Translation, columns: dict[str, Any]) -> hb.Batch:
    table = pa.table(columns)
    source = hb.sources.Memory(table)
    return next(iter(hb.Dataset(source, translation.schema, batch_size=len(table))))


def rows_of(table: hb.Table, ids: list[int]) -> Any:
    return table.gather(table.find_or_insert(np.array(ids)))


# --- embeddings -----------------------------------------------------------------------------------


def two_slots(combiner: str = "sum") -> Graph:
    data = Input(1, "label", 0, "dense", [DataReaderSparseParam("data1", 3, False, 2)])
    layers = [layer(Layer_t.Reshape, "emb", "flat", leading_dim=8), *one_fc("flat"), BCE]
    return Graph(data, [embedding("emb", "data1", 4, combiner=combiner)], layers)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_slots_share_the_keys_of_one_table(combiner: str) -> None:
    translation = translate(two_slots(combiner), ADAM)
    assert list(translation.tables) == ["emb"]
    assert [column.name for column in translation.schema.ids] == ["data1_0", "data1_1"]
    table = translation.tables["emb"]
    ids = {"data1_0": [[5, 9]], "data1_1": [[9]]}
    batch = first_batch(translation, {"label": [1.0], **ids})
    network = built(translation)
    with hb.models.recorded(network, ["emb"]) as tensors:
        network(batch)
    rows = rows_of(table, [5, 9])
    pooled = rows.sum(0) / {"sum": 1, "mean": 2}[combiner]
    assert tensors.values["emb"].shape == (1, 2, 4)
    assert np.allclose(tensors.values["emb"][0], [pooled, rows[1]])


def test_offsets_of_the_reader_shift_the_keys_of_each_slot() -> None:
    columns = Columns(("y",), (), ("C1", "C2"), (0, 100))
    translation = translate(two_slots(), ADAM, columns)
    batch = first_batch(translation, {"y": [1.0], "C1": [5], "C2": [5]})
    assert [batch.ids[name].values.tolist() for name in ("data1_0", "data1_1")] == [[5], [105]]
    assert translation.embeddings[0].offsets == (0, 100)
    assert translation.embeddings[0].slots == ("data1_0", "data1_1")


def test_a_hybrid_embedding_adds_its_own_offsets_once() -> None:
    """HugeCTR's RawAsync reader adds none; where the reader adds them, they are not added twice."""
    graph = two_slots()
    (plain,) = graph.embeddings
    hybrid = dataclasses.replace(
        plain, embedding_type=hugectr.Embedding_t.HybridSparseEmbedding, slot_size_array=(100, 7)
    )
    graph = dataclasses.replace(graph, embeddings=(hybrid,))
    for offsets in ((0, 0), (0, 100)):
        translation = translate(graph, ADAM, Columns(("y",), (), ("C1", "C2"), offsets))
        assert translation.embeddings[0].offsets == (0, 100)
        batch = first_batch(translation, {"y": [1.0], "C1": [5], "C2": [5]})
        assert [batch.ids[name].values.tolist() for name in ("data1_0", "data1_1")] == [[5], [105]]


def test_slots_and_their_embedding_are_placed_alike() -> None:
    """A reader of v3.0 sorts keys by placement, which its embedding has to know."""
    graph = two_slots()
    placed = {}
    for kind in hugectr.DataReaderSparse_t:
        param = dataclasses.replace(DataReaderSparseParam(kind, 3, 3, 2), top_name="data1")
        data = Input(1, "label", 0, "dense", [param])
        placed[kind.name] = Graph(data, graph.embeddings, graph.layers)
    assert list(translate(placed["Distributed"], ADAM).tables) == ["emb"]
    wrong = r"'data1' is read as LocalizedSlot, got DistributedSlotSparseEmbeddingHash"
    with pytest.raises(ConfigError, match=wrong):
        translate(placed["Localized"], ADAM)


def test_two_tables_look_up_the_same_slots() -> None:
    graph = two_slots()
    wide = embedding("wide", "data1", 1)
    layers = [
        layer(Layer_t.Reshape, "emb", "flat", leading_dim=8),
        layer(Layer_t.Reshape, "wide", "flat2", leading_dim=2),
        layer(Layer_t.Concat, ["flat", "flat2"], "both"),
        *one_fc("both"),
        BCE,
    ]
    graph = Graph(graph.input, [*graph.embeddings, wide], layers)
    translation = translate(graph, ADAM)
    batch = first_batch(translation, {"label": [1.0], "data1_0": [5], "data1_1": [6]})
    assert built(translation)(batch).shape == (1,)
    assert translation.embeddings[1].slots == ("data1_0_of_wide", "data1_1_of_wide")


def collection(combiners: list[str], *, lists: bool) -> Graph:
    params = [DataReaderSparseParam(f"data{i}", 3, False, 1) for i in range(2)]
    tables = [EmbeddingTableConfig(f"t{i}", 1000, 4) for i in range(2)]
    config = EmbeddingCollectionConfig()
    if lists:
        config.embedding_lookup(tables, ["data0", "data1"], "emb", combiners)
        layers = []
    else:
        for i, combiner in enumerate(combiners):
            config.embedding_lookup(tables[i], f"data{i}", f"e{i}", combiner)
        layers = [layer(Layer_t.Concat, ["e0", "e1"], "emb", axis=2)]
    config.shard([["t0", "t1"]], [("mp", ["t0", "t1"])])
    layers = [*layers, layer(Layer_t.Reshape, "emb", "flat"), *one_fc("flat"), BCE]
    return Graph(Input(1, "label", 0, "dense", params), [config], layers)


@pytest.mark.parametrize("lists", [False, True])
def test_an_embedding_collection_looks_up_each_table_by_its_combiner(lists: bool) -> None:
    translation = translate(collection(["mean", "concat"], lists=lists), ADAM)
    ids = {"data0": [[5, 9]], "data1": [[7, 8]]}
    batch = first_batch(translation, {"label": [1.0], **ids})
    network = built(translation)
    with hb.models.recorded(network, ["emb"]) as tensors:
        network(batch)
    mean = rows_of(translation.tables["t0"], [5, 9]).mean(0)
    rows = rows_of(translation.tables["t1"], [7, 8]).ravel()
    expected = np.concatenate([mean, rows, np.zeros(4)])  # a hotness of 3, two ids
    shape = (1, 16) if lists else (1, 1, 16)
    assert tensors.values["emb"].shape == shape
    assert np.allclose(tensors.values["emb"].ravel(), expected)
    assert [one.table for one in translation.embeddings] == ["t0", "t1"]


def test_tables_of_earlier_releases_are_named_by_their_number() -> None:
    for arguments in ({"table_id": 3}, {"id_space": 3, "min_key": 0, "max_key": 9}):
        table = EmbeddingTableConfig(**arguments, max_vocabulary_size=9, ev_size=4)
        assert table == EmbeddingTableConfig("table3", 9, 4)
    old = EmbeddingTableConfig(3, 9, 4, None, hugectr.Initializer_t.Uniform, 0.5)
    assert old.init_param_or_empty.up_bound == 0.5
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(old, "data0", "e0", "sum")
    collection = planner.create_embedding_collection(shard_matrix=[["table3"]])
    assert [lookup.table.name for lookup in collection.lookups] == ["table3"]


def test_rows_of_a_collection_start_as_their_initializer_says() -> None:
    kinds = hugectr.Initializer_t
    for kind, bound, scale in (
        (kinds.Default, 0.25, 0.5),
        (kinds.Default, -1, 0.5),
        (kinds.Uniform, 0.25, 0.25),
    ):
        assert collected(EmbeddingTableConfig(0, 4, 8, None, kind, bound)).init == hb.Uniform(scale)
    for kind, bound in ((kinds.Uniform, -1), (kinds.Sinusoidal, -1), (kinds.Zero, 1.0)):
        with pytest.raises(ConfigError, match=f"initializer_type: rows of 'table0'.*{kind.name}"):
            collected(EmbeddingTableConfig(0, 4, 8, None, kind, bound))


def collected(config: EmbeddingTableConfig) -> hb.Table:
    """Return the table of a collection."""
    collection = hugectr.EmbeddingCollectionConfig()
    collection.embedding_lookup(config, "data0", "e0", "sum")
    data = Input(1, "label", 3, "dense", [DataReaderSparseParam("data0", 1, True, 1)])
    graph = Graph(data, (collection,), [*one_fc("dense"), BCE])
    return translate(graph, ADAM).tables[config.name]


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update_type", "scope"),
    [(Update_t.Local, "touched"), (Update_t.Global, "all"), (Update_t.LazyGlobal, "catch_up")],
)
def test_update_types_are_scopes_of_the_tables(update_type: Update_t, scope: str) -> None:
    translation = translate(two_slots(), OptParams(update_type=update_type), lr=0.5)
    expected = hb.Adam(0.5, eps=1e-7, eps_hat=True, scope=scope)
    assert translation.tables["emb"].rule == expected
    assert translation.rule == hb.Adam(0.5, eps=1e-7, eps_hat=True)


def test_an_embedding_has_an_optimizer_of_its_own() -> None:
    own = OptParams(Optimizer_t.MomentumSGD, Update_t.Global, momentum_factor=0.5)
    graph = two_slots()
    tables = [embedding("emb", "data1", 4, optimizer=own)]
    translation = translate(Graph(graph.input, tables, graph.layers), ADAM, lr=0.1)
    assert translation.tables["emb"].rule == hb.Momentum(0.1, 0.5, lr_inside=True, scope="all")
    assert isinstance(translation.rule, hb.Adam)


@pytest.mark.parametrize("kind", Optimizer_t)
def test_every_optimizer_trains(kind: Optimizer_t) -> None:
    translation = translate(two_slots(), OptParams(kind, Update_t.Local), lr=0.01)
    model = hb.RecModel(built(translation), translation.loss, translation.rule)
    table = {"label": [1.0, 0.0], "data1_0": [5, 6], "data1_1": [7, 7]}
    data = hb.Dataset(hb.sources.Memory(pa.table(table)), translation.schema, batch_size=2)
    before = float(model.step(next(iter(data))))
    for batch in data:
        after = float(model.step(batch))
    assert after < before


# --- losses ---------------------------------------------------------------------------------------


def losses(
    layers: list[DenseLayer], dims: list[int], names: list[str], **arguments: Any
) -> Translation:
    data = Input(dims, names, 3, "dense", [])
    return translate(Graph(data, (), layers), ADAM, **arguments)


def loss_of(translation: Translation, labels: dict[str, list[float]]) -> tuple[Any, Any]:
    """Return the loss of two samples, and the last tensor of HugeCTR's graph."""
    torch.manual_seed(0)
    network = built(translation).eval()
    dense = pa.array([[1.0, 2.0, -3.0], [0.5, -2.0, 1.0]], pa.list_(pa.float32()))
    batch = first_batch(translation, {**labels, "dense": dense})
    with hb.models.recorded(network, ["logit"]) as tensors, torch.no_grad():
        outputs = network(batch)
    targets = {name: torch.tensor(values) for name, values in labels.items()}
    if isinstance(outputs, torch.Tensor):
        loss = translation.loss(outputs, *targets.values())
    else:
        loss = translation.loss(outputs, targets)
    return float(loss), torch.tensor(tensors.values["logit"])


@pytest.mark.parametrize(("dim", "name"), [(1, "label"), (2, "label_0")])
def test_cross_entropy_of_two_logits(dim: int, name: str) -> None:
    end = layer(Layer_t.CrossEntropyLoss, ["logit", "label"], "loss")
    translation = losses([*one_fc("dense", 2), end], [dim], ["label"])
    loss, logit = loss_of(translation, {name: [1.0, 0.0]})
    expected = torch.nn.functional.cross_entropy(logit, torch.tensor([1, 0]))
    assert loss == pytest.approx(float(expected))


def test_multi_cross_entropy_leaves_out_missing_labels() -> None:
    end = layer(
        Layer_t.MultiCrossEntropyLoss, ["logit", "label"], "loss", target_weight_vec=[0.5, 2.0]
    )
    translation = losses([*one_fc("dense", 2), end], [2], ["label"])
    labels = {"label_0": [1.0, -1.0], "label_1": [0.0, 1.0]}
    loss, logit = loss_of(translation, labels)
    x, total = logit.numpy(), 0.0
    for row, column, label, weight in ((0, 0, 1, 0.5), (0, 1, 0, 2), (1, 1, 1, 2)):
        share = 1 / (1 + np.exp(-x[row, column]))
        total -= weight * np.log(share if label else 1 - share)
    assert loss == pytest.approx(total / 4)  # labels that are missing count as terms of 0


def test_several_losses_are_weighed() -> None:
    layers = [
        *one_fc("dense", 2),
        layer(Layer_t.Slice, "logit", ["one", "two"], ranges=[(0, 1), (1, 2)]),
        layer(Layer_t.BinaryCrossEntropyLoss, ["one", "a"], "loss_a"),
        layer(Layer_t.BinaryCrossEntropyLoss, ["two", "b"], "loss_b"),
    ]
    translation = losses(layers, [1, 1], ["a", "b"], loss_weights={"a": 0.25, "b": 3.0})
    loss, logit = loss_of(translation, {"a": [1.0, 0.0], "b": [1.0, 1.0]})
    parts = torch.nn.functional.binary_cross_entropy_with_logits
    expected = 0.25 * parts(logit[:, 0], torch.tensor([1.0, 0.0]))
    expected += 3 * parts(logit[:, 1], torch.tensor([1.0, 1.0]))
    assert loss == pytest.approx(float(expected))


def test_slices_of_a_label_are_labels() -> None:
    layers = [
        layer(Layer_t.Slice, "label", ["a", "b"], ranges=[(0, 1), (1, 2)]),
        *one_fc("dense"),
        layer(Layer_t.BinaryCrossEntropyLoss, ["logit", "b"], "loss"),
    ]
    translation = losses(layers, [2], ["label"])
    assert translation.description["outputs"] == {"label_1": "logit"}
    assert [label.name for label in translation.schema.labels] == ["label_1"]


def test_the_mean_of_several_rows_of_a_sample_is_its_logit() -> None:
    layers = [layer(Layer_t.Reshape, "dense", "rows", leading_dim=1), *one_fc("rows"), BCE]
    translation = losses(layers, [1], ["label"])
    loss, logit = loss_of(translation, {"label": [1.0, 0.0]})
    assert logit.shape == (6, 1)
    means = logit.reshape(2, 3).mean(1)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(means, torch.tensor([1.0, 0]))
    assert loss == pytest.approx(float(expected))


def test_a_regularizer_is_a_penalty_of_the_rule() -> None:
    keys = {"use_regularizer": True, "regularizer_type": hugectr.Regularizer_t.L2, "lambda": 0.5}
    end = layer(Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], "loss", **keys)
    translation = losses([*one_fc("dense"), end], [1], ["label"], batchsize=100)
    assert (translation.rule.l1, translation.rule.l2) == (0.0, 0.005)


def test_a_regularizer_of_ftrl_is_added_to_the_gradient() -> None:
    """HugeCTR adds it to the gradient of any optimizer; lambda1 and lambda2 are proximal."""
    optimizer = OptParams(Optimizer_t.Ftrl, beta=1.0, lambda1=0.5, lambda2=0.25)
    keys = {"use_regularizer": True, "lambda": 0.5}
    kinds = {hugectr.Regularizer_t.L1: (0.005, 0.0), hugectr.Regularizer_t.L2: (0.0, 0.005)}
    for kind, penalties in kinds.items():
        ends = {"regularizer_type": kind, **keys}
        end = layer(Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], "loss", **ends)
        graph = Graph(Input([1], ["label"], 3, "dense", []), (), [*one_fc("dense"), end])
        rule = translate(graph, optimizer, batchsize=100).rule
        assert (rule.l1, rule.l2) == (0.5, 0.25)
        assert rule.penalties == penalties


def test_a_graph_for_inference_gives_logits() -> None:
    layers = [*one_fc("dense"), layer(Layer_t.Sigmoid, "logit", "score")]
    translation = losses(layers, [1], ["label"])
    assert translation.description["outputs"] == {"label": "logit"}
    assert translation.tensors["score"] == "logit"


# --- names and mistakes ---------------------------------------------------------------------------


def test_names_that_torch_or_descriptions_refuse_are_mapped() -> None:
    layers = [
        layer(Layer_t.InnerProduct, "dense", "type", num_output=2),
        layer(Layer_t.InnerProduct, "type", "fc 1.a", num_output=1),
        layer(Layer_t.BinaryCrossEntropyLoss, ["fc 1.a", "label"], "loss"),
    ]
    translation = losses(layers, [1], ["label"])
    assert [weight.layer for weight in translation.dense_weights[::2]] == ["type", "fc 1.a"]
    assert built(translation).tensors["fc 1.a"] == "layers.fc_1_a"


MISTAKES = {
    "unknown bottom": (
        [layer(Layer_t.ReLU, "dens", "relu1"), *one_fc("dense"), BCE],
        "relu1.bottom_names: no layer above makes it, got 'dens'. Did you mean 'dense'?",
    ),
    "a top twice": (
        [layer(Layer_t.ReLU, "dense", "x"), layer(Layer_t.ReLU, "dense", "x"), BCE],
        "x: two layers make a tensor of this name, got relu as the second.",
    ),
    "names that become one": (
        [layer(Layer_t.ReLU, "dense", "a b"), layer(Layer_t.ReLU, "a b", "a_b"), BCE],
        "a_b: the same layer as 'a b' once other characters",
    ),
    "a loss without a label": (
        [*one_fc("dense"), layer(Layer_t.BinaryCrossEntropyLoss, ["logit", "lable"], "loss")],
        "loss.bottom_names: the second is not a label, got 'lable'. Did you mean 'label'?",
    ),
    "two losses of one label": ([*one_fc("dense"), BCE, BCE], "label 'label': two losses take it"),
    "shapes that do not fit": (
        [layer(Layer_t.Reshape, "dense", "rows", leading_dim=2), *one_fc("rows"), BCE],
        "rows.inputs: reshape does not take these shapes, got dense [n, 3].",
    ),
    "several logits for a label": (
        [*one_fc("dense", 2), BCE],
        "label: a loss takes one number for each sample, got 'logit' [n, 2].",
    ),
    "weights of other labels": (
        [
            *one_fc("dense"),
            layer(
                Layer_t.MultiCrossEntropyLoss, ["logit", "label"], "loss", target_weight_vec=[1, 1]
            ),
        ],
        "loss.target_weight_vec: expected one for each of 1 labels",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_layers_name_the_place(name: str) -> None:
    layers, message = MISTAKES[name]
    with pytest.raises(ConfigError) as error:
        losses(layers, [1], ["label"])
    assert message in str(error.value)


def test_mistakes_of_embeddings_name_the_place() -> None:
    graph = two_slots()
    twice = Graph(graph.input, [*graph.embeddings] * 2, graph.layers)
    with pytest.raises(ConfigError, match="two tables have this name, got 'emb'"):
        translate(twice, ADAM)
    other = Graph(graph.input, [embedding("emb", "data", 4)], graph.layers)
    with pytest.raises(ConfigError, match=r"no such sparse slots, got 'data'.*'data1'"):
        translate(other, ADAM)
    short = Columns(("label",), (hb.Dense("d", width=2),), (), ())
    with pytest.raises(ConfigError, match="the reader has 2 dense values, got 3"):
        translate(
            Graph(Input(1, "label", 3, "dense", []), (), [*one_fc("dense"), BCE]), ADAM, short
        )


def test_columns_are_named_as_tensors_without_a_reader() -> None:
    data = Input([1, 2], ["a", "b"], 3, "dense", [DataReaderSparseParam("s", 1, True, 2)])
    columns = named_columns(data)
    assert columns.labels == ("a", "b_0", "b_1")
    assert columns.dense == (hb.Dense("dense", width=3),)
    assert columns.slots == ("s_0", "s_1")


def test_layers_that_no_loss_needs_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    layers = [layer(Layer_t.InnerProduct, "dense", "unused"), *one_fc("dense"), BCE]
    translation = losses(layers, [1], ["label"])
    assert len(translation.description["layers"]) == 1
    assert "unused is left out" in caplog.text
    assert {weight.layer for weight in translation.dense_weights} == {"logit"}


# --- JSON -----------------------------------------------------------------------------------------

OWN = OptParams(Optimizer_t.Ftrl, Update_t.Local, beta=1.0, lambda1=0.5)
GRAPHS = {
    "two slots": two_slots("mean"),
    "own optimizer": Graph(
        two_slots().input,
        [embedding("emb", "data1", 4, optimizer=OWN, slot_size_array=[10, 20])],
        two_slots().layers,
        model_name="small",
    ),
    "collection": collection(["average", "concat"], lists=False),
    "collection of lists": collection(["sum", "concat"], lists=True),
    "labels": Graph(
        Input(
            [1, 2],
            ["a", "b"],
            [0.5, 2.0],
            3,
            "dense",
            [DataReaderSparseParam("s", [1, 2], True, 2)],
        ),
        (),
        [
            *one_fc("dense", 1),
            layer(
                Layer_t.BinaryCrossEntropyLoss,
                ["logit", "a"],
                "loss",
                use_regularizer=True,
                lambda_=0.25,
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_survives_its_json(name: str) -> None:
    written = write_graph(GRAPHS[name], ADAM)
    graph = read_graph(json.loads(json.dumps(written)))
    assert write_graph(graph, ADAM) == written
    ours, theirs = translate(graph, ADAM), translate(GRAPHS[name], ADAM)
    assert ours.description == theirs.description
    assert (ours.schema, ours.loss, ours.rule) == (theirs.schema, theirs.loss, theirs.rule)
    configs = [{key: table.config for key, table in one.tables.items()} for one in (ours, theirs)]
    assert configs[0] == configs[1]


def test_a_group_of_layers_is_written_one_by_one() -> None:
    group = GroupDenseLayer(
        hugectr.GroupLayer_t.GroupFusedInnerProduct,
        ["dense"],
        ["fc1", "fc2", "logit"],
        [4, 3, 1],
        hugectr.Activation_t.Non,
    )
    graph = Graph(Input(1, "label", 3, "dense", []), (), [group, BCE])
    read = read_graph(write_graph(graph, ADAM))
    ours, theirs = translate(read, ADAM), translate(graph, ADAM)
    assert [one.layer for one in ours.dense_weights] == [one.layer for one in theirs.dense_weights]
    assert [one.shape for one in ours.dense_weights] == [one.shape for one in theirs.dense_weights]
    torch.manual_seed(0)
    networks = [built(ours), built(theirs)]
    weights = networks[0].state_dict()
    state = networks[1].state_dict()
    for one, other in zip(ours.dense_weights, theirs.dense_weights, strict=True):
        state[other.path].copy_(weights[one.path])
    dense = pa.array([[1.0, 2.0, -3.0]], pa.list_(pa.float32()))
    batch = first_batch(ours, {"label": [1.0], "dense": dense})
    assert torch.allclose(networks[0](batch), networks[1](batch))
