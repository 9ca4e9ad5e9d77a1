# SPDX-License-Identifier: Apache-2.0
"""Negatives of implicit feedback: rows of items that a user did not choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hotbed import checks


@dataclass(frozen=True)
class Negatives:
    """Add rows with label 0 after each row of the source, which all are positives.

    Args:
        user: the column of users.
        item: the column of items.
        per_positive: negatives for each row.
        draw: "uniform": each item is as likely as any other; "popularity": an item is as likely as
            its number of rows to the power of `power`.
        power: of "popularity"; 0.75 as in word2vec.
        item_columns: columns that follow the item; other columns are those of the positive.
    """

    user: str
    item: str
    per_positive: int = 4
    draw: Literal["uniform", "popularity"] = "uniform"
    power: float = 0.75
    item_columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "item_columns", tuple(self.item_columns))
        checks.at_least("negatives.per_positive", self.per_positive, 1)
