# SPDX-License-Identifier: Apache-2.0
"""Two towers: the corrected softmax over a batch, counts of the stream, and vectors of either tower."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError
from hotbed.job import run
from hotbed.job.states import exported

pytestmark = [pytest.mark.torch_core, pytest.mark.usefixtures("one_thread")]
SCHEMA = hb.Schema([hb.Label("clicked"), hb.Id("user"), hb.Id("item"), hb.Dense("price")])
SIDES: dict[str, Any] = {"user": ["user"], "item": ["item", "price"]}
LOSS = hb.losses.InBatchSoftmax()


def network_of(schema: hb.Schema = SCHEMA, **settings: Any) -> Any:
    torch.manual_seed(0)
    tables = hb.make_tables(schema, dim=4, rule=hb.Sgd(lr=1.0), init=hb.Normal(0.5))
    settings = {**SIDES, "hidden": (6,), "dim": 4, **settings}
    return hb.models.TwoTower(schema, tables, **settings)


def columns(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "user": draw.integers(0, 6, n),
        "item": draw.integers(0, 9, n),
        "price": draw.random(n).astype(np.float32),
        "clicked": draw.integers(0, 4, n) > 0,
    }


def batch(values: dict[str, Any]) -> hb.Batch:
    ids = {name: hb.Ids(values[name]) for name in ("user", "item")}
    labels = {"clicked": values["clicked"].astype(np.float32)}
    arrays = hb.Batch(ids, {"price": values["price"]}, labels, num_samples=len(values["user"]))
    return arrays.map_arrays(torch.from_numpy)


def vectors_of(tower: nn.Module, samples: hb.Batch) -> np.ndarray:
    with torch.no_grad():
        vectors: np.ndarray = tower.eval()(samples).numpy()
    return vectors


# --- the loss ---------------------------------------------------------------------------------------


def plain_loss(
    network: Any, rows: dict[str, nn.Embedding], weights: dict[str, Tensor], values: dict[str, Any]
) -> Tensor:
    """The loss in loops: each positive sample against each negative of its batch."""

    def vector(side: str, features: Tensor) -> Tensor:
        hidden = weights[f"towers.{side}.0.weight"] @ features + weights[f"towers.{side}.0.bias"]
        last = weights[f"towers.{side}.2.weight"] @ torch.relu(hidden)
        v = last + weights[f"towers.{side}.2.bias"]
        return v / v.norm() if network.cosine else v

    user, item, clicked = values["user"], values["item"], values["clicked"]
    users = [vector("user", rows["user"](torch.tensor(user[i]))) for i in range(len(user))]
    items = []
    for i in range(len(item)):
        price = torch.tensor([values["price"][i]])
        items.append(vector("item", torch.cat([rows["item"](torch.tensor(item[i])), price])))
    seen = Counter(item.tolist())
    losses = []
    for i in range(len(user)):
        if not clicked[i]:
            continue
        scores = []
        for j in range(len(user)):
            hit = item[i] == item[j] or (user[i] == user[j] and clicked[j])
            if j == i or not hit:
                score = users[i] @ items[j] / network.temperature
                if network.counts is not None:
                    score = score - math.log(seen[item[j]])
                scores.append(score)
            if j == i:
                own = score
        losses.append(torch.logsumexp(torch.stack(scores), 0) - own)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "settings",
    [{}, {"similarity": "dot", "temperature": 1.0}, {"corrected": False}],
    ids=["cosine", "dot", "uncorrected"],
)
def test_the_loss_and_its_gradients_are_those_of_loops(settings: dict[str, Any]) -> None:
    network, values = network_of(**settings), columns(24, seed=1)
    for name in ("user", "item"):  # inserts every id
        network.tables[name].find_or_insert(np.arange(9))
    rows = {}
    for name in ("user", "item"):
        copied = torch.from_numpy(network.tables[name].lookup(np.arange(9))).clone()
        rows[name] = nn.Embedding(9, 4, _weight=copied)
    parameters = {k: p for k, p in network.named_parameters() if k in dense_state(network)}
    weights = {key: p.detach().clone().requires_grad_() for key, p in parameters.items()}
    samples = batch(values)
    loss = LOSS(network(samples), samples.labels["clicked"])
    expected = plain_loss(network, rows, weights, values)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    for key, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, weights[key].grad, rtol=1e-4, atol=2e-6)
    hb.SparseOptimizer(network).step()  # of Sgd with rate 1: subtracts the gradients
    for name, embedding in rows.items():
        stepped = (embedding.weight - embedding.weight.grad).detach()
        found = torch.from_numpy(network.tables[name].lookup(np.arange(9)))
        torch.testing.assert_close(found, stepped, rtol=1e-4, atol=2e-6)


class Clipped:
    """A callback that clips gradients, and keeps their norms before."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_gradients(self, run: Any) -> None:
        self.norms.append(float(run.learner.clip_gradients(0.01)))


@pytest.mark.parametrize("grains", [1, 4])
def test_norm_of_gradients_leaves_counts_out(grains: int) -> None:
    values = {**columns(64, seed=2), "clicked": np.zeros(64)}
    model = hb.RecModel(network_of(), LOSS, hb.Adam(lr=0.01), grains=grains)
    clipped = Clipped()
    data = hb.Dataset(hb.sources.Memory(values), SCHEMA, 32)
    model.fit(data, callbacks=clipped, progress=False)
    assert clipped.norms == [0.0, 0.0]


@pytest.mark.parametrize("grains", [1, 4])
@pytest.mark.parametrize("change", ["", "scaled", "clipped"])
def test_frequencies_of_the_stream_are_those_of_a_dict(grains: int, change: str) -> None:
    network, values = network_of(), columns(150, seed=2)
    model = hb.RecModel(network, LOSS, hb.Adam(lr=0.01), grains=grains)
    if change == "scaled":  # as with float16
        model.learner.network_pass.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    callbacks = [Clipped()] if change == "clipped" else []
    data = hb.Dataset(hb.sources.Memory(values), SCHEMA, 32)
    model.fit(data, epochs=2, callbacks=callbacks, progress=False)
    expected = Counter(values["item"].tolist())
    (counts,) = network.counts.counts.tables
    found = {item: float(counts.lookup(np.array([item]))[0, 0]) for item in expected}
    assert found == {item: 2.0 * count for item, count in expected.items()}


def test_batches_without_a_positive_or_a_negative_have_no_loss() -> None:
    network = network_of()
    for n, clicked in ((0, True), (1, True), (3, False)):
        values = columns(n, seed=3)
        values["clicked"] = np.full(n, clicked)
        samples = batch(values)
        loss = LOSS(network(samples), samples.labels["clicked"])
        loss.backward()
        assert loss == 0
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


# --- what it is for -----------------------------------------------------------------------------------

USERS, ITEMS = 300, 1000


def popular_world(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Clicks of users on items: a taste in four dimensions, times a popularity by Zipf's law."""
    draw = np.random.default_rng(0)
    taste = 0.75 * draw.normal(size=(USERS, 4)) @ draw.normal(size=(4, ITEMS))
    share = np.exp(taste) / np.arange(1, ITEMS + 1)
    limits = (share / share.sum(1, keepdims=True)).cumsum(1)
    users = draw.integers(0, USERS, n)
    picks = [np.searchsorted(limits[user], draw.random()) for user in users]
    return users, np.minimum(picks, ITEMS - 1)


def recall_at_50(corrected: bool) -> float:
    """The share of held-out clicks that are among the 50 best items of their user."""
    users, items = popular_world(18_000)
    clicked = {"user": users, "item": items, "clicked": np.ones(len(users))}
    schema = hb.Schema([hb.Label("clicked"), hb.Id("user"), hb.Id("item")])
    torch.manual_seed(0)
    tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.2), init=hb.Normal(0.1))
    network = hb.models.TwoTower(
        schema,
        tables,
        user=["user"],
        item=["item"],
        corrected=corrected,
        temperature=0.2,
        hidden=(16,),
        dim=8,
    )
    model = hb.RecModel(network, LOSS, hb.Adam(lr=1e-2))
    source = hb.sources.Memory(clicked)
    model.fit(hb.Dataset(source.slice(0.0, 0.85), schema, 128), progress=False)
    vectors = {}
    for side, count in (("user", USERS), ("item", ITEMS)):
        every = hb.Batch({side: hb.Ids(np.arange(count))}, num_samples=count)
        vectors[side] = vectors_of(network.tower(side), every.map_arrays(torch.from_numpy))
    best = np.argsort(-vectors["user"] @ vectors["item"].T, axis=1)[:, :50]
    held_out = range(int(0.85 * len(users)), len(users))
    return float(np.mean([items[row] in best[users[row]] for row in held_out]))


def test_the_correction_finds_popular_items_that_a_plain_softmax_loses() -> None:
    corrected, plain = recall_at_50(True), recall_at_50(False)
    assert corrected > 0.5
    assert corrected > 1.3 * plain


# --- either tower alone -------------------------------------------------------------------------------


def test_a_tower_is_exported_alone_and_its_vectors_become_parquet(tmp_path: Path) -> None:
    values = columns(200, seed=4)
    catalogue = pl.DataFrame(
        {"item": [3, 7, 99], "price": [0.5, 0.1, 0.9], "name": ["a", "b", "c"]}
    )
    catalogue.write_parquet(tmp_path / "items.parquet")
    network = network_of()
    model = hb.RecModel(network, LOSS, hb.Adam(lr=0.01))
    model.fit(hb.Dataset(hb.sources.Memory(values), SCHEMA, 50), progress=False)
    model.save(tmp_path / "states")
    run.export_state(tmp_path / "states", tmp_path / "tower", tower="item")
    run.predict_files(
        tmp_path / "tower",
        [str(tmp_path / "items.parquet")],
        tmp_path / "vectors.parquet",
        ["item"],
    )
    items = network.tower("item")
    assert [column.name for column in items.schema.columns] == ["item", "price"]
    asked = {"user": [0, 1, 5], "item": [3, 7, 99], "price": [0.5, 0.1, 0.9]}
    ids = {name: hb.Ids(torch.tensor(asked[name])) for name in ("user", "item")}
    samples = hb.Batch(ids, {"price": torch.tensor(asked["price"])}, num_samples=3)
    expected = vectors_of(items, samples)
    written = pl.read_parquet(tmp_path / "vectors.parquet")
    assert written["item"].to_list() == [3, 7, 99]
    np.testing.assert_allclose(written["prediction"].to_numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1.0, atol=1e-6)
    users = vectors_of(network.tower("user"), samples)
    model.export(tmp_path / "whole")
    scores = hb.InferenceSession(tmp_path / "whole").predict(asked)
    np.testing.assert_allclose(scores, (users * expected).sum(1) / 0.1, rtol=0, atol=1e-5)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user": []}, r"user: the first feature is the key of the user, an Id column, got \[\]"),
        ({"item": ["price", "item"]}, "item: the first feature is the key of the item"),
        ({"item": ["item", "colour"]}, r"item: not a feature of this model, got \['colour'\]"),
        ({"similarity": "euclid"}, "similarity: unknown value"),
        ({"temperature": 0.0}, "temperature: must be above 0"),
        (
            {"schema": hb.Schema([*SCHEMA.columns, hb.DisplayPosition("place")])},
            "TwoTower: it does not learn the effect of the place of an item, got the column 'place'",
        ),
    ],
)
def test_wrong_settings_are_config_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        network_of(**settings)


def test_scores_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected scores \[n, n\] and labels \[n\]"):
        LOSS(torch.zeros(3, 2), torch.ones(3))
    network = hb.models.DNN(SCHEMA, hb.make_tables(SCHEMA, dim=4), hidden=(4,))
    model = hb.RecModel(network, "bce", "adam")
    with pytest.raises(ConfigError, match="--tower: the model has no towers, got DNN"):
        exported(model, "nowhere", "nowhere", tower="item")
