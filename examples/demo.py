# SPDX-License-Identifier: Apache-2.0
"""`make demo`: train on MovieLens events, offline and then online, serve, and recommend films.

1. `hotbed train examples/movielens.yaml`: a DCNv2 learns the first 80 % of the events; the last
   tenth of them validates. Then it follows the rest as a stream, as `hotbed online` does: each batch
   is predicted, then learned. Checkpoints let a killed run resume, and are published for servers.
2. `examples/serve_and_ask.py`: `hotbed serve` waits for the first version and follows the run, and
   Triton's client asks for scores.
3. `examples/recommend.py`: a new process loads the model and ranks films that a user has not seen.

Arguments are passed on to `hotbed train`: `python examples/demo.py --set fit.epochs=2`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
from serve_and_ask import ask, hotbed, server

import hotbed as hb

ROOT = Path(__file__).resolve().parent.parent
JOB = "examples/movielens.yaml"
SCORES_NOTE = (
    "In these data, the stream's busiest user rates 2,478 films and likes 8 % of them: the model "
    "learns this from batches that hold little else, and the scores for this user fall. The "
    "reference user rates seldom in the stream; these scores move only as far as the model as a "
    "whole does."
)


def main(arguments: list[str]) -> None:
    began = time.perf_counter()
    changes = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    output = ROOT / changes.get("output", hb.Job.read(ROOT / JOB).output)
    published = output / "published"
    shutil.rmtree(published, ignore_errors=True)
    keep = f"checkpoint={{every_seconds: 0.5, publish: {{kind: publish_directory, path: {published}}}}}"
    output.mkdir(parents=True, exist_ok=True)
    with (
        hotbed(["train", JOB, "--restart", "--set", keep, *arguments], cwd=ROOT) as train,
        server(published, output / "serve.log") as address,  # waits for the first version
    ):
        valid, stream = popularity()
        while not (published / "CURRENT").exists() and train.poll() is None:
            time.sleep(0.05)
        if (published / "CURRENT").exists():
            answers, scores = ask(address, until=lambda: train.poll() is not None)
    if train.returncode:
        sys.exit(train.returncode)
    print(
        "for comparison: ranking films by how often they were liked before has AUC "
        f"{valid:.4f} on the validation events and {stream:.4f} on the stream\n"
    )
    versions = [json.loads(path.read_text()) for path in published.glob("*/MANIFEST.json")]
    facts = {"popularity: validation auc": valid, "popularity: stream auc": stream}
    numbers = hb.report.add_serving(
        output / "report.html", hb.report.Served(answers, versions, scores), facts, SCORES_NOTE
    )
    print(
        "served meanwhile",
        *(f"  {value:>9,.4g} {name}" for name, value in numbers.items()),
        sep="\n",
    )
    for user, films in scores.items():
        print(f"scores for {user}, at first and at the end of the stream")
        for title, points in films.items():
            print(f"  {points[0][1]:.3f}  {points[-1][1]:.3f}  {title}")
    print()
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "recommend.py"), str(output)], cwd=ROOT, check=True
    )
    print(f"\nthe report: {(output / 'report.html').as_uri()}")
    print(f"all of it took {time.perf_counter() - began:.0f} s")


def popularity() -> list[float]:
    """Return the AUC of ranking films by their likes so far: on the validation and the stream."""
    ratings = pl.read_csv(ROOT / "data/ml_latest_small/ratings.csv").sort(
        "timestamp", maintain_order=True
    )
    liked = (pl.col("rating") >= 4).cast(pl.Float64)
    before = (liked.cum_sum() - liked).over(ratings["movieId"])
    events = ratings.select(liked=liked, before=before)
    values = []
    for start, stop in ((0.72, 0.8), (0.8, 1.0)):
        part = events[int(start * len(events)) : int(stop * len(events))]
        auc = hb.metrics.AUC()
        auc.update(part["before"].to_numpy(), part["liked"].to_numpy())
        values.append(auc.eval())
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
