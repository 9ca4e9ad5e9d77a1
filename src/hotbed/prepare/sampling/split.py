# SPDX-License-Identifier: Apache-2.0
"""Splits: which rows train, and which are only for validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


class Holdout(ABC):
    """Base of the splits into the parts `train` and `valid`."""

    @abstractmethod
    def inputs(self) -> Sequence[str]:
        """Return the raw columns that it reads, without the schema's time."""


@dataclass(frozen=True)
class ByTime(Holdout):
    """The latest rows are for validation: a share `valid`, or those since `from_`.

    Examples: `ByTime(valid=0.1)`, `ByTime(from_="2020-01-01")`
    """

    valid: float | None = None
    from_: str | None = None

    def inputs(self) -> Sequence[str]:
        return ()


@dataclass(frozen=True)
class ByFold(Holdout):
    """A share `valid` of the rows is for validation, chosen by a hash of their places."""

    valid: float = 0.1

    def inputs(self) -> Sequence[str]:
        return ()


@dataclass(frozen=True)
class ByGroup(Holdout):
    """All rows of a share `valid` of the values of `column` are for validation."""

    column: str
    valid: float = 0.1

    def inputs(self) -> Sequence[str]:
        return (self.column,)
