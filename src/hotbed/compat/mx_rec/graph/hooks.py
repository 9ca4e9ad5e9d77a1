# SPDX-License-Identifier: Apache-2.0
"""Hooks that cut a graph of TensorFlow: the trace of step 8 does their work."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.no_effect import ARGUMENTS

__all__ = ["LookupSubgraphSlicerHook", "OrphanLookupKeySlicerHook"]


class LookupSubgraphSlicerHook:
    """Has no effect: step 8 finds what computes the ids of a lookup, whatever operations these are.

    Args:
        op_types: types of operations, not needed.
        full_graph: not needed.
    """

    def __init__(self, op_types: Any = (), full_graph: Any = None) -> None:
        ARGUMENTS.log_no_effect("slicer.op_types")

    def begin(self) -> None:
        """Do nothing."""


class OrphanLookupKeySlicerHook:
    """Has no effect: ids that do not come from the batch are looked up in the forward pass.

    Args:
        full_graph: not needed.
    """

    def __init__(self, full_graph: Any = None) -> None:
        ARGUMENTS.log_no_effect("slicer.orphans")

    def begin(self) -> None:
        """Do nothing."""
