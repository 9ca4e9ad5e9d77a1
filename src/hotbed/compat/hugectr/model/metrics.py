# SPDX-License-Identifier: Apache-2.0
"""The metrics of a solver as metrics of the engine, and their results by HugeCTR's names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from statistics import fmean

from hotbed import metrics
from hotbed.compat.hugectr.enums import MetricsType
from hotbed.compat.hugectr.model.console import say

LOSS = "loss"
HIT = math.nextafter(0.8, 1.0)  # HugeCTR counts predictions above 0.8, without 0.8 itself


def engine_metrics(spec: Mapping[MetricsType, float]) -> dict[str, metrics.Metric]:
    """Return the metrics for `hb.RecModel`; `AverageLoss` is its loss."""
    by_kind: dict[MetricsType, metrics.Metric] = {
        MetricsType.AUC: metrics.AUC(),
        MetricsType.HitRate: metrics.Precision(HIT),
        MetricsType.NDCG: metrics.NDCG(k=None, whole=True),
        MetricsType.SMAPE: metrics.SMAPE(),
    }
    return {kind.name: by_kind[kind] for kind in spec if kind in by_kind}


def measured(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the results of the engine; a metric that is not defined is nan, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return measure()


class Results:
    """The metrics of one evaluation.

    Args:
        spec: the metrics that a solver asks for.
        measured: the results of the engine: `loss`, and each metric by its name or, of several
            labels, by `label.name`.
    """

    def __init__(self, spec: Mapping[MetricsType, float], measured: Mapping[str, float]) -> None:
        self._measured = measured
        self.by_name = {kind.name: self._value(kind) for kind in spec}

    def say(self) -> None:
        """Print a line for each metric, and the AUC of each label where there are several."""
        for name, value in self.by_name.items():
            say(f"Evaluation, {name}: {value:g}")
            classes = self._of_labels(name)
            if name == MetricsType.AUC.name and len(classes) > 1:
                texts = ", ".join(f"{value:f}" for value in classes)
                say(f"Evaluation, AUC: {{{texts}}}")

    def _value(self, kind: MetricsType) -> float:
        """Return a metric; of several labels, the mean over labels."""
        if kind is MetricsType.AverageLoss:
            return self._measured.get(LOSS, math.nan)
        values = self._of_labels(kind.name)
        if not values:
            return math.nan
        return fmean(values)

    def _of_labels(self, name: str) -> list[float]:
        return [value for key, value in self._measured.items() if key.rpartition(".")[2] == name]
