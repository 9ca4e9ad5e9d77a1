# SPDX-License-Identifier: Apache-2.0
"""What the report shows of segments: a table for each column, and the AUC of each value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotbed.pictures.bars import Bar, bars_figure
from hotbed.pictures.numbers import number_text
from hotbed.pictures.page import grid, section, side_by_side
from hotbed.training.watching.baselines import CONSTANT
from hotbed.training.watching.history import History
from hotbed.training.watching.report_charts import BASELINE_COLORS
from hotbed.training.watching.segments import MODEL, SegmentRow, segment_findings

TEXT = (
    "Values with most rows come first. Calibration is the mean prediction divided by the mean "
    "label: above 1 the model predicts too much."
)
CHANCE = 0.5
MOST_DRAWN = 10


def segments(histories: Mapping[str, History]) -> str:
    """Return the sections of the columns by which histories divide figures."""
    blocks = []
    for name, history in histories.items():
        for column, rows in history.segments.items():
            plain = column.removeprefix("valid.")
            of_part = "validation" if plain != column else name
            text = " ".join([*segment_findings({column: rows}), TEXT])
            body = _table(plain, rows)
            bars = _bars(plain, rows)
            if bars:
                body = f"{body}\n{side_by_side([bars])}"
            blocks.append(section(f"By {plain}, {of_part}", body, text))
    return "\n".join(blocks)


def _table(column: str, rows: Sequence[SegmentRow]) -> str:
    """Return the figures of each value, those of the model beside those of baselines."""
    baselines = list(dict.fromkeys(name for row in rows for name in row.figures if name != MODEL))
    ranked = [MODEL, *(name for name in baselines if name != CONSTANT)]
    cells = [(name, "auc", "AUC") for name in ranked]
    cells += [(name, "log_loss", "log loss") for name in (MODEL, *baselines)]
    cells.append((MODEL, "calibration", "calibration"))
    titles = [text if name == MODEL else f"{text}, {name}" for name, _, text in cells]
    lines = []
    for row in rows:
        numbers = [row.figures.get(name, {}).get(key, "") for name, key, _ in cells]
        lines.append([row.value, f"{row.rows:,}", f"{row.positives:,}", *map(number_text, numbers)])
    return grid([column, "rows", "positives", *titles], lines)


def _bars(column: str, rows: Sequence[SegmentRow]) -> str:
    """Return how far the AUC of each value lies above chance, and that of the best baseline."""
    bars = []
    for row in rows[:MOST_DRAWN]:
        aucs = {name: values.get("auc", math.nan) for name, values in row.figures.items()}
        aucs = {name: auc for name, auc in aucs.items() if math.isfinite(auc)}
        aucs.pop(CONSTANT, None)
        model = aucs.pop(MODEL, None)
        if model is not None:
            bars.append(_bar(row.value, model, 0))
        if model is not None and aucs:
            best = max(aucs, key=lambda name: aucs[name])
            bars.append(_bar(f"{row.value}, {best}", aucs[best], BASELINE_COLORS[0]))
    title = f"AUC by {column}: how far it lies above {CHANCE:g}, which is chance"
    return bars_figure(title, bars, end=CHANCE) if bars else ""


def _bar(name: str, auc: float, color: int) -> Bar:
    return Bar(name, max(auc - CHANCE, 0.0), number_text(auc), color)
