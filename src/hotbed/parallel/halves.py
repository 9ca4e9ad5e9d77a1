# SPDX-License-Identifier: Apache-2.0
"""The order in which the values of grains are added: by halves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def joined(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the values of grains, added by halves: (0 + 1) + (2 + 3).

    None is left out. The size of the first half is the greatest power of two below that of all.
    """
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    first = joined(values[:middle])
    second = joined(values[middle:])
    if first is None or second is None:
        return second if first is None else first
    return first + second
