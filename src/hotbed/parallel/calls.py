# SPDX-License-Identifier: Apache-2.0
"""RankCall: what a rank asks the others to do together, and from where: how each call begins."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import TracebackType

from hotbed.errors import ConfigError, RankLost
from hotbed.parallel.world import trains_together

from .roll_call import Departure, report_departure

NAME_WORDS = 6
CALL_WORDS = NAME_WORDS + 1
"""int64 numbers that say which call it is: its name, and its step."""
SEPARATOR = ": "


@dataclass
class Place:
    """Where a rank is in a program.

    Attributes:
        step: the number of the step under way; 0 = none is.
        phase: of the step, or the call of the program.
        call: the outermost call of the program under way.
        number: of the last call of the program in which the ranks met, equal on all of them.
        has_met: whether they have met in the call under way.
        failures: calls that an error has ended here before the ranks met in them, since they met
            last.
        depth: how many calls are under way, one within the other.
    """

    step: int = 0
    phase: str = "start"
    call: str = ""
    number: int = 0
    has_met: bool = False
    failures: int = 0
    depth: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase

    def meet(self) -> None:
        """Note that the ranks meet: calls of the program are counted in which they do."""
        if not self.has_met:
            self.number += 1
        self.has_met = self.depth > 0

    def begin(self) -> None:
        """Count calls anew: the ranks have connected."""
        self.number = 0
        self.has_met = False
        self.failures = 0


PLACE = Place()
"""Where the main thread of this process is."""


@contextmanager
def at(phase: str) -> Iterator[None]:
    """Let the main thread be in a call of the program in this block, or in the decorated method."""
    before = (PLACE.step, PLACE.phase)
    PLACE.phase = phase
    try:
        with reporting_errors():
            yield
    finally:
        PLACE.step, PLACE.phase = before


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report to the other ranks an error that leaves this block, a call of the program.

    They may wait for this rank in that call. An error of a nested call is left to the outer one,
    which may handle it and continue.
    """
    PLACE.depth += 1
    if PLACE.depth == 1:
        PLACE.call = PLACE.phase
    try:
        yield
    except BaseException as error:
        if PLACE.depth == 1 and not isinstance(error, RankLost) and trains_together():
            _report(error)
        raise
    finally:
        PLACE.depth -= 1
        if not PLACE.depth:
            PLACE.call = ""
            PLACE.has_met = False


def _report(error: BaseException) -> None:
    """Report that an error ends the call under way, which the others may be in or come to."""
    number = PLACE.number
    failures = 0
    if not PLACE.has_met:
        number += 1
        PLACE.failures += 1
        failures = PLACE.failures
    report_departure(Departure(number, failures, PLACE.call, _brief(error)))


@cache
def report_uncaught_errors() -> None:
    """From now on, report an error that nothing catches: this rank comes to no further call.

    Its process may live on, such as for a thread of the program.
    """
    show = sys.excepthook

    def show_and_report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, trace)
        if not isinstance(error, RankLost):
            report_departure(Departure(None, 0, "the program", _brief(error)))

    sys.excepthook = show_and_report


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


@dataclass(frozen=True)
class RankCall:
    """A call to the other ranks, which all of them must make.

    Attributes:
        kind: what is done together.
        step: from where.
        phase: from where.
    """

    kind: str
    step: int
    phase: str

    @classmethod
    def of(cls, kind: str, place: Place) -> RankCall:
        """Return a call that is made at this place."""
        return cls(kind, place.step, place.phase)

    @classmethod
    def of_words(cls, words: Sequence[int]) -> RankCall:
        """Return the call that another rank told."""
        *name, step = words
        text = struct.pack(f"={NAME_WORDS}q", *name).rstrip(b"\0").decode("ascii", "replace")
        kind, _, phase = text.partition(SEPARATOR)
        return cls(kind, step, phase)

    @property
    def words(self) -> list[int]:
        """The call as int64 numbers, of which the first is not 0."""
        return [*_name_words(f"{self.kind}{SEPARATOR}{self.phase}"), self.step]

    @property
    def place(self) -> Place:
        """From where the call is made."""
        return Place(self.step, self.phase)


@lru_cache(maxsize=256)
def _name_words(name: str) -> tuple[int, ...]:
    size = 8 * NAME_WORDS
    text = name.encode("ascii", "replace")[:size].ljust(size, b"\0")
    return struct.unpack(f"={NAME_WORDS}q", text)


def check_one_call(words: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless all ranks make the same call; `words`: of each rank."""
    if all(of_rank == words[0] for of_rank in words):
        return
    calls = [RankCall.of_words(of_rank) for of_rank in words]
    places = [str(call.place) for call in calls]
    if len(set(places)) == 1:
        places = [f"{call.place} ({call.kind})" for call in calls]
    ranks_at: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_at.setdefault(place, []).append(rank)
    lines = [f"{named(ranks)} in {place}" for place, ranks in ranks_at.items()]
    raise ConfigError(
        "ranks: all ranks must make the same calls in the same order, got "
        f"{' and '.join(lines)}. Call fit, save, evaluate, predict, export and the like on every "
        "rank, not below `if rank == 0:`, and give each rank the same intervals and limits."
    )


def named(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
