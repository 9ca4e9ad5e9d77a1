# SPDX-License-Identifier: Apache-2.0
"""What each `amp_level` and `compile` really does: the demo's DCNv2 on its training events, one at
a time.

One JSON line a level: samples/s (median) of the epochs after the first, seconds that the first
epoch took longer (compilation), AUC and log loss of the validation events, the largest difference
of a prediction from O0's after the first step, and the levels that come to the same thing here. Run
it on a quiet machine:

    python benchmarks/levels.py --epochs 3 --batch 1024
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotbed as hb
from hotbed.optim.precision import precision

ROOT = Path(__file__).resolve().parent.parent
COMPILES = {
    "plain": None,
    "default": hb.Compile(),
    "max-autotune-no-cudagraphs": hb.Compile("max-autotune-no-cudagraphs"),
}
LEVELS = [
    *((level, "plain") for level in ("O0", "O1", "O2", "O3", "auto")),
    *(("O0", mode) for mode in COMPILES if mode != "plain"),
]


def measure(
    job: hb.Job, levels: tuple[str, str], arguments: argparse.Namespace, plain: np.ndarray | None
) -> Any:
    """One line of the table, and the predictions after the first step."""
    torch.compiler.reset()
    model = job.rec_model(job.schema)
    given = {"metrics": {"auc", "log_loss"}, "amp_level": levels[0]}
    model = hb.RecModel(
        model.network, "bce", hb.Adam(lr=3e-3), compile=COMPILES[levels[1]], **given
    )
    torch.set_num_threads(arguments.threads)  # the job has its own
    train = hb.Dataset(job.train, job.schema, arguments.batch, seed=arguments.seed, cache=True)
    valid = hb.Dataset(job.valid, job.schema, 4096, cache=True)
    model.fit([next(iter(train))], progress=False)
    first = model.predict(valid)
    seconds = []
    for _ in range(arguments.epochs + 1):
        began = time.perf_counter()
        model.fit(train, progress=False)
        seconds.append(time.perf_counter() - began)
    steady = statistics.median(seconds[1:])
    scores, rows = model.evaluate(valid), job.train.count_rows()
    line = {
        "amp_level": levels[0],
        "compile": levels[1],
        "samples_per_s": round(rows / steady),
        "slowest_to_fastest": [round(rows / max(seconds[1:])), round(rows / min(seconds[1:]))],
        "first_epoch_extra_s": round(seconds[0] - steady, 2),
        "auc": round(scores["auc"], 4),
        "log_loss": round(scores["log_loss"], 4),
        "prediction_max_difference": 0.0
        if plain is None
        else float(f"{np.abs(first - plain).max():.2g}"),
    }
    return line, first


def same_as(
    levels: tuple[str, str], seen: list[tuple[str, str]], device: torch.device
) -> str | None:
    """The level before this one that means the same on this device."""
    meaning = (precision(levels[0], device), levels[1])
    for other in seen:
        if (precision(other[0], device), other[1]) == meaning:
            return f"amp {other[0]}, {other[1]}"
    return None


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--epochs", type=int, default=3, help="epochs that are timed, after one that is not"
    )
    p.add_argument("--batch", type=int, default=1024)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", default="", help="such as O2/plain: this beside O0/plain")
    arguments = p.parse_args()
    logging.disable(logging.INFO)
    # each level compiles, whatever ran before
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    hb.set_num_threads(arguments.threads)
    job = hb.Job.read(ROOT / "examples/movielens.yaml")
    chosen = [
        levels
        for levels in LEVELS
        if not arguments.only or "/".join(levels) in ("O0/plain", arguments.only)
    ]
    plain: np.ndarray | None = None
    for number, levels in enumerate(chosen):
        line, predictions = measure(job, levels, arguments, plain)
        plain = predictions if plain is None else plain
        same = same_as(levels, chosen[:number], torch.device("cpu"))
        print(json.dumps(line | ({"same_as": same} if same else {})), flush=True)


if __name__ == "__main__":
    main()
