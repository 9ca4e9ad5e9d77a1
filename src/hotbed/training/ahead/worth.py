# SPDX-License-Identifier: Apache-2.0
"""Whether mapping ahead makes the steps of a pass faster."""

from __future__ import annotations

import logging
import statistics
import time

log = logging.getLogger("hotbed")

FIRST_STEP = 128
"""Steps of a pass before the comparison: the threads are chosen then, and caches are warm."""
BLOCK_STEPS = 16
"""Steps with and without mapping ahead in turn; the first four of a block are not timed."""
NUM_BLOCKS = 6


class Worth:
    """Compares steps with and without mapping ahead, and keeps to the faster way.

    Threads share Python's lock, so that mapping on a thread of its own slows small networks down.
    Results have the same bits either way; so nothing is journalled.
    """

    def __init__(self) -> None:
        self.maps_ahead = True
        self._step = 0
        self._moment: float | None = None  # when the step before ended
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def wait(self) -> None:
        """Do not time the next step: it waits for data."""
        self._moment = None

    def count(self) -> None:
        """Time the step that ended, and decide how the next one is mapped."""
        if self._step > FIRST_STEP + NUM_BLOCKS * BLOCK_STEPS:
            return
        now = time.perf_counter()
        block, place = divmod(self._step - FIRST_STEP, BLOCK_STEPS)
        if self._moment is not None and 0 <= block < NUM_BLOCKS and place >= 4:
            self._seconds[self.maps_ahead].append(now - self._moment)
        self._moment = now
        self._step += 1
        block = (self._step - FIRST_STEP) // BLOCK_STEPS
        if 0 <= block < NUM_BLOCKS:
            self.maps_ahead = block % 2 == 0
        elif block >= NUM_BLOCKS:
            self._decide()

    def _decide(self) -> None:
        if not all(self._seconds.values()):
            self.maps_ahead = True
            return
        ahead = statistics.median(self._seconds[True])
        without = statistics.median(self._seconds[False])
        self.maps_ahead = ahead <= without
        log.info(
            "a step takes %.2f ms with ids mapped ahead, %.2f ms without: they are mapped %s",
            1e3 * ahead,
            1e3 * without,
            "ahead" if self.maps_ahead else "in each step",
        )
