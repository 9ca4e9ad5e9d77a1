# SPDX-License-Identifier: Apache-2.0
"""`make demo`: train on the MovieLens events that the repository ships, offline and then online; recommend films.

1. `hotbed train examples/movielens.yaml`: a DCNv2 learns the first 80 % of the events (the last tenth of them validates),
   then follows the rest as a stream, as `hotbed online` does: each batch is predicted, then learned, and what was learned
   is kept in checkpoints, so that a stream without end can be killed and started again. Model and report are saved.
2. `examples/recommend.py`: a new process loads the model and ranks the films that a user has not seen.

Arguments are passed on to `hotbed train`: `python examples/demo.py --set fit.epochs=2`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import polars as pl

import hotbed as hb

ROOT = Path(__file__).resolve().parent.parent
JOB = "examples/movielens.yaml"


def main(arguments: list[str]) -> None:
    began = time.perf_counter()
    train = [sys.executable, "-m", "hotbed.cli", "train", JOB, *arguments]
    subprocess.run(train, cwd=ROOT, check=True)
    changes = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    output = changes.get("output", hb.Job.read(ROOT / JOB).output)
    valid, stream = popularity()
    print(
        "for comparison: ranking films by how often they were liked before has AUC "
        f"{valid:.4f} on the validation events and {stream:.4f} on the stream\n"
    )
    recommend = [sys.executable, str(ROOT / "examples" / "recommend.py"), output]
    subprocess.run(recommend, cwd=ROOT, check=True)
    print(f"\nthe report: {(ROOT / output / 'report.html').as_uri()}")
    print(f"all of it took {time.perf_counter() - began:.0f} s")


def popularity() -> list[float]:
    """AUC of the number of likes that a film had had before: on 72 % to 80 % of the events, and on the rest."""
    ratings = pl.read_csv(ROOT / "data/ml_latest_small/ratings.csv").sort("timestamp", maintain_order=True)
    liked = (pl.col("rating") >= 4).cast(pl.Float64)
    before = (liked.cum_sum() - liked).over(ratings["movieId"])
    events = ratings.select(liked=liked, before=before)
    result = []
    for start, stop in ((0.72, 0.8), (0.8, 1.0)):
        part = events[int(start * len(events)) : int(stop * len(events))]
        auc = hb.metrics.AUC()
        auc.update(part["before"].to_numpy(), part["liked"].to_numpy())
        result.append(auc.eval())
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
