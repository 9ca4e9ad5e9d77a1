# SPDX-License-Identifier: Apache-2.0
"""What click histories add on MIND's impressions of news: DNN without them, DIN, DIEN and BST.

The impressions come in the order of time, in parts; each part is predicted, then learned. One JSON
line a network and seed: AUC over all candidates, and MIND's own metric, the mean of the AUC of each
impression; both over the later half. `behaviors.tsv` has MIND's columns, without a header:

    python benchmarks/histories.py ../shared/data/mind/behaviors.tsv
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import nn

import hotbed as hb

COLUMNS = ["impression", "user", "time", "history", "candidates"]
PARTS = 50


def candidates(behaviors: Path) -> pl.DataFrame:
    """Return a row for each news that was shown, in the order of time."""
    shown = pl.read_csv(
        behaviors, separator="\t", has_header=False, new_columns=COLUMNS, quote_char=None
    )
    when = pl.col("time").str.to_datetime("%m/%d/%Y %I:%M:%S %p")
    rows = shown.sort(when).with_columns(pl.col("candidates").str.split(" "))
    pair = pl.col("candidates").str.split("-").list
    return rows.explode("candidates").with_columns(
        news=pair.get(0), clicked=pair.get(1).cast(pl.Int64)
    )


def schema(length: int | None) -> hb.Schema:
    """Return the columns, with the newest `length` news of the history, or without it."""
    columns: list[hb.Label | hb.Id] = [hb.Label("clicked"), hb.Id("news")]
    if length is not None:
        words = [hb.transforms.Split(" ")]  # an absent history is an empty one
        columns.append(
            hb.Id("history", table="news", pooling="none", max_length=length, transforms=words)
        )
    return hb.Schema(columns)


def recmodel(kind: str, arguments: argparse.Namespace, seed: int) -> hb.RecModel:
    """Return a model of the kind, all with the same perceptron."""
    columns = schema(None if kind == "DNN" else arguments.length)
    torch.manual_seed(seed)
    tables = hb.make_tables(
        columns, dim=arguments.dim, rule=hb.Adagrad(lr=arguments.table_lr), seed=seed
    )
    settings = {} if kind == "DNN" else {"histories": {"history": "news"}}
    network: nn.Module = getattr(hb.models, kind)(
        columns, tables, hidden=[64, 32], activation="relu", **settings
    )
    return hb.RecModel(network, "bce", hb.Adam(lr=1e-3))


def measure(rows: pl.DataFrame, model: hb.RecModel, batch_size: int) -> dict[str, float]:
    """Learn part by part, predict each part of the later half before, and return the metrics."""
    source, scores = hb.sources.Memory(rows), []
    for part in range(PARTS):
        piece = source.slice(part / PARTS, (part + 1) / PARTS)
        dataset = hb.Dataset(piece, model.schema, batch_size)
        if part >= PARTS // 2:
            scores.append(model.predict(dataset))
        model.fit(dataset, progress=False)
    scored = np.concatenate(scores)
    later = rows.tail(len(scored))
    clicked, impression = later["clicked"].to_numpy(), later["impression"].to_numpy()
    whole, within = hb.metrics.AUC(), hb.metrics.GAUC()
    whole.update(scored, clicked)
    # weights of an impression that sum to 1: GAUC is then the plain mean over impressions
    share = later.select(1 / pl.len().over("impression")).to_series().to_numpy()
    within.update(scored, clicked, weight=share, group=impression)
    return {"auc": whole.eval(), "impression_auc": within.eval()}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("behaviors", type=Path)
    p.add_argument("--kinds", nargs="*", default=["DNN", "DIN", "BST"], help="DIEN is another")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--length", type=int, default=20, help="newest news of a history")
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--table-lr", type=float, default=0.2)
    p.add_argument("--batch", type=int, default=64)
    arguments = p.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on two
    rows = candidates(arguments.behaviors)
    for kind in arguments.kinds:
        for seed in range(arguments.seeds):
            began = time.process_time()
            metrics = measure(rows, recmodel(kind, arguments, seed), arguments.batch)
            line = {name: round(value, 4) for name, value in metrics.items()}
            seconds = round(time.process_time() - began, 1)
            print(json.dumps({"kind": kind, "seed": seed, **line, "cpu_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
