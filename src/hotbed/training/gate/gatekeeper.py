# SPDX-License-Identifier: Apache-2.0
"""Gatekeeper: decides of each state that is saved whether it is published."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hotbed.embedding.modules.state import dense_state
from hotbed.persist.container.manifest import HeldEntry
from hotbed.training.gate.counts import BINS, EventCounter, EventCounts
from hotbed.training.gate.gate import Gate
from hotbed.training.gate.rules import VersionFacts, default_rules, rule_name
from hotbed.training.gate.sample import EventSample, LabelScores, norms_of, scores_of
from hotbed.training.run import Run
from hotbed.training.step.example import Example
from hotbed.training.step.scorer import Scorer, Scores, scorer_of, scores_of_training

log = logging.getLogger("hotbed")
MOST_USUAL = 16
"""Usual values of a number that are kept."""

MOST_LOGGED = 100
"""Held versions whose reasons are kept for the report."""

_FADING = 0.8
"""What the events of earlier versions count for at each version after them."""

Reasons = tuple[HeldEntry, ...]


class Gatekeeper:
    """Watches the events of a run, and decides of its versions by the rules of a gate.

    Decisions follow from the events, from the steps at which states are saved, and from `state`.
    Ranks decide alike: they count the same events, and rank 0 says which rules are broken.

    Attributes:
        reasons: why the newest version is held; empty if it is not.
        in_a_row: number of held versions without a published one between them.
        num_held: number of versions that were held, over all resumptions.
        log: step and reasons of the versions that were held last, at most 100.
        measured: what each rule measured of the newest version; empty before the first one.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.reasons: Reasons = ()
        self.in_a_row = 0
        self.num_held = 0
        self.measured: dict[str, dict[str, float]] = {}
        self.log: list[tuple[int, list[str]]] = []
        self._rules = default_rules() if gate.rules is None else tuple(gate.rules)
        self._counter = EventCounter()
        self._recent: list[EventCounts] = []  # since the versions before, oldest first
        self._num_new = 0.0  # events since usual values were added
        self._before = EventCounts()
        self._usual: dict[str, dict[str, list[float]]] = {}
        self._sample = EventSample(gate.sample)
        self._served: LabelScores = {}
        self._served_norms: dict[str, float] = {}
        self._tables: dict[str, dict[str, int]] = {}
        self._offsets: dict[str, int] = {}
        self._step = -1
        self._run: Run | None = None

    @property
    def rule_names(self) -> list[str]:
        """Names of the rules, in their order."""
        return [rule_name(rule) for rule in self._rules]

    def join(self, run: Run) -> None:
        """Watch what the observer of a run scores."""
        if run.observer is not None and self not in run.observer.watchers:
            run.observer.watchers.append(self)

    def begin(self, run: Run) -> None:
        """Begin or resume with a run whose tables have their rows."""
        self._run = run
        if not self._tables:
            self._tables = _counters(run)
            self._offsets = _offsets(run)

    def watch_training(self, run: Run) -> None:
        """Count the batch of a step that no observer scores, by its training forward."""
        if run.observer is None and run.example is not None:
            self.watch(scores_of_training(run.learner, run.example, run.loss), run.example)

    def watch(self, outputs: Scores, example: Example) -> None:
        """Count the events of a batch that was learned, with the scores that it had before."""
        assert self._run is not None
        kinds = self._run.learner.criterion
        scorer = scorer_of(self._run.observer)
        if scorer is not None and scorer.has_own_outputs:
            kinds = None
        self._counter.count(outputs, example, kinds)
        self._sample.add(example)

    def decide(self, run: Run) -> Reasons:
        """Return why the version of this step is held; nothing if it may be published."""
        if run.step == self._step:
            return self.reasons
        self._step = run.step
        self._recent.append(self._counted(run))
        newest = self._newest()
        facts = self._facts(run, newest)
        has_new = newest.samples >= self.gate.min_samples
        measured = {rule_name(rule): rule.measure(facts) for rule in self._rules}
        self.measured = measured
        self.reasons = run.learner.shard.from_first(lambda: self._broken(measured, has_new=has_new))
        if self.reasons:
            self._hold()
        else:
            self._accept(run, newest, measured, has_new=has_new)
        return self.reasons

    def overrule(self, run: Run) -> None:
        """Take the state that was held as one that is published: somebody has published it."""
        log.info("the version at step %d was published although it was held", run.step)
        self.reasons = ()
        self.in_a_row = 0
        self._usual = {}  # the events are others now
        self._before = EventCounts()
        self._note_served(run)

    def state(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as JSON values and NumPy arrays."""
        return {
            "reasons": [reason.to_json() for reason in self.reasons],
            "in_a_row": self.in_a_row,
            "num_held": self.num_held,
            "log": [list(entry) for entry in self.log],
            "counter": self._counter.state(),
            "recent": [counts.state() for counts in self._recent],
            "num_new": self._num_new,
            "before": self._before.state(),
            "usual": self._usual,
            "sample": self._sample.state(),
            "served": {label: list(pair) for label, pair in self._served.items()},
            "served_norms": self._served_norms,
            "tables": self._tables,
            "offsets": self._offsets,
            "step": self._step,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.reasons = tuple(HeldEntry.from_json(reason) for reason in state["reasons"])
        self.in_a_row = state["in_a_row"]
        self.num_held = state["num_held"]
        self.log = [(step, list(reasons)) for step, reasons in state["log"]]
        self._counter.load_state(state["counter"])
        self._recent = [EventCounts.of_state(counts) for counts in state["recent"]]
        self._num_new = state["num_new"]
        self._before = EventCounts.of_state(state["before"])
        self._usual = {rule: dict(values) for rule, values in state["usual"].items()}
        self._sample.load_state(state["sample"])
        self._served = {label: tuple(pair) for label, pair in state["served"].items()}
        self._served_norms = dict(state["served_norms"])
        self._tables = {name: dict(counters) for name, counters in state["tables"].items()}
        self._offsets = dict(state["offsets"])
        self._step = state["step"]

    def _counted(self, run: Run) -> EventCounts:
        """Return what was counted since the version before, and begin to count anew."""
        counts = self._counter.counts
        self._counter.counts = EventCounts()
        tables = _counters(run)
        looked_up = _looked_up(run, counts)
        for name, counters in tables.items():
            before = self._tables.get(name, counters)
            grown = [counters[key] - before[key] for key in ("admitted", "refused", "evicted")]
            counts.tables[name] = np.array([*grown, counters["rows"], looked_up.get(name, 0.0)])
        offsets = _offsets(run)
        for name, offset in offsets.items():
            counts.partitions[name] = np.array(float(offset - self._offsets.get(name, offset)))
        self._tables = tables
        self._offsets = offsets
        return counts

    def _newest(self) -> EventCounts:
        """Return the counts of the newest events, as few versions back as hold enough of them."""
        newest = EventCounts()
        kept: list[EventCounts] = []
        for counts in reversed(self._recent):
            kept.insert(0, counts)
            rows = {name: sums[3] for name, sums in newest.tables.items()}
            newest = newest.plus(counts)
            for name, number in rows.items():
                newest.tables[name][3] = number  # a level, and no sum
            if newest.samples >= self.gate.min_samples:
                break
        self._recent = kept
        return newest

    def _facts(self, run: Run, newest: EventCounts) -> VersionFacts:
        scores: LabelScores = {}
        norms: dict[str, float] = {}
        scorer = _scorer(run)
        if self._sample.known is not None:
            if scorer is not None:
                scores = scores_of(run, scorer, self._sample.known)
            norms = norms_of(run, self._sample.known)
        criterion = run.learner.criterion
        probabilities = [
            label
            for label in scores
            if criterion is not None and criterion.is_probability(label or None)
        ]
        return VersionFacts(
            newest,
            self._before,
            self._served,
            scores,
            frozenset(probabilities),
            self._served_norms,
            norms,
            _num_not_finite(run),
        )

    def _broken(self, measured: Mapping[str, Mapping[str, float]], *, has_new: bool) -> Reasons:
        """Return a reason for each number that breaks a rule."""
        reasons = []
        if self.in_a_row and not has_new:
            text = f"fewer than {self.gate.min_samples} events came since the version before"
            reasons.append(HeldEntry(rule="min_samples", reason=text))
        for rule in self._rules:
            name = rule_name(rule)
            usual = {}
            for what, values in self._usual.get(name, {}).items():
                if has_new and len(values) >= self.gate.warm_up:
                    usual[what] = values
            for sentence in rule.broken(measured[name], usual):
                reasons.append(HeldEntry(rule=name, reason=sentence))
        return tuple(reasons)

    def _hold(self) -> None:
        self.in_a_row += 1
        self.num_held += 1
        self.log.append((self._step, [reason.reason for reason in self.reasons]))
        del self.log[:-MOST_LOGGED]
        self._recent = []
        self._num_new = 0.0
        self._sample.forget_fresh()

    def _accept(
        self,
        run: Run,
        newest: EventCounts,
        measured: Mapping[str, Mapping[str, float]],
        *,
        has_new: bool,
    ) -> None:
        self.in_a_row = 0
        self._num_new += self._recent[-1].samples
        if has_new and self._num_new >= self.gate.min_samples:  # stretches do not overlap
            self._num_new = 0.0
            self._before = self._before.plus(newest, share=_FADING)
            for name, values in measured.items():
                for what, value in values.items():
                    kept = self._usual.setdefault(name, {}).setdefault(what, [])
                    kept.append(value)
                    del kept[:-MOST_USUAL]
        self._note_served(run)

    def _note_served(self, run: Run) -> None:
        """Note how the version that is published scores the sample."""
        self._sample.accept()
        if self._sample.known is not None:
            scorer = _scorer(run)
            self._served = {} if scorer is None else scores_of(run, scorer, self._sample.known)
            self._served_norms = norms_of(run, self._sample.known)


def _scorer(run: Run) -> Scorer | None:
    """Return what scores a sample; None where the network computes its own loss."""
    scorer = scorer_of(run.observer)
    if scorer is not None:
        return None if scorer.has_own_outputs else scorer
    criterion = run.learner.criterion
    if criterion is None:
        return None
    return Scorer(run.learner.network, criterion, {}, shard=run.learner.shard)


def _counters(run: Run) -> dict[str, dict[str, int]]:
    """Return the counters of each table, of all ranks; each of them must ask."""
    keys = ("admitted", "refused", "evicted", "rows")
    here = {}
    for name, table in run.tables.items():
        stats = table.stats
        here[name] = {key: stats[key] for key in keys}
    everywhere = run.learner.shard.gathered(here)
    return {
        name: {key: sum(part[name][key] for part in everywhere) for key in keys} for name in here
    }


def _looked_up(run: Run, counts: EventCounts) -> dict[str, float]:
    """Return how many ids were looked up in each table."""
    schema = getattr(run.model, "schema", None)
    numbers: dict[str, float] = {}
    for column in () if schema is None else schema.ids:
        bins = counts.columns.get(column.name)
        if bins is not None:
            numbers[column.table] = numbers.get(column.table, 0.0) + float(bins[-BINS:].sum())
    return numbers


def _offsets(run: Run) -> dict[str, int]:
    """Return the offset of each partition in the position of a run, by its path in the position."""
    offsets: dict[str, int] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key == "offsets" and isinstance(inner, Mapping):
                    for partition, offset in inner.items():
                        offsets[f"{path}{partition}"] = int(offset)
                else:
                    walk(inner, f"{path}{key}.")
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                walk(inner, f"{path}{number}.")

    if run.position is not None:
        walk(run.position.state, "")
    return offsets


def _num_not_finite(run: Run) -> int:
    number = 0
    for tensor in dense_state(run.learner.network).values():
        if torch.is_floating_point(tensor):
            number += int(tensor.numel() - torch.isfinite(tensor).sum())
    return number
