# SPDX-License-Identifier: Apache-2.0
"""Memory of this process that is free, but not yet with the system."""

from __future__ import annotations

import os
import resource

import pyarrow as pa

from hotbed import _core


def return_free_memory(above: int = 0) -> None:
    """Return free memory of malloc (where the C library can: glibc) and of Arrow to the system.

    Each of them keeps as much as it ever needed at once, and a process takes the sum of these. It
    costs time to get the memory back.

    Args:
        above: do nothing while the process takes at most this many bytes.
    """
    if above and resident_bytes() <= above:
        return
    _core.return_free_memory()
    pa.default_memory_pool().release_unused()


def peak_bytes() -> int:
    """Return the most bytes of memory that this process has taken."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            peak = next(line for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # only Linux tells; elsewhere that of its parent may count
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak.split()[1]) * 1024


def resident_bytes() -> int:
    """Return the bytes of memory that this process takes now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:  # only Linux tells; elsewhere it is the most that the process ever took
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")
