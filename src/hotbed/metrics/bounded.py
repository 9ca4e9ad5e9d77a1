# SPDX-License-Identifier: Apache-2.0
"""Metrics whose memory does not grow with the number of samples."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

from hotbed import checks, config
from hotbed.metrics.classification import AUC
from hotbed.metrics.metric import Metric, Samples, StoredMetric


@config.described
class Windowed(Metric):
    """A metric of the last `samples` samples only, such as progressive AUC over event time.

    Within groups where `metric` is: its `group` counts.

    Example: `Windowed(AUC(), samples=100_000)`.
    """

    def __init__(self, metric: Metric, samples: int) -> None:
        self.metric = metric
        checks.at_least("Windowed.samples", samples, 1)
        self.samples = samples
        self.group = getattr(metric, "group", None)
        self.needs_group = metric.needs_group
        super().__init__()

    def clear(self) -> None:
        """Remove all samples."""
        self._parts: deque[Samples] = deque()
        self._held = 0

    def add(self, samples: Samples) -> None:
        """Add checked samples and drop the oldest beyond the window."""
        self._parts.append(samples)
        self._held += len(samples.label)
        while self._held > self.samples:
            oldest = self._parts.popleft()
            spare = self._held - self.samples
            if len(oldest.label) > spare:
                self._parts.appendleft(oldest[spare:])
            self._held -= min(spare, len(oldest.label))

    def eval(self) -> float:
        """Return the inner metric of the samples in the window."""
        self.metric.clear()
        for part in self._parts:
            self.metric.add(part)
        return self.metric.eval()

    def state(self) -> dict[str, Any]:
        """Return the samples in the window."""
        return Samples.concat(self._parts).state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.clear()
        self.add(Samples.from_state(state))

    def merge(self, later: Metric) -> None:
        """Add the samples in the window of `later`."""
        self._check_like(later)
        assert isinstance(later, Windowed)
        for part in later._parts:
            self.add(part)


def bounded(metric: Any, samples: int = 100_000) -> Any:
    """Return a fresh form of `metric` whose memory does not grow with the number of samples.

    The AUC of more than 32,768 samples is counted in 8,192 bins of equal mass (memory grows with
    the logarithm); other metrics that keep their samples keep the last `samples`. Metrics that keep
    none and metrics from outside this package are copied and cleared.

    Example: `bounded(GAUC("user"))` is `Windowed(GAUC("user"), samples=100_000)`.
    """
    bounded_metric = copy.deepcopy(metric)
    if isinstance(metric, AUC) and metric.bins is None:
        bounded_metric = AUC(bins=8192, exact=32_768)
    elif isinstance(metric, StoredMetric):
        bounded_metric.set_indexes(None)
        bounded_metric = Windowed(bounded_metric, samples)
    if isinstance(metric, Metric):
        bounded_metric.set_indexes(metric.indexes)
    bounded_metric.clear()
    return bounded_metric
