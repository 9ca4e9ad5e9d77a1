# SPDX-License-Identifier: Apache-2.0
"""Memory of this process that is free, but not yet with the system."""

from __future__ import annotations

import pyarrow as pa

from hotbed import _core


def return_free_memory() -> None:
    """Return free memory of malloc (where the C library can: glibc) and of Arrow to the system.

    Each of them keeps as much as it ever needed at once, and the sum of these is what a process
    takes.
    """
    _core.return_free_memory()
    pa.default_memory_pool().release_unused()
