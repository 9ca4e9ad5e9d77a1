# SPDX-License-Identifier: Apache-2.0
"""Predictions and labels of a batch as text, as HugeCTR exports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotbed.data.batch import Batch
from hotbed.parallel.world import rank
from hotbed.training.model import RecModel


def append_predictions(learner: RecModel, batch: Batch, predictions: Path, labels: Path) -> None:
    """Append the predictions and the labels of a batch to two files, numbers with a space behind.

    Several labels of a sample stand side by side. On several ranks, the first writes.
    """
    scores = learner.predict(batch)
    if not isinstance(scores, dict):
        (label,) = batch.labels
        scores = {label: scores}
    if rank():
        return
    _append(predictions, list(scores.values()))
    _append(labels, [batch.labels[label] for label in scores])


def _append(path: Path, columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        np.savetxt(file, np.stack(columns, axis=1).reshape(1, -1), fmt="%g", newline=" ")
