# SPDX-License-Identifier: Apache-2.0
"""Columns: the raw columns that a reader of HugeCTR's data has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotbed.compat.hugectr.clauses import Input

__all__ = ["Columns"]


@dataclass(frozen=True)
class Columns:
    """Names of the raw columns behind an `Input`.

    Attributes:
        labels: the columns of each label, by its name, one for each of its dimensions.
        dense: the width of each dense column, by its name, in their order; together `dense_dim`.
        slots: the columns of each sparse input, by its name, one for each of its slots.
        offsets: what is added to the ids of each slot, by the name of the sparse input; inputs
            without offsets are missing.
    """

    labels: Mapping[str, tuple[str, ...]]
    dense: Mapping[str, int]
    slots: Mapping[str, tuple[str, ...]]
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, input: Input) -> Columns:
        """Return the columns named as the input's tensors.

        A label or sparse input `x` of one dimension or slot is the column `x`, otherwise its
        columns are `x_0`, `x_1`, …. The dense values are one column of lists.
        """
        labels = {}
        for name, dim in zip(input.label_names, input.label_dims, strict=True):
            labels[name] = numbered(name, dim)
        slots = {}
        for sparse in input.data_reader_sparse_param_array:
            slots[sparse.top_name] = numbered(sparse.top_name, sparse.slot_num)
        dense = {input.dense_name: input.dense_dim} if input.dense_dim else {}
        return cls(labels, dense, slots)


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return names for `count` things: the name itself for one, else with a number behind."""
    if count == 1:
        return (name,)
    return tuple(f"{name}_{number}" for number in range(count))
