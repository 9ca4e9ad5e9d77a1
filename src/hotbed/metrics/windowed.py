# SPDX-License-Identifier: Apache-2.0
"""Metrics over a part of a stream: the last samples."""

from __future__ import annotations

from collections import deque

from hotbed import config
from hotbed.metrics.metric import Metric, Samples, at_least_one


@config.described
class Windowed(Metric):
    """A metric of the last `samples` samples only, such as progressive AUC over event time.

    Example: `Windowed(AUC(), samples=100_000)`.
    """

    def __init__(self, metric: Metric, samples: int) -> None:
        self.metric, self.samples = metric, at_least_one("Windowed.samples", samples)
        super().__init__()

    def clear(self) -> None:
        """Forget all samples."""
        self._parts: deque[Samples] = deque()
        self._held = 0

    def add(self, samples: Samples) -> None:
        """Take checked samples and drop the oldest beyond the window."""
        self._parts.append(samples)
        self._held += len(samples.label)
        while self._held > self.samples:
            oldest = self._parts.popleft()
            spare = self._held - self.samples
            if len(oldest.label) > spare:
                self._parts.appendleft(oldest[spare:])
            self._held -= min(spare, len(oldest.label))

    def eval(self) -> float:
        """The inner metric of the samples in the window."""
        self.metric.clear()
        for part in self._parts:
            self.metric.add(part)
        return self.metric.eval()
