# SPDX-License-Identifier: Apache-2.0
"""Data readers: their raw columns, and the datasets that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from hotbed.data.schema import Dense


@dataclass(frozen=True)
class Columns:
    """The raw columns of a reader, as a translation needs them.

    Args:
        labels: One raw column for each label value, over all labels in the order of the `Input`.
        dense: Columns of a schema which, in this order, make up the dense tensor. They bring the
            transforms of the reader, such as log(x + 1) of whole numbers.
        slots: One raw column for each slot, over all sparse inputs in their order.
        offsets: What the reader adds to the keys of each slot; zeros without `slot_size_array`.
    """

    labels: tuple[str, ...]
    dense: tuple[Dense, ...]
    slots: tuple[str, ...]
    offsets: tuple[int, ...]
