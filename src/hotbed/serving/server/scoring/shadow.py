# SPDX-License-Identifier: Apache-2.0
"""A version that scores requests once more, after their answers, to be compared."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hotbed.errors import HotbedError
from hotbed.frozen import RowArray
from hotbed.serving.routes.rule import Shadow
from hotbed.serving.server.scoring.batching import QueuedRequest, ServedVersion
from hotbed.serving.server.traffic import ShadowCounts
from hotbed.serving.session import Scores

log = logging.getLogger("hotbed.serving")
_PAUSE_SECONDS = 0.02  # after the first request of several, so that its answer is sent before
_MOST_ROWS = 16_384  # candidates that wait
_NICENESS = 10  # of the thread, so that answers come first where processors are scarce
_EQUAL = 1e-6


class ShadowScorer:
    """Scores a sample of the answered requests on a thread of its own.

    Args:
        rule: sample and rate.
        served: returns the version that scores.
        counts: where it counts.
        scored: called with each request that it scored, the version and the scores.
    """

    def __init__(
        self,
        rule: Shadow,
        served: Callable[[], ServedVersion | None],
        counts: ShadowCounts,
        scored: Callable[[QueuedRequest, ServedVersion, Scores], None],
    ) -> None:
        self.rule = rule
        self._served = served
        self._counts = counts
        self._scored = scored
        self._waiting = deque[tuple[QueuedRequest, Scores]]()
        self._num_rows = 0  # that wait
        self._allowed = rule.rows_per_second  # candidates that may be scored now
        self._filled = time.monotonic()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hotbed-shadow", daemon=True)
        self._thread.start()

    def offer(self, request: QueuedRequest, answer: Scores) -> None:
        """Have a request scored later, if it is in the sample; drop it if there are too many."""
        if random.random() >= self.rule.sample:
            return
        with self._lock:
            now = time.monotonic()
            rate = self.rule.rows_per_second
            self._allowed = min(rate, self._allowed + rate * (now - self._filled))
            self._filled = now
            is_full = self._num_rows + request.size > _MOST_ROWS
            if self._closed or is_full or request.size > self._allowed:
                self._counts.dropped += 1
                return
            self._allowed -= request.size
            self._num_rows += request.size
            self._waiting.append((request, answer))
        self._wake.set()

    def close(self) -> None:
        """End the thread; requests that wait are dropped, and counted."""
        self._closed = True
        self._wake.set()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            self._wake.wait()
            self._wake.clear()
            time.sleep(_PAUSE_SECONDS)
            while self._waiting and not self._closed:
                with self._lock:
                    request, answer = self._waiting.popleft()
                    self._num_rows -= request.size
                self._compare(request, answer)
            if self._closed:
                with self._lock:
                    self._counts.dropped += len(self._waiting)
                    self._waiting.clear()
                return

    def _compare(self, request: QueuedRequest, answer: Scores) -> None:
        counts = self._counts
        try:
            served = self._served()
            if served is None:  # its rule has ended
                counts.dropped += 1
                return
            scores = served.session.ask(request.columns, request.context)
        except Exception as error:
            counts.errors += 1
            if not isinstance(error, HotbedError):
                log.exception("a shadow could not score a request")
            return
        self._scored(request, served, scores)
        counts.requests += 1
        counts.rows += request.num_rows
        for name, values in scores.outputs.items():
            if name in answer.outputs:
                self._count(values, answer.outputs[name])

    def _count(self, values: RowArray, answered: RowArray) -> None:
        """Count the differences of an output; those that are NaN or infinite are not summed."""
        counts = self._counts
        if values.shape != answered.shape:  # an output of another width
            counts.different += len(values)
            return
        with np.errstate(invalid="ignore"):  # of infinite scores
            differences = np.abs(values - answered)
        is_equal = (differences <= _EQUAL).all(axis=tuple(range(1, differences.ndim)))
        counts.different += len(is_equal) - int(is_equal.sum())
        finite = differences[np.isfinite(differences)]
        counts.difference_sum += float(finite.sum())
        counts.difference_most = max(counts.difference_most, float(finite.max(initial=0.0)))
