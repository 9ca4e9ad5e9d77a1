# SPDX-License-Identifier: Apache-2.0
"""Which ranks are gone: those that do not answer where all of them look, once one is lost."""

from __future__ import annotations

import os
import threading
import time

from torch.distributed.distributed_c10d import _get_default_store

GRACE_SECONDS = 3.0
"""How long a rank waits for the answers of the others; each finds the loss in its next call."""
PAUSE_SECONDS = 0.05


def absent_ranks(rank: int, size: int) -> list[int]:
    """Answer the others, and return the ranks that do not; [] if that is not known.

    The answers lie in the store in which the ranks have met, since gloo names no rank.

    Args:
        rank: of this process.
        size: number of ranks.
    """
    if size == 2:
        return [1 - rank]
    absent: list[list[int]] = []
    # a store on a host that cannot be reached may answer after minutes
    thread = threading.Thread(target=_call, args=(rank, size, absent), daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)
    if absent:
        return absent[0]
    is_with_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return [] if is_with_launcher or rank == 0 else [0]  # which keeps the store


def _call(rank: int, size: int, absent: list[list[int]]) -> None:
    """Put the ranks that do not answer into `absent`; nothing if the store cannot be asked."""
    started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = {number: f"hotbed-lost/{started}/{number}" for number in range(size)}
    try:
        store = _get_default_store()
        store.set(keys.pop(rank), "here")
        until = time.monotonic() + GRACE_SECONDS
        while keys and time.monotonic() < until:
            keys = {number: key for number, key in keys.items() if not store.check([key])}
            time.sleep(PAUSE_SECONDS)
    except (RuntimeError, ValueError):  # it is gone, or torch's default group is
        return
    absent.append(list(keys))
