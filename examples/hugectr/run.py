# SPDX-License-Identifier: Apache-2.0
"""Run the three HugeCTR pipelines, each from raw files to served scores.

    python examples/hugectr/run.py criteo ../shared/data/criteo/kaggle_head10001.tsv
    python examples/hugectr/run.py rees46 ../shared/data/rees46/2019-Oct.head.csv
    python examples/hugectr/run.py mind ../shared/data/mind

Each is trained twice: as a Hotbed job, and by a script that was written for HugeCTR. The job's model
is exported, served and asked. `runs/hugectr/NAME/report.html` has the pictures. `download.py` fetches
the full data; give their path instead.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import hotbed as hb

CANDIDATES = 100
REQUESTS = 50

# Columns that all candidates of a request share; elsewhere a request is a hundred rows.
TOGETHER = {"mind": ["time", "user"]}
# Columns that depend on earlier rows, as they are when a session begins.
DERIVED = {"rees46": {"since_last": 0.0, "position": 0, "age": 0.0}}


def main(name: str, data: str) -> None:
    scripts = Path("examples/hugectr") / name
    runs = Path("runs/hugectr") / name
    job = str(scripts / "train.yaml")
    preparation = hb.prepare.Preparation.read(scripts / "prepare.yaml")
    shutil.rmtree(runs, ignore_errors=True)
    source = data
    if (scripts / "rows.py").exists():
        source = preparation.source.path
        run(scripts / "rows.py", data, source)
    run("-m", "hotbed.cli", "prepare", scripts / "prepare.yaml", "--set", f"source.path={source}")
    run("-m", "hotbed.cli", "train", job)
    run("-m", "hotbed.cli", "evaluate", job)
    run("-m", "hotbed.cli", "export", job)
    changes = {"source.path": source}
    rows = hb.prepare.Preparation.read(scripts / "prepare.yaml", changes).source
    served = ask(name, runs, requests(name, rows, runs))
    printed = run("-m", "hotbed.compat.hugectr.run", scripts / "train.py")
    auc = float(re.findall(r"AUC: ([\d.]+)", printed)[-1])
    facts = {"HugeCTR script: validation auc": auc}
    numbers = hb.report.add_serving(runs / "report.html", served, facts)
    print("\nserved", *(f"  {value:>9,.4g} {text}" for text, value in numbers.items()), sep="\n")
    print(f"the report: {(runs / 'report.html').absolute().as_uri()}")


def run(*command: object) -> str:
    """Run a Python command; show and return what it prints. End if it fails."""
    words = [str(word) for word in command]
    print("\n$ python", *words, flush=True)
    printed = []
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(printed)


def requests(name: str, source: hb.sources.Source, runs: Path) -> list[pl.DataFrame]:
    """Return the raw columns of the candidates of each request."""
    batches = source.slice(0, REQUESTS * CANDIDATES).read()
    rows = pl.concat([pl.DataFrame(batch) for batch, _ in batches])
    derived = [pl.lit(value).alias(column) for column, value in DERIVED.get(name, {}).items()]
    rows = rows.with_columns(derived)
    if name in TOGETHER:
        groups = rows.partition_by(TOGETHER[name], maintain_order=True)[:REQUESTS]
    else:
        groups = [rows.slice(begin, CANDIDATES) for begin in range(0, len(rows), CANDIDATES)]
    columns = hb.prepare.Workflow(runs / "prepared").raw.raw_columns(labels=False)
    return [group.select(columns) for group in groups]


@contextmanager
def server(name: str, runs: Path) -> Iterator[hb.Client]:
    """Run `hotbed serve` in a process of its own; yield a client when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["serve", f"{name}={runs / 'export'}", "--http-port", str(port), "--grpc-port", "-1"]
    with open(runs / "serve.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "hotbed.cli", *command], stderr=log)
    try:
        with hb.Client(f"http://127.0.0.1:{port}") as client:
            yield ready(client, process)
    finally:
        process.terminate()
        process.wait()


def ready(client: hb.Client, process: subprocess.Popen[bytes]) -> hb.Client:
    """Return the client when its server answers."""
    while process.poll() is None:
        try:
            client.models()
            return client
        except hb.errors.ServingError:
            time.sleep(0.1)
    sys.exit("The server ended before it answered.")


def ask(name: str, runs: Path, asked: list[pl.DataFrame]) -> hb.report.Served:
    """Ask a server all requests; check its scores against those of the trained model."""
    model = hb.load(runs)
    schema = hb.prepare.Workflow(runs / "prepared").raw
    answers, differences = [], []
    with server(name, runs) as client:
        for rows in asked:
            columns: dict[str, Any] = rows.to_dict(as_series=False)
            began = time.perf_counter()
            answer = client.ask(name, columns)
            seconds = time.perf_counter() - began
            answers.append(hb.report.Answer(time.time(), seconds, answer.version))
            expected = model.predict(hb.Dataset(hb.sources.Memory(rows), schema))
            differences.append(np.abs(answer.outputs["prediction"] - expected).max())
    difference = max(differences)
    if difference > 1e-6:
        sys.exit(f"A served score differs from that of training by {difference:.1e}.")
    print(f"{len(answers)} requests; served scores are those of training to {difference:.1e}")
    return hb.report.Served(answers, [])


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
