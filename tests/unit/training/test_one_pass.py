# SPDX-License-Identifier: Apache-2.0
"""With `hb.Ahead` the pass that learns a batch may score it: scores have the bits of a pass before it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schedule import in_soak

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.models import layers
from hotbed.training.callbacks import Checkpoint, Evict, Windows
from hotbed.training.run import Run
from hotbed.training.step.one_pass import is_same_in_both_modes, obstacle_to_one_pass
from hotbed.training.watching.points import Point
from hotbed.training.watching.window_log import Window

from .test_ahead import POLICIES, QUICK_LEAVES, counts, everything

STEPS = 26
ROWS = 64 * STEPS
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Label("z"),
        hb.Time("t"),
        hb.Weight("w"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("clicked", table="item", pooling="none"),
        hb.Id("tags", pooling="mean"),
        hb.Dense("x"),
    ]
)
FLAT = hb.Schema([column for column in SCHEMA.columns if column.name != "clicked"])
ONE_LABEL = hb.Schema([column for column in FLAT.columns if column.name not in ("z", "w")])
HISTORIES = hb.Schema(
    [column for column in SCHEMA.columns if column.name not in ("z", "w", "tags")]
)
SMALL = {"hidden": (8, 8)}
CLICKED = {"histories": {"clicked": "item"}, "length": 5, "activation": "relu"}
SAME_IN_BOTH = {
    "LR": (ONE_LABEL, {}),
    "FM": (ONE_LABEL, {}),
    "DNN": (ONE_LABEL, SMALL),
    "WideDeep": (ONE_LABEL, SMALL),
    "DeepFM": (ONE_LABEL, SMALL),
    "DCN": (ONE_LABEL, SMALL),
    "DCNv2": (ONE_LABEL, SMALL),
    "DLRM": (ONE_LABEL, {**SMALL, "bottom": (8,)}),
    "DIN": (HISTORIES, CLICKED),
    "DIEN": (HISTORIES, CLICKED),
    "BST": (HISTORIES, CLICKED),
    "MMoE": (FLAT, {"num_experts": 3, "expert_hidden": (8,), "tower_hidden": (4,)}),
    "PLE": (FLAT, {"levels": ((8,), (4,)), "tower_hidden": ()}),
    "ESMM": (FLAT, SMALL),
    "AITM": (FLAT, SMALL),
}


@functools.cache
def columns() -> dict[str, Any]:
    """Events whose ids are often new, some of them late."""
    random = np.random.default_rng(5)
    return {
        "y": random.integers(0, 2, ROWS),
        "z": random.integers(0, 2, ROWS),
        "t": np.arange(ROWS) - random.integers(0, 400, ROWS) + 1000,
        "w": random.random(ROWS).astype(np.float32),
        "user": np.minimum(*random.integers(0, 4000, (2, ROWS))),
        "item": np.minimum(*random.integers(0, 4000, (2, ROWS))),
        "clicked": [list(random.integers(0, 500, random.integers(0, 6))) for _ in range(ROWS)],
        "tags": [list(random.integers(0, 500, random.integers(0, 4))) for _ in range(ROWS)],
        "x": random.normal(size=ROWS).astype(np.float32),
    }


def events(schema: hb.Schema) -> hb.Dataset:
    source = hb.sources.Memory({name: columns()[name] for name in schema.raw_columns()})
    return hb.Dataset(source, schema, 64, prefetch=0)


def made(name: str, table: dict[str, Any] | None = None, **keywords: Any) -> nn.Module:
    schema, own = SAME_IN_BOTH[name]
    torch.manual_seed(3)
    tables = hb.make_tables(schema, 4, **({"rule": hb.Adagrad(lr=0.1)} | (table or {})))
    network: nn.Module = getattr(hb.models, name)(schema, tables, **{**own, **keywords})
    return network


def stream(network: nn.Module, schema: hb.Schema, depth: int, **keywords: Any) -> Any:
    """Everything that a scored stream leaves: model, metrics, windows and the reliability curve."""
    model = hb.RecModel(network, "bce", "adam", {"auc", "log_loss"}, **keywords)
    windows = Windows(samples=64 * 7)
    callbacks = [windows, Evict(step_interval=17)]
    data = hb.Ahead(events(schema), depth=depth, torch_threads=1)
    history = model.online_train(data, callbacks, progress=False)
    curves = [
        (name, key, array.tobytes())
        for name, curve in history.reliability.items()
        for key, array in curve.state().items()
    ]
    points = [
        (repr(point.values if isinstance(point, Window) else point.window), tables_of(point))
        for point in (*history.points, *windows.points)
    ]
    return everything(model), history.metrics, points, curves


def tables_of(point: Point | Window) -> dict[str, dict[str, int]]:
    return {name: counts(statistics) for name, statistics in point.tables.items()}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward pass of a collection was one of training."""
    passes: list[bool] = []
    pool = hb.EmbeddingCollection.pool

    def watched(self: Any, *arguments: Any) -> Any:
        passes.append(self.training)
        return pool(self, *arguments)

    monkeypatch.setattr(hb.EmbeddingCollection, "pool", watched)
    return passes


QUICK_NETWORKS = {"LR", "DeepFM", "DCNv2", "DLRM", "DIN", "BST", "MMoE", "AITM"}
"""One of each structure; `make soak` has the others."""


@pytest.mark.parametrize("name", in_soak(SAME_IN_BOTH, QUICK_NETWORKS))
def test_a_model_without_modes_is_scored_by_the_pass_that_learns_it(
    name: str, forwards: list[bool]
) -> None:
    schema = SAME_IN_BOTH[name][0]
    apart = stream(made(name), schema, depth=0)
    assert not all(forwards)
    forwards.clear()
    assert stream(made(name), schema, depth=2) == apart
    assert forwards
    assert all(forwards), "no pass in eval mode"


QUICK = {"Adam, all rows", *QUICK_LEAVES}
"""Policies whose scores each run of the suite compares; `make soak` has the others."""


@pytest.mark.parametrize("policies", in_soak(POLICIES, QUICK))
def test_scores_have_the_same_bits_under_each_policy(policies: str) -> None:
    def learned(depth: int) -> Any:
        return stream(made("DCNv2", POLICIES[policies]), ONE_LABEL, depth)

    assert learned(2) == learned(0)


def test_scores_in_half_precision_have_the_same_bits() -> None:
    def learned(depth: int) -> Any:
        return stream(made("DCNv2"), ONE_LABEL, depth, amp_level="O2")

    assert learned(2) == learned(0)


def test_a_fit_is_scored_by_the_same_pass(forwards: list[bool]) -> None:
    def learned(depth: int) -> Any:
        model = hb.RecModel(made("DCNv2"), "bce", "adam", {"auc"})
        data = hb.Ahead(events(ONE_LABEL), depth=depth, torch_threads=1)
        history = model.fit(data, epochs=2, progressive=True, progress=False)
        return everything(model), history.metrics, history.epochs[0]["auc"]

    apart = learned(0)
    forwards.clear()
    assert learned(2) == apart
    assert all(forwards)


class Dies:
    """Ends a run in the middle, while batches may be mapped ahead."""

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        if run.step == 23:
            raise KeyboardInterrupt


def test_a_run_that_ended_early_resumes_to_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    def learned(depth: int, folder: str, *callbacks: Any) -> Any:
        model = hb.RecModel(made("DCNv2"), "bce", "adam", {"auc"})
        saves = Checkpoint(tmp_path / folder, every_steps=9, wait=True)
        data = hb.Ahead(events(ONE_LABEL), depth=depth, torch_threads=1)
        history = model.online_train(data, [saves, *callbacks], progress=False)
        return everything(model), history.metrics

    unbroken = learned(0, "unbroken")
    with pytest.raises(KeyboardInterrupt):
        learned(2, "broken", Dies())
    assert learned(2, "broken") == unbroken


def test_models_with_modes_are_scored_before_they_learn(forwards: list[bool]) -> None:
    for keywords in ({"dropout": 0.1}, {"batch_norm": True}):
        assert "mode" in obstacle_to_one_pass(made("DCNv2", **keywords), ())
        results = [stream(made("DCNv2", **keywords), ONE_LABEL, depth) for depth in (0, 2)]
        assert results[0] == results[1]
    assert not all(forwards)


def test_a_network_of_the_users_own_may_do_anything_in_eval_mode() -> None:
    class Own(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch if self.training else -batch

    assert not is_same_in_both_modes(Own())
    assert not is_same_in_both_modes(nn.Linear(1, 1))


def test_networks_of_the_package_say_what_the_loop_asks() -> None:
    kinds = [kind for kind in vars(hb.models).values() if inspect.isclass(kind)]
    networks = [kind for kind in kinds if issubclass(kind, nn.Module)]
    assert len(networks) >= 13
    for kind in networks:
        assert vars(kind).get("looks_up_once") is True, kind
        # in training TwoTower scores all pairs of a batch
        assert vars(kind).get("ignores_mode", False) is (kind is not hb.models.TwoTower), kind


def test_tables_that_read_other_rows_before_a_map_are_named() -> None:
    counted = hb.Table("shop", 4, admit=hb.MinCount(2))
    aged = hb.Table("event", 4, evict=hb.Ttl(days=1))
    rounded = hb.Table("city", 4, dtype="bfloat16")
    bounded = hb.Table("user", 4, evict=hb.Lru(1024))
    network = made("DCNv2")
    assert "'shop' admits" in obstacle_to_one_pass(network, [counted])
    assert "'city' are rounded to bfloat16" in obstacle_to_one_pass(network, [rounded])
    assert obstacle_to_one_pass(network, [bounded, aged]) == ""


def test_each_layer_that_asks_for_its_mode_is_known() -> None:
    asking = [
        layer
        for layer in vars(layers).values()
        if inspect.isclass(layer) and "self.training" in inspect.getsource(layer)
    ]
    made_with: dict[str, Callable[[Any], nn.Module]] = {
        "Dropout": lambda layer: layer(0.5),
        "ReLUDropout": lambda layer: layer(0.5),
        "BatchNorm": lambda layer: layer(4),
        "Dice": lambda layer: layer(4),
    }
    checks_only = {"HistoryInputs"}  # it refuses data that do not fit, and computes the same
    names = {layer.__name__ for layer in asking} - checks_only
    assert names
    for layer in asking:
        if layer.__name__ in names:
            network = made("DCNv2")
            network.extra = made_with[layer.__name__](layer)
            assert not is_same_in_both_modes(network), layer
