# SPDX-License-Identifier: Apache-2.0
"""do_merge_lookup: programs with gradients of their own call it before step 8."""

from __future__ import annotations

from hotbed.compat.mx_rec.checks import boolean

__all__ = ["do_merge_lookup"]


def do_merge_lookup(is_train: bool | str = True) -> None:
    """Have no effect: the lookups of a table are always one."""
    boolean("do_merge_lookup: is_train", is_train)
