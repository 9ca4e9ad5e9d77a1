# SPDX-License-Identifier: Apache-2.0
"""The models of several labels and of retrieval, in the order of time, as `board.py` has it.

Labels: the views of REES46, of which some are followed by a choice (cart or purchase) and fewer by
a purchase within 30 minutes. Beside the models stand two DNNs, each of one label, and FuxiCTR's
layers of MMoE and PLE.

Retrieval: the ratings of at least 4 stars among the first 100,000 of MovieLens 1M. Before a batch
is learned, the films that were rated until then are ordered for each user; recall at 50 is the
share of the batch's films that are among the first 50. A film without an earlier rating counts as
missed. Beside the model stand it without the correction of the softmax, and the films with most
ratings of at least 4 stars.

    python benchmarks/board_tasks.py --data DIR --fuxictr FuxiCTR
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from board import HIDDEN, Entry, Network, batch_size, encoded, mean_before, own, peer, scores_of
from board_logs import LOGS
from board_page import cell_of

import hotbed as hb
from hotbed.metrics import AUC, LogLoss

TASKS = ("chosen", "bought")
BCE = {name: hb.losses.BCE() for name in TASKS}
EXPERTS = {"num_experts": 4, "expert_hidden": (128,), "tower_hidden": (64,)}
LEVELS = {"levels": ((128,),), "tower_hidden": (64,)}
MODELS: Mapping[str, tuple[Network, Any]] = {
    "MMoE": (own("MMoE", **EXPERTS), BCE),
    "PLE": (own("PLE", **LEVELS), BCE),
    "ESMM": (own("ESMM", tasks=TASKS, hidden=HIDDEN), BCE),
    "AITM": (own("AITM", tasks=TASKS, hidden=HIDDEN), hb.losses.MultiTask(BCE, order=TASKS)),
}
PEERS: Mapping[str, tuple[Network, Any]] = {
    "FuxiCTR MMoE": (peer("Experts", kind="MMoE", tasks=TASKS), BCE),
    "FuxiCTR PLE": (peer("Experts", kind="PLE", tasks=TASKS), BCE),
}
USER = ["user_id", "gender", "age", "job", "zip"]
ITEM = ["item_id", "genres"]
NUM_RATINGS = 100_000


def scores_of_tasks(
    kind: tuple[Network, Any], rows: pl.DataFrame, seed: int
) -> dict[str, np.ndarray]:
    """Return the scores of each row before it was learned, by label."""
    log = LOGS["REES46"]
    log = dataclasses.replace(log, columns=[*map(hb.Label, TASKS), *log.columns[1:]])
    network, loss = kind
    schema, batches = encoded(log, rows, Entry(network))
    torch.manual_seed(seed)
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05), seed=seed)
    built = network(schema, tables)
    first = rows[: log.num_first]
    hb.models.set_base_rate(built, {name: mean_before(first[name].to_numpy()) for name in TASKS})
    model = hb.RecModel(built, loss, hb.Adam(lr=1e-3))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in TASKS}
    for batch in batches:
        for name, scores in model.predict(batch).items():
            parts[name].append(scores)
        model.step(batch)
    return {name: np.concatenate(scores).astype(np.float64) for name, scores in parts.items()}


def scores_apart(rows: pl.DataFrame, seed: int) -> dict[str, np.ndarray]:
    """Return the scores of a DNN for each label, which knows nothing of the other one."""
    scores = {}
    for name in TASKS:
        log = LOGS["REES46"]
        log = dataclasses.replace(log, columns=[hb.Label(name), *log.columns[1:]])
        entry = Entry(own("DNN", hidden=HIDDEN))
        schema, batches = encoded(log, rows, entry)
        rate = mean_before(rows[name].to_numpy()[: log.num_first])
        scores[name] = scores_of(entry, log, schema, batches, rate, seed)[0]
    return scores


def recalls(rows: pl.DataFrame, seed: int, *, corrected: bool) -> Iterator[np.ndarray]:
    """Return whether each liked film was among the 50 best of its user, batch by batch."""
    log = LOGS["ML-1M"]
    schema = log.schema()
    torch.manual_seed(seed)
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05), seed=seed)
    network = hb.models.TwoTower(
        schema, tables, user=USER, item=ITEM, corrected=corrected, hidden=HIDDEN
    )
    model = hb.RecModel(network, hb.losses.InBatchSoftmax(), hb.Adam(lr=1e-3))
    towers = {side: network.tower(side).eval() for side in ("user", "item")}
    size = batch_size(len(rows))
    films = rows.unique("item_id", keep="first", maintain_order=True)
    num_known = 0
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        batches = [
            hb.Dataset(hb.sources.Memory(each), schema, len(each))
            for each in (part, films[: max(1, num_known)])
        ]
        [now], [known] = batches
        if num_known > 50:
            with torch.no_grad():
                scores = towers["user"](now) @ towers["item"](known).T
            yield among_best(scores.numpy(), part, films[:num_known])
        model.step(now)
        num_known = rows["item_id"][: begin + size].n_unique()


def among_best(scores: np.ndarray, part: pl.DataFrame, films: pl.DataFrame) -> np.ndarray:
    """Return whether the film of each liked row is one of the 50 with the highest scores.

    `scores`: [rows, films].
    """
    best = films["item_id"].to_numpy()[np.argpartition(-scores, 50, axis=1)[:, :50]]
    is_there = (best == part["item_id"].to_numpy()[:, None]).any(axis=1)
    return is_there[part["liked"].to_numpy() > 0]


def popular(rows: pl.DataFrame) -> Iterator[np.ndarray]:
    """Return what `recalls` does for the films with most likes until then."""
    size = batch_size(len(rows))
    films = rows.unique("item_id", keep="first", maintain_order=True)
    for begin in range(size, len(rows), size):
        likes = rows[:begin].group_by("item_id").agg(pl.col("liked").sum().alias("likes"))
        known = films.join(likes, "item_id", maintain_order="left")
        part = rows[begin : begin + size]
        scores = np.tile(known["likes"].to_numpy(), (len(part), 1))
        yield among_best(scores, part, known)


def print_labels(rows: pl.DataFrame, entries: Mapping[str, Any], num_seeds: int) -> None:
    """Print AUC and log loss of each label by model."""
    num_first = LOGS["REES46"].num_first
    labels = {name: rows[name].to_numpy().astype(np.float64)[num_first:] for name in TASKS}
    print({name: int(values.sum()) for name, values in labels.items()}, "of", len(rows) - num_first)
    for name, scored in entries.items():
        figures: dict[str, list[float]] = {}
        for seed in range(num_seeds):
            for task, scores in scored(rows, seed=seed).items():
                for metric in (AUC(), LogLoss()):
                    metric.update(scores[num_first:], labels[task])
                    kind = f"{task} {type(metric).__name__}"
                    figures.setdefault(kind, []).append(metric.eval())
        cells = [cell_of(values).text() for values in figures.values()]
        print(f"| {name} | {' | '.join(cells)} |", list(figures), flush=True)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True, help="folder with a folder for each log")
    p.add_argument("--fuxictr", type=Path, help="its repository; without it, its rows are left out")
    p.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    a = p.parse_args()
    models = dict(MODELS)
    if a.fuxictr is not None:
        sys.path.append(str(a.fuxictr))
        models |= PEERS
    entries = {name: partial(scores_of_tasks, kind) for name, kind in models.items()}
    print_labels(LOGS["REES46"].read(a.data), {"DNN": scores_apart, **entries}, a.seeds)
    ratings = LOGS["ML-1M"].read(a.data)[:NUM_RATINGS]
    print(f"| popularity | {np.concatenate(list(popular(ratings))).mean():.4f} |", flush=True)
    for name, corrected in (("TwoTower", True), ("TwoTower, corrected=False", False)):
        shares = [
            float(np.concatenate(list(recalls(ratings, seed, corrected=corrected))).mean())
            for seed in range(a.seeds)
        ]
        print(f"| {name} | {cell_of(shares).text()} |", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    hb.set_num_threads(1)
    main()
