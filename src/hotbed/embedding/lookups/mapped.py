# SPDX-License-Identifier: Apache-2.0
"""MappedIds: the distinct ids of a batch, and their gradients summed by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.embedding.table import Table
from hotbed.errors import NonFiniteGradient

from .layout import Group


class MappedIds(Protocol):
    """The distinct ids of a batch in each table, mapped to rows.

    Their rows are given to no other id while this lives, until `let_go`. Only the lookup that
    mapped the ids knows where the rows are.
    """

    @property
    def tables(self) -> Sequence[Table]:
        """The tables, by number."""

    def num_uniques(self) -> list[int]:
        """Return the number of distinct ids of each table."""

    def unique_ids(self, number: int) -> NDArray[np.int64]:
        """Return the distinct ids of a table, int64 [u], in the order of their sums."""

    def read(self, number: int, rows: Tensor, slots: Tensor) -> None:
        """Write the distinct rows of a table as they are now, and their slots; -1 = no row.

        Args:
            number: of the table.
            rows: float32, at least [u, dim].
            slots: int64, at least [u].
        """

    def read_positions(self, feature: int, rows: Tensor) -> None:
        """Write the row of each id of a feature as it is now, neither weighted nor pooled.

        Args:
            feature: its number among those of the lookup.
            rows: float32 [m, dim].
        """

    def leave_out(self, number: int, places: NDArray[np.int64]) -> None:
        """Let the distinct ids of a table at these places take no gradient."""

    def find_nonfinite(self, sums: Sums) -> tuple[int, int] | None:
        """Return the number of the table and the id of the first sum that is not finite, or None.

        `sums`: those of these ids.
        """

    def has_value(self, grads: Sequence[Tensor]) -> bool:
        """Return whether a sum of these ids is not zero; `grads`: the sums of each group."""

    def squares(self, sums: Sums) -> NDArray[np.float64]:
        """Return the squares of the sums, added by partition of their id, float64 [256].

        In a partition the tables come in their order, and the ids of a table in that of their sums.

        `sums`: those of these ids.
        """

    def let_go(self) -> None:
        """Let the rows leave memory, and the slots of those that go be given to other ids.

        A step has applied the gradients, so that none are likely to come. For those that come all
        the same, as of a graph that was kept, the rows are found anew by their ids.
        """

    def without_ids(self) -> MappedIds:
        """Return the same tables without an id: their update counts as a step all the same."""


@dataclass(frozen=True)
class Sums:
    """The gradients of one or more lookups, summed by distinct id.

    Attributes:
        mapped: the ids.
        groups: the tables that have sums; an update leaves all others alone.
        grads: of each group, float32 [rows, dim]: the sums of its tables in order, then zeros.
        finite: whether all sums were finite when they were made; False = not known.
    """

    mapped: MappedIds
    groups: Sequence[Group]
    grads: list[Tensor]
    finite: bool = False

    def check_finite(self) -> None:
        """Raise NonFiniteGradient, naming table and id, if a sum is not finite now."""
        place = self.mapped.find_nonfinite(self)
        if place is None:
            return
        number, id = place
        name = self.mapped.tables[number].name
        raise NonFiniteGradient(
            f"table {name!r}: the gradient of id {id} is not finite; nothing was updated. Look at "
            "the loss.",
            name,
            id,
        )
