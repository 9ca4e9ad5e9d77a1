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
import subprocess
import sys
from pathlib import Path

import polars as pl
from serve import ask

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
    facts = {"HugeCTR script: validation auc, of its whole batches": auc}
    numbers = hb.report.add_serving(runs / "report.html", served, facts)
    print("\nserved", *(f"  {value:>9,.4g} {text}" for text, value in numbers.items()), sep="\n")
    print(f"the report: {(runs / 'report.html').absolute().as_uri()}")


def run(*command: object) -> str:
    """Run a Python command; show and return what it prints. End if it fails."""
    words = [str(word) for word in command]
    print("\n$ python", *words, flush=True)
    printed = []
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
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


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
