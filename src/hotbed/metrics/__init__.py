# SPDX-License-Identifier: Apache-2.0
"""Metrics of ranking models: clear, update batch by batch, eval.

    metric = AUC()
    metric.update(prediction, label)     # NumPy arrays or tensors [n]; weight= and group= where they apply
    metric.eval()                        # a float

Predictions are probabilities; AUC, GAUC, HitRate and NDCG take any score. Labels above 0.5 are positive. A metric that
is undefined for what it saw (one class only, no samples, no group) is nan and warns, saying why.

`state()` gives what a metric has seen, as JSON values and NumPy arrays, and `load_state` takes it: checkpoints hold the
windows of a stream. `bounded(metric)` is a metric like it for a stream that never ends.
"""

from __future__ import annotations

from hotbed import config
from hotbed.metrics.classification import (
    AUC,
    Accuracy,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    Precision,
    Recall,
)
from hotbed.metrics.metric import Metric
from hotbed.metrics.ranking import GAUC, NDCG, HitRate
from hotbed.metrics.windows import Windowed, bounded

__all__ = [
    "AUC", "GAUC", "NDCG", "Accuracy", "Calibration", "HitRate", "LogLoss", "Metric", "NormalizedEntropy", "Precision",
    "Recall", "Windowed", "bounded", "get_metric",
]  # fmt: skip


def get_metric(name: str) -> Metric:
    """A metric by its name, with default settings: auc, gauc, log_loss, normalized_entropy, calibration, accuracy,
    precision, recall, hit_rate, ndcg."""
    metric: Metric = config.build(name, Metric, "metric")
    return metric
