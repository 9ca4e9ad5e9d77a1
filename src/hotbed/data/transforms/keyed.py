# SPDX-License-Identifier: Apache-2.0
"""Transforms of keys into numbers that training rows of the same key gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, get_args

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.data.arrays import nulls_of
from hotbed.data.context import Context
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Learner
from hotbed.data.transforms.base import Transform, not_fitted
from hotbed.errors import ConfigError
from hotbed.frozen import IdArray

Statistic = Literal["mean", "sum", "std", "min", "max", "count"]
_ZERO_WITHOUT_ROWS = ("count", "sum")


@dataclass(frozen=True)
class TargetEncode(Transform):
    """Replace a key by the mean of a label over the training rows with this key, smoothed.

    The value is (sum + smooth * prior) / (count + smooth); an unknown or missing key gives the
    prior. The keys are the values that reach the transform: integers, or text. `hotbed prepare`
    fits it: each training row gets a value that its own label has no part in, all other rows and
    servers the value over all training rows. See Micci-Barreca, "A preprocessing scheme for
    high-cardinality categorical attributes" (SIGKDD Explorations 3, 2001).

    Args:
        label: the name of a label of the schema.
        folds: a training row gets the value of the rows outside of its fold.
        ordered_by: a raw column, such as the time. A training row then gets the value of the rows
            strictly before it, and `folds` is not used.
        smooth: how many rows with the mean of all rows are added to each key.
        prior: the mean of the label over the training rows, learned.
        fitted: the values by key, learned.

    Example: `Dense("city_rate", column="city", transforms=[TargetEncode("clicked")])`
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False
    by_value: ClassVar[bool] = True

    label: str
    folds: int = 5
    ordered_by: str | None = None
    smooth: float = 20.0
    prior: float | None = None
    fitted: FittedMap | None = None

    def __post_init__(self) -> None:
        checks.at_least("target_encode.folds", self.folds, 2, "Give the number of folds.")
        advice = "Give the number of rows to add, or 0 for none."
        checks.at_least("target_encode.smooth", self.smooth, 0, advice)

    def learns_from(self) -> Sequence[str]:
        if self.ordered_by is None:
            return ()
        return (self.ordered_by,)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.fitted is None or self.prior is None:
            raise not_fitted("target_encode", "Run hotbed prepare")
        slots = _slots(self.fitted, values, context)
        encoded = self.fitted.values(slots)[:, 0]
        encoded[slots < 0] = self.prior
        return pa.array(encoded)

    def learner(self) -> Learner | None:
        if self.fitted is not None:
            return None
        return OfPreparation("target_encode")

    def learned(self, value: tuple[float, FittedMap]) -> TargetEncode:
        prior, fitted = value
        return replace(self, prior=prior, fitted=fitted)


@dataclass(frozen=True)
class JoinGroupby(Transform):
    """Replace a key by a statistic of a raw column over the training rows with this key.

    An unknown or missing key gives 0 for `count` and `sum`, and null for the rest: a dense column
    then needs `FillMissing` after it. The keys are the values that reach the transform: integers,
    or text. `hotbed prepare` fits it.

    Args:
        column: a raw column of numbers. Its missing values have no part in the statistic.
        statistic: mean, sum, std (of the sample: divided by the count - 1), min, max, or count.
        fitted: the statistic by key, learned.

    Example:
        `Dense("mean_price", column="shop", transforms=[JoinGroupby("price"), FillMissing(0.0)])`
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False
    by_value: ClassVar[bool] = True

    column: str
    statistic: Statistic = "mean"
    fitted: FittedMap | None = None

    def __post_init__(self) -> None:
        checks.one_of("join_groupby.statistic", self.statistic, get_args(Statistic))

    @property
    def gives_nulls(self) -> bool:
        return self.statistic not in _ZERO_WITHOUT_ROWS

    def learns_from(self) -> Sequence[str]:
        return (self.column,)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.fitted is None:
            raise not_fitted("join_groupby", "Run hotbed prepare")
        slots = _slots(self.fitted, values, context)
        statistics = self.fitted.values(slots)[:, 0]
        if self.gives_nulls:
            return pa.array(statistics, mask=np.isnan(statistics))
        statistics[slots < 0] = 0.0
        return pa.array(statistics)

    def learner(self) -> Learner | None:
        if self.fitted is not None:
            return None
        return OfPreparation("join_groupby")

    def learned(self, value: FittedMap) -> JoinGroupby:
        return replace(self, fitted=value)


class OfPreparation(Learner):
    """Stands for what `hotbed prepare` alone learns: it has all rows of a key in one place."""

    keyed: ClassVar[bool] = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def add(self, values: pa.Array, context: Context) -> None:
        self._refuse()

    def merge(self, later: OfPreparation) -> None:
        self._refuse()

    def learned(self) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"{self.kind}: Schema.fit cannot learn it, got a schema to fit. Run hotbed prepare and "
            "use the schema that it fits."
        )


def _slots(fitted: FittedMap, values: pa.Array, context: Context) -> IdArray:
    """Return the slots of the keys `values`; -1 for unknown and missing ones."""
    slots = fitted.slots(context.ids(values))
    slots[nulls_of(values)] = -1
    return slots
