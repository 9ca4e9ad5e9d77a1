# SPDX-License-Identifier: Apache-2.0
"""MindSpore's metrics: their names, those of Hotbed that they stand for, and their base class."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hotbed.compat.mindspore_rec.tensor import with_asnumpy
from hotbed.config import kind_of
from hotbed.errors import ConfigError
from hotbed.metrics import Accuracy
from hotbed.metrics import Metric as EngineMetric

__all__ = ["Metric", "TopKCategoricalAccuracy", "rearrange_inputs", "translated"]

LOSS = "loss"
NAMES = {"acc": "accuracy", "F1": "f1"}
"""MindSpore's name -> Hotbed's; those that are not here are the same in both, or of one only."""
TOP = {"top_1_accuracy": 1, "top_5_accuracy": 5}
"""MindSpore's name of an accuracy of classes -> how many of the highest scores count."""

NO_NUMBER = "it is not a number"
OTHER_TASKS = "it measures another task than a score for each sample"
MISSING = {
    "bleu_score": OTHER_TASKS,
    "confusion_matrix": NO_NUMBER,
    "confusion_matrix_metric": NO_NUMBER,
    "cosine_similarity": OTHER_TASKS,
    "dice": OTHER_TASKS,
    "hausdorff_distance": OTHER_TASKS,
    "mean_surface_distance": OTHER_TASKS,
    "occlusion_sensitivity": OTHER_TASKS,
    "perplexity": OTHER_TASKS,
    "roc": NO_NUMBER,
    "roc_curve": NO_NUMBER,
    "root_mean_square_distance": OTHER_TASKS,
    "topk": "its name does not say k: give TopKCategoricalAccuracy(k)",
}
"""MindSpore's names that have no counterpart, and why."""


class Metric(ABC):
    """Base of a program's metrics: define `clear`, `update` and `eval`.

    `update` gets tensors with `asnumpy()`: prediction and label, or with `set_indexes` all outputs
    of the evaluation, of which `rearrange_inputs` picks.
    """

    _indexes: list[int] | None = None

    @abstractmethod
    def clear(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def update(self, *inputs: Any) -> None:
        """Add a batch."""

    @abstractmethod
    def eval(self) -> Any:
        """Return the metric of all samples since `clear`."""

    @property
    def indexes(self) -> list[int] | None:
        """What `set_indexes` was given; None = nothing."""
        return self._indexes

    def set_indexes(self, indexes: list[int]) -> Metric:
        """Choose outputs of the evaluation by their positions; return self."""
        if not isinstance(indexes, list) or not all(type(index) is int for index in indexes):
            raise ConfigError(
                f"set_indexes: must be a list of integers, got {indexes!r:.60}. Give positions "
                "such as [1, 2]."
            )
        self._indexes = indexes
        return self

    def __call__(self, *inputs: Any) -> Any:
        """Return the metric of these inputs alone."""
        self.clear()
        self.update(*inputs)
        return self.eval()


def rearrange_inputs(update: Callable[..., Any]) -> Callable[..., Any]:
    """Let `update` of a metric get the inputs that `set_indexes` chose, in that order."""

    @functools.wraps(update)
    def rearranged(self: Any, *inputs: Any) -> Any:
        if self.indexes:
            inputs = tuple(inputs[index] for index in self.indexes)
        return update(self, *inputs)

    return rearranged


def TopKCategoricalAccuracy(k: int) -> Accuracy:
    """Return the share of samples whose label is among the k classes with the highest scores."""
    return Accuracy(top=k)


def translated(metrics: Any, *, reports_loss: bool) -> Any:
    """Return the metrics of `RecModel` by the names that the program gave them.

    Hotbed always reports the loss under "loss", so the loss is left out of the metrics.

    Args:
        metrics: a set of names, or a dict of name to metric, as MindSpore takes them.
        reports_loss: whether evaluation has a loss.

    Raises:
        ConfigError: a metric is unknown here, or evaluation has no loss.
    """
    if isinstance(metrics, str):
        metrics = {metrics}
    if isinstance(metrics, set | frozenset | list | tuple):
        metrics = _named(metrics)
    if not isinstance(metrics, Mapping):
        return metrics
    named = {name: _translated(metric) for name, metric in metrics.items()}
    for name in [name for name, metric in named.items() if metric == LOSS]:
        _check_loss(name, reports_loss=reports_loss)
        del named[name]
    return named or None


def _named(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return metrics of a set by their names, or those of their classes."""
    return {
        metric if isinstance(metric, str) else kind_of(type(metric)): metric
        for metric in sorted(metrics, key=str)
    }


def _translated(metric: Any) -> Any:
    if isinstance(metric, EngineMetric):
        return metric
    if isinstance(metric, set | frozenset | list | tuple):  # those of a label
        return {name: _translated(each) for name, each in _named(metric).items()}
    if not isinstance(metric, str):
        return OfProgram(metric) if callable(getattr(metric, "update", None)) else metric
    if metric in TOP:
        return TopKCategoricalAccuracy(TOP[metric])
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
