# SPDX-License-Identifier: Apache-2.0
"""MindSpore's names of metrics, and those of Hotbed that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed.compat.mindspore_rec.tensor import with_asnumpy
from hotbed.errors import ConfigError
from hotbed.metrics import Metric

__all__ = ["translated"]

LOSS = "loss"
NAMES = {"acc": "accuracy", "top_1_accuracy": "accuracy", "F1": "f1"}
"""MindSpore's name -> Hotbed's; those that are not here are the same in both, or of one only."""

RANKS = "accuracies are of the class with the highest score"
OTHER_TASKS = "it measures another task than a score for each sample"
MISSING = {
    "bleu_score": OTHER_TASKS,
    "confusion_matrix": "it is not a number",
    "cosine_similarity": OTHER_TASKS,
    "dice": OTHER_TASKS,
    "hausdorff_distance": OTHER_TASKS,
    "mean_surface_distance": OTHER_TASKS,
    "occlusion_sensitivity": OTHER_TASKS,
    "perplexity": OTHER_TASKS,
    "roc_curve": "it is not a number",
    "root_mean_square_distance": OTHER_TASKS,
    "top_5_accuracy": RANKS,
    "topk": RANKS,
}
"""MindSpore's names that have no counterpart, and why."""


def translated(metrics: Any, *, reports_loss: bool) -> Any:
    """Return the metrics of `RecModel` with Hotbed's names.

    Hotbed always reports the loss under "loss", so the loss is left out of the metrics.

    Args:
        metrics: a set of names, or a dict of name to metric, as MindSpore takes them.
        reports_loss: whether evaluation has a loss.

    Raises:
        ConfigError: a metric is unknown here, or evaluation has no loss.
    """
    if isinstance(metrics, str):
        metrics = {metrics}
    if isinstance(metrics, Mapping):
        named = {name: _translated(metric) for name, metric in metrics.items()}
        for name in [name for name, metric in named.items() if metric == LOSS]:
            _check_loss(name, reports_loss=reports_loss)
            del named[name]
        return named or None
    if not isinstance(metrics, set | frozenset | list | tuple):
        return metrics
    if LOSS in metrics:
        _check_loss(LOSS, reports_loss=reports_loss)
    return [_translated(metric) for metric in sorted(metrics, key=str) if metric != LOSS] or None


def _translated(metric: Any) -> Any:
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        return OfProgram(metric) if callable(getattr(metric, "update", None)) else metric
    if metric in MISSING:
        raise ConfigError(
            f"metrics: {metric!r} of MindSpore has no counterpart, because {MISSING[metric]}. "
            "Give an object with clear(), update() and eval(), or a name of hb.metrics."
        )
    return NAMES.get(metric, metric)


class OfProgram:
    """A metric of a program, whose `update` gets tensors with `asnumpy`."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._metric, name)

    def update(self, *outputs: Any, **extras: Any) -> None:
        self._metric.update(*with_asnumpy(outputs), **extras)


def _check_loss(name: str, *, reports_loss: bool) -> None:
    if name != LOSS:
        raise ConfigError(
            f"metrics: the loss is reported as {LOSS!r}, got the name {name!r} for it. Rename it."
        )
    if not reports_loss:
        raise ConfigError(
            "metrics: 'loss' needs a loss in evaluation, got neither loss_fn nor eval_indexes. "
            "Give one of them."
        )
