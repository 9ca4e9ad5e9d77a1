# SPDX-License-Identifier: Apache-2.0
"""The metrics that a user names, as objects by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from hotbed.config import kind_of
from hotbed.errors import ConfigError
from hotbed.metrics import Metric, get_metric


def metric_set(metrics: Any) -> dict[str, Any]:
    """Return the metrics of the argument `RecModel(metrics=…)` by name.

    Args:
        metrics: a set or list of names and `Metric` objects, a mapping of names to either, or a
            mapping of label names to such sets. "gauc@user" is the metric within the groups of Id
            column `user`; a metric object has an attribute `group` for this.

    Raises:
        ConfigError: the argument, or one of its metrics, is something else.

    >>> sorted(metric_set({"auc", "gauc@user"}))
    ['auc', 'gauc@user']
    """
    if metrics is None:
        return {}
    if isinstance(metrics, (str, Metric)):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        return {str(name): _metrics_of(metric, str(name)) for name, metric in metrics.items()}
    if not isinstance(metrics, Iterable):
        raise ConfigError(
            f"metrics: not a set of metrics, got {metrics!r:.80}. Give names such as {{'auc'}}."
        )
    if isinstance(metrics, (set, frozenset)):
        metrics = sorted(metrics, key=str)
    named: dict[str, Any] = {}
    for metric in metrics:
        name = metric if isinstance(metric, str) else kind_of(type(metric))
        named[name] = _metric(metric, name)
    return named


def _metrics_of(metric: Any, name: str) -> Any:
    """Return the set of metrics of a label, or the metric of a name."""
    if isinstance(metric, (Mapping, set, frozenset, list, tuple)):
        return metric_set(metric)
    return _metric(metric, name)


def check_groups(metrics: Mapping[str, Any]) -> None:
    """Raise ConfigError if a metric within groups does not name the Id column of the groups."""
    for name, metric in metrics.items():
        if isinstance(metric, Mapping):
            check_groups(metric)
            continue
        lacks_group = getattr(metric, "needs_group", False) and metric.group is None
        if lacks_group and metric.indexes is None:
            raise ConfigError(
                f"metrics.{name}: it ranks within groups, got no group. Name their Id column, as "
                f"in '{kind_of(type(metric))}@user' or {type(metric).__name__}(group='user')."
            )


def _metric(metric: Any, name: str) -> Any:
    """Return the metric; a name such as `ndcg@user` sets its group."""
    if isinstance(metric, str):
        metric = get_metric(metric)
    for method in ("clear", "update", "eval"):
        if not callable(getattr(metric, method, None)):
            raise ConfigError(
                f"metrics: {method}() is missing, got {metric!r:.80}. Give a name or a hb.metrics "
                "object."
            )
    group = name.partition("@")[2]
    if group and getattr(metric, "needs_group", False) and metric.group is None:
        metric = copy.copy(metric)
        metric.group = group
    return metric
