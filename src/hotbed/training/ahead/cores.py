# SPDX-License-Identifier: Apache-2.0
"""How reading, mapping and the dense network share the cores of a machine."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hotbed.connectors import Journal
from hotbed.embedding.native import num_threads, set_num_threads

if TYPE_CHECKING:
    from hotbed.training.run import Run

log = logging.getLogger("hotbed")

TOPIC = "threads"
TRIAL_STEPS = 9
"""Steps of one trial of a setting."""
UNTIMED_STEPS = 3
"""The first of them, which are not timed: batches are mapped already as the setting before did."""
FAR_WORSE = 4.0
"""A setting with a step that takes this many times the best one's time is tried no longer."""
WORSE = (1.5, 1.15, 1.15)
"""After each round, a setting that takes more than this many times the best one's time leaves."""
CLEARLY = 1.05
"""Of settings whose times differ by less than this factor, the one with fewer threads is chosen."""


@dataclass(frozen=True)
class Threads:
    """Threads of torch, and of the native core.

    Attributes:
        torch: threads of torch.
        core: threads of the native core.
        ahead: whether ids are mapped ahead, by a thread beside these. Where torch keeps all cores
            busy, that thread may take more from it than it gains; then ids are mapped in their
            turn.
    """

    torch: int
    core: int
    ahead: bool = True

    def __str__(self) -> str:
        text = f"{self.torch} of torch, {self.core} of the core"
        if not self.ahead:
            text += ", ids mapped in their turn"
        return text

    @staticmethod
    def now() -> Threads:
        """Return the threads in use."""
        return Threads(torch.get_num_threads(), num_threads())

    def use(self) -> None:
        """Let torch, on this thread, and the core use these threads."""
        torch.set_num_threads(self.torch)
        set_num_threads(self.core)


def candidates(most: Threads) -> list[Threads]:
    """Return the settings to try, the most frugal one first.

    Torch gets 1, 2, 4, … threads up to `most`, the core one or `most`. With one thread, the core
    runs on the threads that call it, so that a map never waits for a lookup. Where torch may take
    several cores, the last setting gives it all of them, and maps ids in their turn.
    """
    counts = [1]
    while counts[-1] * 2 < most.torch:
        counts.append(counts[-1] * 2)
    if most.torch > 1:
        counts.append(most.torch)
    of_core = sorted({1, most.core})
    settings = [Threads(of_torch, core) for core in of_core for of_torch in counts]
    if most.torch > 1:
        settings.append(replace(most, ahead=False))
    return settings


class Cores:
    """Choose the number of threads that torch and the native core use, from the first steps.

    The settings are tried in turn, nine steps each, and the good ones up to four times. The fastest
    stays until the end of the run; then the threads from before are back. Where several are about
    as fast, the one with the fewest threads stays: threads that wait for work keep a core busy,
    which then lacks for reading. No setting has more threads of torch and of the core than were in
    use before.

    The core gives the same bits for any number of threads, torch does not: each change is written
    to the journal of the run before it takes effect, with the number of the step after which it
    does, and a resumed run repeats it. This is a callback; in a loop of your own `hb.Ahead` calls
    `begin`, `step` and `close`.

    Args:
        torch_threads: threads of torch from the first step on; None = measured.
        measures: False = take over the decisions of a journal or a state, and take none.
    """

    def __init__(self, torch_threads: int | None = None, *, measures: bool = True) -> None:
        self._given = torch_threads
        self._measures = measures
        self._before: Threads | None = None
        self._now: Threads | None = None
        self._decided = torch_threads is not None
        self._left: list[Threads] = []  # the settings still to be tried in this round
        self._round = 0
        self._began = 0  # the step after which this trial began
        self._seconds: dict[Threads, list[float]] = {}  # of each setting, those of its steps
        self._moment: float | None = None  # when the step before ended; None = do not time the next

    @property
    def torch_threads(self) -> int | str:
        """The number of torch's threads that was given, or "measured"."""
        return self._given or "measured"

    # --- events of a run

    def on_epoch_begin(self, run: Run) -> None:
        self.begin(run.step, run.clock.journal)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return True while ids are mapped in their turn."""
        return self._now is not None and not self._now.ahead

    def on_step_end(self, run: Run) -> None:
        self.step(run.step, run.clock.journal)

    def on_idle(self, run: Run) -> None:
        self._moment = None

    def on_fit_end(self, run: Run) -> None:
        self.close()

    # --- events of any loop

    def begin(self, step: int, journal: Journal | None = None) -> None:
        """Use the setting of a resumed run, or the first one to try, from after step `step` on."""
        if self._before is None:
            self._before = Threads.now()
        if self._given is not None:
            self._now = Threads(self._given, num_threads())
        self._moment = None
        if self._now is not None:
            self._now.use()
        else:
            self._next(step, journal)

    def step(self, step: int, journal: Journal | None = None) -> None:
        """Time the step that ended, and use another setting after it if it is time to."""
        follows = self._given is None and journal is not None and journal.last(TOPIC) >= step
        if self._decided and not follows:
            return
        moment = time.perf_counter()
        is_slow = False
        is_settled = step > self._began + UNTIMED_STEPS
        if is_settled and self._moment is not None and self._now is not None:
            seconds = moment - self._moment
            is_slow = seconds > FAR_WORSE * self._best_seconds()
            self._seconds.setdefault(self._now, []).append(seconds)
        self._moment = moment
        if follows or is_slow or step >= self._began + TRIAL_STEPS:
            self._next(step, journal)

    def close(self) -> None:
        """Use the threads from before again."""
        if self._before is not None:
            self._before.use()
            self._before = None

    def state(self) -> dict[str, Any]:
        """Return the setting and what was measured, as plain values; no content digest covers it.

        A run that is resumed in the middle of the trials continues them.
        """
        if self._given is not None or self._now is None:
            return {}
        return {
            "wall_threads": astuple(self._now),
            "wall_decided": self._decided,
            "wall_left": [astuple(threads) for threads in self._left],
            "wall_round": self._round,
            "wall_began": self._began,
            "wall_trials": [[astuple(threads), times] for threads, times in self._seconds.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, unless the number of threads is given."""
        if self._given is not None or not state:
            return
        self._now = Threads(*state["wall_threads"])
        self._decided = bool(state["wall_decided"])
        self._left = [Threads(*threads) for threads in state["wall_left"]]
        self._round = state["wall_round"]
        self._began = state["wall_began"]
        self._seconds = {}
        for threads, times in state.get("wall_trials", ()):  # older states have others
            self._seconds[Threads(*threads)] = list(times)

    # --- decisions

    def _next(self, step: int, journal: Journal | None) -> None:
        """Use the setting that the journal holds for this step, or the next one to try."""
        planned: list[Threads] | None = None

        def propose() -> dict[str, Any] | None:
            nonlocal planned
            if not self._measures:
                return None
            planned = self._planned()
            chosen = planned[0] if planned else self._chosen()
            return {
                "torch": chosen.torch,
                "core": chosen.core,
                "ahead": chosen.ahead,
                "decided": not planned,
            }

        decision = (journal or Journal()).decide(TOPIC, step, propose)
        if decision is None:
            return
        threads = Threads(decision["torch"], decision["core"], decision.get("ahead", True))
        self._decided = bool(decision["decided"])
        rest = self._planned() if planned is None else planned
        self._left = [other for other in rest if other != threads]
        self._now = threads
        self._began = step
        threads.use()
        if self._decided:
            self._log(step)

    def _planned(self) -> list[Threads]:
        """Return the settings still to be tried, those of the next round if there are none."""
        if self._left or self._round > len(WORSE):
            return self._left
        every = candidates(self._before or Threads.now())
        if self._round:
            limit = self._best_seconds() * WORSE[self._round - 1]
            every = [threads for threads in every if self._median(threads) <= limit]
        self._round += 1
        if len(every) == 1:
            return []
        return every

    def _median(self, threads: Threads) -> float:
        times = self._seconds.get(threads)
        if not times:
            return math.inf
        return statistics.median(times)

    def _best_seconds(self) -> float:
        """Return the median of the fastest setting; infinite before the first."""
        return min(map(self._median, self._seconds), default=math.inf)

    def _chosen(self) -> Threads:
        """Return the setting with the fewest threads of those about as fast as the best."""
        limit = CLEARLY * self._best_seconds()
        fast = [threads for threads in self._seconds if self._median(threads) <= limit]
        return min(fast, key=_num_threads, default=Threads.now())

    def _log(self, step: int) -> None:
        tried = ", ".join(
            f"{1e3 * self._median(threads):.2f} ms with {threads}" for threads in self._seconds
        )
        log.info(
            "threads from step %d on: %s (measured: %s)", step + 1, self._now, tried or "nothing"
        )


def _num_threads(threads: Threads) -> tuple[int, int, int]:
    """Return the number of threads that may be busy at a time, then those of each kind."""
    return threads.torch + threads.ahead, threads.torch, threads.core
