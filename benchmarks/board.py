# SPDX-License-Identifier: Apache-2.0
"""The board: all ranking models on logs in the order of time, beside FuxiCTR's layers.

Each batch is scored before it is learned, in one pass. One setting serves all models and logs, that
of the drafts of `hotbed init`: dim 16, Adagrad 0.05 for the tables, Adam 1e-3 for the network,
hidden layers of 128 and 64, two layers where a model has layers of its own. The first 1,000 rows
are learned without being counted; their share of positives is the bias that each model begins with.

Appends one JSON line a log, model and seed to `--out`, and skips the lines that it has, so that it
may be stopped at any time. `board_page.py` makes the tables and the picture of docs/accuracy.md.
The rows of FuxiCTR need its package (`pip install fuxictr==2.3.10`) and its repository.

    git clone https://github.com/reczoo/FuxiCTR
    python benchmarks/board.py --data DIR --out board.jsonl --fuxictr FuxiCTR
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from board_logs import LOGS, Log
from numpy.typing import NDArray
from torch import nn

import hotbed as hb
from hotbed.metrics import AUC, LogLoss
from hotbed.metrics.baselines import PRIOR_ROWS

Floats = NDArray[np.float64]
Network = Callable[..., nn.Module]

HIDDEN = (128, 64)
KEPT_COUNTS = ("counts", "user_counts")
PARTS = 50
"""Times that the calibration is fitted anew."""


@dataclass(frozen=True)
class Entry:
    """One line of the board.

    Attributes:
        network: makes the network from schema and tables.
        pooling: of the history of the rows; None: it is not read. With "none" the network gets
            `histories`.
        admit: of the tables.
        kept: the columns that the model keeps itself, of `Log.kept`.
    """

    network: Network
    pooling: str | None = None
    admit: Any = None
    kept: Sequence[str] = ()

    def histories(self, log: Log) -> list[dict[str, str]]:
        """Return each history that the network weighs, with its target."""
        names = [column.name for column in log.kept if isinstance(column, hb.History)]
        names = [name for name in names if name in self.kept]
        if self.pooling == "none" and log.history is not None:
            names.append(log.history.name)
        return [{name: log.item} for name in names]


class Scores:
    """A callback that keeps the score of each sample before it was learned, in their order."""

    def __init__(self) -> None:
        self.parts: list[Floats] = []

    def on_predicted(self, run: Any) -> None:
        if self not in run.observer.watchers:
            run.observer.watchers.append(self)

    def watch(self, outputs: Any, example: Any) -> None:
        _, prediction, _ = outputs
        self.parts.append(np.array(prediction, np.float64))


def own(kind: str, **settings: Any) -> Network:
    """Return the maker of a model of `hb.models`."""
    return partial(getattr(hb.models, kind), **settings)


def peer(network: str, **settings: Any) -> Network:
    """Return the maker of a network of FuxiCTR's layers, which are imported when it is made."""

    def make(*arguments: Any, **more: Any) -> nn.Module:
        import board_peers

        made: nn.Module = getattr(board_peers, network)(*arguments, **settings, **more)
        return made

    return make


MODELS = {
    "LR": Entry(own("LR")),
    "FM": Entry(own("FM")),
    "DNN": Entry(own("DNN", hidden=HIDDEN)),
    "WideDeep": Entry(own("WideDeep", hidden=HIDDEN)),
    "DeepFM": Entry(own("DeepFM", hidden=HIDDEN)),
    "DCN": Entry(own("DCN", num_cross_layers=2, hidden=HIDDEN)),
    "DCNv2": Entry(own("DCNv2", num_cross_layers=2, hidden=HIDDEN)),
    "DLRM": Entry(own("DLRM", bottom=(64,), hidden=HIDDEN)),
    "AutoInt": Entry(own("AutoInt", num_layers=2, width=16, hidden=HIDDEN)),
    "MaskNet": Entry(own("MaskNet", num_blocks=2, hidden=HIDDEN)),
    "FinalMLP": Entry(own("FinalMLP", hidden=HIDDEN)),
    "QNN": Entry(own("QNN", num_layers=2)),
    "RankMixer": Entry(own("RankMixer", part_width=4)),
}
PEERS = {
    "FuxiCTR DNN": Entry(peer("Crossed", hidden=HIDDEN)),
    "FuxiCTR DeepFM": Entry(peer("DeepFM", hidden=HIDDEN)),
    "FuxiCTR DCN": Entry(peer("Crossed", kind="DCN", num_crosses=2, hidden=HIDDEN)),
    "FuxiCTR DCNv2": Entry(peer("Crossed", kind="DCNv2", num_crosses=2, hidden=HIDDEN)),
    "FuxiCTR DLRM": Entry(peer("DLRM", bottom=(64,), hidden=HIDDEN)),
    "FuxiCTR AutoInt": Entry(peer("AutoInt", num_layers=2, width=16, hidden=HIDDEN)),
    "FuxiCTR MaskNet": Entry(peer("MaskNet", num_blocks=2, hidden=HIDDEN)),
    "FuxiCTR FinalMLP": Entry(peer("FinalMLP", hidden=HIDDEN)),
    "FuxiCTR QNN": Entry(peer("QNN", num_layers=2)),
}
ADMISSIONS = {"DCNv2, ids seen twice": Entry(MODELS["DCNv2"].network, admit=hb.MinCount(2))}
DECAY = own("DIN", attention="decay", hidden=HIDDEN, activation="relu")
DOT = own("DIN", attention="dot", hidden=HIDDEN, activation="relu")
HISTORIES = {
    "DNN, mean of history": Entry(own("DNN", hidden=HIDDEN), "mean"),
    "DIN decay": Entry(DECAY, "none"),
    "DIN dot": Entry(DOT, "none"),
    "DIN": Entry(own("DIN", hidden=HIDDEN, activation="relu"), "none"),
    "FuxiCTR DIN": Entry(peer("DIN", hidden=HIDDEN), "none"),
    "BST": Entry(own("BST", hidden=HIDDEN), "none"),
    "DIEN": Entry(own("DIEN", hidden=HIDDEN, activation="relu"), "none"),
}
KEPT = {
    "DNN, counts of the item": Entry(own("DNN", hidden=HIDDEN), kept=["counts"]),
    "DNN, counts of item and user": Entry(own("DNN", hidden=HIDDEN), kept=KEPT_COUNTS),
    "DIN decay, kept history": Entry(DECAY, kept=["before"]),
    "DIN dot, kept history": Entry(DOT, kept=["before"]),
    "DIN decay, long kept history": Entry(DECAY, kept=["long_before"]),
    "DIN dot, long kept history": Entry(DOT, kept=["long_before"]),
    "DIN decay, kept history and counts": Entry(DECAY, kept=["before", *KEPT_COUNTS]),
    "DIN dot, kept history and counts": Entry(DOT, kept=["before", *KEPT_COUNTS]),
}
ENTRIES = {**MODELS, **PEERS, **ADMISSIONS, **HISTORIES, **KEPT}
BASELINES = ("constant", "popularity")


def batch_size(num_rows: int) -> int:
    """Return a hundredth of the rows as a power of two from 128 to 1024, as drafts have it."""
    return min(max(128, 2 ** math.floor(math.log2(max(num_rows, 200) / 100))), 1024)


def encoded(log: Log, rows: Any, entry: Entry) -> tuple[hb.Schema, list[hb.Batch]]:
    """Return schema and batches; numbers are normalized by the first rows, which begin a batch."""
    first = hb.sources.Memory(rows[: log.num_first])
    rest = hb.sources.Memory(rows[log.num_first :])
    schema = log.schema(entry.pooling, entry.kept).fit(first)
    size = batch_size(len(rows))
    return schema, [*hb.Dataset(first, schema, size), *hb.Dataset(rest, schema, size)]


def scores_of(
    entry: Entry, log: Log, schema: hb.Schema, batches: Iterable[hb.Batch], rate: float, seed: int
) -> tuple[Floats, int]:
    """Return the score of each row before it was learned, and the rows of all tables at the end.

    `rate`: the share of positives that the model begins with.
    """
    torch.manual_seed(seed)
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05), admit=entry.admit, seed=seed)
    histories = entry.histories(log)
    settings = {"histories": histories} if histories else {}
    network = entry.network(schema, tables, **settings)
    hb.models.set_base_rate(network, rate)
    scores = Scores()
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3))
    model.fit(batches, callbacks=[scores], progressive=True, progress=False)
    return np.concatenate(scores.parts), sum(map(len, model.tables.values()))


def baseline_scores(name: str, log: Log, rows: Any, labels: Floats) -> Floats:
    """Return what a baseline predicts from the rows of earlier batches."""
    items = rows[log.item].to_list()
    rates: dict[Any, list[float]] = {}
    scores = np.empty(len(labels))
    begins = [0, *range(log.num_first, len(labels), batch_size(len(labels))), len(labels)]
    for begin, end in itertools.pairwise(begins):
        mean = mean_before(labels[:begin])
        for row in range(begin, end):
            clicks, shown = rates.get(items[row], (0.0, 0.0))
            scores[row] = (clicks + PRIOR_ROWS * mean) / (shown + PRIOR_ROWS)
        if name == "constant":
            scores[begin:end] = mean
        for row in range(begin, end):
            counts = rates.setdefault(items[row], [0.0, 0.0])
            counts[0] += labels[row]
            counts[1] += 1.0
    return scores


def mean_before(labels: Floats) -> float:
    """Return the share of positives, never 0 or 1."""
    return float((labels.sum() + 0.5) / (len(labels) + 1.0))


def calibrated(scores: Floats, labels: Floats) -> Floats:
    """Return scores after Platt's scaling, fitted before each part on all counted rows before it.

    Source: Platt, "Probabilistic Outputs for Support Vector Machines", 1999.
    """
    logits = np.log(np.clip(scores, 1e-7, 1 - 1e-7) / np.clip(1 - scores, 1e-7, 1.0))
    parts = np.array_split(np.arange(len(scores)), PARTS)
    scaled = [scores[parts[0]]]
    weights = np.array([0.0, 1.0])
    for part in parts[1:]:
        before = slice(0, part[0])
        weights = scaling(logits[before], labels[before], weights)
        scaled.append(sigmoid(weights[0] + weights[1] * logits[part]))
    return np.concatenate(scaled)


def sigmoid(logits: Floats) -> Floats:
    """Return probabilities."""
    return 1 / (1 + np.exp(-np.clip(logits, -30, 30)))


def scaling(logits: Floats, labels: Floats, start: Floats) -> Floats:
    """Return bias and slope of the logistic regression on logits, by Newton's steps.

    Ten rows' weight holds the slope near 1 and the bias near 0 while positives are few.
    """
    inputs = np.stack([np.ones_like(logits), logits], 1)
    weights = start
    prior = np.array([0.0, 1.0])
    for _ in range(10):
        rates = sigmoid(inputs @ weights)
        gradient = inputs.T @ (rates - labels) + 10 * (weights - prior)
        curvature = (inputs * (rates * (1 - rates))[:, None]).T @ inputs + 10 * np.eye(2)
        weights = weights - np.linalg.solve(curvature, gradient)
    return weights


def figures(scores: Floats, labels: Floats) -> dict[str, float]:
    """Return AUC and log loss of all rows and of the later half, and log loss after calibration."""
    later = slice(len(labels) // 2, None)
    return {
        "auc": measured_by(AUC(), scores, labels),
        "log_loss": measured_by(LogLoss(), scores, labels),
        "calibrated": measured_by(LogLoss(), calibrated(scores, labels), labels),
        "late_auc": measured_by(AUC(), scores[later], labels[later]),
        "late_log_loss": measured_by(LogLoss(), scores[later], labels[later]),
    }


def measured_by(metric: AUC | LogLoss, scores: Floats, labels: Floats) -> float:
    """Return the value of a new metric over these rows."""
    metric.update(scores, labels)
    return metric.eval()


def work(
    logs: Iterable[str], models: Iterable[str], num_seeds: int
) -> Iterator[tuple[str, str, int]]:
    """Return what is to be measured, seed after seed; baselines have one."""
    for seed in range(num_seeds):
        for name in logs:
            for model in models:
                entry = ENTRIES.get(model)
                if is_for(entry, LOGS[name]) and (seed == 0 or entry is not None):
                    yield name, model, seed


def is_for(entry: Entry | None, log: Log) -> bool:
    """Whether a log has what an entry reads; None, a baseline, reads items and labels alone."""
    if entry is None:
        return True
    has_history = entry.pooling is None or log.history is not None
    return has_history and {*entry.kept} <= {column.name for column in log.kept}


def measured(log: Log, rows: Any, model: str, seed: int, cache: dict[Any, Any]) -> dict[str, Any]:
    """Return the figures of one model, seed and log; `cache`: encoded batches."""
    labels = rows[log.columns[0].name].to_numpy().astype(np.float64)
    began = time.process_time()
    if model in BASELINES:
        scores = baseline_scores(model, log, rows, labels)
        return figures(scores[log.num_first :], labels[log.num_first :])
    entry = ENTRIES[model]
    columns = (entry.pooling, *entry.kept)
    if columns not in cache:
        cache[columns] = encoded(log, rows, entry)
    schema, batches = cache[columns]
    rate = mean_before(labels[: log.num_first])
    scores, num_rows = scores_of(entry, log, schema, batches, rate, seed)
    line: dict[str, Any] = figures(scores[log.num_first :], labels[log.num_first :])
    line["table_rows"] = num_rows
    return {**line, "cpu_s": round(time.process_time() - began, 1)}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; one that is not there has none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_of(line: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return log, model and seed of a line."""
    return line["log"], line["model"], line["seed"]


def main(arguments: list[str] | None = None) -> None:
    names = [*BASELINES, *ENTRIES]
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True, help="folder with a folder for each log")
    p.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    p.add_argument("--only", nargs="+", default=list(LOGS)[:-1], choices=list(LOGS))
    p.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help="default: all")
    p.add_argument("--fuxictr", type=Path, help="its repository; without it, its rows are left out")
    p.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    p.add_argument("--rows", type=int, help="read only the first rows of a log")
    a = p.parse_args(arguments)
    present = {key_of(line) for line in lines_of(a.out)}
    models = a.models or names
    if a.fuxictr is None:
        models = [name for name in models if not name.startswith("FuxiCTR")]
    else:
        sys.path.append(str(a.fuxictr))  # the package stands before it
    name, rows, cache = "", None, {}
    for key in work(a.only, models, a.seeds):
        if key in present:
            continue
        if key[0] != name:
            name = key[0]
            rows, cache = LOGS[name].read(a.data)[: a.rows], {}
        line = measured(LOGS[name], rows, *key[1:], cache)
        whole = {"log": name, "model": key[1], "seed": key[2], "rows": len(rows), **line}
        with a.out.open("a") as file:
            file.write(json.dumps(whole) + "\n")
        print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # networks this small are slower on two
    hb.set_num_threads(1)
    main()
