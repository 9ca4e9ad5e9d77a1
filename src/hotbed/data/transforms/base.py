# SPDX-License-Identifier: Apache-2.0
"""The base of transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hotbed.data.context import Context
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Learner
from hotbed.errors import ConfigError


class Transform(ABC):
    """Base of the transforms: a column in, a column of the same length out."""

    @abstractmethod
    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        """Return the transformed values; `values` is flat (lists are transformed item by item)."""

    reads_text: ClassVar[bool] = False
    """Whether the transform reads text; a column that begins with it is not parsed as numbers."""

    gives_ids: ClassVar[bool] = False
    """Whether text and integers become ids of their own, which do not clash in a table."""

    by_item: ClassVar[bool] = True
    """Whether a list is transformed item by item; else a column must hold single values."""

    by_value: ClassVar[bool] = False
    """Whether the result for a value depends on it alone, so that words are mapped once each."""

    by_type: ClassVar[bool] = False
    """Whether equal values of another type may give another result, as 7 and 7.0 do as text."""

    joint: str | None = None
    """Transforms of one name learn together, from the values of all of their columns."""

    fitted: FittedMap | None = None
    """What the transform learned, where that lies in a file."""

    @property
    def gives_nulls(self) -> bool:
        """Whether keys that training did not have become null, which a dense column must fill."""
        return False

    @property
    def reads_floats(self) -> bool:
        """Whether an integer gives the same result as the float64 number nearest to it."""
        return False

    def keeps_rounding(self, kind: type[np.floating[Any]]) -> bool:
        """Return whether numbers may be rounded to `kind` before the transform, not after it."""
        return False

    def inputs(self) -> Sequence[str]:
        """Return the names of other raw columns that the transform reads."""
        return ()

    def learns_from(self) -> Sequence[str]:
        """Return the names of other raw columns that only learning reads."""
        return ()

    def learner(self) -> Learner | None:
        """Return what learns from the column; None if nothing is left to learn."""
        return None

    def learned(self, value: Any) -> Transform:
        """Return this transform with the value of `Learner.learned` filled in."""
        return self


def not_fitted(kind: str, advice: str = "Call schema.fit(training_source)") -> ConfigError:
    """Return the error to raise where a transform has not learned yet."""
    return ConfigError(
        f"{kind}: the transform is not fitted, got no learned values. {advice} first and use the "
        "schema that it returns."
    )
