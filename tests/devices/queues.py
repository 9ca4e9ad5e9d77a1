# SPDX-License-Identifier: Apache-2.0
"""Queues: work that runs late, in any order that queues and their marks allow. No torch here.

Waits can be removed by the line that asks for them. If no run then differs, the line is not needed,
or the tests cannot see what it does:

    for site in wait_sites(queues, run):
        assert list(finds_removed(queues, run, site, expected, schedules()))
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ALL = 10**9
Site = tuple[str, int]
"""The name of a file and a line in it."""


@dataclass
class Schedule:
    """Which queued work runs before it must.

    Attributes:
        mode: "eager" runs everything at once, "lazy" nothing, the name of a queue runs that one at
            once and the others late, and "random" draws how many tasks of each queue run.
        seed: of the draws.
        draw: returns an integer of 0 … n - 1; None = drawn by the seed.
    """

    mode: str = "eager"
    seed: int = 0
    draw: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        self._draw = self.draw or random.Random(self.seed).randrange

    def num_tasks(self, queue: Queue) -> int:
        """Return how many tasks of a queue run now."""
        if self.mode == "random":
            return (0, 0, 0, 1, 4, ALL)[self._draw(6)]
        return ALL if self.mode in ("eager", queue.name) else 0

    def __str__(self) -> str:
        return f"random {self.seed}" if self.mode == "random" else self.mode


def schedules(drawn: int = 6) -> list[Schedule]:
    """Return the three extreme schedules of a device with a stream of copies, and drawn ones."""
    extremes = [Schedule(mode) for mode in ("lazy", "main", "copies")]
    return [*extremes, *(Schedule("random", seed) for seed in range(drawn))]


class Mark:
    """A place in a queue.

    `reached`: whether the work before it has run. `seconds`: when that was; 0 before.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.reached = False
        self.seconds = 0.0


@dataclass(frozen=True)
class _WaitFor:
    """A task that waits for a mark of another queue."""

    mark: Mark


class Queue:
    """Work in order: functions, marks, and waits for marks of other queues."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: deque[Any] = deque()


class Queues:
    """The queues of a device. A wait of the host runs what it needs; a schedule runs the rest.

    Attributes:
        schedule: which work runs before it must.
        sites: how often each line of the code under test has asked for a wait.
        removed: the line whose waits do nothing; None = there is none.
    """

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.queues: list[Queue] = []
        self.sites: Counter[Site] = Counter()
        self.removed: Site | None = None
        self.lock = threading.RLock()
        self._watched = ""
        self._passed_over: tuple[str, ...] = ()

    def watch(self, folder: str, passed_over: tuple[str, ...] = ()) -> None:
        """Let waits be known by the innermost line of a folder that asks for them.

        `passed_over`: names of files there whose callers are named instead.
        """
        self._watched = folder
        self._passed_over = passed_over

    def add(self, name: str) -> Queue:
        queue = Queue(name)
        self.queues.append(queue)
        return queue

    def push(self, queue: Queue, task: Callable[[], None]) -> None:
        with self.lock:
            queue.tasks.append(task)
            self._run_some()

    def record(self, queue: Queue) -> Mark:
        """Return a mark at the end of a queue."""
        mark = Mark(queue)
        with self.lock:
            queue.tasks.append(mark)
            self._run_some()
        return mark

    def queue_waits(self, queue: Queue, mark: Mark) -> None:
        """Let what is pushed next wait for a mark; the code under test asks for it."""
        if not self._is_removed():
            self.push_wait(queue, mark)

    def push_wait(self, queue: Queue, mark: Mark) -> None:
        """Let what is pushed next wait for a mark; the device asks for it itself."""
        with self.lock:
            queue.tasks.append(_WaitFor(mark))
            self._run_some()

    def host_waits(self, mark: Mark) -> None:
        """Run what lies before a mark."""
        if not self._is_removed():
            with self.lock:
                self._run_to(mark)

    def finish(self, *queues: Queue) -> None:
        """Run everything in these queues, or in all: a wait that cannot be removed."""
        with self.lock:
            for queue in queues or self.queues:
                mark = Mark(queue)
                queue.tasks.append(mark)
                self._run_to(mark)

    def reset(self, schedule: Schedule, removed: Site | None = None) -> None:
        """Finish all work, and follow another schedule from here on."""
        self.finish()
        self.schedule = schedule
        self.removed = removed

    def _run_to(self, mark: Mark) -> None:
        while not mark.reached:
            self._run_first(mark.queue, may_force=True)

    def _run_first(self, queue: Queue, *, may_force: bool) -> bool:
        """Run the first task of a queue; return False if it waits for a mark.

        `may_force`: whether the work before that mark may be run.
        """
        task = queue.tasks[0]
        if isinstance(task, _WaitFor):
            if not task.mark.reached and not may_force:
                return False
            self._run_to(task.mark)
        queue.tasks.popleft()
        if isinstance(task, Mark):
            task.reached = True
            task.seconds = time.perf_counter()
        elif not isinstance(task, _WaitFor):
            task()
        return True

    def _run_some(self) -> None:
        """Run what the schedule lets run; a queue that ran may have freed another one."""
        runs_on = True
        while runs_on:
            runs_on = False
            for queue in self.queues:
                left = self.schedule.num_tasks(queue)
                while left and queue.tasks and self._run_first(queue, may_force=False):
                    left -= 1
                    runs_on = self.schedule.mode != "random"

    def _is_removed(self) -> bool:
        site = self._site()
        if site is None:
            return False
        self.sites[site] += 1
        return site == self.removed

    def _site(self) -> Site | None:
        """Return the line of the code under test that asks for this wait."""
        frame: Any = sys._getframe(2)
        while frame is not None and self._watched:
            path = frame.f_code.co_filename
            name = path.rsplit("/", 1)[-1]
            if path.startswith(self._watched) and name not in self._passed_over:
                return name, frame.f_lineno
            frame = frame.f_back
        return None


def wait_sites(queues: Queues, run: Callable[[], object]) -> list[Site]:
    """Return every line of the code under test that waits in a run."""
    queues.reset(Schedule())
    queues.sites.clear()
    run()
    return sorted(queues.sites)


def finds_removed(
    queues: Queues,
    run: Callable[[], object],
    site: Site | None,
    expected: object,
    tried: list[Schedule],
) -> Iterator[str]:
    """Yield the schedules under which a run without the waits of a line differs or fails.

    `site`: None = no wait is removed, for a run that has a fault of its own.
    """
    for schedule in tried:
        queues.reset(schedule, site)
        try:
            differs = run() != expected
        except Exception:
            differs = True
        finally:
            queues.reset(Schedule())
        if differs:
            yield str(schedule)
