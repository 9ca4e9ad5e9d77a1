# SPDX-License-Identifier: Apache-2.0
"""Derived columns: raw columns whose values depend on other rows of the same key."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hotbed import checks


class Derivation(ABC):
    """Base of the derived columns.

    `name`: of the new raw column. `by`: the key column. `time`: the raw column that orders the rows
    of a key; text that is a number or a date is parsed as the schema's `Time` is.
    """

    name: str
    by: str
    time: str

    def inputs(self) -> Sequence[str]:
        """Return the raw columns that it reads, `by` and `time` included."""
        return (self.by, self.time)


@dataclass(frozen=True)
class TimeDifference(Derivation):
    """Seconds since the latest strictly earlier row of the same key; null for the first.

    Example: `TimeDifference("since_last", by="user", time="timestamp")`
    """

    name: str
    by: str
    time: str


@dataclass(frozen=True)
class Session(Derivation):
    """The session of a row: rows of a key with at most `gap_seconds` between two of them.

    `gives`: "id" (one integer for each session), "position" (the number of strictly earlier rows of
    the session) or "seconds" (since its first row).

    Example: `Session("session", by="user", time="timestamp", gap_seconds=1800)`
    """

    name: str
    by: str
    time: str
    gap_seconds: float = 1800.0
    gives: Literal["id", "position", "seconds"] = "id"


@dataclass(frozen=True)
class Previous(Derivation):
    """The last `length` values of `column` in strictly earlier rows of the key, oldest first.

    Example: `Previous("history", by="user", time="timestamp", column="item", length=20)`
    """

    name: str
    by: str
    time: str
    column: str
    length: int = 20

    def __post_init__(self) -> None:
        checks.at_least("previous.length", self.length, 1)

    def inputs(self) -> Sequence[str]:
        return (self.by, self.time, self.column)
