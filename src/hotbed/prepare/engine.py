# SPDX-License-Identifier: Apache-2.0
"""Engines: they run the tasks of a preparation; `Ray` is in `hotbed.prepare.ray`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotbed import checks

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int], None]
"""Takes the number of finished items."""


def no_progress(_done: int) -> None:
    """Ignore how far a stage is."""


class Engine(ABC):
    """Runs a task on each of many items, several at a time.

    Tasks and items can be pickled. A task reads and writes files, and returns a small value: all
    that is large goes through files, so that engines cannot differ in what they give.
    """

    @abstractmethod
    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        progress: Progress = no_progress,
    ) -> Iterator[Result]:
        """Yield `task(item)` for each item, in the order of `items`.

        The first error in this order is raised, as the task raised it.
        """

    def check_folder(self, folder: Path) -> None:
        """Check that all machines that run tasks see a local folder.

        Raises:
            ConfigError: a machine does not see it.
        """
        return

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of tasks that run at a time; they share the memory of the preparation."""


@dataclass(frozen=True)
class Local(Engine):
    """Threads of this process: Polars, Arrow and the native core release the GIL.

    Args:
        workers: threads; None = one for each processor that this process may use.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        checks.at_least("local.workers", self.workers, 1)

    @property
    def num_workers(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        progress: Progress = no_progress,
    ) -> Iterator[Result]:
        running: deque[Future[Any]] = deque()
        done = 0
        with ThreadPoolExecutor(self.num_workers, "hotbed-prepare") as pool:
            try:
                for item in items:
                    running.append(pool.submit(task, item))
                    # a result that is slow to come must not let the others pile up
                    if len(running) > 2 * self.num_workers:
                        yield running.popleft().result()
                        done += 1
                        progress(done)
                while running:
                    yield running.popleft().result()
                    done += 1
                    progress(done)
            finally:
                for future in running:
                    future.cancel()
