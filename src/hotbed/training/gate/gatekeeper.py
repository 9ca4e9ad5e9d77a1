# SPDX-License-Identifier: Apache-2.0
"""Gatekeeper: decides of each state that is saved whether it is published."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hotbed.persist.container.manifest import HeldEntry
from hotbed.persist.publish.gate import PublishGate
from hotbed.training.gate.counts import EventCounter, EventCounts
from hotbed.training.gate.facts import (
    compared,
    norms_of,
    num_not_finite,
    num_unscored,
    offsets_of,
    scorer_for,
    scores_of,
    table_counters,
    table_counts,
)
from hotbed.training.gate.held_back import HeldBackEvents, LabelScores
from hotbed.training.gate.rules import RULES, SERVED_RULES, VersionFacts, against_served
from hotbed.training.run import Run
from hotbed.training.step.example import Example
from hotbed.training.step.scorer import Scores, scorer_of, scores_of_training

log = logging.getLogger("hotbed")
MOST_USUAL = 16
"""Usual values of a number that are kept; `PublishGate.warm_up` of them if that is more."""

MOST_LOGGED = 100
"""Held versions whose reasons are kept for the report."""

_FADING = 0.8
"""What the events of earlier versions count for at each version after them."""

Reasons = tuple[HeldEntry, ...]
Measured = dict[str, dict[str, float]]


class Gatekeeper:
    """Watches the events of a run, and decides of its versions by the rules of a gate.

    Decisions follow from the events, from the steps at which states are saved, and from `state`.
    Ranks decide alike: they count the same events, and rank 0 says which rules are broken.

    Attributes:
        reasons: why the newest version is held; empty if it is not.
        in_a_row: number of held versions without a published one between them.
        num_held: number of versions that were held, over all resumptions.
        log: step and reasons of the versions that were held last, at most 100.
        facts: what is known of the newest version; None before the first.
    """

    def __init__(self, gate: PublishGate) -> None:
        self.gate = gate
        self.reasons: Reasons = ()
        self.in_a_row = 0
        self.num_held = 0
        self.log: list[tuple[int, list[str]]] = []
        self.facts: VersionFacts | None = None
        self._counter = EventCounter()
        self._recent: list[EventCounts] = []  # since the versions before, oldest first
        self._num_new = 0.0  # events since usual values were added
        self._num_published = 0
        self._num_saves = 0
        self._num_due = 0  # clean versions until one may be published
        self._before = EventCounts()
        self._usual: dict[str, dict[str, list[float]]] = {}
        self._events = HeldBackEvents(gate.sample)
        self._served_norms: dict[str, float] = {}
        self._tables: dict[str, dict[str, int]] = {}
        self._offsets: dict[str, int] = {}
        self._step = -1
        self._undecided: dict[str, Any] = {}  # `state` before the newest decision
        self._run: Run | None = None

    @property
    def rule_names(self) -> list[str]:
        """Names of the rules, in their order."""
        return [rule.name for rule in (*RULES, *SERVED_RULES)]

    def begin(self, run: Run) -> None:
        """Begin or resume with a run whose tables have their rows."""
        self._run = run
        if run.observer is not None and self not in run.observer.watchers:
            run.observer.watchers.append(self)
        if not self._tables:
            self._tables = table_counters(run)
            self._offsets = offsets_of(run)

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

    def add_held_back(self, run: Run) -> None:
        """Keep the held-back events of the step that is done."""
        if run.example is not None and run.example.held_back is not None:
            self._events.add(run.example.held_back)

    def decide(self, run: Run) -> Reasons:
        """Return why the version of this step is held; nothing if it may be published."""
        if run.step == self._step:
            return self.reasons
        self._undecided = self.state()
        self._step = run.step
        self._num_saves += 1
        self._recent.append(self._counted(run))
        newest = self._newest()
        has_new = newest.samples >= self.gate.min_samples
        facts, scores = self._facts(run, newest)
        measured = {rule.name: rule.measure(facts) for rule in (*RULES, *SERVED_RULES)}
        self.facts = facts
        shard = run.learner.shard
        of_events = shard.from_first(lambda: self._broken(measured, has_new=has_new))
        if of_events:
            self._num_due = self.gate.probation
        elif has_new and self._num_due:
            self._num_due -= 1
        of_model = shard.from_first(lambda: self._worse(facts, measured))
        self.reasons = (*of_events, *self._waits(has_new=has_new), *of_model)
        if self.reasons:
            self._hold()
        else:
            self._accept(facts, scores, measured if has_new else {})
        return self.reasons

    def take_back(self) -> None:
        """Forget the newest decision, because its state could not be saved.

        The version that is served stays the same, and the events of the failed save count for the
        next one.
        """
        since = self._counter.state()
        fresh = self._events.fresh
        self.load_state(self._undecided)
        counts = self._counter.counts
        self._counter.load_state(since)
        self._counter.counts = counts.plus(self._counter.counts)
        if fresh is not None:
            self._events.add(fresh)

    def overrule(self, run: Run) -> None:
        """Take the state that was held as the one that is served: somebody has published it."""
        log.info("the version at step %d was published although it was held", run.step)
        self._usual = {}  # the events are others now
        self._before = EventCounts()
        self._num_published = 0
        self._num_due = 0
        self._events = HeldBackEvents(self.gate.sample)
        facts, scores = self._facts(run, EventCounts())
        self._accept(facts, scores, {})
        self.reasons = ()

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
            "num_published": self._num_published,
            "num_saves": self._num_saves,
            "num_due": self._num_due,
            "before": self._before.state(),
            "usual": {
                rule: {what: list(values) for what, values in numbers.items()}
                for rule, numbers in self._usual.items()
            },
            "events": self._events.state(),
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
        self._num_published = state["num_published"]
        self._num_saves = state["num_saves"]
        self._num_due = state["num_due"]
        self._before = EventCounts.of_state(state["before"])
        self._usual = {rule: dict(values) for rule, values in state["usual"].items()}
        self._events.load_state(state["events"])
        self._served_norms = dict(state["served_norms"])
        self._tables = {name: dict(counters) for name, counters in state["tables"].items()}
        self._offsets = dict(state["offsets"])
        self._step = state["step"]

    def _counted(self, run: Run) -> EventCounts:
        """Return what was counted since the version before, and begin to count anew."""
        counts = self._counter.counts
        self._counter.counts = EventCounts()
        tables = table_counters(run)
        counts.tables = table_counts(run, counts, self._tables, tables)
        self._tables = tables
        offsets = offsets_of(run)
        counts.partitions = {
            name: float(offset - self._offsets.get(name, offset))
            for name, offset in offsets.items()
        }
        self._offsets = offsets
        return counts

    def _newest(self) -> EventCounts:
        """Return the counts of the newest events, as few versions back as hold enough of them."""
        newest = EventCounts()
        number = 0
        for counts in reversed(self._recent):
            newest = newest.plus(counts)
            number += 1
            if newest.samples >= self.gate.min_samples:
                break
        self._recent = self._recent[-number:]
        return newest

    def _facts(self, run: Run, newest: EventCounts) -> tuple[VersionFacts, LabelScores]:
        """Return what is known of a version, and its scores of all held-back events."""
        events = self._events
        scorer = scorer_for(run)
        scores: LabelScores = {}
        if events.all is not None and scorer is not None:
            scores = scores_of(run, scorer, events.all)
        norms = {} if events.trusted is None else norms_of(run, events.trusted)
        facts = VersionFacts(
            newest,
            self._before,
            compared(run.learner.criterion, events, scores, self._num_saves),
            self._num_saves - events.past[-1].save if events.past else 0,
            num_unscored(scores),
            {name: counters["rows"] for name, counters in self._tables.items()},
            self._served_norms,
            norms,
            num_not_finite(run),
        )
        return facts, scores

    def _broken(self, measured: Measured, *, has_new: bool) -> Reasons:
        """Return a reason for each number of the newest events and of the rows that is too high."""
        reasons = []
        for rule in RULES:
            limit = self.gate.limit(rule.name)
            if limit is None:
                continue
            usual = {}
            for what, values in self._usual.get(rule.name, {}).items():
                if has_new and len(values) >= self.gate.warm_up:
                    usual[what] = values
            for sentence in rule.broken(measured[rule.name], usual, limit):
                reasons.append(HeldEntry(rule=rule.name, reason=sentence))
        return tuple(reasons)

    def _worse(self, facts: VersionFacts, measured: Measured) -> Reasons:
        """Return a reason for each number that is worse than that of the served version."""
        reasons = []
        for rule in SERVED_RULES:
            limit = self.gate.limit(rule.name)
            if limit is None or self._num_published < self.gate.warm_up:
                continue
            usual = self._usual.get(rule.name, {})
            values, usual_values = against_served(facts, measured[rule.name], usual)
            for sentence in rule.broken(values, usual_values, limit):
                reasons.append(HeldEntry(rule=rule.name, reason=sentence))
        return tuple(reasons)

    def _waits(self, *, has_new: bool) -> Reasons:
        """Return why a version waits for more events after one that was held."""
        if self.in_a_row and not has_new:
            text = f"fewer than {self.gate.min_samples} events came since the version before"
            return (HeldEntry(rule="min_samples", reason=text),)
        if self._num_due:
            text = f"versions without a broken rule before one is published: {self._num_due} more"
            return (HeldEntry(rule="probation", reason=text),)
        return ()

    def _hold(self) -> None:
        self.in_a_row += 1
        self.num_held += 1
        self.log.append((self._step, [reason.reason for reason in self.reasons]))
        del self.log[:-MOST_LOGGED]
        self._recent = []
        self._num_new = 0.0
        self._events.forget_fresh()

    def _accept(self, facts: VersionFacts, scores: LabelScores, measured: Measured) -> None:
        """Take the version as the one that is served; `measured`: what becomes usual of it."""
        self.in_a_row = 0
        self._num_published += 1
        self._num_new += self._recent[-1].samples if self._recent else 0
        if measured and self._num_new >= self.gate.min_samples:  # stretches do not overlap
            self._num_new = 0.0
            self._before = self._before.plus(facts.newest, share=_FADING)
            for name, values in measured.items():
                for what, value in values.items():
                    usual = self._usual.setdefault(name, {}).setdefault(what, [])
                    usual.append(value)
                    del usual[: -max(MOST_USUAL, self.gate.warm_up)]
        self._events.trust(scores, self._num_saves)
        self._served_norms = dict(facts.norms)
        run = self._run
        if run is not None and self._events.trusted is not None:
            self._served_norms = norms_of(run, self._events.trusted)
