# SPDX-License-Identifier: Apache-2.0
"""The board of benchmarks/board.py, on the first rows of the shipped ratings."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODELS = ["popularity", "LR", "DIN dot"]
NUM_ROWS = 320

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the script."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("board")


def scored(board: ModuleType, model: str, rows: pl.DataFrame) -> Any:
    """Return the score of each row."""
    log = board.LOGS["ml-latest-small"]
    labels = rows["liked"].to_numpy().astype(np.float64)
    if model in board.BASELINES:
        return board.baseline_scores(model, log, rows, labels)
    entry = board.ENTRIES[model]
    schema, batches = board.encoded(log, rows, entry)
    return board.scores_of(entry, log, schema, batches, 0.5, 0)[0]


@pytest.mark.parametrize("model", MODELS)
def test_board_scores_each_batch_before_it_learns_its_labels(
    board: ModuleType, shipped_data: Path, model: str
) -> None:
    rows = board.LOGS["ml-latest-small"].read(shipped_data)[:NUM_ROWS]
    begin, end = 50 + 128, 50 + 2 * 128  # of the second batch that is counted
    row = pl.int_range(pl.len())
    other = rows.with_columns(
        liked=pl.when(row >= begin).then(1 - pl.col("liked")).otherwise("liked")
    )
    scores, changed = scored(board, model, rows), scored(board, model, other)
    assert len(scores) == NUM_ROWS
    assert (scores[:end] == changed[:end]).all()
    assert (scores[end:] != changed[end:]).any()


def test_board_skips_the_lines_that_it_has(
    board: ModuleType, shipped_data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "board.jsonl"
    arguments = ["--data", str(shipped_data), "--out", str(path), "--only", "ml-latest-small"]
    arguments += ["--seeds", "2", "--rows", str(NUM_ROWS), "--models", *MODELS]
    board.main(arguments)
    lines = path.read_text().splitlines()
    keys = [board.key_of(json.loads(line)) for line in lines]
    assert len(keys) == len(set(keys)) == 5  # of popularity one, which has no seed
    path.write_text("\n".join(lines[:-1]) + "\n")
    board.main(arguments)
    figures = [json.loads(line) for line in (lines[-1], path.read_text().splitlines()[-1])]
    for line in figures:
        del line["cpu_s"]
    assert figures[0] == figures[1]
    assert len(path.read_text().splitlines()) == len(lines)


def test_history_of_the_board_holds_choices_of_earlier_moments_alone(board: ModuleType) -> None:
    rows = pl.DataFrame(
        {
            "user": [1, 1, 2, 1, 1, 1],
            "item": [10, 11, 12, 13, 14, 15],
            "time": [0, 0, 0, 5, 5, 9],
            "chosen": [1, 1, 1, 0, 1, 0],
        }
    )
    logs = importlib.import_module("board_logs")
    earlier = logs.with_earlier(rows, "user", "item", "time", "chosen")["earlier"].to_list()
    assert earlier == [[], [], [], [10, 11], [10, 11], [10, 11, 14]]


def test_kept_columns_show_nothing_of_shuffled_labels(
    board: ModuleType, shipped_data: Path
) -> None:
    shuffled = importlib.import_module("kept").shuffled
    line = shuffled("ml-latest-small", shipped_data, seed=0, num_rows=6000)
    assert len(line["kept"]) == 4
    assert line["standard_error"] < 0.01
    assert abs(line["deviations"]) < 4
