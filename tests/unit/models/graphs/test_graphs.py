# SPDX-License-Identifier: Apache-2.0
"""The graphs of examples/graphs find planted signals, keep their JSON and are served exactly."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schedule import in_soak

pytest.importorskip("torch", reason="torch absent")

import planted
import torch

import hotbed as hb

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FILES = Path(__file__).resolve().parents[4] / "examples" / "graphs"
MARK = 0.95
# samples and epochs
SIZES = {
    "bst": (50_000, 1),
    "dcn": (80_000, 2),
    "deepfm": (100_000, 3),
    "din": (60_000, 2),
    "dlrm": (80_000, 3),
    "mmoe": (80_000, 2),
    "ncf": (100_000, 3),
    "wide_deep": (120_000, 4),
}
GRAPHS = sorted(SIZES)
HISTORIES = ("bst", "din")
QUICK = {"din", "mmoe"}
"""Graphs that are trained in every run of the suite; `make soak` has the others."""
# The layers without which a graph cannot find its signal, and what stands in their place.
CUTS: Mapping[str, list[dict[str, Any]]] = {
    # positions
    "bst": [{"layer": "reduce_mean", "name": "sequence", "inputs": ["feed_forward_norm"]}],
    # all products
    "dcn": [{"layer": "linear", "name": "logit", "inputs": ["features"], "out_features": 1}],
    # products of all pairs
    "deepfm": [{"layer": "add", "name": "logit", "inputs": ["deep_logit", "linear_logit"]}],
    # attention
    "din": [{"layer": "concat", "name": "features", "inputs": ["user", "mean_item", "target"]}],
    # inner products
    "dlrm": [
        {"layer": "reshape", "name": "flat", "inputs": ["embeddings"]},
        {"layer": "concat", "name": "products", "inputs": ["bottom", "flat"]},
    ],
    # experts
    "mmoe": [
        {"layer": "linear", "name": "clicked_tower", "inputs": ["embeddings"], "out_features": 1},
        {"layer": "linear", "name": "bought_tower", "inputs": ["embeddings"], "out_features": 1},
    ],
    # the product of user and item
    "ncf": [{"layer": "linear", "name": "logit", "inputs": ["mlp3_dropout"], "out_features": 1}],
    # memorized pairs
    "wide_deep": [
        {"layer": "linear", "name": "logit", "inputs": ["deep2_dropout"], "out_features": 1}
    ],
}


def description(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text())
    return value


def model_of(samples: planted.Planted, graph: Any, seed: int = 0) -> hb.RecModel:
    torch.manual_seed(seed)
    tables = hb.make_tables(samples.schema, dim=8, rule=hb.Adam(lr=0.01), seed=seed)
    network = hb.models.Graph(samples.schema, tables, graph)
    loss: Any = "bce"
    if len(samples.chances) > 1:
        loss = hb.losses.MultiTask({label: hb.losses.BCE() for label in samples.chances})
    return hb.RecModel(network, loss, hb.Adam(lr=0.01))


def train(samples: planted.Planted, graph: Any, epochs: int, seed: int = 0) -> hb.RecModel:
    model = model_of(samples, graph, seed)
    data = hb.Dataset(
        samples.trained,
        samples.schema,
        batch_size=512,
        shuffle=samples.num_samples,
        seed=seed,
        cache=True,
    )
    torch.manual_seed(seed)
    model.fit(data, epochs=epochs, progress=False)
    return model


def scores(model: hb.RecModel, samples: planted.Planted) -> dict[str, np.ndarray]:
    """Return the scores of the held-out samples by label."""
    found = model.predict(hb.Dataset(samples.held_out, samples.schema, batch_size=4096))
    return found if isinstance(found, dict) else dict.fromkeys(samples.chances, found)


def shares(model: hb.RecModel, samples: planted.Planted) -> dict[str, float]:
    found = scores(model, samples)
    return {label: samples.share(label, found[label]) for label in samples.chances}


@functools.cache
def samples_of(name: str, seed: int = 0) -> planted.Planted:
    num_samples, _ = SIZES[name]
    return planted.GENERATORS[name](num_samples, seed)


@functools.cache
def trained(name: str) -> hb.RecModel:
    _, epochs = SIZES[name]
    return train(samples_of(name), description(name), epochs)


def changed(name: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a graph with other layers under their names, without those that nothing takes then."""
    graph = description(name)
    others = {layer["name"]: layer for layer in layers}
    graph["layers"] = [others.pop(layer["name"], layer) for layer in graph["layers"]]
    graph["layers"] += others.values()
    while unused := _unused(graph):
        for part in ("inputs", "layers"):
            graph[part] = [node for node in graph[part] if node["name"] not in unused]
    return graph


def _unused(graph: Mapping[str, Any]) -> set[str]:
    taken = set(graph["outputs"].values())
    for layer in graph["layers"]:
        taken.update(layer["inputs"])
    nodes = [*graph["inputs"], *graph["layers"]]
    return {node["name"] for node in nodes if taken.isdisjoint(node.get("outputs", [node["name"]]))}


@pytest.mark.parametrize("name", in_soak(GRAPHS, QUICK))
def test_the_graph_finds_what_was_planted(name: str) -> None:
    found = shares(trained(name), samples_of(name))
    assert min(found.values()) >= MARK, found


@pytest.mark.soak
@pytest.mark.parametrize("name", GRAPHS)
def test_without_its_own_layers_a_graph_misses_the_mark(name: str) -> None:
    _, epochs = SIZES[name]
    samples = samples_of(name)
    found = shares(train(samples, changed(name, CUTS[name]), epochs), samples)
    assert max(found.values()) < MARK - 0.03, found


def test_cross_layers_alone_find_products() -> None:
    logit = {"layer": "linear", "name": "logit", "inputs": ["cross"], "out_features": 1}
    samples = samples_of("dcn")
    found = shares(train(samples, changed("dcn", [logit]), epochs=2), samples)
    assert found["clicked"] >= MARK


@pytest.mark.parametrize("name", in_soak(HISTORIES, QUICK))
def test_the_score_depends_on_the_history_alone(name: str) -> None:
    samples = samples_of(name).with_histories_of_others()
    found = scores(trained(name), samples)
    assert abs(samples.auc("clicked", found["clicked"]) - 0.5) <= 0.05


@pytest.mark.soak
@pytest.mark.parametrize("name", HISTORIES)
def test_nothing_is_learned_from_the_histories_of_others(name: str) -> None:
    samples = samples_of(name).with_histories_of_others()
    found = scores(train(samples, description(name), epochs=1), samples)
    assert samples.auc("clicked", found["clicked"]) <= 0.55


@pytest.mark.soak
def test_nothing_is_learned_from_histories_in_a_random_order() -> None:
    samples = samples_of("bst").with_histories_in_random_order()
    found = scores(train(samples, description("bst"), epochs=1), samples)
    assert samples.auc("clicked", found["clicked"]) <= 0.55


@pytest.mark.parametrize("name", GRAPHS)
def test_the_json_of_a_graph_is_the_json_that_it_was_built_from(name: str) -> None:
    samples = samples_of(name)
    text = (FILES / f"{name}.json").read_text()
    tables = hb.make_tables(samples.schema, dim=8)
    network = hb.models.Graph(samples.schema, tables, FILES / f"{name}.json")
    assert json.dumps(network.to_json()) == json.dumps(json.loads(text))
    again = hb.models.Graph(samples.schema, tables, network.to_json())
    assert json.dumps(again.to_json()) == json.dumps(network.to_json())


@pytest.mark.parametrize("name", GRAPHS)
def test_losses_are_the_same_bits_after_a_round_trip(name: str) -> None:
    samples = samples_of(name)
    data = hb.Dataset(samples.trained, samples.schema, batch_size=64)
    batches = list(itertools.islice(data, 12))
    first = model_of(samples, description(name))
    assert isinstance(first.network, hb.models.Graph)
    second = model_of(samples, json.loads(json.dumps(first.network.to_json())))
    losses = []
    for model in (first, second):
        torch.manual_seed(1)  # of dropout
        losses.append([model.step(batch) for batch in batches])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1


@pytest.mark.parametrize("name", in_soak(GRAPHS, QUICK))
def test_an_exported_graph_is_served_with_its_training_score(name: str, tmp_path: Path) -> None:
    samples = samples_of(name)
    model = trained(name)
    model.export(tmp_path / "exported")
    columns = samples.schema.raw_columns(labels=False)
    request = {column: samples.columns[column][-500:] for column in columns}
    served = hb.InferenceSession(tmp_path / "exported").predict(request)
    if not isinstance(served, dict):
        served = dict.fromkeys(samples.chances, served)
    for label, expected in scores(model, samples).items():
        assert np.abs(served[label] - expected[-500:]).max() <= 1e-6
        assert served[label].std() > 0.1
