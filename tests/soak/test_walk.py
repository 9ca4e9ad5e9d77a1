# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/walk.md, on the data that the repository ships, print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch absent")

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/walk.md").read_text()
COMMANDS = re.findall(r"^    hotbed (.+)$", PAGE, re.M)


def figures(text: str) -> dict[str, float]:
    """The metrics on a line, by name."""
    pairs = re.findall(r"(validation \w+|loss) ([\d.]+)", text)
    return {name: float(value) for name, value in pairs}


def test_the_walk_prints_what_its_page_says(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    printed: dict[str, str] = {}
    for line in COMMANDS[:5]:  # init, prepare, two trainings, export
        command = [sys.executable, "-m", "hotbed.cli", *shlex.split(line)]
        environment = {**os.environ, "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed[line] = done.stdout
    _, prepare, logistic, deep, export = COMMANDS[:5]
    for count in re.findall(r"^(?:train|valid): [\d,]+$", PAGE, re.M):
        assert count in printed[prepare]
    results = re.findall(r"^train: loss .+$", PAGE, re.M)
    for line, said in zip((logistic, deep), results, strict=True):
        (told,) = re.findall(r"^train: loss .+$", printed[line], re.M)
        assert figures(told) == pytest.approx(figures(said), abs=0.002)
    for said in re.findall(r"^  (?:constant|linear|popularity).+$", PAGE, re.M):
        name = said.split(":")[0]
        (told,) = re.findall(rf"^{name}: .+$", printed[deep], re.M)
        assert figures(told) == pytest.approx(figures(said), abs=0.0005)
    (rows,) = re.findall(r"(\d+,\d+) rows, [\d,]+ bytes", printed[export])
    assert f"{rows} rows" in PAGE
