# SPDX-License-Identifier: Apache-2.0
"""What a join of turns yields, by dicts and loops: the oracle of its tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Oracle:
    """What a join of some turns yields, by dicts and loops.

    `windows`, `lateness`: in seconds. `turns`: (input, rows) of each turn.
    """

    windows: Mapping[str, float]
    lateness: float
    as_they_come: bool
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.impressions: dict[tuple[Any, float], dict[str, Any]] = {}
        self.outcomes: dict[tuple[Any, float, str], bool] = {}
        self.unmatched: list[tuple[Any, float, str]] = []
        self.watermark = float("-inf")

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def is_over(self, time: float) -> bool:
        return time + max(self.windows.values()) + self.lateness < self.watermark

    def take(self, impressions: list[Any], outcomes: list[Any], watermark: float) -> list[Any]:
        """Return the samples of a turn: (n, labels)."""
        for key, time, n in impressions:
            if self.is_over(time):
                self.count("late")
            elif (key, time) in self.impressions:
                self.count("repeated")
            else:
                self.count("impressions")
                self.impressions[key, time] = {"n": n, "decided": {}, "new": True}
        for key, time, label in outcomes:
            if self.is_over(time):
                self.count("unmatched")
                self.unmatched.append((key, time, label))
            elif (key, time, label) in self.outcomes:
                self.count("outcomes_repeated")
            else:
                self.count("outcomes")
                self.outcomes[key, time, label] = False
        positive = self._positive()
        self.watermark = max(self.watermark, watermark)
        samples = self._samples(positive)
        for outcome, matched in list(self.outcomes.items()):
            if self.is_over(outcome[1]):
                del self.outcomes[outcome]
                if not matched:
                    self.count("unmatched")
                    self.unmatched.append(outcome)
        return samples

    def _positive(self) -> dict[tuple[Any, float], set[str]]:
        """Return the labels of each impression that have an outcome while they are undecided."""
        positive: dict[tuple[Any, float], set[str]] = {}
        for (key, time), impression in self.impressions.items():
            positive[key, time] = set(impression.get("positive", ()))
            for other, when, label in self.outcomes:
                window = self.windows[label]
                if other == key and time <= when <= time + window:
                    last = window if self.as_they_come else max(self.windows.values())
                    is_open = time + last + self.lateness >= self.watermark
                    if is_open or impression["new"]:
                        self.outcomes[other, when, label] = True
                        positive[key, time].add(label)
        return positive

    def _samples(self, positive: Mapping[Any, set[str]]) -> list[Any]:
        samples = []
        for place, impression in list(self.impressions.items()):
            impression["new"] = False
            impression["positive"] = positive[place]
            time = place[1]
            if not self.as_they_come:
                if self.is_over(time):
                    labels = [float(label in positive[place]) for label in self.windows]
                    samples.append((impression["n"], labels))
                    del self.impressions[place]
                continue
            told = {}
            for label, window in self.windows.items():
                is_over = time + window + self.lateness < self.watermark
                if label not in impression["decided"] and (is_over or label in positive[place]):
                    told[label] = float(label in positive[place])
            impression["decided"] |= told
            if told:
                samples.append((impression["n"], [told.get(name, -1.0) for name in self.windows]))
            if self.is_over(time):
                del self.impressions[place]
        return samples


@dataclass(frozen=True)
class Topics:
    """Two topics as their broker holds them, and the journal of a run that forgets nothing."""

    logs: list[list[list[dict[str, Any]]]]
    decided: Mapping[str, Mapping[int, Any]]

    @classmethod
    def of(cls, broker: Any, journal: Path) -> Topics:
        logs = []
        for topic in ("shown", "clicks"):
            partitions = broker._topics[topic]
            logs.append([[json.loads(value) for _, value in messages] for messages in partitions])
        decided: dict[str, dict[int, Any]] = {}
        for line in journal.read_text().splitlines():
            topic, number, value = json.loads(line[9:])
            decided.setdefault(topic, {})[number] = value
        return cls(logs, decided)

    def explain(self, learned: list[Any], oracle: Oracle) -> bool:
        """Whether samples (n, label) are those that the oracle yields, in the order of turns."""
        rest = [tuple(row) for row in learned]
        for samples in self._samples(oracle):
            if len(rest) < len(samples):  # a batch ends in this turn
                return set(rest) <= set(samples) and len(set(rest)) == len(rest)
            if sorted(rest[: len(samples)]) != sorted(samples):
                return False
            rest = rest[len(samples) :]
        return not rest

    def _samples(self, oracle: Oracle) -> Iterator[list[Any]]:
        """Yield what the oracle yields in each turn."""
        used: list[dict[str, int]] = [{}, {}]
        blocks = [0, 0]
        highs: list[dict[str, float]] = [{}, {}]
        for turn in self.decided["block"].values():
            events: list[list[Any]] = [[], []]
            number = turn["input"]
            if number is not None:
                block = self.decided[f"block.{number}"][blocks[number]]
                blocks[number] += 1
                for partition in range(len(self.logs[number])):
                    highs[number].setdefault(str(partition), float("-inf"))
                for partition, end in block["take"].items():
                    rows = self.logs[number][int(partition)][used[number].get(partition, 0) : end]
                    used[number][partition] = end
                    events[number] += [
                        (row["n"], row["t"], (row["n"], "y")[number]) for row in rows
                    ]
                    times = [row["t"] for row in rows]
                    highs[number][partition] = max([highs[number][partition], *times])
                assert len(events[number]) == turn["rows"]
            samples = oracle.take(events[0], events[1], _mark(highs, turn["idle"]))
            yield [(n, labels[0]) for n, labels in samples]


def _mark(highs: list[dict[str, float]], idle: Iterable[Any]) -> float:
    """The lowest of the newest times of partitions that are not idle."""
    quiet = [(number, name) for number, name in idle]
    active = []
    for number, by_name in enumerate(highs):
        names = [name for name in by_name if (number, name) not in quiet]
        if names:
            active.append(min(by_name[name] for name in names))
        elif not by_name and (number, "") not in quiet:
            active.append(float("-inf"))
    return min(
        active, default=max(max(by_name.values(), default=float("-inf")) for by_name in highs)
    )
