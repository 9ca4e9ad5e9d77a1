# SPDX-License-Identifier: Apache-2.0
"""Untouched drafts of `hotbed init` on eight public logs, beside simple models and LightGBM.

Each file is drafted (with --prepare where it holds events alone), prepared, trained and evaluated
as the commands do it. LightGBM gets the columns of one value from the same encoded rows, ids as its
own categories, with early stopping on the same validation rows.

It needs `pip install lightgbm`. Prints one JSON line a set, and last a table.

    python benchmarks/drafts.py --data DIR --only census,avazu
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import hotbed as hb
from hotbed.job import run
from hotbed.metrics import AUC, LogLoss
from hotbed.yaml_files import parse_value

MIND = ["impression", "user", "time", "clicked", "impressions"]
ROUNDS = 500


def mind(data: Path, folder: Path) -> Path:
    """Write a row for each candidate of MIND, with the time as ISO, as docs/jobs.md shows."""
    rows = pl.read_csv(
        data / "mind/behaviors.tsv", separator="\t", has_header=False, new_columns=MIND
    )
    rows = rows.with_columns(
        pl.col("time").str.to_datetime("%m/%d/%Y %I:%M:%S %p"), pl.col("impressions").str.split(" ")
    ).explode("impressions")
    parts = pl.col("impressions").str.extract_groups(r"^(?<news>.+)-(?<click>[01])$")
    rows = rows.with_columns(parts.alias("parts")).drop("impressions").unnest("parts")
    path = folder / "mind.csv"
    rows.sort("time", maintain_order=True).write_csv(path)
    return path


def grocery(data: Path, folder: Path) -> Path:
    """Write the purchases of a quarter of the users."""
    rows = pl.read_csv(data / "amazon_grocery/train.tsv", separator="\t")
    path = folder / "grocery.csv"
    rows.filter(pl.col("user_id") % 4 == 0).write_csv(path)
    return path


def file(name: str) -> Callable[[Path, Path], Path]:
    """Return a function of data and scratch folder that returns a file as it is."""
    return lambda data, folder: data / name


# set -> its file, and whether it holds events without labels
SETS: Mapping[str, tuple[Callable[[Path, Path], Path], bool]] = {
    "census": (file("census_income_kdd/train.parquet"), False),
    "avazu": (file("avazu/stream_20141021.csv"), False),
    "rees46": (file("rees46/2019-Oct.head.csv"), True),
    "grocery": (grocery, True),
    "mind": (mind, False),
    "obd": (file("obd/bts_men.csv"), False),
    "taobao": (file("taobao_ad/raw_sample_10k.csv"), False),
    "ml-1m": (file("ml1m_u2999/ratings_early.csv"), False),
}


def drafted(path: Path, folder: Path, *, is_events: bool, changes: Mapping[str, Any]) -> hb.Job:
    """Return the drafted job of a file; of events, after its preparation has run."""
    out = folder / "job.yaml"
    if is_events:
        preparation = run.init_preparation(str(path), out)
        hb.prepare.prepare(hb.prepare.Preparation.read(str(preparation)), hb.prepare.Local(1))
    else:
        run.init(str(path), out)
    return hb.Job.read(out, {"output": str(folder / "out"), **changes})


def figures(scores: Any, labels: Any) -> dict[str, float]:
    """Return AUC and log loss."""
    values = {}
    for name, metric in {"auc": AUC(), "log_loss": LogLoss()}.items():
        metric.update(scores, labels)
        values[name] = metric.eval()
    return values


def encoded(job: hb.Job, source: Any) -> tuple[dict[str, Any], Any]:
    """Return the columns of one value of the rows that a job reads, and the labels."""
    schema = job.fitted()
    columns: dict[str, list[Any]] = {}
    labels = []
    for batch in job.dataset(source, schema):
        labels.append(batch.labels[schema.labels[0].name])
        for name, ids in batch.ids.items():
            lengths = ids.lengths()
            if lengths.max(initial=0) <= 1:
                values = np.full(batch.num_samples, -1, np.int64)
                values[lengths == 1] = ids.values
                columns.setdefault(f"id {name}", []).append(values)
        for name, values in batch.dense.items():
            columns.setdefault(name, []).append(np.reshape(values, (batch.num_samples, -1))[:, 0])
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    num_rows = sum(map(len, labels))
    return {n: v for n, v in whole.items() if len(v) == num_rows}, np.concatenate(labels)


def lightgbm_figures(job: hb.Job, metric: str) -> dict[str, float]:
    """Return the figures of LightGBM on the rows and columns of a job."""
    import lightgbm

    train, train_labels = encoded(job, job.train)
    valid, valid_labels = encoded(job, job.valid)
    names = [name for name in train if name in valid]
    matrices = [[], []]
    for name in names:
        columns = (train[name], valid[name])
        if name.startswith("id "):
            kinds = np.unique(columns[0])
            places = [np.searchsorted(kinds, column) for column in columns]
            for number, place in enumerate(places):
                place = np.minimum(place, len(kinds) - 1)
                codes = np.where(kinds[place] == columns[number], place, -1)  # new ids: missing
                matrices[number].append(codes.astype(np.float64))
        else:
            for number, column in enumerate(columns):
                matrices[number].append(column.astype(np.float64))
    features = [np.stack(matrix, 1) for matrix in matrices]
    categories = [number for number, name in enumerate(names) if name.startswith("id ")]
    data = lightgbm.Dataset(features[0], train_labels, categorical_feature=categories)
    evaluated = lightgbm.Dataset(features[1], valid_labels, reference=data)
    settings = {
        "objective": "binary",
        "learning_rate": 0.05,
        "metric": {"auc": "auc", "log_loss": "binary_logloss"}[metric],
        "num_threads": 1,
        "verbosity": -1,
        "seed": 0,
    }
    stop = lightgbm.early_stopping(30, verbose=False)
    model = lightgbm.train(settings, data, ROUNDS, valid_sets=[evaluated], callbacks=[stop])
    return figures(model.predict(features[1]), valid_labels)


def measured(name: str, data: Path, changes: Mapping[str, Any], *, peer: bool) -> dict[str, Any]:
    """Return the figures of the draft, its baselines and LightGBM on one set."""
    path_of, is_events = SETS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job = drafted(path_of(data, folder), folder, is_events=is_events, changes=changes)
        began = time.perf_counter()
        history = run.train(job).histories["train"]
        seconds = time.perf_counter() - began
        evaluated = run.evaluate(job)
        stopped_by = job.callbacks[0]["metric"]
        models = {"draft": evaluated.metrics, **evaluated.baselines}
        if peer:
            models["lightgbm"] = lightgbm_figures(job, stopped_by)
    line: dict[str, Any] = {"set": name, "seconds": round(seconds, 1), "by": stopped_by}
    line["epochs"] = f"{history.kept.epoch} of {len(history.epochs)}" if history.kept else ""
    for model, values in models.items():
        key = "popularity" if model.startswith("popularity") else model
        line[key] = [round(values["auc"], 4), round(values["log_loss"], 4)]
    line["says"] = list(evaluated.findings)
    return line


def table(lines: list[dict[str, Any]]) -> str:
    """Return the figures as a table of Markdown."""
    models = ["draft", "lightgbm", "linear", "popularity", "constant"]
    rows = [f"| AUC / log loss | {' | '.join(models)} | epochs |", "|---" * (len(models) + 2) + "|"]
    for line in lines:
        cells = []
        for model in models:
            auc, log_loss = line.get(model, (float("nan"), float("nan")))
            cells.append(f"{auc:.4f} / {log_loss:.4f}".replace("0.", "."))
        rows.append(f"| {line['set']} | {' | '.join(cells)} | {line['epochs']} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SETS), help="names of sets, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--without-lightgbm", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    changes = {}
    for assignment in arguments.set:
        key, _, value = assignment.partition("=")
        changes[key] = parse_value(value)
    lines = []
    for name in arguments.only.split(","):
        line = measured(name, arguments.data, changes, peer=not arguments.without_lightgbm)
        print(json.dumps(line), flush=True)
        lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()
