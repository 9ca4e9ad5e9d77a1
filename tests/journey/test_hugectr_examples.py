# SPDX-License-Identifier: Apache-2.0
"""The HugeCTR examples run from raw files to scores: as notebooks, and as the pipeline of run.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/hugectr"
NAMES = ("criteo", "rees46", "mind")


def code_of(name: str) -> list[str]:
    """Return the code cells of a notebook."""
    notebook = json.loads((EXAMPLES / f"{name}/{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory like the root of the project, without results."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def small(name: str, shared_data: Path, folder: Path) -> Path:
    """Return a part of the real data, in which the examples take seconds."""
    if name == "criteo":
        lines = (shared_data / "criteo/kaggle_head10001.tsv").read_text().splitlines(True)
        path = folder / "train.txt"
        path.write_text("".join(lines[:3000]))
        return path
    if name == "rees46":
        path = folder / "2019-Oct.csv"
        pl.read_csv(shared_data / "rees46/2019-Oct.head.csv").head(6000).write_csv(path)
        return path
    path = folder / "mind"
    path.mkdir()
    lines = (shared_data / "mind/behaviors.tsv").read_text().splitlines(True)
    (path / "behaviors.tsv").write_text("".join(lines[:600]))
    (path / "news.tsv").symlink_to(shared_data / "mind/news.tsv")
    return path


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a Python command in the folder, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("criteo", marks=pytest.mark.soak),
        pytest.param("mind", marks=pytest.mark.soak),
        pytest.param("rees46", marks=pytest.mark.soak),
    ],
)
def test_notebook_runs(name: str, folder: Path, shared_data: Path) -> None:
    (folder / "notebook.py").write_text("\n\n".join(code_of(name)))
    raw = small(name, shared_data, folder)
    output = run(folder, "notebook.py", **{name.upper(): str(raw)})
    assert "'valid.auc'" in output
    assert re.search(r"AUC: 0\.\d+", output)
    results = folder / "runs/hugectr" / name
    assert "<svg" in (results / "notebook.html").read_text()
    assert (results / "notebook_export").is_dir()


@pytest.mark.parametrize("name", NAMES)
def test_notebook_holds_the_hugectr_script(name: str) -> None:
    script = (EXAMPLES / name / "train.py").read_text().split('"""', 2)[2]
    script = script.replace("import hugectr\n", "import hotbed.compat.hugectr as hugectr\n")
    script = script.replace("from hugectr", "from hotbed.compat.hugectr")
    cells = "\n".join(code_of(name))
    assert lines_of(script) == lines_of(cells)[-len(lines_of(script)) :]


def lines_of(code: str) -> list[str]:
    return [line for line in code.splitlines() if line.strip()]


@pytest.mark.soak
def test_pipeline_goes_from_raw_files_to_served_scores(folder: Path, shared_data: Path) -> None:
    raw = small("criteo", shared_data, folder)
    output = run(folder, "examples/hugectr/run.py", "criteo", str(raw))
    assert "served scores are those of training" in output
    report = (folder / "runs/hugectr/criteo/report.html").read_text()
    assert "HugeCTR script: validation auc" in report
    assert "A server answered requests with the trained model." in report
