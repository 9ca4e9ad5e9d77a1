# SPDX-License-Identifier: Apache-2.0
"""Positions of a dataset, whether reading may resume from them, and the limit of times in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hotbed.connectors.live import Live
from hotbed.connectors.position import Position, require_equal
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, DataError

GRAIN_KEYS = {"epoch", "batch", "grains", "order"}
"""Members of a position in an epoch by grains."""

LATEST_TIME = "latest"
"""Member of a position in a source that ends and whose times are limited."""


def check_position(position: Position, start: Position, source: Source) -> None:
    """Raise ConfigError if a position belongs to another order of rows.

    Args:
        position: to resume from.
        start: the position of the dataset before its first row.
        source: its source.
    """
    layout = start.state.keys() - {LATEST_TIME}
    names = position.state.keys() - {LATEST_TIME}
    if layout ^ names == {"rows"}:
        writer = "an endless source"
        if source.endless:
            writer = "a source that ends"
        raise ConfigError(
            f"dataset: the position was written by {writer} "
            f"({Position.from_json(position['source'] or {}).writer}), got "
            f"{type(source).__name__} to resume from it. Give the source that the "
            "position was written for, or begin without it."
        )
    layouts = [layout]
    if not source.endless:
        layouts.append(GRAIN_KEYS)
    if names not in layouts:
        raise ConfigError(
            f"dataset: expected the position of a dataset, got {position.state}. Pass a batch's "
            "position."
        )
    check_grains(position, start["order"].get("grains", 1))
    order = dict(start["order"])
    # positions of streams of older versions do not say it
    if source.endless and "max_ahead_seconds" not in position["order"]:
        order.pop("max_ahead_seconds", None)
    if position["order"] != order:
        raise ConfigError(
            "dataset: cannot resume a position of another order, got "
            f"{position['order'] or 'no shuffle'}, this dataset has "
            f"{start['order'] or 'no shuffle'}. Give it the same shuffle, seed, cache and "
            "max_ahead_seconds."
        )


def check_grains(position: Position, grains: int) -> None:
    """Raise ConfigError if a position was written with another number of grains."""
    written = position["order"].get("grains", 1)
    if written != grains:
        raise ConfigError(
            f"dataset: the position was written with grains={written}, got {grains}. Give the "
            "model the number that the state was written with, or call Dataset.divide with it "
            "before resume, or begin without the position."
        )


def check_layout(start: Position, *, divided: bool) -> None:
    """Raise ConfigError if a position of an epoch by grains is to resume a stream, or vice versa.

    Args:
        start: the position.
        divided: whether rows are read by grains.
    """
    by_grains = "grains" in start.state
    is_start = not by_grains and start["source"] is None and not start["skip"]
    if by_grains == divided or (is_start and not start["emitted"]):
        return
    writer = "in the order of the source, as online_train does,"
    reader = "by grains, as fit does"
    if by_grains:
        writer = "by grains, as fit does,"
        reader = "in the order of the source, as online_train does"
    raise ConfigError(
        f"dataset: the position was written while rows were read {writer} got a reader {reader}. "
        "Resume with the call that wrote it, or begin without the position."
    )


def begins_at(place: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Return whether a place counts rows from the start of a source, as those of a cache do.

    Places of older versions do not say where that is.
    """
    return place["source"] is None or _plain(place) == _plain(start)


def check_begin(place: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    """Raise DataError if a place counts other rows than those from the start of a source."""
    if place["source"] is not None:
        require_equal("a cached dataset", _plain(place), _plain(start))


def _plain(place: Mapping[str, Any]) -> Any:
    return Position(place["source"] or {}).to_json()


class Latest(NamedTuple):
    """The latest time in microseconds that an event may have, and whether the user limited it."""

    time: int
    is_set: bool


class TimeLimit:
    """How far event times may lie ahead of the clock.

    In a stream it is the clock of each block. In a source that ends it is the clock of the first
    reading, which positions hold, so that a resume leaves out the same rows.

    Args:
        seconds: how far; None = to the end of the next day, for rows that are learned.
        endless: whether the source is a stream.
        timed: whether events have times.
    """

    def __init__(self, seconds: float | None, *, endless: bool, timed: bool) -> None:
        self._is_set = seconds is not None
        self._timed = timed
        self._plan = ReadPlan(max_ahead_seconds=seconds)
        self._endless = endless
        self._latest: int | None = None

    def begin(self, live: Live, *, learns: bool) -> None:
        """Note the clock before the first row of a source that ends.

        `learns`: whether the rows are learned, so that their times move clocks.
        """
        if self._applies(learns) and not self._endless and self._latest is None:
            self._latest = self._plan.latest_recorded(live.now())

    def to_json(self) -> dict[str, int]:
        """Return the member of a position; {} without one."""
        return {} if self._latest is None else {LATEST_TIME: self._latest}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take over what a position holds."""
        self._latest = state.get(LATEST_TIME)

    def latest(self, after: Position, *, learns: bool) -> Latest | None:
        """Return what limits the times of rows before a position of the source; None: nothing.

        Raises:
            DataError: the position of an endless source does not hold the clock.
        """
        if not self._applies(learns):
            return None
        latest = self._latest
        if self._endless:
            latest = self._plan.latest_recorded(_clock_at(after))
        return None if latest is None else Latest(latest, self._is_set)

    def _applies(self, learns: bool) -> bool:
        return self._timed and (self._is_set or learns)


def _clock_at(after: Position) -> int:
    """Return the clock in microseconds when a block of an endless source was decided."""
    if "now" not in after.state:
        raise DataError(
            "dataset: the position of an endless source has no member 'now', by which times are "
            f"limited, got {sorted(after.state)}. Add the clock in microseconds when the block was "
            "decided, as hb.testing.FakeStream does."
        )
    clock: int = after["now"]
    return clock
