# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted amounts: squared, absolute and relative errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from hotbed import config
from hotbed.metrics.metric import Array, Samples, SumsMetric


class _MeanError(SumsMetric):
    """The weighted mean of an error of each sample."""

    smaller_is_better = True

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        errors = self._errors(samples.prediction, samples.label)
        counted = samples.weight > 0  # an infinite error of weight 0 would be nan
        total = errors[counted] @ samples.weight[counted]
        return float(total), float(samples.weight.sum()), 0.0

    def eval(self) -> float:
        """Return a number from 0 on; nan without samples."""
        error, weight, _ = self._sums
        if not weight > 0:
            return self._undefined("no samples")
        return float(error / weight)

    @abstractmethod
    def _errors(self, prediction: Array, label: Array) -> Array:
        """Return the error of each sample, [n]."""


@config.described
class MAE(_MeanError):
    """Mean absolute error: mean of `abs(prediction - label)`, in the unit of the label."""

    def _errors(self, prediction: Array, label: Array) -> Array:
        errors: Array = np.abs(prediction - label)
        return errors


class _MeanSquare(_MeanError, ABC):
    """The weighted mean of the squared errors."""

    def _errors(self, prediction: Array, label: Array) -> Array:
        errors: Array = np.square(prediction - label)
        return errors


@config.described
class MSE(_MeanSquare):
    """Mean squared error: mean of (prediction - label)^2, in the label's unit squared."""


@config.described
class RMSE(_MeanSquare):
    """Root mean squared error: root of the mean of (prediction - label)^2, in the label's unit."""

    def eval(self) -> float:
        """Return a number from 0 on; nan without samples."""
        return math.sqrt(super().eval())


@config.described
class SMAPE(_MeanError):
    """Symmetric mean absolute percentage error, from 0 to 2.

    The mean of `abs(p - y) / ((abs(p) + abs(y)) / 2)`. A sample whose prediction p and label y are
    both 0 has error 0. For values from 0 on, this is the formula of HugeCTR, whose denominator is
    (p + y) / 2. With the absolute values, samples with values below 0 have an error from 0 to 2 as
    well, and it is 2 where the signs differ.
    """

    def _errors(self, prediction: Array, label: Array) -> Array:
        sizes = np.abs(prediction) + np.abs(label)
        distances = np.abs(prediction - label)
        errors = np.where(np.isinf(sizes), 2.0, 0.0)
        divisible = (sizes > 0) & np.isfinite(sizes)
        np.divide(2.0 * distances, sizes, out=errors, where=divisible)
        return errors
