# SPDX-License-Identifier: Apache-2.0
"""End an endless run on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ended_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` with the name of the first SIGINT or SIGTERM within.

    A second signal has its usual effect, and so has a signal in a thread other than the main one,
    which may not set handlers. Signals that are ignored stay ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    for ending_signal in SIGNALS:
        handler = signal.getsignal(ending_signal)
        if handler is not signal.SIG_IGN:
            before[ending_signal] = handler or signal.SIG_DFL

    def handle(number: int, _: Any) -> None:
        stop(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for ending_signal in before:
        signal.signal(ending_signal, handle)
    try:
        yield
    finally:
        for ending_signal, handler in before.items():
            signal.signal(ending_signal, handler)
