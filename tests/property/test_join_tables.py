# SPDX-License-Identifier: Apache-2.0
"""Policies of tables and metrics count an impression once, however many samples a rule makes of it:
compared with dicts over the samples that were learned.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import ranks_of

import hotbed as hb
from hotbed.embedding.table import Answer, Question, Step
from hotbed.testing import FakeStream

HALF_LIFE = 40.0
ADMITTED = 3
TABLES = {
    "lfu": {"evict": hb.Lfu(10**6)},
    "score": {"evict": hb.Lfu(10**6, half_life_seconds=HALF_LIFE)},
    "steps": {"evict": hb.Ttl(steps=10**6)},
    "age": {"evict": hb.Ttl(seconds=10**6)},
    "wait": {"admit": hb.MinCount(ADMITTED)},
    "batch": {"admit": hb.MinCount(ADMITTED, once_a_batch=True), "evict": hb.Lfu(10**6)},
}
SCHEMA = hb.Schema(
    [
        *(hb.Label(name) for name in ("click", "buy")),
        hb.Time("time", unit="s"),
        *(hb.Id(name, column="key") for name in TABLES),
        hb.Id("n"),
    ]
)


class TwoLabels(torch.nn.Module):
    """A logistic regression for each label."""

    def __init__(self, tables: dict[str, hb.Table]) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(SCHEMA, tables)
        self.heads = torch.nn.Linear(self.embeddings.output_dim, 2)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        logits = self.heads(self.embeddings.flat(batch))
        return {"click": logits[:, 0], "buy": logits[:, 1]}


class Seen:
    """What was learned: the impressions of each step, and their keys and times."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int]]] = []

    def on_step_end(self, run: Any) -> None:
        batch = run.example.batch
        columns = (batch.ids["n"].values, batch.ids["lfu"].values, batch.time)
        self.steps.append(list(zip(*(np.asarray(c).tolist() for c in columns), strict=True)))


WINDOWS = {"click": 9, "buy": 40}


def stream(seed: int) -> Any:
    """A join of few keys, of which each click and purchase comes in a turn of its own."""
    impressions, outcomes = events(seed)
    kinds: dict[str, Any] = {}
    for label, (rows, size) in outcomes.items():
        source = FakeStream(rows, then=size, ends=True)
        kinds[label] = hb.sources.Outcome(source, WINDOWS[label])
    shown = FakeStream(impressions, then=7, ends=True)
    return hb.sources.Join(shown, kinds, on="n", unit="s", rule=hb.sources.AsTheyCome())


def nested(source: Any, nesting: str) -> Any:
    """A join that is not the outermost source."""
    if nesting == "side table":
        return source.join(hb.sources.Memory({"key": range(31), "side": range(31)}), on="key")
    if nesting == "after files":
        before = {"n": [900, 901], "key": [1, 2], "time": [0, 0], "click": [0.0, 1.0]}
        return hb.sources.Concat([hb.sources.Memory({**before, "buy": [1.0, 0.0]}), source])
    return source


def events(seed: int) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], int]]]:
    """Impressions; and outcomes of each label, with the size of their turns."""
    draw = random.Random(seed)
    times = sorted(draw.randrange(150) for _ in range(120))
    keys = [draw.randrange(30) for _ in times]
    # what comes last closes the windows of the others
    shown = {"n": range(121), "key": [*keys, 0], "time": [*times, 400]}
    outcomes: dict[str, tuple[dict[str, Any], int]] = {}
    for label, window in WINDOWS.items():
        chosen = [n for n in range(120) if draw.random() < 0.5]
        at = {n: times[n] + draw.randint(0, window + 3) for n in chosen}
        chosen.sort(key=at.__getitem__)
        rows = {"n": [*chosen, 999], "time": [*(at[n] for n in chosen), 400]}
        outcomes[label] = (rows, draw.randint(1, 5))
    return shown, outcomes


def trained(
    seed: int,
    ahead: int,
    grains: int,
    callbacks: list[Any],
    max_steps: int | None = None,
    nesting: str = "alone",
) -> Any:
    """Learn a join; return the model."""
    torch.manual_seed(0)
    rule = hb.Adagrad(lr=0.1)
    tables = {name: hb.Table(name, 2, rule=rule, **keywords) for name, keywords in TABLES.items()}
    network = TwoLabels({**tables, "n": hb.Table("n", 2, rule=rule)})
    loss = {label: hb.losses.BCE(missing_below=0) for label in WINDOWS}
    model = hb.RecModel(network, loss, "adam", {"auc"}, grains=grains)
    data: Any = hb.Dataset(nested(stream(seed), nesting), SCHEMA, 16)
    if ahead:
        data = hb.Ahead(data, depth=ahead, torch_threads=1 if grains == 1 else None)
    model.online_train(data, callbacks, max_steps=max_steps, progress=False)
    return model


def learn(seed: int, ahead: int, grains: int) -> tuple[list[Any], dict[str, Any]]:
    """Learn a join; return the samples of each step, and what the tables keep of each id."""
    seen = Seen()
    model = trained(seed, ahead, grains, [seen])
    kept: dict[str, Any] = {}
    for name in TABLES:
        table = model.tables[name]
        columns = ("id", "count", "score", "last_seen")
        rows = [row for batch in table.export() for row in batch.to_pylist()]
        kept[name] = {row["id"]: [row.get(column) for column in columns] for row in rows}
        waiting = [row for batch in table.candidates() for row in batch.to_pylist()]
        kept[f"{name} waits"] = {row["id"]: row["count"] for row in waiting}
    return seen.steps, kept


def check(steps: list[Any], kept: dict[str, Any]) -> None:
    """Compare what tables keep with dicts over the samples of each step."""
    count: dict[int, int] = defaultdict(int)
    batches: dict[int, int] = defaultdict(int)
    mass: dict[int, float] = defaultdict(float)
    last_step: dict[int, int] = {}
    last_time: dict[int, int] = {}
    known: set[int] = set()
    for step, samples in enumerate(steps, 1):
        new = {n: (key, time) for n, key, time in samples if n not in known}
        known |= new.keys()
        for key, time in new.values():
            count[key] += 1
            mass[key] += 2 ** (time / 1e6 / HALF_LIFE)
            last_step[key] = step
            last_time[key] = max(last_time.get(key, 0), time)
        for key in {key for key, _ in new.values()}:
            batches[key] += 1
    num_samples = sum(map(len, steps))
    assert num_samples > 1.5 * len(known), "the rule made one sample an impression"
    assert {id: row[1] for id, row in kept["lfu"].items()} == count
    assert kept["score"].keys() == count.keys()
    for id, row in kept["score"].items():
        assert row[2] == pytest.approx(math.log2(mass[id]))
    assert {id: row[3] for id, row in kept["steps"].items()} == last_step
    assert {id: row[3] for id, row in kept["age"].items()} == last_time
    for name, counts in (("wait", count), ("batch", batches)):
        waiting = {id: number for id, number in counts.items() if number < ADMITTED}
        assert kept[f"{name} waits"] == waiting
        assert kept[name].keys() == counts.keys() - waiting.keys()
        assert waiting, "no id waits"


@pytest.mark.parametrize(("ahead", "grains"), [(0, 1), (3, 2)])
def test_policies_count_an_impression_of_several_samples_once(ahead: int, grains: int) -> None:
    check(*learn(ahead + grains, ahead, grains))


def rows_of(table: hb.Table) -> list[Any]:
    every = [*table.export(), *table.candidates()]
    return [row for batch in every for row in batch.drop_columns(["partition"]).to_pylist()]


@pytest.mark.parametrize("policies", TABLES.values(), ids=[*TABLES])
def test_an_owner_counts_what_two_processes_count(policies: dict[str, Any]) -> None:
    """The samples that do not count are known to the process that asks for their ids."""
    draw = np.random.default_rng(0)
    here, owner = (hb.Table("ids", 2, **policies) for _ in range(2))
    for _ in range(6):
        ids = draw.integers(0, 40, 32)
        times = draw.integers(0, 10**8, 32)
        counted = draw.random(32) < 0.6
        step = Step([here.native], [(0, "none")], [16, 32])
        step.mark(counted.ctypes.data)
        step.map([(ids.ctypes.data, 32, 0, 0, 32)], times.ctypes.data, training=True)
        asked, words = [], []
        for first in (0, 16):
            front = Question([owner.native], [(0, "none")], [16])
            front.mark(counted[first:].ctypes.data)
            addresses = (ids[first:].ctypes.data, 16, 0, 0, 16)
            front.find([addresses], times[first:].ctypes.data)
            (counts,) = front.ask(np.zeros(256, np.uint8), 1)
            words.append(np.zeros(front.num_words(counts, timed=True), np.int64))
            front.write_asked(words[-1].ctypes.data)
            asked.append((counts, words[-1].ctypes.data))
        answer = Answer([owner.native])
        answer.mark()
        answer.map(asked, timed=True, training=True, num_rows=[], logs=False)
        assert rows_of(owner) == rows_of(here)
    assert rows_of(owner)


@pytest.mark.soak
def test_policies_count_an_impression_once_on_two_ranks() -> None:
    (steps, kept), (_, other) = ranks_of(learn, 2, 1, 0, 2)
    kept = {name: {**kept[name], **other[name]} for name in kept}
    check(steps, kept)


class ScoresBefore:
    """What the network predicts for each impression, by its number, before the next step."""

    def __init__(self) -> None:
        self.scores: dict[int, dict[str, float]] = {}

    def on_step_begin(self, run: Any) -> None:
        previews = run.example.batch.previews
        if previews is None:
            return
        network = run.learner.network
        network.eval()
        with torch.no_grad():
            logits = network(previews.map_arrays(torch.from_numpy))
        network.train()
        for row, n in enumerate(previews.ids["n"].values.tolist()):
            assert n not in self.scores, "an impression was handed out twice"
            self.scores[n] = {name: float(value[row].sigmoid()) for name, value in logits.items()}


def final_labels(seed: int) -> dict[int, dict[str, float]]:
    """The labels of each impression, by loops over all events."""
    shown, outcomes = events(seed)
    labels: dict[int, dict[str, float]] = {}
    for n, time in zip(range(120), shown["time"], strict=False):
        labels[n] = {}
        for label, window in WINDOWS.items():
            rows, _ = outcomes[label]
            happened = [t for m, t in zip(rows["n"], rows["time"], strict=True) if m == n]
            labels[n][label] = float(any(time <= t <= time + window for t in happened))
    return labels


def shown_metrics(seed: int, scores: dict[int, dict[str, float]]) -> dict[str, float]:
    """AUC and log loss of each label, each impression once."""
    found: dict[str, float] = {}
    for label in WINDOWS:
        final = final_labels(seed)
        predicted = np.array([scores[n][label] for n in final], np.float32)
        labels = np.array([told[label] for told in final.values()], np.float32)
        for name in ("auc", "log_loss"):
            metric: Any = hb.metrics.bounded(hb.metrics.get_metric(name))
            metric.update(predicted, labels)
            found[f"{label}.{name}"] = metric.eval()
    return found


@pytest.mark.parametrize(("ahead", "grains"), [pytest.param(0, 1, marks=pytest.mark.soak), (3, 2)])
def test_metrics_of_shown_impressions_are_of_final_labels_and_change_no_bit(
    ahead: int, grains: int, tmp_path: Any
) -> None:
    seed = 7
    windows = [hb.callbacks.Windows(samples=10**6, scored=how) for how in ("shown", "learned")]
    before = ScoresBefore()
    model = trained(seed, ahead, grains, [*windows, before])
    (point,) = windows[0].points
    assert len(before.scores) == 121
    for name, value in shown_metrics(seed, before.scores).items():
        assert point.values[name] == pytest.approx(value, abs=1e-6), name
    (provisional,) = windows[1].points
    assert provisional.values["click.auc"] != point.values["click.auc"]
    plain = trained(seed, ahead, grains, [])
    weights = plain.network.state_dict()["heads.weight"]
    assert torch.equal(model.network.state_dict()["heads.weight"], weights)
    for stop in (4, 9, None):  # in lives that end in the middle
        shown = hb.callbacks.Windows(samples=10**6, scored="shown")
        checkpoint = hb.callbacks.Checkpoint(tmp_path, every_steps=3, wait=True)
        trained(seed, ahead, grains, [shown, checkpoint], stop)
    (resumed,) = shown.points
    assert resumed.values == point.values


@pytest.mark.parametrize("nesting", ["side table", "after files"])
def test_metrics_of_shown_impressions_do_not_depend_on_the_sources_over_a_join(
    nesting: str,
) -> None:
    shown = hb.callbacks.Windows(samples=10**6, scored="shown")
    before = ScoresBefore()
    trained(7, 0, 1, [shown, before], nesting=nesting)
    (point,) = shown.points
    for name, value in shown_metrics(7, before.scores).items():
        assert point.values[name] == pytest.approx(value, abs=1e-6), name


def test_metrics_of_shown_impressions_need_a_join_of_streams() -> None:
    rows = {"y": [0, 1], "time": [1, 2], "user": [1, 2]}
    schema = hb.Schema([hb.Label("y"), hb.Time("time", unit="s"), hb.Id("user")])
    for source, message in (
        (hb.sources.Memory(rows), "impressions of a join of streams, got Dataset that ends"),
        (FakeStream(rows, ends=True), "needs the impressions of a join, got data without"),
    ):
        model = hb.RecModel(hb.models.LR(schema, hb.make_tables(schema, 1)), "bce", "adam")
        shown = hb.callbacks.Windows(seconds=60, scored="shown")
        with pytest.raises(hb.errors.ConfigError, match=message):
            model.online_train(hb.Dataset(source, schema, 1), [shown], progress=False)
