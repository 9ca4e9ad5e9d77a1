# SPDX-License-Identifier: Apache-2.0
"""Base classes of the metrics: samples in, one number out, in float64 and without torch."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class Samples:
    """Checked inputs of one update, [n] each.

    Prediction, label and weight are float64; group holds group codes or is None.
    """

    prediction: Array
    label: Array
    weight: Array
    group: Array | None

    def __getitem__(self, rows: slice | Array) -> Samples:
        group = None if self.group is None else self.group[rows]
        return Samples(self.prediction[rows], self.label[rows], self.weight[rows], group)

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """Return all samples of `parts`, in order."""
        if not parts:
            return Samples(np.empty(0), np.empty(0), np.empty(0), None)
        # an empty list of groups has no type of its own, and would make floats of integers
        groups = [part.group for part in parts if part.group is not None and len(part.group)]
        return Samples(
            np.concatenate([part.prediction for part in parts]),
            np.concatenate([part.label for part in parts]),
            np.concatenate([part.weight for part in parts]),
            np.concatenate(groups) if groups else None,
        )

    def state(self) -> dict[str, Any]:
        """Return NumPy arrays and, for groups that are texts, a list.

        `from_state` restores the samples.
        """
        state: dict[str, Any] = {
            "prediction": self.prediction,
            "label": self.label,
            "weight": self.weight,
        }
        if self.group is None:
            return state
        if self.group.dtype.kind in "iufb":
            state["group"] = self.group
        else:
            state["group"] = self.group.tolist()
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Samples:
        """Return the samples that `state` described."""
        prediction = np.asarray(state["prediction"], np.float64)
        label = np.asarray(state["label"], np.float64)
        weight = np.asarray(state["weight"], np.float64)
        group = np.asarray(state["group"]) if "group" in state else None
        return Samples(prediction, label, weight, group)


class Metric(ABC):
    """Base of the metrics.

    The methods `clear`, `update` and `eval` are named after those of `mindspore.train.Metric`.
    A metric of your own defines `clear`, `add`, `eval`, `state` and `load_state`; `update` checks
    its inputs and calls `add`. docs/extending.md has a whole example.
    """

    needs_group = False
    """Whether the metric ranks within groups, so that every update needs `group`."""

    smaller_is_better = False
    """Whether a smaller value is a better one, as for a loss."""

    def __init__(self) -> None:
        self._indexes: list[int] | None = None
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def eval(self) -> float:
        """Return the metric of all samples since `clear`; nan with a warning if it is undefined."""

    @abstractmethod
    def add(self, samples: Samples) -> None:
        """Add samples that `update` has checked."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the accumulated state as JSON values and NumPy arrays.

        A metric that loads it continues with the same bits.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace the accumulated state by `state`, from a metric with the same settings."""

    def merge(self, later: Metric) -> None:
        """Add the samples of `later`, which came after those of this metric.

        Parts of a data set may be counted apart and merged in their order. Metrics that keep their
        samples then equal a metric of the whole to the bit; sums differ by rounding, and equal
        parts give equal bits. `later` stays as it is.

        Raises:
            ConfigError: `later` is another metric, or a metric of your own does not define `merge`.
        """
        raise ConfigError(
            f"{self._name}.merge: the class does not define it, got {later!r:.80}. Define "
            "merge(self, later), which adds what `later` has accumulated."
        )

    def _check_like(self, later: Metric) -> None:
        """Raise ConfigError if `later` is of another class, or has another value of a setting."""
        names = {type(metric).__name__ for metric in (self, later)}
        for setting in _settings_of(self) | _settings_of(later):
            if len(names) > 1:
                break
            value: Any = getattr(self, setting, None)
            other: Any = getattr(later, setting, None)
            if isinstance(value, Metric):
                value._check_like(other)
            elif value != other:
                names = {f"{setting}={value}", f"{setting}={other}"}
        if len(names) > 1:
            raise ConfigError(
                f"{self._name}.merge: the parts are not alike, got {' and '.join(sorted(names))}. "
                "Merge metrics that were made alike."
            )

    def update(self, *inputs: Any, weight: Any = None, group: Any = None) -> None:
        """Add a batch: prediction [n], label [n], optionally weight [n] and group [n].

        Weight and group may come by position or by name. Inputs are NumPy arrays or tensors; [n, 1]
        is read as [n]. `group` holds integers or strings (for example user ids). After
        `set_indexes`, there may be more inputs, in another order.

        Raises:
            DataError: for lengths that differ, for nan, for negative weights, and for a missing
                group if the metric ranks within groups.
        """
        if self._indexes is not None:
            if max(self._indexes) >= len(inputs):
                raise DataError(
                    f"{self._name}: set_indexes asks for input {max(self._indexes)}, got "
                    f"{len(inputs)} inputs. Give indexes below their number."
                )
            inputs = tuple(inputs[index] for index in self._indexes)
        if not 2 <= len(inputs) <= 4:
            raise DataError(
                f"{self._name}: update takes prediction, label, weight and group, got "
                f"{len(inputs)} inputs. Choose them with set_indexes."
            )
        prediction, label, *rest = inputs
        weight = rest[0] if rest else weight
        group = rest[1] if len(rest) > 1 else group
        samples = _checked(self._name, prediction, label, weight, group)
        if self.needs_group and samples.group is None and len(samples.label):
            raise DataError(
                f"{self._name}: it ranks within groups, got {len(samples.label)} samples without "
                "group. Pass group=, for example user ids."
            )
        self.add(samples)

    @property
    def indexes(self) -> list[int] | None:
        """The indexes set by `set_indexes`; None = none."""
        return self._indexes

    def set_indexes(self, indexes: Sequence[int] | None) -> Metric:
        """Choose which inputs of `update` are prediction, label, weight and group; return self.

        As in MindSpore: a list of integers from 0 on; an input may be chosen twice. None keeps the
        order of the inputs.
        """
        if indexes is None:
            self._indexes = None
            return self
        if not all(isinstance(index, int) for index in indexes):
            raise ConfigError(
                f"indexes: expected integers, got {indexes!r}. Give positions such as [2, 0]."
            )
        if not 2 <= len(indexes) <= 4 or any(index < 0 for index in indexes):
            raise ConfigError(
                f"indexes: expected 2 to 4 positions, got {list(indexes)}. Give those of "
                "prediction and label (weight, group)."
            )
        self._indexes = list(indexes)
        return self

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _undefined(self, why: str) -> float:
        warnings.warn(
            f"{self._name} is undefined and reads nan: {why}", RuntimeWarning, stacklevel=3
        )
        return math.nan


class StoredMetric(Metric, ABC):
    """Base of metrics that need all samples at once: 24 to 32 bytes per sample."""

    def clear(self) -> None:
        self._parts: list[Samples] = []

    def add(self, samples: Samples) -> None:
        self._parts.append(samples)

    def state(self) -> dict[str, Any]:
        return self._all().state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._parts = [Samples.from_state(state)]

    def merge(self, later: Metric) -> None:
        self._check_like(later)
        assert isinstance(later, StoredMetric)
        self._parts += later._parts

    def _all(self) -> Samples:
        self._parts = [Samples.concat(self._parts)]
        return self._parts[0]


class SumsMetric(Metric):
    """Base of metrics that are a function of a few sums over samples."""

    def clear(self) -> None:
        self._sums = np.zeros(3)

    def add(self, samples: Samples) -> None:
        self._sums += self._summands(samples)

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums.copy()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._sums = np.array(state["sums"], np.float64)

    def merge(self, later: Metric) -> None:
        self._check_like(later)
        assert isinstance(later, SumsMetric)
        self._sums += later._sums

    @abstractmethod
    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        """Return three sums over `samples`."""


def _settings_of(metric: Metric) -> set[str]:
    """Return the arguments that a metric was made with, by name."""
    return set(getattr(metric, "_described", ()))


def _checked(metric: str, prediction: Any, label: Any, weight: Any, group: Any) -> Samples:
    arrays = {"prediction": _floats(prediction), "label": _floats(label)}
    if weight is not None:
        arrays["weight"] = _floats(weight)
    groups = None
    if group is not None:
        if hasattr(group, "detach"):
            group = group.detach().cpu()
        groups = np.asarray(group).reshape(-1)
    num_samples = len(arrays["label"])
    sizes = {name: len(values) for name, values in arrays.items()}
    if groups is not None:
        sizes["group"] = len(groups)
    shape = np.shape(prediction)
    if len(shape) > 1 and shape[0] == num_samples and sizes["prediction"] > num_samples:
        raise DataError(
            f"{metric}: expected one score for each sample, got scores of the shape {list(shape)} "
            f"for {num_samples} labels. Measure one class: give its column of the scores, and "
            "labels that say whether a sample is of this class."
        )
    if any(size != num_samples for size in sizes.values()):
        raise DataError(
            f"{metric}: inputs differ in length, got lengths {sizes}. Give one of each per sample."
        )
    for name, values in arrays.items():
        if math.isnan(values @ values):  # a sum of squares is nan exactly where one of them is
            raise DataError(
                f"{metric}: {name} is nan, got nan at sample {int(np.isnan(values).argmax())}. "
                "Check the model and the data."
            )
    weights = arrays.get("weight")
    if weights is None:
        weights = np.ones(num_samples)
    elif (weights < 0).any():
        raise DataError(f"{metric}: weight below 0, got {weights.min()}. Give weights from 0 on.")
    return Samples(arrays["prediction"], arrays["label"], weights, groups)


def _floats(values: Any) -> Array:
    if hasattr(values, "detach"):  # a tensor of any device and dtype, without importing torch
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


# --- shared by several metrics -------------------------------------------------------------------


def starts(values: Array) -> Array:
    """Return bool [n]: true at the first value and where a value differs from the one before it."""
    changed = np.ones(len(values), dtype=bool)
    changed[1:] = values[1:] != values[:-1]
    return changed
