# SPDX-License-Identifier: Apache-2.0
"""When an impression becomes a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hotbed.connectors.times import EARLIEST

UNKNOWN = -1.0
"""The value of a label that is not decided yet."""


@dataclass(frozen=True)
class Impressions:
    """Some open impressions in a turn.

    Attributes:
        positive: whether each label had its outcome, [labels, impressions].
        fresh: whether it had the first one in this turn.
        closes: whether the window of each label closed in this turn.
        closed: whether it closed in an earlier one.
    """

    positive: np.ndarray
    fresh: np.ndarray
    closes: np.ndarray
    closed: np.ndarray


class Decided(NamedTuple):
    """Impressions that become samples in a turn.

    Attributes:
        rows: their numbers.
        labels: [labels, rows].
        is_first: whether this is the first sample of the impression.
    """

    rows: np.ndarray
    labels: np.ndarray
    is_first: np.ndarray


class JoinRule(ABC):
    """Decides which labels of which impressions become samples in a turn; use a subclass."""

    @abstractmethod
    def last_windows(self, windows: Sequence[int]) -> list[int]:
        """Return until when each label may have an outcome, in microseconds after the impression.

        Args:
            windows: of the labels, in microseconds.
        """

    @abstractmethod
    def decide(self, impressions: Impressions) -> Decided:
        """Return the impressions that become samples."""

    def known(self, decided: Decided, ends: np.ndarray, met: np.ndarray) -> np.ndarray:
        """Return from when on the labels of each sample could be known, in microseconds, [rows].

        Args:
            decided: the samples.
            ends: the end of the window of each label, [labels, rows].
            met: the time of the first outcome of each label in this turn, [labels, rows].
        """
        last: np.ndarray = np.where(decided.labels != UNKNOWN, ends, EARLIEST).max(axis=0)
        return last

    @abstractmethod
    def repeats(self, num_labels: int) -> bool:
        """Return whether an impression of `num_labels` labels may become several samples."""


@dataclass(frozen=True)
class Wait(JoinRule):
    """An impression becomes a sample when the windows of all of its labels have closed.

    Example: `hb.sources.Join(views, clicks, on="id", within=1800, rule=hb.sources.Wait())`
    """

    def last_windows(self, windows: Sequence[int]) -> list[int]:
        return [max(windows)] * len(windows)

    def decide(self, impressions: Impressions) -> Decided:
        rows = np.flatnonzero(impressions.closes[0])
        labels = impressions.positive[:, rows].astype(np.float64)
        return Decided(rows, labels, np.ones(len(rows), bool))

    def repeats(self, num_labels: int) -> bool:
        return False


@dataclass(frozen=True)
class AsTheyCome(JoinRule):
    """A positive label becomes a sample at once, a negative one when its window has closed.

    With several labels, an impression may become several samples, at most one for each label. A
    sample has the labels that are decided at that moment. The others are -1, which
    `hb.losses.BCE(missing_below=0)` leaves out.

    Example: `hb.sources.Join(views, clicks, on="id", within=1800, rule=hb.sources.AsTheyCome())`
    """

    def last_windows(self, windows: Sequence[int]) -> list[int]:
        return list(windows)

    def decide(self, impressions: Impressions) -> Decided:
        negative = impressions.closes & ~impressions.positive
        is_decided = impressions.fresh | negative
        rows = np.flatnonzero(is_decided.any(axis=0))
        labels = np.where(is_decided[:, rows], impressions.fresh[:, rows], UNKNOWN)
        was_positive = impressions.positive & ~impressions.fresh
        is_first = ~(was_positive | impressions.closed)[:, rows].any(axis=0)
        return Decided(rows, labels.astype(np.float64), is_first)

    def known(self, decided: Decided, ends: np.ndarray, met: np.ndarray) -> np.ndarray:
        return super().known(decided, np.where(decided.labels > 0, met, ends), met)

    def repeats(self, num_labels: int) -> bool:
        return num_labels > 1
