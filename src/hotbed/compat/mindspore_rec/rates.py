# SPDX-License-Identifier: Apache-2.0
"""Rows follow the learning rate of the optimizer that updates them."""

from __future__ import annotations

from collections.abc import Collection

from hotbed.training.run import Run


class FollowedRate:
    """Gives rows the learning rate of the optimizer of a model, wherever a program changes it.

    Rows whose rate is another one, because the program set it for tables alone, keep it.

    Args:
        tables: names of those that the optimizer updates.
        rate: its learning rate when the model was made.
        group: number of its parameter group that has the rows.
    """

    def __init__(self, tables: Collection[str], rate: float, group: int) -> None:
        self._tables = frozenset(tables)
        self._rate = rate
        self._group = group

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_gradients(self, run: Run) -> None:
        dense = run.learner.dense
        sparse = run.learner.sparse
        if dense is None or sparse is None:
            return
        rate = float(dense.param_groups[self._group]["lr"])
        if rate == self._rate:
            return
        for group in sparse.param_groups:
            if self._tables.issuperset(group["tables"]) and group["lr"] == self._rate:
                group["lr"] = rate
        self._rate = rate
