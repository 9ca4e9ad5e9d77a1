# SPDX-License-Identifier: Apache-2.0
"""What several ranks can train has the bits of one process: networks, number formats, policies,
callbacks, and batches that leave ranks without data. What they cannot is refused on each of them.

All cases run in one group of three ranks, one after another.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import logging
import math
import os
import pickle
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.compute as pc
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from departures import End, check_ends, ends_of
from forked import LogLines, ranks_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hotbed as hb
import hotbed.compat.hugectr as hugectr
import hotbed.compat.hugectr.model.model as hugectr_module
import hotbed.compat.mindspore_rec as mindspore
import hotbed.compat.mx_rec as mx_rec
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.pipeline import Pipeline
from hotbed.compat.mx_rec.util.tf_version_adapter import hccl_ops
from hotbed.embedding.changed_rows import ChangeReader
from hotbed.embedding.lookups import Feature
from hotbed.errors import ConfigError, HotbedError
from hotbed.models.layers import BatchNorm
from hotbed.parallel import DenseExchange, Placement, Ranks, TableExchange
from hotbed.parallel.world import trains_together, world_size
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.state.digest import table_digest
from hotbed.training.auto import plain_state_dict
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

Found = dict[str, Any]
Case = Callable[[], Found]

ROWS = 150  # two batches of 64, and an uneven one
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Label("z"),
        hb.Time("t"),
        hb.Weight("w"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("clicked", table="item", pooling="none"),
        hb.Id("tags", pooling="mean", weights="importance"),
        hb.Dense("x"),
    ]
)


def without(*names: str) -> hb.Schema:
    return hb.Schema([column for column in SCHEMA.columns if column.name not in names])


TWO_LABELS = without("clicked")
ONE_LABEL = without("clicked", "z")
HISTORIES = without("z")


@functools.cache
def columns() -> dict[str, Any]:
    draw = np.random.default_rng(2)
    tags = [draw.integers(0, 50, draw.integers(0, 4)).tolist() for _ in range(ROWS)]
    return {
        "user": draw.zipf(1.3, ROWS) % 200,
        "item": draw.integers(0, 100, ROWS),
        "clicked": [draw.integers(0, 100, draw.integers(0, 7)).tolist() for _ in range(ROWS)],
        "tags": tags,
        "importance": [draw.random(len(bag)).tolist() for bag in tags],
        "x": draw.normal(size=ROWS).astype(np.float32),
        "y": draw.integers(0, 2, ROWS),
        "z": draw.integers(0, 2, ROWS),
        "w": draw.random(ROWS).astype(np.float32),
        "t": np.arange(ROWS),
    }


def dataset(schema: hb.Schema, batch_size: int = 64, rows: int = ROWS, **options: Any) -> Any:
    parts = {name: columns()[name][:rows] for name in schema.raw_columns()}
    return hb.Dataset(hb.sources.Memory(parts), schema, batch_size, prefetch=0, **options)


# --- digests --------------------------------------------------------------------------------------


def digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8])


def bits(tensor: Tensor) -> int:
    return digest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def rows_of(model: hb.RecModel) -> dict[str, list[int]]:
    """The number of rows of each table, of the ids that wait, and sums of their digests.

    The sum of these over ranks does not depend on their number.
    """
    every = {}
    for name, table in model.tables.items():
        rows = [row for batch in table.export() for row in batch.to_pylist()]
        counted = [batch.filter(pc.greater(batch["count"], 0)) for batch in table.candidates()]
        waiting = [row for batch in counted for row in batch.to_pylist()]
        stats = [table.stats[count] for count in ("admitted", "refused", "evicted")]
        every[name] = [len(rows), sum(map(digest, rows)), sum(map(digest, waiting)), *stats]
    return every


def found(model: hb.RecModel, **more: Any) -> Found:
    """The rows of this rank, and what must be equal on all of them."""
    dense = {name: bits(value) for name, value in hb_state(model.network).items()}
    assert model.learner.dense is not None
    for number, state in model.learner.dense.state_dict()["state"].items():
        dense |= {f"{name} of {number}": bits(value) for name, value in state.items()}
    dense["random"] = bits(torch.get_rng_state())
    rates = [model.dense_learning_rate, model.table_learning_rates]
    steps = {name: table.step for name, table in model.tables.items()}
    return {"rows": rows_of(model), "same": [dense, rates, steps, model.counters, more]}


def hb_state(network: nn.Module) -> dict[str, Any]:
    values = {n: p for n, p in network.named_parameters() if p.numel()}
    return values | {n: b for n, b in network.named_buffers() if b.numel()}


def trained(
    network: nn.Module,
    data: Any,
    valid: Any = None,
    *,
    loss: Any = "bce",
    metrics: Any = ("auc", "log_loss"),
    epochs: int = 1,
    callbacks: Iterable[Any] = (),
    progressive: bool = False,
    scored: Any = None,
    optimizer: Any = "adam",
    **options: Any,
) -> Found:
    """Train a network by grains; return what it then is, measures and predicts."""
    options = {"grains": 8, **options}
    model = hb.RecModel(network, loss, optimizer, set(metrics) or None, **options)
    history = model.fit(
        data, valid, epochs, list(callbacks), progressive=progressive, progress=False
    )
    epochs_of = [{k: v for k, v in row.items() if "second" not in k} for row in history.epochs]
    measured: list[Any] = [epochs_of]
    if metrics:
        measured.append(model.evaluate(scored or data))
    if loss is not None:
        predicted = model.predict(scored or data)
        values = predicted if isinstance(predicted, Mapping) else {"": predicted}
        measured += [digest(np.asarray(value).tobytes()) for value in values.values()]
    points = [
        (p.step, p.loss, {n: counted(c) for n, c in p.tables.items()}) for p in history.points
    ]
    return found(model, measured=measured, points=points, evicted=history.evictions)


def counted(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that follow from the data alone, not from memory."""
    return {name: count for name, count in counters.items() if "bytes" not in name}


# --- cases ----------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}
QUICK: list[str] = []
"""Cases of every run of the suite; the soak runs all."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def quick(function: Case) -> Case:
    QUICK.append(function.__name__)
    return case(function)


def small(schema: hb.Schema = ONE_LABEL, **settings: Any) -> nn.Module:
    """A network with batch norm and dropout over single ids, bags with weights, and numbers."""
    every = tables(schema, **settings)
    shape = {"hidden": (8,), "num_cross_layers": 1, "batch_norm": True, "dropout": 0.2}
    network: nn.Module = hb.models.DCNv2(schema, every, **shape)
    return network


def tables(schema: hb.Schema, **settings: Any) -> dict[str, hb.Table]:
    torch.manual_seed(3)
    return hb.make_tables(schema, 4, **({"rule": hb.Adagrad(lr=0.1)} | settings))


@quick
def many_labels() -> Found:
    shape = {"num_experts": 3, "expert_hidden": (8,), "tower_hidden": (4,)}
    schema = hb.Schema([*TWO_LABELS.columns, hb.DisplayPosition("shown", "t", form="factor")])
    network = hb.models.MMoE(schema, tables(schema), **shape, batch_norm=True, dropout=0.2)
    loss = hb.losses.MultiTask({"y": hb.losses.BCE(), "z": hb.losses.Focal()}, weights={"y": 2.0})
    return trained(network, dataset(schema), loss=loss, whole_tables=["item"], average=0.9)


class SideBySide(nn.Module):
    """A model of each further kind over tables of its own; the mean of their logits."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden": (8,), "dropout": 0.2}
        kinds: dict[str, dict[str, Any]] = {
            "AutoInt": {"width": 8, **shape},
            "FinalMLP": {"context": ["user"], **shape},
            "MaskNet": {"block_width": 4, **shape},
            "QNN": {"batch_norm": True, "dropout": 0.2},
            "RankMixer": {"part_width": 2},
        }
        self.networks = nn.ModuleList()
        for kind, settings in kinds.items():
            columns = [
                replace(column, table=f"{kind}.{column.name}")
                if isinstance(column, hb.Id)
                else column
                for column in ONE_LABEL.columns
            ]
            schema = hb.Schema(columns)
            self.networks.append(getattr(hb.models, kind)(schema, tables(schema), **settings))

    def forward(self, batch: hb.Batch) -> Tensor:
        return torch.stack([network(batch) for network in self.networks]).mean(0)


@quick
def one_label_models() -> Found:
    return trained(SideBySide(), dataset(ONE_LABEL))


@case
def layered_experts() -> Found:
    shape = {"levels": ((8,), (4,)), "tower_hidden": (4,), "batch_norm": True, "dropout": 0.2}
    network = hb.models.PLE(TWO_LABELS, tables(TWO_LABELS), **shape)
    return trained(network, dataset(TWO_LABELS))


def events(kind: str) -> Case:
    """Labels of which the second follows the first, with the penalty of their order."""

    def trained_events() -> Found:
        make = getattr(hb.models, kind)
        network = make(TWO_LABELS, tables(TWO_LABELS), hidden=(8,), dropout=0.2)
        losses = {"y": hb.losses.BCE(), "z": hb.losses.BCE()}
        loss = hb.losses.MultiTask(losses, order=("y", "z"))
        return trained(network, dataset(TWO_LABELS), loss=loss)

    return trained_events


CASES["entire_space"] = events("ESMM")
CASES["transferred"] = events("AITM")


@case
def two_towers() -> Found:
    sides: dict[str, Any] = {"user": ["user", "tags"], "item": ["item", "x"]}
    network = hb.models.TwoTower(ONE_LABEL, tables(ONE_LABEL), **sides, hidden=(8,), dim=4)
    loss = hb.losses.InBatchSoftmax()
    return trained(network, dataset(ONE_LABEL), loss=loss, metrics=("auc",), progressive=True)


@quick
def sequences() -> Found:
    network = hb.models.DIN(
        HISTORIES, tables(HISTORIES), histories={"clicked": "item"}, length=4, hidden=(8,)
    )
    return trained(network, dataset(HISTORIES, shuffle=100), progressive=True)


@quick
def callbacks_that_decide() -> Found:
    """Rates warm up; of a noisy metric, they fall and training stops early."""
    called = [
        hb.callbacks.Validate(every_steps=2),
        hb.callbacks.ReducePlateau("log_loss", patience=1),
        hb.callbacks.EarlyStopping("auc", patience=2),
        hb.callbacks.LearningRate(hb.schedules.Warmup(3)),
        hb.callbacks.ClipGradients(0.05),
    ]
    data = dataset(ONE_LABEL, shuffle=64)
    return trained(small(), data, dataset(ONE_LABEL, rows=50), epochs=3, callbacks=called)


@quick
def half_precision() -> Found:
    network = small(dtype="bfloat16", rule=hb.Adam(lr=0.1, scope="all"))
    return trained(network, dataset(ONE_LABEL), amp_level="O2", grains=8)


def half(amp_level: str, dtype: Any, rule: hb.Rule) -> Case:
    return lambda: trained(
        small(dtype=dtype, rule=rule), dataset(ONE_LABEL), amp_level=amp_level, epochs=3
    )


CASES["amp O1, float16"] = half("O1", "float16", hb.Ftrl(lr=0.1))
CASES["amp O3, float16"] = half("O3", "float16", hb.Adam(lr=0.1, scope="catch_up"))
CASES["amp auto, bfloat16"] = half("auto", "bfloat16", hb.RowwiseAdagrad(lr=0.1))


class OwnLoss(nn.Module):
    """A network that returns its loss."""

    looks_up_once = True

    def __init__(self) -> None:
        super().__init__()
        self.network = small()

    def forward(self, batch: hb.Batch) -> Tensor:
        scores = self.network(batch)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.labels["y"])


@case
def network_that_returns_its_loss() -> Found:
    return trained(OwnLoss(), dataset(ONE_LABEL), loss=None, metrics=(), epochs=3)


@case
def no_dense_parameter() -> Found:
    network = hb.models.LR(ONE_LABEL, tables(ONE_LABEL))
    return trained(network, dataset(ONE_LABEL), epochs=3)


class Choosy(OwnLoss):
    """It learns nothing from the rows of a grain whose first label is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.network = hb.models.LR(ONE_LABEL, tables(ONE_LABEL, rule=hb.Adam(lr=0.1)))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: hb.Batch) -> Tensor:
        scores = self.network(batch)
        labels = batch.labels["y"]
        if labels[0] == 1:
            scores = scores.detach()
        return nn.functional.binary_cross_entropy_with_logits(scores + self.bias, labels)


@quick
def grains_without_gradients_of_rows() -> Found:
    """An id of such grains alone does not move; one of other grains, too, takes their sums."""
    return trained(Choosy(), dataset(ONE_LABEL), loss=None, metrics=())


def ahead(depth: int) -> Case:
    """Fits whose ids are mapped ahead, up to evictions and the last step; one ends by an error."""

    def learn() -> Found:
        seen = []
        watch = SimpleNamespace(
            barrier=lambda step, now: False, on_step_end=lambda run: seen.append(run.ahead)
        )
        called = [hb.callbacks.Evict(step_interval=4), hb.callbacks.ClipGradients(0.05), watch]
        data = list(batches([250, 1, 250, 3, 40, 90, 80, 2, 70]))
        network = Shared(HALVED, COUNTED)
        model = hb.RecModel(network, "bce", "adam", {"auc"}, grains=8)
        history = model.fit(
            hb.Ahead(data, depth=depth), callbacks=called, progress=False, max_steps=8
        )
        if model.learner.shard.size > 1:  # one process maps what is read already
            assert max(seen) == min(depth, 3)
        loss = history.epochs[0]["loss"]
        points = [(p.step, {n: counted(c) for n, c in p.tables.items()}) for p in history.points]
        network = Shared({"admit": hb.MinCount(2)}, {"evict": hb.Lru(1024)})
        other = hb.RecModel(network, "bce", "adam", grains=8)
        failed = error_of(lambda: other.fit(hb.Ahead(spoiled(), depth=depth), progress=False))
        failed = failed.partition(" id ")[0]  # one of those ids
        result = found(model, loss=loss, points=points, failed=failed)
        left = found(other)
        of_both = {f"{name} of the one that failed": rows for name, rows in left["rows"].items()}
        return {"rows": result["rows"] | of_both, "same": result["same"] + left["same"]}

    return learn


def spoiled() -> list[hb.Batch]:
    """Batches of which the third has a label that is not a number."""
    every = list(batches([60, 50, 40, 30, 20]))
    every[2].labels["y"][0] = np.nan
    return every


for depth in (0, 1, 4):
    CASES[f"ahead {depth}"] = ahead(depth)
QUICK.append("ahead 4")


class StopsAt:
    """Ends a training after a step, before which it lets nothing be mapped that lies behind."""

    def __init__(self, step: int) -> None:
        self.last = step

    def barrier(self, step: int, now: int | None) -> bool:
        return step >= self.last

    def on_step_end(self, run: Any) -> None:
        if run.step >= self.last:
            run.stop("enough")


def stopped(depth: int) -> Case:
    """Streams and fits that end at a step, or with their data, in each way of scoring."""

    def learn() -> Found:
        rows = {}
        same: list[Any] = []
        ends: dict[str, dict[str, Any]] = {
            "max_steps": {"max_steps": 3},
            "stop": {"callbacks": [StopsAt(2)]},
            "stop at once": {"max_steps": 0},
            "end": {},
        }
        for progressive in (False, True, "training"):
            for end, options in ends.items():
                network = hb.models.LR(ONE_LABEL, tables(ONE_LABEL))
                model = hb.RecModel(network, "bce", "adam", {"auc"}, grains=8)
                data = hb.Ahead(list(dataset(ONE_LABEL, 16, 70)), depth=depth)
                model.online_train(data, progressive=progressive, progress=False, **options)
                result = found(model)
                same += [model.counters["steps"], *result["same"]]
                for name, of_table in result["rows"].items():
                    rows[f"{name}, {end}, {progressive}"] = of_table
        return {"rows": rows, "same": same}

    return learn


for depth in (0, 1, 2, 3, 4):
    CASES[f"stopped, ahead {depth}"] = stopped(depth)
QUICK.append("stopped, ahead 2")


@case
def mapped_and_scored_ahead() -> Found:
    plain = hb.models.DCNv2(ONE_LABEL, tables(ONE_LABEL), hidden=(8,))
    data = hb.Ahead(dataset(ONE_LABEL))
    return trained(plain, data, epochs=2, scored=dataset(ONE_LABEL), progressive=True)


class Plain(nn.Module):
    """A model of torch alone: ids that it computes, a table of two lookups, bags that it weighs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(60, 4)
        self.item = nn.Embedding(40, 4, padding_idx=3)
        self.tags = nn.EmbeddingBag(50, 4, mode="sum", padding_idx=7)
        self.months = nn.Embedding(12, 4)
        self.share = nn.Parameter(torch.ones(1))
        self.head = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        user, item, tags, weights = (columns[n] for n in ("user", "item", "tags", "tags_weights"))
        of_item = [self.item(item), self.item((item + 7 * user) % 50)]
        of_tags = self.tags(tags, columns["tags_offsets"], weights * self.share)
        rows = [self.user(user % 60), *of_item, of_tags, self.months(user % 12)]
        scores: Tensor = self.head(torch.cat(rows, 1)).squeeze(1)
        return scores


def moved(**policies: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Such a model by `hb.auto`; its months stay, and its users have rows of their own."""
    network = Plain()
    every: dict[str, Any] = {"months": None, "item": policies}
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
    model, converted, _ = hb.auto(network, optimizer, every, "t", unbounded=["user"])
    return model, converted


def of_auto(**policies: Any) -> Found:
    """Fit a model of `hb.auto`, then map the ids of its batches ahead; save it before and after."""
    network, optimizer = moved(**policies)
    model = hb.RecModel(network, "bce", optimizer, {"auc"}, grains=8)
    folder = model.learner.shard.from_first(tempfile.mkdtemp)
    first = model.fit(dataset(ONE_LABEL), callbacks=[hb.callbacks.Evict(2)], progress=False)
    model.save(f"{folder}/0")
    second = map_ahead(model)
    model.save(f"{folder}/1")
    losses = [history.epochs[-1]["loss"] for history in (first, second)]
    scores = np.asarray(model.predict(dataset(ONE_LABEL))).tolist()
    result = found(model, losses=losses, auc=model.evaluate(dataset(ONE_LABEL)), scores=scores)
    return result | {"folder": folder}


def map_ahead(model: hb.RecModel) -> Any:
    torch.manual_seed(1)
    return model.fit(hb.Ahead(dataset(ONE_LABEL)), progress=False)


POLICIES: dict[str, Any] = {"admit": hb.MinCount(2), "evict": hb.Ttl(seconds=1)}


@quick
def auto() -> Found:
    return of_auto(**POLICIES)


CASES["auto with an Lru"] = lambda: of_auto(evict=hb.Lru(1024))


class Shared(nn.Module):
    """Two collections; three features share one of the tables, and another one is frozen.

    Args:
        pair: policies of the shared table.
        other: policies of another one.
    """

    looks_up_once = True

    def __init__(self, pair: dict[str, Any], other: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        frozen = hb.Table("frozen", 2)
        frozen.frozen = "rows"
        rule = hb.Momentum(lr=0.1)
        self.pairs = hb.EmbeddingCollection(
            [Feature("a", "pair"), Feature("b", "pair"), Feature("bag", "pair", "mean")],
            [hb.Table("pair", 3, rule=rule, **pair)],
        )
        self.others = hb.EmbeddingCollection(
            [Feature("c", "other"), Feature("d", "frozen")],
            [hb.Table("other", 2, rule=rule, **other), frozen],
        )
        self.head = nn.Sequential(nn.Linear(13, 8), BatchNorm(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: hb.Batch) -> Tensor:
        flat = torch.cat([self.pairs.flat(batch), self.others.flat(batch)], 1)
        scores: Tensor = self.head(flat).squeeze(1)
        return scores


def batches(sizes: Iterable[int]) -> Iterator[hb.Batch]:
    """Yield batches of so many samples; small ones leave grains, and ranks, without any."""
    draw = np.random.default_rng(4)
    for step, samples in enumerate(sizes):
        ids = {name: hb.Ids(draw.zipf(1.2, samples) % 900 + 30 * step) for name in "abcd"}
        offsets = np.concatenate([[0], draw.integers(0, 3, samples).cumsum()])
        weights = draw.random(offsets[-1]).astype(np.float32)
        ids["bag"] = hb.Ids(draw.integers(0, 900, offsets[-1]), offsets, weights)
        labels = draw.integers(0, 2, samples).astype(np.float32)
        yield hb.Batch(ids, {}, {"y": labels}, time=step * 1_000_000 + np.arange(samples))


COUNTED: dict[str, Any] = {
    "admit": hb.MinCount(2, sketch_bytes=1 << 16),
    "evict": [hb.Lfu(1024, half_life_seconds=2), hb.Ttl(seconds=3)],
}
HALVED: dict[str, Any] = {"admit": hb.MinCount(3, max_candidates=256), "evict": hb.Lru(1024)}
ONCE: dict[str, Any] = {"admit": hb.MinCount(2, once_a_batch=True), "evict": hb.Ttl(steps=3)}
BYTES: dict[str, Any] = {"admit": hb.MinCount(3, admission_bytes=1 << 16)}


def shared(pair: dict[str, Any], other: dict[str, Any], rounds: int = 1) -> Found:
    evict = hb.callbacks.Evict(step_interval=2)
    data = list(batches([250, 1, 250, 3, 40] * rounds))
    return trained(Shared(pair, other), data, callbacks=[evict])


@quick
def policies() -> Found:
    return shared(HALVED, ONCE)


CASES["sketch and once a batch"] = lambda: shared(COUNTED, ONCE, 3)
CASES["once a batch and sketch"] = lambda: shared(ONCE, COUNTED, 3)
CASES["bytes and halving"] = lambda: shared(BYTES, HALVED, 3)


@quick
def own_loop() -> Found:
    """Steps, evaluation and predictions one by one, and rates that are set between steps."""
    model = hb.RecModel(Shared({}, {}), "bce", "adam", {"auc"}, grains=8)
    losses = []
    for number, batch in enumerate(batches([30, 2, 65])):
        model.dense_learning_rate = 0.01 / (number + 1)
        model.table_learning_rates = {"pair": 0.2 / (number + 1)}
        losses.append(model.step(batch))
    evaluation = hb.Evaluation(model)
    for batch in batches([40, 1]):
        evaluation.add(batch)
    predicted = model.predict(next(iter(batches([10]))))
    return found(model, losses=losses, auc=evaluation.results(), predicted=predicted.tolist())


@contextmanager
def counted_calls(kind: str) -> Iterator[list[str]]:
    """Yield the calls of a kind that this rank makes in the block."""
    calls: list[str] = []
    meet = Ranks.meet

    def counting(ranks: Ranks, call: Any, parts: Any) -> Any:
        if call.kind == kind:
            calls.append(call.kind)
        return meet(ranks, call, parts)

    with patch.object(Ranks, "meet", counting):
        yield calls


@quick
def shared_out() -> Found:
    """Ranks share out the grains of a score, also where a network draws numbers in eval mode.

    They ask once for the rows of all grains of a batch, and of both collections. Of few samples,
    a rank may have no grain: then those that have one ask for each collection.
    """
    model = hb.RecModel(Shared({}, {}), "bce", "adam", {"auc"}, grains=8)
    model.fit(list(batches([30, 20])), progress=False)
    passes = []
    model.network.register_forward_hook(lambda module, arguments, output: passes.append(1))
    ranks = world_size()
    metrics: list[Any] = [model.evaluate(list(batches([40, 3, 1])))]
    for samples in (40, 3, 1):
        passes.clear()
        with counted_calls("ask") as asks:
            metrics.append(digest(model.predict(next(batches([samples]))).tobytes()))
        present = min(samples, 8)
        rank = int(os.environ.get("RANK", "0"))
        if present < ranks:
            assert len(passes) == 1
        else:
            assert len(passes) == present * (rank + 1) // ranks - present * rank // ranks
        if ranks > 1:
            assert len(asks) == (1 if present >= ranks else 2)
    hook = model.network.register_forward_hook(
        lambda module, arguments, output: output + torch.rand(len(output))
    )
    scores = [part.tolist() for part in map(model.predict, batches([40, 3]))]
    metrics.append(model.evaluate(list(batches([12]))))
    hook.remove()
    # a loop of its own: each rank may score another batch
    model.network.eval()
    with torch.no_grad():
        every = [model.network(batch) for batch in batches(range(5, 5 + ranks))]
        own = list(batches(range(5, 5 + ranks)))[int(os.environ.get("RANK", "0"))]
        assert torch.equal(model.network(own), every[int(os.environ.get("RANK", "0"))])
    drawn = torch.rand(3).tolist()
    return found(model, metrics=metrics, scores=scores, drawn=drawn)


class Straying(Shared):
    """In eval mode it looks up a collection twice, under other weights, and other ids, too."""

    def forward(self, batch: hb.Batch) -> Tensor:
        scores = super().forward(batch)
        if not self.training:
            bag = batch.ids["bag"]
            for ids in (hb.Ids(bag.values, bag.offsets, bag.weights * 2), bag):
                other = {**batch.ids, "bag": ids}
                scores = scores + self.pairs.flat(replace(batch, ids=other)).sum(1)
            other = {**batch.ids, "c": hb.Ids(batch.ids["c"].values % 7)}
            scores = scores + self.others.flat(replace(batch, ids=other)).sum(1)
        return scores


class Outputs(nn.Module):
    """An evaluation network of its own, which looks up one of the two collections."""

    def __init__(self, network: Shared) -> None:
        super().__init__()
        self.others = network.others

    def forward(self, batch: hb.Batch) -> tuple[Tensor, Tensor]:
        return self.others.flat(batch).sum(1).sigmoid(), batch.labels["y"]


@quick
def scored_in_another_way() -> Found:
    """In eval mode a network looks up what its steps do not; another network is evaluated."""
    network = Straying({}, {})
    model = hb.RecModel(network, "bce", "adam", {"auc"}, grains=8)
    model.fit(list(batches([30, 20])), progress=False)
    metrics = [model.evaluate(list(batches([40, 3, 1])))]
    auc = hb.metrics.AUC().set_indexes([0, 1])
    options = {"eval_network": Outputs(network), "grains": 8}
    model = hb.RecModel(network, "bce", "adam", {"auc": auc}, **options)
    metrics.append(model.evaluate(list(batches([40, 3, 1]))))
    return found(model, metrics=metrics)


@quick
def copied() -> Found:
    """Rows are removed between steps; copies and an average train and score as the model did."""
    removed = []
    remove = SimpleNamespace(
        barrier=lambda step, now: True,
        on_step_end=lambda run: removed.append(run.tables["pair"].remove(np.arange(9) + run.step)),
    )
    model = hb.RecModel(Shared({}, {}), "bce", "adam", {"auc"}, grains=8)
    average = AveragedModel(model.network)
    model.fit(list(batches([30, 20])), callbacks=[remove], progress=False)
    average.update_parameters(model.network)
    twin = copy.deepcopy(model)
    for held in (model, model.network, model.tables["pair"]):
        with pytest.raises(ConfigError, match="a table cannot be pickled"):
            pickle.dumps(held)
    copies = [copy.deepcopy(model.network), average.module]
    scores = []
    for network in copies:
        network.eval()
        with torch.no_grad():
            scores.append([network(batch).tolist() for batch in batches([12, 3])])
    other = hb.RecModel(copies[0], "bce", "adam", grains=8)
    other.fit(list(batches([25, 2])), progress=False)
    twin.fit(hb.Ahead(list(batches([25, 2])), depth=1), progress=False)
    result = found(model, removed=removed, scores=scores)
    for name, copied_model in (("network", other), ("model", copy.deepcopy(twin))):
        of_copy = found(copied_model)
        result["same"] += of_copy["same"]
        for table, rows in of_copy["rows"].items():
            result["rows"][f"{table} of the copied {name}"] = rows
    return result


class PlainLoop:
    """A loop of plain PyTorch: schedules, clipping, and two batches a step where it accumulates."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        self.network = Shared(HALVED, COUNTED)
        self.tables = {
            t.name: t for m in (self.network.pairs, self.network.others) for t in m.tables
        }
        self.dense = torch.optim.Adam(hb.dense_parameters(self.network), lr=0.01)
        self.sparse = hb.SparseOptimizer(self.network)
        self.loop = hb.shard(self.network, self.dense, self.sparse, whole_tables=["other"])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sparse, 1, gamma=0.5)
        self.losses: list[float] = []

    def loss_of(self, part: hb.Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.network(part), part.labels["y"])

    def learn(self, sizes: Iterable[int], batches_a_step: int = 1) -> None:
        self.network.train()
        for number, batch in enumerate(batches(sizes), 1):
            self.losses.append(self.loop.backward(batch, self.loss_of).item())
            if number % batches_a_step:
                continue
            self.losses.append(self.loop.clip_gradients(0.05).item())
            for optimizer in (self.dense, self.sparse):
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            self.schedule.step()

    def state(self) -> Any:
        every = {"dense": self.dense, "sparse": self.sparse}
        shard = self.loop.shard
        return hb.checkpoints.State(self.network, self.tables, every, shard=shard)

    def found(self, **more: Any) -> Found:
        self.network.eval()
        with torch.no_grad():
            more["scores"] = [self.network(batch).tolist() for batch in batches([9, 1])]
        learner = SimpleNamespace(dense=self.dense)
        rates = {"dense_learning_rate": 0.01, "table_learning_rates": self.schedule.get_last_lr()}
        every = {"network": self.network, "tables": self.tables, "learner": learner, "counters": {}}
        return found(SimpleNamespace(**every, **rates), losses=self.losses, **more)


@quick
def plain_loop() -> Found:
    """A loop learns, is saved, and goes on from there in a loop of its own."""
    first = PlainLoop()
    first.learn([250, 3])
    first.learn([90, 1, 120, 2], batches_a_step=2)
    folder = first.loop.shard.from_first(tempfile.mkdtemp)
    hb.checkpoints.save(folder, first.state())
    again = PlainLoop()
    reader = hb.checkpoints.open_checkpoint(folder)
    hb.checkpoints.restore(reader, again.state())
    for loop in (first, again):
        loop.learn([80, 5])
    more = {"saved": content_digest(reader), "losses before": first.losses[:-4]}
    assert again.losses == first.losses[-4:]
    result = again.found(**more)
    kept = [rows[:3] for rows in first.found()["rows"].values()]  # counts lie on other ranks
    assert [rows[:3] for rows in result["rows"].values()] == kept
    return result


class Weighing(nn.Module):
    """A bag, a sequence and an id of a frozen table, which learned numbers weigh.

    Args:
        names: of the features that the network weighs itself.
    """

    looks_up_once = True

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        frozen = hb.Table("frozen", 3, init=hb.Uniform(1.0))
        frozen.frozen = "rows"
        tables = [hb.Table(name, 3, rule=hb.Adagrad(lr=0.1), dtype="bfloat16") for name in "xy"]
        features = [Feature("bag", "x", "mean"), Feature("a", "y", "none"), Feature("b", "frozen")]
        self.rows = hb.EmbeddingCollection(features, [*tables, frozen])
        self.third = nn.Parameter(torch.tensor([1.0, 0.5, -0.5]))
        self.names = names

    def weighed(self, batch: hb.Batch, names: Iterable[str]) -> hb.Batch:
        ids = {name: torch.as_tensor(batch.ids[name].values) for name in names}
        return batch.with_weights({name: self.third[ids[name] % 3] for name in names})

    def forward(self, batch: hb.Batch) -> Tensor:
        flat, sequences = self.rows.flat_and_sequences(self.weighed(batch, self.names))
        return flat.sum(1) + sequences["a"].sum(1)


@quick
def learned_weights() -> Found:
    """A network weighs ids that were mapped ahead; a loop weighs some before the grains."""
    data = list(batches([250, 1, 40]))
    model = hb.RecModel(Weighing("bag", "a", "b"), "bce", "adam", grains=8)
    model.fit(hb.Ahead(data, depth=2), progress=False)
    network = Weighing("a")
    dense = torch.optim.SGD(hb.dense_parameters(network), lr=0.1)
    sparse = hb.SparseOptimizer(network)
    loop = hb.shard(network, dense, sparse)
    loss_fn = nn.BCEWithLogitsLoss()
    leaves = []
    for batch in data:
        leaf = torch.ones(len(batch), requires_grad=True)
        weighed = network.weighed(batch, ["bag"]).with_weights({"b": leaf})
        loop.backward(weighed, lambda part: loss_fn(network(part), part.labels["y"]))
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        leaves.append([bits(leaf.grad), bits(network.third)])
    return found(model, leaves=leaves)


LAYER = hugectr.Layer_t


def hugectr_model(**settings: Any) -> hugectr.Model:
    """A spread and a localized embedding, compiled over data in memory."""
    sizes = {"batchsize": 40, "batchsize_eval": 50, "max_eval_batches": 4}
    solver = hugectr.CreateSolver(seed=7, **sizes, **{"lr": 0.05, **settings})
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Parquet,
        "train",
        eval_source="test",
        check_type=hugectr.Check_t.Non,
    )
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    sparse = [hugectr.DataReaderSparseParam(name, 1, True, 1) for name in ("user", "item")]
    model.add(hugectr.Input(1, "y", 0, "x", sparse))
    for kind, name in zip(("Distributed", "Localized"), ("user", "item"), strict=True):
        placement = hugectr.Embedding_t[f"{kind}SlotSparseEmbeddingHash"]
        model.add(hugectr.SparseEmbedding(placement, 1, 4, "sum", f"{name}s", name))
        model.add(hugectr.DenseLayer(LAYER.Reshape, [f"{name}s"], [f"{name}_row"], leading_dim=4))
    model.add(hugectr.DenseLayer(LAYER.Concat, ["user_row", "item_row"], ["row"]))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["row"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(LAYER.BinaryCrossEntropyLoss, ["logit", "y"], ["loss"]))

    def data(reader: Any, input: Any, solver: Any, schema: Any, **checks: Any) -> hb.Dataset:
        return dataset(schema, solver.batchsize, shuffle=50)

    in_memory = patch.multiple(
        hugectr_module,
        columns_of=lambda _, input: hugectr_module.named_columns(input),
        training_data=data,
        evaluation_data=data,
    )
    with in_memory, redirect_stdout(io.StringIO()):
        model.compile()
        for opened in (model.get_data_reader_train(), model.get_data_reader_eval()):
            assert opened.dataset is not None
    return model


@quick
def hugectr_placements() -> Found:
    """The first rank writes the files of one process, and all ranks read them."""
    model = hugectr_model(grains=8)
    from_first = model.learner.learner.shard.from_first
    with ExitStack() as opened, redirect_stdout(io.StringIO()):
        folder = from_first(lambda: opened.enter_context(tempfile.TemporaryDirectory()))
        settings = {"snapshot": 3, "snapshot_prefix": f"{folder}/s/"}
        model.fit(max_iter=5, display=2, eval_interval=2, **settings)
        model.start_data_reading()
        model.train()
        model.eval()
        model.save_params_to_files(f"{folder}/", 6)
        read = hugectr_model(grains=8)
        read.load_dense_weights(f"{folder}/_dense_6.model")
        read.load_dense_optimizer_states(f"{folder}/_opt_dense_6.model")
        read.load_sparse_weights([f"{folder}/{number}_sparse_6.model" for number in range(2)])
        states = [f"{folder}/{number}_opt_sparse_6.model" for number in range(2)]
        read.load_sparse_optimizer_states(states)
        read.save_params_to_files(f"{folder}/read/", 6)
        files = from_first(lambda: digests_of_files(folder))
    saved = {name: value for name, value in files.items() if "/" not in name.split(".model")[0]}
    again = {n.removeprefix("read/"): v for n, v in files.items() if n.startswith("read/")}
    assert again == saved
    assert {"_dense_6.model", "0_sparse_6.model/key", "1_sparse_6.model/slot_id"} <= set(saved)
    assert len(files) == 3 * len(saved), sorted(files)  # those of a snapshot, and nothing else
    measured = [model.get_current_loss(), model.get_eval_metrics(), model.get_params_num()]
    return found(model.learner, measured=[*measured, files])


class Computes(nn.Module):
    """A network of MindSpore's names that computes its keys, and looks up one table twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        limits = {"permit_filter_value": 2, "evict_filter_value": 4}
        self.deep = mindspore.HashEmbeddingLookup(4, max_norm=0.5, **limits)
        self.wide = mindspore.MapParameter(value_shape=1, default_value="ones")
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))

    def forward(self, ids: Tensor) -> Tensor:
        deep = self.mlp(self.deep(ids).flatten(1)).sum(1)
        return deep + self.wide[ids % 40].sum((1, 2)) + self.wide.get(ids[:, 0]).squeeze(1)


def clicks(steps: int, *, own: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 45 samples; `own`: of several ranks each has some of them, the first one most."""
    draws = torch.Generator().manual_seed(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ends = [0, *(45 - 5 * (ranks - other) for other in range(1, ranks)), 45]
    run = slice(*ends[rank : rank + 2]) if own else slice(None)
    for _ in range(steps):
        ids = torch.randint(-5, 60, (45, 3), generator=draws, dtype=torch.int32)
        yield ids[run], (ids.sum(1) % 2).float()[run]


class Stops(mindspore.Callback):
    """Keeps losses, and stops at a step; of several ranks, the first one has it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.losses: list[float] = []

    def step_end(self, run_context: Any) -> None:
        args = run_context.original_args()
        self.losses.append(float(args.net_outputs))
        if args.cur_step_num == self.step:
            run_context.request_stop()


def of_mindspore(*, own: bool) -> Found:
    """A program learns, saves, scores, and changes its tables; another one restores it."""

    def program() -> mindspore.RecModel:
        settings = {"grains": 8, "data_parallel": own, "metrics": {"auc", "loss"}}
        return mindspore.RecModel(Computes(), "bce", hb.Adam(lr=0.1), **settings)

    model = program()
    shard = model.engine.learner.shard
    with ExitStack() as opened, redirect_stdout(io.StringIO()) as printed:
        folder = shard.from_first(lambda: opened.enter_context(tempfile.TemporaryDirectory()))
        config = mindspore.CheckpointConfig(save_checkpoint_steps=3)
        saves = mindspore.ModelCheckpoint("m", folder, config)
        stops = Stops(7)
        torch.manual_seed(3)
        callbacks = [mindspore.LossMonitor(2), saves, *([stops] if shard.is_first else [])]
        history = model.online_train(clicks(9, own=own), callbacks)
        fitted = model.train(2, list(clicks(2, own=own)), [saves])
        other = program()
        other.engine.restore(saves.latest_ckpt_file_name)
        measured = [
            history.metrics,
            fitted.epochs[-1]["loss"],
            shard.from_first(lambda: stops.losses),
        ]
        measured += [each.eval(list(clicks(3, own=own))) for each in (model, other)]
        ids = next(clicks(1, own=own))[0]
        predicted = [part for of_rank in shard.gathered(model.predict(ids)) for part in of_rank]
        measured.append(predicted[: len(ids) if not own else None])
        shard.from_first(lambda: None)  # all have read the state
    deep, wide = model.train_network.deep.embedding_table, model.train_network.wide
    for values in (deep, wide):
        values.export_data()
        values.put(np.arange(50, 90), np.ones((40, *values.value_shape)))
        values.erase(np.arange(10))
        measured.append([part.tolist() for part in values.export_data(incremental=True)])
        values.import_data(values.export_data())
        measured.append([part.tolist() for part in values.get_data()])
        measured.append(values.get(np.arange(60), insert_default_value=False).tolist())
    lines = shard.gathered(printed.getvalue().count("loss is"))
    assert lines == [3, *[0] * (shard.size - 1)]
    return found(model.engine, measured=measured)


@case
def mindspore_door() -> Found:
    return of_mindspore(own=False)


@quick
def mindspore_data_of_each_rank() -> Found:
    return of_mindspore(own=True)


def hugectr_of_files(source: str, folder: str, *, collected: bool) -> hugectr.Model:
    """A model of files of two slots: a collection, or an embedding on a disk with a cache."""
    solver = hugectr.CreateSolver(
        seed=7, batchsize=40, lr=0.05, i64_input_key=True, repeat_dataset=False, grains=8
    )
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Parquet,
        source,
        eval_source=source,
        check_type=hugectr.Check_t.Non,
        slot_size_array=[50, 50],
    )
    optimizer = hugectr.CreateOptimizer(hugectr.Optimizer_t.AdaGrad)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cached = [hugectr.TrainPSType_t.Cached]
    blocks = [hugectr.CreateHMemCache(1, 0.5, 0)]
    cache = hugectr.CreateETC(cached, [f"{folder}/etc"], [folder] * ranks, blocks)
    model = hugectr.Model(solver, reader, optimizer, None if collected else cache)
    tops = ["a", "b"] if collected else ["rows"]
    slots = 1 if collected else 2
    sparse = [hugectr.DataReaderSparseParam(f"keys {top}", 1, True, slots) for top in tops]
    model.add(hugectr.Input(1, "y", 1, "x", sparse))
    if collected:
        tables = hugectr.EmbeddingCollectionConfig()
        for top in tops:
            table = hugectr.EmbeddingTableConfig(f"table {top}", 50, 4)
            tables.embedding_lookup(table, f"keys {top}", top, "sum")
        model.add(tables)
    else:
        kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
        settings = {"max_vocabulary_size_per_gpu": 80}
        model.add(
            hugectr.SparseEmbedding(
                kind,
                embedding_vec_size=4,
                combiner="sum",
                sparse_embedding_name="rows",
                bottom_name="keys rows",
                **settings,
            )
        )
    for top in tops:
        layer = hugectr.DenseLayer(LAYER.Reshape, [top], [f"{top} flat"], leading_dim=4 * slots)
        model.add(layer)
    model.add(hugectr.DenseLayer(LAYER.Concat, [*(f"{top} flat" for top in tops), "x"], ["row"]))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["row"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(LAYER.BinaryCrossEntropyLoss, ["logit", "y"], ["loss"]))
    model.compile()
    return model


def generated(folder: str) -> list[str]:
    sources = []
    for number in range(2):
        source = f"{folder}/{number}/list.txt"
        params = hugectr.tools.DataGeneratorParams(
            format=hugectr.DataReaderType_t.Parquet,
            label_dim=1,
            dense_dim=1,
            num_slot=2,
            i64_input_key=True,
            source=source,
            eval_source=f"{folder}/{number}/eval.txt",
            slot_size_array=[50, 50],
            num_files=1,
            eval_num_files=1,
            num_samples_per_file=130,
        )
        hugectr.tools.DataGenerator(params).generate()
        sources.append(source)
    return sources


@case
def hugectr_passes() -> Found:
    """Epochs with the snapshot of the default, passes of a cache, its changes, and collections."""
    from_first = Ranks.of_job().from_first if trains_together() else lambda make: make()
    with ExitStack() as opened, redirect_stdout(io.StringIO()):
        folder = from_first(lambda: opened.enter_context(tempfile.TemporaryDirectory()))
        sources = from_first(lambda: generated(folder))
        model = hugectr_of_files(sources[0], folder, collected=False)
        model.fit(num_epochs=1)
        reader = model.get_data_reader_train()
        changed = []
        for number, source in enumerate(sources):
            reader.set_source(source)
            while model.train():
                pass
            changed += [part.tolist() for pair in model.get_incremental_model() for part in pair]
            model.save_params_to_files(f"{folder}/pass-", number)
        read = hugectr_of_files(sources[0], folder, collected=False)
        assert read.get_params_num() == model.get_params_num()  # it begins with the saved rows
        collected = hugectr_of_files(sources[0], folder, collected=True)
        collected.fit(num_epochs=1)
        collected.embedding_dump(f"{folder}/dumped")
        loaded = hugectr_of_files(sources[0], folder, collected=True)
        loaded.embedding_load(f"{folder}/dumped")
        loaded.embedding_dump(f"{folder}/again")
        files = from_first(lambda: digests_of_files(folder))
    files = {name: value for name, value in files.items() if not name.startswith(("0/", "1/"))}
    for name, value in files.items():
        if name.startswith("dumped"):
            assert files[name.replace("dumped", "again")] == value
    return found(model.learner, measured=[changed, files])


def digests_of_files(folder: str) -> dict[str, int]:
    files = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*")}
    return {
        name: digest(files[name].read_bytes()) for name in sorted(files) if files[name].is_file()
    }


# --- programs with the names of Rec SDK -----------------------------------------------------------

TIMED = without("z", "w", "clicked", "tags", "x")
SAVED_STEP = 4


def rows_of_rank(rank: int, ranks: int) -> hb.Dataset:
    """Every so-manieth row is that of a rank; the first rank has as much again."""
    parts = {}
    for name in TIMED.raw_columns():
        share = list(columns()[name][rank::ranks])
        parts[name] = share if rank else share * 2
    source = hb.sources.Memory(parts)
    return hb.Dataset(source, TIMED, batch_size=8, shuffle=20, seed=3, prefetch=0)


class Program(nn.Module):
    """A program of Rec SDK: each rank learns batches of its own, and sums its gradients.

    Args:
        mode: "rows"; "addresses": dynamic expansion, where the loop hands gradients over by
            address; "static": static shape; "automatic": the model computes the ids.
    """

    def __init__(self, mode: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.mode = mode
        torch.manual_seed(7)
        mx_rec.init(use_dynamic_expansion=mode == "addresses", use_dynamic=mode != "static")
        factory = mx_rec.optimizers.lazy_adam.create_hash_optimizer
        if mode == "addresses":
            factory = mx_rec.optimizers.lazy_adam_by_addr.create_hash_optimizer_by_address
        elif mode == "static":  # a gradient of zero moves a row
            factory = mx_rec.optimizers.ftrl.create_hash_optimizer
        self.sparse = factory(0.05)
        self.thresholds = {"access_threshold": 2, "eviction_threshold": 30}
        self.specs = [
            mx_rec.FeatureSpec("user", **self.thresholds),
            mx_rec.FeatureSpec("item"),
            mx_rec.FeatureSpec("again", table_name="item", index_key="user"),
        ]
        padding = {"padding_keys": [3], "padding_keys_mask": True, "padding_keys_len": 1}
        mean = {"all2all_gradients_op": "sum_gradients_and_div_by_ranksize"}
        init = hb.Normal(std=0.1)
        self.described = {
            "user": mx_rec.create_table(torch.int64, 3, "user", init),
            "item": mx_rec.create_table(torch.int64, 3, "item", init, **padding, **mean),
        }
        last = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 1))
        self.head = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), *last)
        parameters, _ = mx_rec.get_dense_and_sparse_variable(self.head)
        self.dense = torch.optim.Adam(parameters, lr=0.01)
        self.hook = mx_rec.EvictHook(True, None, evict_step_interval=3)
        self.batches, self.evaluation = self._started()
        self.saver = mx_rec.Saver([self.head, self.dense])
        self.tables = {name: table.table for name, table in self.described.items()}

    def _started(self) -> tuple[Iterator[hb.Batch], Iterator[hb.Batch]]:
        """Run step 8, and return the batches of training and of an evaluation."""
        ranks = (mx_rec.get_rank_id(), mx_rec.get_rank_size())
        every = [rows_of_rank(*ranks) for _ in range(2)]
        if self.mode == "automatic":
            mx_rec.modify_graph_and_start_emb_cache(self, every[0], every[1])
            return mx_rec.get_initializer(True)(), mx_rec.get_initializer(False)()
        specs = [mx_rec.FeatureSpec("time", is_timestamp=True), *self.specs]
        inserts = [
            mx_rec.get_asc_insert_func(tgt_key_specs=specs, is_training=training)
            for training in (True, False)
        ]
        mx_rec.start_asc_pipeline()
        train, evaluation = zip(every, inserts, strict=True)
        return iter(train[0].map(train[1])), iter(evaluation[0].map(evaluation[1]))

    def forward(self, batch: hb.Batch) -> Tensor:
        rows = []
        for spec in self.specs:
            ids: Any = spec
            options: dict[str, Any] = {"is_train": torch.is_grad_enabled(), "batch": batch}
            if self.mode == "automatic":
                ids = batch.ids[spec.key].values
                options = {"modify_graph": True}
                if spec.name == "user":
                    options["access_and_evict_config"] = self.thresholds
            elif self.mode == "static":
                options["send_count"] = 20
            rows.append(mx_rec.sparse_lookup(self.described[spec.table], ids, **options))
        scores: Tensor = self.head(torch.cat(rows, 1)).squeeze(1)
        return scores

    def learn(self, first: int, last: int) -> int:
        """Learn up to the last step, or as long as every rank has data; return the last one."""
        loss_fn = nn.BCEWithLogitsLoss()
        step = first - 1
        for step, batch in zip(range(first, last + 1), self.batches):  # noqa: B905
            loss = loss_fn(self(batch), batch.labels["y"])
            num_samples = hccl_ops.allreduce(torch.tensor(len(batch)), "sum").item()
            self.update(loss * (len(batch) / num_samples))
            self.hook.after_run(global_step=step)
        return step

    def learn_at(self, rate: float) -> None:
        self.sparse.learning_rate = rate
        self.learn(1, 2)

    def update(self, loss: Tensor) -> None:
        parameters = list(self.head.parameters())
        if self.mode == "addresses":
            rows = mx_rec.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
            addresses = mx_rec.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
            gradients = torch.autograd.grad(loss, [*rows, *parameters])
            pairs = zip(gradients[: len(rows)], addresses, strict=True)
            self.sparse.apply_gradients(list(pairs))
            for parameter, gradient in zip(parameters, gradients[len(rows) :], strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
            self.sparse.step()
        for parameter in parameters:
            parameter.grad = hccl_ops.allreduce(parameter.grad, "sum")
        self.dense.step()
        self.dense.zero_grad()

    def found(self, **more: Any) -> Found:
        with torch.no_grad():
            scores = bits(self(next(self.evaluation)))
        dense = [bits(parameter) for parameter in self.head.parameters()]
        number = torch.tensor(mx_rec.get_rank_id() + 1)
        more["reduced"] = [
            hccl_ops.allreduce(number, reduction).item() for reduction in ("max", "min", "prod")
        ]
        return {"rows": rows_of(self), "same": [dense, more], "scores": scores}


def program(mode: str) -> Case:
    """A program that saves a state, and learns on; another one resumes it."""

    def learn() -> Found:
        first = Program(mode)
        first.learn(1, SAVED_STEP)
        folder = framework.current().shard.from_first(tempfile.mkdtemp)
        first.saver.save(folder)
        steps = first.learn(SAVED_STEP + 1, 99)
        saved = open_checkpoint(folder)
        digests = {name: table_digest(saved, name) for name in saved.table_names}
        result = first.found(steps=steps, saved=digests)
        mx_rec.terminate_config_initializer()
        again = Program(mode)
        assert again.saver.restore(folder) == SAVED_STEP
        assert again.learn(SAVED_STEP + 1, 99) == steps
        resumed = again.found(steps=steps, saved=digests)
        mx_rec.terminate_config_initializer()
        for part in ("same", "scores"):
            assert resumed[part] == result[part]
        kept = {name: counts[:3] for name, counts in result["rows"].items()}
        assert {name: counts[:3] for name, counts in resumed["rows"].items()} == kept
        return result | {"folder": folder}

    return learn


PROGRAMS = {mode: program(mode) for mode in ("rows", "addresses", "static", "automatic")}
QUICK_PROGRAMS = ("rows",)


class Rows(nn.Module):
    """The network of a program, for `hb.shard`."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        features = [Feature(spec.name, spec.table, "none") for spec in program.specs]
        self.rows = hb.EmbeddingCollection(features, program.tables)
        self.head = program.head

    def forward(self, batch: hb.Batch) -> Tensor:
        scores: Tensor = self.head(torch.cat(list(self.rows(batch).values()), 1)).squeeze(1)
        return scores


def batch_of_ranks(parts: Iterable[hb.Batch], grains: int) -> hb.Batch:
    """Return the batches of ranks as the grains of one."""
    parts = list(parts)
    whole = hb.Batch.concat(parts)
    sizes = [0] * grains
    for rank, part in enumerate(parts):
        sizes[Placement(len(parts), grains).grains_of(rank).start] = len(part)
    ids = {**whole.ids, "again": hb.Ids(whole.ids["user"].values)}
    ends = tuple(np.cumsum(sizes).tolist())
    return hb.Batch(ids, {}, whole.labels, time=whole.time, grain_ends=ends)


def as_grains(ranks: int, mode: str) -> Found:
    """What a loop by grains finds in the data of so many ranks, in one process."""
    torch.set_num_threads(1)
    like = Program(mode)
    network = Rows(like)
    sparse = hb.SparseOptimizer(network)
    grains = max(2, 1 << (ranks - 1).bit_length())
    loop = hb.shard(network, like.dense, sparse, grains=grains)
    schedule = EvictionSchedule(like.tables, 3)
    loss_fn = nn.BCEWithLogitsLoss()
    newest = 0
    digests = {}
    data = [rows_of_rank(rank, ranks) for rank in range(ranks)]
    for step, parts in enumerate(zip(*data), 1):  # noqa: B905
        batch = batch_of_ranks(parts, grains)
        loop.backward(batch, lambda part: loss_fn(network(part), part.labels["y"]))
        sums = network.rows.gradients.take(keeps=True)
        number = [table.name for table in sums.mapped.tables].index("item")
        padding = np.flatnonzero(sums.mapped.unique_ids(number) == 3)
        sums.mapped.leave_out(number, padding)
        uniques = sums.mapped.num_uniques()
        (both,) = network.rows.rows
        both.grad[sum(uniques[:number]) :][: uniques[number]] /= ranks
        for optimizer in (like.dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        newest = max(newest, int(batch.time.max()))
        schedule.step(step, newest)
        if step == SAVED_STEP:
            folder = tempfile.mkdtemp()
            hb.checkpoints.save(folder, hb.checkpoints.State(network.head, like.tables))
            saved = open_checkpoint(folder)
            digests = {name: table_digest(saved, name) for name in saved.table_names}
    network.eval()
    scores = []
    for rank in range(ranks):
        first = next(iter(rows_of_rank(rank, ranks)))
        with torch.no_grad():
            scores.append(bits(network(batch_of_ranks([first], 2))))
    dense = [bits(parameter) for parameter in network.head.parameters()]
    mx_rec.terminate_config_initializer()
    reduced = [ranks, 1, math.factorial(ranks)]
    same = [dense, {"steps": step, "saved": digests, "reduced": reduced}]
    return {"rows": rows_of(like), "same": same, "scores": scores}


# --- negative controls: what must change the bits -------------------------------------------------


@contextmanager
def counted_feature_by_feature() -> Iterator[None]:
    """Map each batch twice: first as a single grain, which counts, then as it is divided."""
    ask = TableExchange.ask

    def twice(self: Any, inputs: Any, time: Any, ends: Any, *, training: bool, **rest: Any) -> Any:
        if training:
            ask(self, inputs, time, [ends[-1]] * len(ends), training=True, **rest)
        return ask(self, inputs, time, ends, training=False, **rest)

    with patch.object(TableExchange, "ask", twice):
        yield


@contextmanager
def summed_by_all_reduce() -> Iterator[None]:
    """Let gloo add the dense values of the ranks."""
    to_owners = DenseExchange.to_owners
    own_values: list[Any] = []

    def remembered(self: Any, values: Any) -> Any:
        own_values[:] = values
        return to_owners(self, values)

    def all_reduced(self: Any, shares: Any) -> dict[int, Any]:
        totals = {}
        for number, shape in zip(self._numbers, self._shapes, strict=True):
            parts = [value for value in own_values[number] if value is not None]
            totals[number] = sum(parts, torch.zeros(shape))
            torch.distributed.all_reduce(totals[number])
        return totals

    with (
        patch.object(DenseExchange, "to_owners", remembered),
        patch.object(DenseExchange, "totals", all_reduced),
    ):
        yield


def changed(change: Callable[[], AbstractContextManager[None]]) -> Case:
    def learn() -> Found:
        with change():
            return policies()

    return learn


CONTROLS = {
    change.__name__: changed(change)
    for change in (counted_feature_by_feature, summed_by_all_reduce)
}


# --- what is refused ------------------------------------------------------------------------------


class UpdatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = small()

    def forward(self, batch: hb.Batch) -> Tensor:
        loss: Tensor = self.network(batch).sum()
        loss.backward()
        return loss


class Guessed(Plain):
    """Its users are those that it has learned to take."""

    def forward(self, user: Tensor) -> Tensor:  # type: ignore[override]
        return self.user((user * self.share).long() % 60).sum(1)


def step(network: nn.Module, data: Any = None, *, grains: int = 4, **options: Any) -> Any:
    model = hb.RecModel(network, "bce", "adam", grains=grains, **options)
    return model.step(data or next(iter(dataset(ONE_LABEL))))


def by_auto(network: nn.Module) -> None:
    network, optimizer, _ = hb.auto(network, torch.optim.Adam(network.parameters()))
    hb.RecModel(network, "bce", optimizer, grains=4).step(next(iter(dataset(ONE_LABEL))))


def plain_weights() -> None:
    network, optimizer = moved()
    hb.RecModel(network, "bce", optimizer, grains=4)
    plain_state_dict(network)


def with_sparse_gradients() -> None:
    network = small()
    network.others = nn.Embedding(4, 2, sparse=True)
    hb.RecModel(network, "bce", "adam", grains=4)


def clipped_by_torch() -> None:
    """The norm of torch is that of the rows of this rank."""
    loop = PlainLoop()
    for batch in batches([60, 60]):
        loop.loop.backward(batch, loop.loss_of)
        nn.utils.clip_grad_norm_(loop.network.parameters(), 0.05)
        loop.dense.step()
        loop.sparse.step()
        loop.dense.zero_grad()


def loop_with(loss_of: Callable[[hb.Batch], Any]) -> None:
    PlainLoop().loop.backward(next(batches([60])), loss_of)


def not_sharded() -> None:
    network = Shared({}, {})
    network(next(batches([9]))).sum().backward()
    hb.SparseOptimizer(network).step()


def filled() -> None:
    """Rows that were there before the ranks share them, others on each of them."""
    network = small()
    network(next(iter(dataset(ONE_LABEL)))[: 20 + int(os.environ["RANK"])])
    hb.shard(network, None, hb.SparseOptimizer(network))


def state_dict_of_a_loop() -> None:
    PlainLoop().network.state_dict()


def on_learned(call: Callable[[PlainLoop], Any]) -> Callable[[], Any]:
    """Call it with a loop that has learned, whose rows lie on several ranks."""

    def learn() -> None:
        loop = PlainLoop()
        loop.learn([60])
        call(loop)

    return learn


def state_of(loop: PlainLoop) -> hb.checkpoints.State:
    return hb.checkpoints.State(loop.network, loop.tables, {"dense": loop.dense})


def restored_alone(loop: PlainLoop) -> None:
    with tempfile.TemporaryDirectory() as folder:
        network = Shared(HALVED, COUNTED)
        tables = {t.name: t for m in (network.pairs, network.others) for t in m.tables}
        hb.checkpoints.save(folder, hb.checkpoints.State(network, tables))
        hb.checkpoints.restore(hb.checkpoints.open_checkpoint(folder), state_of(loop))


def removed_by_one(loop: PlainLoop) -> None:
    """Each rank removes other ids; no row is gone then."""
    before = len(loop.tables["pair"])
    try:
        loop.tables["pair"].remove([int(os.environ["RANK"])])
    finally:
        assert len(loop.tables["pair"]) == before


def mapped_by_insert() -> None:
    network = small()
    insert = hb.Insert(network)
    for data in dataset(ONE_LABEL):
        step(network, insert(data))


def sharded() -> None:
    """`fully_shard` replaces the class of a module by one of its own."""
    network = small()
    kind = type("FSDPDCNv2", (type(network),), {"__module__": "torch.distributed.fsdp.any"})
    network.__class__ = kind
    step(network, grains=1)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1)


def moved_by_fsdp() -> None:
    """FullyShardedDataParallel moves parameters while it is made; its import takes long."""
    code = "for parameter in parameters: parameter.data = parameter.to('cpu')"
    fsdp = {"__name__": "torch.distributed.fsdp._init_utils", "parameters": small().parameters()}
    exec(code, fsdp)


def learned_keys() -> mindspore.MapParameter:
    model = mindspore.RecModel(Computes(), "bce", "adam", data_parallel=True)
    model.train(1, list(clicks(1, own=True)))
    return model.train_network.wide


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "updates itself": (lambda: hb.RecModel(UpdatesItself(), grains=4), "a network that updates"),
    "no grains": (lambda: step(small(), grains=1), "Make RecModel with grains, such as 8"),
    "ids of auto that a model learns": (
        lambda: by_auto(Guessed()),
        "got a lookup 'user' whose ids depend on more than the batch",
    ),
    "plain weights": (plain_weights, "plain_state_dict: several ranks hold the rows of 'user'"),
    "sparse gradients": (with_sparse_gradients, "got 'others', an embedding with sparse=True"),
    "a program of MindSpore that updates itself": (
        lambda: mindspore.RecModel(Computes()),
        "RecModel.optimizer: several ranks add up gradients before an update",
    ),
    "tuples of nobody": (
        lambda: mindspore.RecModel(Computes(), "bce", "adam").train(1, list(clicks(1, own=True))),
        "train_dataset: tuples of several ranks are those of each rank, or the same on all",
    ),
    "values that one rank puts": (
        lambda: learned_keys().put([1], [[float(is_last_rank())]]),
        "got values to put into 'wide' [",
    ),
    "other data of each rank": (
        lambda: mindspore.RecModel(Computes(), "bce", "adam", data_parallel=False).train(
            1, [(torch.full((40, 3), int(is_last_rank())), torch.ones(40))]
        ),
        "got column 'tensor 0' of a batch with the digest",
    ),
    "batches of each rank": (
        lambda: mindspore.RecModel(Computes(), "bce", "adam", data_parallel=True).train(
            1, list(dataset(ONE_LABEL))
        ),
        "data: batches of each rank are tuples",
    ),
    "no table": (
        lambda: hb.RecModel(nn.Linear(1, 1), "bce", "adam", grains=4),
        "ranks: several ranks share the rows of tables, got a network without a table",
    ),
    "compile": (lambda: step(small(), compile=hb.Compile()), "a compiled network"),
    "tuples": (
        lambda: step(small(), (torch.ones(4), torch.ones(4))),
        "columns of a batch, got a tuple",
    ),
    "Insert": (mapped_by_insert, "got 4 grains and a batch of hb.Ahead or hb.Insert"),
    "files of HugeCTR": (
        lambda: hugectr_model(grains=4).load_sparse_weights(["never", "never"]),
        "never: expected a file, got nothing",
    ),
    "a loop that is not sharded": (not_sharded, "or give a loop of your own to hb.shard"),
    "a loop that clips by torch": (clipped_by_torch, "and hold the same weights"),
    "no loss": (lambda: loop_with(lambda part: part), "loss_of must return the loss of a part"),
    "rows of before": (filled, "must hold the same rows before they share them, got table 'user'"),
    "no optimizer": (lambda: hb.shard(small()), "the tables ['user', 'item', 'tags'] learn"),
    "no grains in a loop": (lambda: hb.shard(small(), grains=1), "a batch is divided in 2 or more"),
    "state_dict": (state_dict_of_a_loop, "Save with RecModel.save, or with hb.checkpoints.save"),
    "a state without its shard": (
        on_learned(lambda loop: hb.checkpoints.save("never", state_of(loop))),
        "State.shard: several ranks hold the rows of a table, got table 'pair' and not their",
    ),
    "a capture without its shard": (
        on_learned(lambda loop: hb.checkpoints.capture(state_of(loop))),
        "State.shard: several ranks hold the rows of a table",
    ),
    "a restoration without its shard": (
        on_learned(restored_alone),
        "State.shard: several ranks hold the rows of a table",
    ),
    "a digest of the rows of a rank": (
        on_learned(lambda loop: content_digest(loop.tables)),
        "content_digest: several ranks hold the rows of a table, got table 'pair'",
    ),
    "changes of the rows of a rank": (
        on_learned(lambda loop: ChangeReader(loop.tables["pair"]).all()),
        "table 'pair': several ranks hold its rows, got a reader on one of them",
    ),
    "rows of another rank": (
        on_learned(lambda loop: loop.tables["pair"].lookup(np.arange(500))),
        "table 'pair': several ranks hold its rows, got an id, whose row belongs to another rank",
    ),
    "new rows of another rank": (
        on_learned(lambda loop: loop.tables["pair"].find_or_insert(np.arange(500), 0)),
        "table 'pair': several ranks hold its rows, got an id, whose row belongs to another rank",
    ),
    "ids that one rank removes": (
        on_learned(removed_by_one),
        "got ids to remove from table 'pair' ['1 with the digest",
    ),
    "copies": (
        lambda: step(nn.parallel.DistributedDataParallel(small())),
        "network: DistributedDataParallel shares out dense parameters alone",
    ),
    "copies in a loop": (
        lambda: hb.SparseOptimizer(nn.Sequential(nn.parallel.DistributedDataParallel(small()))),
        "got it around its part '0'",
    ),
    "copies of auto": (
        lambda: hb.auto(
            copies := nn.parallel.DistributedDataParallel(nn.Linear(1, 1)), sgd(copies)
        ),
        "Give hb.auto the network as it is, and RecModel or hb.shard grains, such as 8",
    ),
    "moved to be sharded": (
        moved_by_fsdp,
        "network: FullyShardedDataParallel shares out dense parameters alone",
    ),
    "shards": (sharded, "network: fully_shard shares out dense parameters alone"),
}


def unequal_programs() -> None:
    mx_rec.init()
    try:
        mx_rec.optimizers.adagrad.create_hash_optimizer(0.1)
        mx_rec.get_asc_insert_func(tgt_key_specs=mx_rec.FeatureSpec("user"))
        mx_rec.create_table(torch.int64, 2, "user", hb.Zeros())
        torch.manual_seed(mx_rec.get_rank_id())
        mx_rec.get_dense_and_sparse_variable(nn.Linear(2, 1))
        mx_rec.start_asc_pipeline()
    finally:
        mx_rec.terminate_config_initializer()


def is_last_rank() -> bool:
    return int(mx_rec.get_rank_id()) == int(mx_rec.get_rank_size()) - 1


def other_program(learn: Callable[[], Any]) -> None:
    try:
        learn()
    finally:
        mx_rec.terminate_config_initializer()


def spoiled_program(spoil: Callable[[Tensor], None]) -> None:
    """Spoil what the second rank gives a table."""
    program = Program("rows")
    try:
        program(next(program.batches)).sum().backward()
        if mx_rec.get_rank_id() == 1:
            spoil(mx_rec.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")[0])
        program.sparse.step()
    finally:
        mx_rec.terminate_config_initializer()


def drop_gradient(rows: Tensor) -> None:
    rows.grad = None


def saved_by_first() -> None:
    """The first rank saves a program, as with Horovod; the others go on with the data."""
    program = Program("rows")
    try:
        program.learn(1, 1)
        with tempfile.TemporaryDirectory() as folder:
            if mx_rec.get_rank_id() == 0:
                program.saver.save(folder)
            next(program.batches)
    finally:
        mx_rec.terminate_config_initializer()


REFUSED |= {
    "programs that one rank saves": (
        saved_by_first,
        "got rank 0 in Saver.save and ranks 1, 2 in next batch. ",
    ),
    "programs with other weights": (unequal_programs, "network 0.weights with the digest ["),
    "programs with other networks": (
        lambda: other_program(lambda: Program("rows", dropout=0.1 * mx_rec.get_rank_id())),
        "got network 0.network.2.p [0.0, 0.1, 0.2] on ranks 0 to 2",
    ),
    "programs with other rates": (
        lambda: other_program(lambda: Program("rows").learn_at(0.05 + 0.45 * is_last_rank())),
        "must update tables at the same rates, got [{'user': 0.05, 'item': 0.05}, {'user'",
    ),
    "networks of HugeCTR": (
        lambda: hugectr_model(grains=4, lr=0.05 + int(os.environ["RANK"])).fit(max_iter=2),
        "lr",
    ),
    "gradients of some ranks": (
        lambda: spoiled_program(drop_gradient),
        "got those of [['user', 'item'], ['item'], ['user', 'item']] on ranks 0 to 2",
    ),
    "gradients of a program that are not finite": (
        lambda: spoiled_program(lambda rows: rows.grad.fill_(torch.nan)),
        "table 'user': the gradient of id",
    ),
}


# --- mistakes of one rank in a call of a door -----------------------------------------------------


def of_hugectr(call: Callable[[hugectr.Model], Any]) -> Callable[[], Any]:
    def make_and_call() -> None:
        with redirect_stdout(io.StringIO()):
            model = hugectr_model(grains=4)
            model.start_data_reading()
            call(model)

    return make_and_call


def of_program(call: Callable[[Program], Any]) -> Callable[[], Any]:
    return lambda: call(Program("rows"))


def fail(*arguments: Any) -> None:
    raise hb.errors.DataError("row 33: bad")


def next_batch_fails(program: Program) -> None:
    with patch.object(Pipeline, "_read", fail):
        next(program.batches)


def updated(program: Program, update: Callable[[], Any]) -> None:
    program(next(program.batches)).sum().backward()
    update()


def wrong_lookup(program: Program) -> None:
    batch = next(program.batches)
    table = program.described["user"]
    mx_rec.sparse_lookup(table, program.specs[0], is_train="no idea", batch=batch)


def evicted(program: Program, step: int) -> None:
    updated(program, program.sparse.step)
    program.hook.after_run(global_step=step)


def step_of_auto(batch: hb.Batch) -> None:
    network, optimizer = moved()
    hb.RecModel(network, "bce", optimizer, grains=4).step(batch)


def train_by_mindspore(epochs: Any) -> None:
    model = mindspore.RecModel(Computes(), "bce", "adam", data_parallel=False)
    model.train(epochs, list(clicks(1, own=False)))


def put_keys(width: int) -> None:
    learned_keys().put(np.arange(3), np.ones((3, width)))


def calls_of_doors(folder: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Calls of the doors, and of a model of `hb.auto`; and the same calls with a mistake."""
    mx_rec.terminate_config_initializer()
    wide: Any = of_hugectr
    rows: Any = of_program
    one = torch.ones(1)
    return {
        "fit": (wide(lambda m: m.fit(max_iter=2)), wide(lambda m: m.fit(max_iter=0))),
        "train of HugeCTR": (
            wide(lambda m: m.train()),
            wide(lambda m: patch.object(m._train_reader, "next", fail).start() and m.train()),
        ),
        "eval": (
            wide(lambda m: m.eval()),
            wide(lambda m: patch.object(m._eval_reader, "next", fail).start() and m.eval()),
        ),
        "save": (
            wide(lambda m: m.save_params_to_files(f"{folder}/m")),
            wide(lambda m: m.save_params_to_files("s3://bucket/m")),
        ),
        "sizes": (wide(lambda m: m.get_params_num()), wide(lambda m: m.get_params_num(1))),
        "next batch": (rows(lambda p: next(p.batches)), rows(next_batch_fails)),
        "lookup": (rows(lambda p: p(next(p.batches))), rows(wrong_lookup)),
        "update": (
            rows(lambda p: updated(p, p.sparse.step)),
            rows(lambda p: updated(p, lambda: p.sparse.apply_gradients(3))),
        ),
        "allreduce": (
            rows(lambda p: hccl_ops.allreduce(one, "sum")),
            rows(lambda p: hccl_ops.allreduce(one, "mean")),
        ),
        "evict": (rows(lambda p: evicted(p, 1)), rows(lambda p: evicted(p, 7))),
        "save of a program": (
            rows(lambda p: p.learn(1, 1) and p.saver.save(f"{folder}/p")),
            rows(lambda p: p.learn(1, 1) and p.saver.save(3)),
        ),
        "auto": (
            lambda: step_of_auto(next(iter(dataset(ONE_LABEL)))),
            lambda: step_of_auto(hb.Batch({}, {}, {})),
        ),
        "train": (lambda: train_by_mindspore(1), lambda: train_by_mindspore("one")),
        "put": (lambda: put_keys(1), lambda: put_keys(2)),
    }


NUM_DOORS = 14


def one_fails(folder: str, rank: int) -> dict[str, End]:
    return ends_of(lambda: calls_of_doors(folder), range(NUM_DOORS), folder, rank, "value")


def test_a_mistake_of_one_rank_in_a_call_of_a_door_ends_the_others_at_once(tmp_path: Path) -> None:
    ends = ranks_of(one_fails, 2, str(tmp_path), 1)
    assert len(ends[0]) == NUM_DOORS
    check_ends(ends, 1)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HotbedError as error:
        return str(error)
    return "no error"


def text_of(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
    return text


def sizes() -> Found:
    """What is shown of a table with a capacity, and what is logged."""
    logged = LogLines()
    logging.getLogger("hotbed").addHandler(logged)
    model = hb.RecModel(small(capacity=45), "bce", "adam", {"auc"}, grains=4)
    model.evaluate(dataset(ONE_LABEL))
    windows = hb.callbacks.Windows(samples=64)
    server = hb.callbacks.Prometheus(0, every_seconds=0)
    read = SimpleNamespace(on_epoch_end=lambda run: served.append(text_of(server.address)))
    served: list[str] = []
    callbacks = [windows, server, read]
    history = model.fit(dataset(ONE_LABEL), callbacks=callbacks, progress=False)
    model.evaluate(dataset(ONE_LABEL))
    logging.getLogger("hotbed").removeHandler(logged)
    rows = {name: table["rows"] for name, table in history.points[-1].tables.items()}
    return {
        "rows": rows,
        "windows": [window.tables["user"]["rows"] for window in history.windows],
        "empty": [text.split(": ")[-1] for text in logged.lines if "learned nothing yet" in text],
        "capacity": sorted(
            text.split(":")[-2].strip() for text in logged.lines if "than its capacity" in text
        ),
        "here": {name: len(table) for name, table in model.tables.items()},
        "shown": (str(model), model.summary()),
        "served": re.findall(r'hotbed_table_rows\{(.*)table="user"\} (.*)\.0', served[0]),
    }


# --- equal bits -----------------------------------------------------------------------------------


def every_case(names: list[str]) -> dict[str, Found]:
    torch.set_num_threads(1)
    results = {}
    for name in names:
        torch.manual_seed(9)
        results[name] = (CASES | CONTROLS | PROGRAMS)[name]()
    return results


def everything() -> Found:
    """What a rank of the group of every run of the suite finds."""
    found = every_case([*QUICK, *CONTROLS, *QUICK_PROGRAMS])
    found["refused"] = {name: error_of(call) for name, (call, _) in REFUSED.items()}
    found["sizes"] = sizes()
    return found


@pytest.fixture(scope="module")
def three_ranks() -> list[Found]:
    return ranks_of(everything, 3)


@functools.cache
def one_process(name: str) -> Found:
    return every_case([name])[name]


def summed(every: list[Found]) -> dict[str, list[int]]:
    """Return the rows of all ranks."""
    of_tables = {}
    for table in every[0]["rows"]:
        of_ranks = [of_rank["rows"][table] for of_rank in every]
        of_tables[table] = [sum(counts) for counts in zip(*of_ranks, strict=True)]
    return of_tables


def check_case(name: str, every: list[Found]) -> None:
    expected = one_process("ahead 0" if name.startswith("ahead") else name)
    assert summed([of_rank[name] for of_rank in every]) == expected["rows"]
    for of_rank in every:
        assert of_rank[name]["same"] == expected["same"]


@pytest.mark.parametrize("name", QUICK)
def test_three_ranks_have_the_bits_of_one_process(name: str, three_ranks: list[Found]) -> None:
    check_case(name, three_ranks)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "host_ranks"), [(2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (4, 2), (6, 3)]
)
def test_any_number_of_ranks_has_the_bits_of_one_process(ranks: int, host_ranks: int) -> None:
    every = ranks_of(every_case, ranks, list(CASES), host_ranks=host_ranks)
    for name in CASES:
        check_case(name, every)


def check_program(name: str, every: list[Found]) -> None:
    """Compare a program on several ranks with a loop whose grains are their batches."""
    expected = as_grains(len(every), name)
    found = [of_rank[name] for of_rank in every]
    assert summed(found) == expected["rows"]
    assert [of_rank["scores"] for of_rank in found] == expected["scores"]
    for of_rank in found:
        assert of_rank["same"] == expected["same"]
    one = Program(name)
    assert one.saver.restore(found[0]["folder"]) == SAVED_STEP
    one.saver.save(f"{found[0]['folder']}-one")
    saved = open_checkpoint(f"{found[0]['folder']}-one")
    digests = {table: table_digest(saved, table) for table in saved.table_names}
    mx_rec.terminate_config_initializer()
    assert digests == expected["same"][1]["saved"]


@pytest.mark.parametrize("name", QUICK_PROGRAMS)
def test_a_program_of_rec_sdk_has_the_bits_of_its_batches_as_grains(
    name: str, three_ranks: list[Found]
) -> None:
    check_program(name, three_ranks)


def test_a_rank_whose_grains_are_two_blocks_learns_a_program_of_rec_sdk() -> None:
    assert len(Placement(5, 8, frozenset()).blocks[1]) == 2
    check_program("rows", ranks_of(every_case, 5, ["rows"]))


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "host_ranks"), [(2, 1), (3, 1), (5, 1), (4, 2)])
def test_programs_of_rec_sdk_on_any_number_of_ranks(ranks: int, host_ranks: int) -> None:
    every = ranks_of(every_case, ranks, list(PROGRAMS), host_ranks=host_ranks)
    for name in PROGRAMS:
        check_program(name, every)


def test_a_whole_table_lies_on_one_rank(three_ranks: list[Found]) -> None:
    rows = [of_rank["many_labels"]["rows"] for of_rank in three_ranks]
    assert sorted(bool(of_rank["item"][0]) for of_rank in rows) == [False, False, True]
    assert all(of_rank["user"][0] for of_rank in rows)
    names = [f"table {number}" for number in range(20)]
    of_door = [of_rank["hugectr_placements"]["rows"] for of_rank in three_ranks]
    assert sorted(bool(of_rank["items"][0]) for of_rank in of_door) == [False, False, True]
    owners = [Placement(3, 8, frozenset(names)).owners(name) for name in names]
    assert {len(set(of_table)) for of_table in owners} == {1}
    assert {int(of_table[0]) for of_table in owners} == {0, 1, 2}
    with pytest.raises(
        ConfigError, match="whole_tables: the network has no such table, got 'itme'"
    ):
        hb.RecModel(small(), "bce", "adam", whole_tables=["itme"])


def test_another_order_of_ids_has_other_rows(three_ranks: list[Found]) -> None:
    of_control = [of_rank["counted_feature_by_feature"] for of_rank in three_ranks]
    assert summed(of_control) != one_process("policies")["rows"]


def test_a_sum_by_all_reduce_has_other_bits(three_ranks: list[Found]) -> None:
    for of_rank in three_ranks:
        dense = of_rank["summed_by_all_reduce"]["same"][0]
        assert dense.keys() == one_process("policies")["same"][0].keys()
        assert dense != one_process("policies")["same"][0]


def test_one_process_goes_on_where_three_ranks_saved_a_model_of_auto(
    three_ranks: list[Found], tmp_path: Path
) -> None:
    folder = three_ranks[0]["auto"]["folder"]
    network, optimizer = moved(**POLICIES)
    model = hb.RecModel(network, "bce", optimizer, {"auc"}, grains=8)
    model.restore(f"{folder}/0")
    map_ahead(model)
    model.save(tmp_path)
    expected = content_digest(open_checkpoint(f"{folder}/1"))
    assert content_digest(open_checkpoint(tmp_path)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_each_rank(name: str, three_ranks: list[Found]) -> None:
    _, part = REFUSED[name]
    errors = [
        re.sub(r"the id \d+, whose", "an id, whose", of_rank["refused"][name])
        for of_rank in three_ranks
    ]
    assert part in errors[0]
    assert errors == [errors[0]] * 3


def test_sizes_are_those_of_all_ranks_but_for_the_rows_of_a_table(three_ranks: list[Found]) -> None:
    expected = sizes()
    every = [of_rank["sizes"] for of_rank in three_ranks]
    assert len(expected["empty"]) == 1
    assert expected["capacity"]
    for rank, of_rank in enumerate(every):
        for what in ("rows", "windows", "empty", "capacity"):
            assert of_rank[what] == expected[what], what
        assert all(f"on rank {rank} of 3" in text for text in of_rank["shown"])
        assert of_rank["served"] == [(f'rank="{rank}",', str(of_rank["here"]["user"]))]
    assert expected["served"] == [("", str(expected["here"]["user"]))]
    here = {table: sum(of_rank["here"][table] for of_rank in every) for table in expected["here"]}
    assert here == expected["here"] == expected["rows"]
