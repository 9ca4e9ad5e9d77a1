# SPDX-License-Identifier: Apache-2.0
"""The streams and events of the fake device: torch's own do nothing on a backend in Python."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

from .queues import Mark, Queue, Queues

NAME = "fake"

queues = Queues()
counts: Counter[str] = Counter()
"""Copies, and waits of operations such as `item()`, by kind."""
_main = queues.add("main")
_of_thread = threading.local()


class Stream:
    """What `torch.Stream(device="fake")` returns."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, queue: Queue | None = None
    ) -> None:
        self.queue = queue or queues.add("copies")
        self.device = torch.device(NAME, 0)
        self.device_index = 0
        self.stream_id = queues.queues.index(self.queue)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return not self.queue.tasks

    def __enter__(self) -> Stream:
        _of_thread.before = [*getattr(_of_thread, "before", []), current_stream()]
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(_of_thread.before.pop())


class Event:
    """What `torch.Event(device="fake")` returns."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = queues.record(stream.queue if stream else current_queue())

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:  # as on CUDA, an event that was never recorded is no wait
            queues.queue_waits(stream.queue if stream else current_queue(), self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            queues.host_waits(self._mark)

    def query(self) -> bool:
        return self._mark is None or self._mark.reached

    def elapsed_time(self, later: Event) -> float:
        if self._mark is None or later._mark is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (later._mark.seconds - self._mark.seconds)


def current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", None) or Stream(queue=_main)


def current_queue() -> Queue:
    stream = getattr(_of_thread, "stream", None)
    return _main if stream is None else stream.queue


def set_stream(stream: Stream) -> None:
    _of_thread.stream = stream


def wait_for_current(reason: str) -> None:
    """Let the host wait for the current stream, as CUDA does in an operation such as `item()`."""
    counts[f"wait: {reason}"] += 1
    queues.finish(current_queue())
