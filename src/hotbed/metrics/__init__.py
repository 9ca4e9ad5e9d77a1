# SPDX-License-Identifier: Apache-2.0
"""Metrics of ranking models: clear, update batch by batch, eval.

    metric = AUC()
    metric.update(prediction, label)    # NumPy arrays or tensors [n]; also weight= and group=
    metric.eval()                       # a float

Predictions are probabilities; AUC, GAUC, HitRate and NDCG take any score. Labels above 0.5 are
positive. RMSE, MAE and SMAPE take amounts, which are any numbers. A metric that is undefined for
its samples (one class only, no samples, no group) is nan and warns with the reason.

`state()` returns the accumulated samples or sums as JSON values and NumPy arrays, and `load_state`
restores them: checkpoints hold the windows of a stream. `bounded(metric)` returns the form of a
metric that needs bounded memory on an endless stream.

    baselines.py       what a model has to beat: a constant, the rate of items, a linear model
    bounded.py         metrics whose memory does not grow with the number of samples
    clustered.py       metrics of samples that come in clusters, with intervals
    classification.py  metrics of predicted probabilities
    metric.py          base classes of the metrics
    metric_set.py      the metrics that a user names, as objects by name
    ranking.py         metrics within groups (users, sessions): AUC, hit rate, NDCG
    regression.py      metrics of predicted amounts: squared, absolute and relative errors
    reliability.py     how predicted probabilities compare with what happened
    score_counts.py    weights of negatives and positives by score
    segments.py        figures of the samples of each country, each device, and so on
    stability.py       how much a distribution has moved
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hotbed import config
from hotbed.errors import ConfigError
from hotbed.metrics.bounded import Windowed, bounded
from hotbed.metrics.classification import (
    AUC,
    F1,
    Accuracy,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    Precision,
    Recall,
)
from hotbed.metrics.metric import Metric
from hotbed.metrics.ranking import GAUC, NDCG, HitRate
from hotbed.metrics.regression import MAE, MSE, RMSE, SMAPE

__all__ = [
    "AUC",
    "F1",
    "GAUC",
    "MAE",
    "MSE",
    "NDCG",
    "RMSE",
    "SMAPE",
    "Accuracy",
    "Calibration",
    "HitRate",
    "LogLoss",
    "Metric",
    "NormalizedEntropy",
    "Precision",
    "Recall",
    "Windowed",
    "bounded",
    "get_metric",
    "smaller_is_better",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def smaller_is_better(name: str) -> bool:
    """Return whether a smaller value of the metric `name` is a better one.

    Losses are named `loss`; `name` may begin with labels, as in `valid.click.log_loss`.
    """
    kind = name.rpartition(".")[2].partition("@")[0]
    if kind == "loss":
        return True
    return bool(getattr(config.kinds(Metric).get(kind), "smaller_is_better", False))


def get_metric(spec: str | Mapping[str, Any], path: str = "metric") -> Metric:
    """Build a metric from its name, or from its kind and keywords as in a job.

    Names: auc, gauc, log_loss, normalized_entropy, calibration, accuracy, precision, recall, f1,
    hit_rate, ndcg, mse, rmse, mae, smape. "gauc@user" ranks within the groups of the Id column
    `user`, as do "hit_rate@user" and "ndcg@user". Raises a ConfigError that starts with `path`.
    """
    keys: Any = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(keys, Mapping):
        return cast(Metric, config.build(spec, Metric, path))
    kind, separator, group = str(keys.get("kind", "")).partition("@")
    if not separator:
        return cast(Metric, config.build(spec, Metric, path))
    cls = config.kinds(Metric).get(kind)
    if not group or (cls is not None and "group" not in config.parameters(cls)):
        kinds = config.kinds(Metric).items()
        names = [kind for kind, cls in kinds if "group" in config.parameters(cls)]
        choices = ", ".join(f"{kind}@{group or 'user'}" for kind in sorted(names))
        raise ConfigError(
            f"{path}: not a metric within groups, got {keys['kind']!r}. Use one of {choices}."
        )
    return cast(Metric, config.build({**keys, "kind": kind, "group": group}, Metric, path))
