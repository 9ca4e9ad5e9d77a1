# SPDX-License-Identifier: Apache-2.0
"""Join: impressions that become samples with the labels that their outcomes give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from hotbed import checks
from hotbed.connectors.endings import check_source
from hotbed.connectors.join.reading import JoinReading
from hotbed.connectors.join.rules import AsTheyCome, JoinRule, Wait
from hotbed.connectors.join.settings import Outcome, check_where, names_of
from hotbed.connectors.join.spill import Spill
from hotbed.connectors.position import Batches, Position
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source, described
from hotbed.connectors.status import SourceReading
from hotbed.connectors.times import check_unit
from hotbed.connectors.types import opened
from hotbed.errors import ConfigError, SchemaError

MOST_LABELS = 8


@dataclass(frozen=True)
class Join(Source):
    """Impressions, each with the labels that its outcomes give it: two live topics as one source.

    An outcome belongs to the impressions with the same keys that happened at most `within` seconds
    before it. Both may arrive late, twice, and in any order. A window closes when the events of all
    partitions have passed its end by `lateness_seconds`. The open impressions are a part of
    checkpoints, so that a killed run resumes without reading anything again. docs/join.md says what
    is counted.

    Args:
        impressions: a topic, a followed folder, or a source that ends. Its rows become samples.
        outcomes: a source, whose rows make the label `label` positive within `within` seconds; or
            an `Outcome` for each label, by its name.
        on: the key columns, which are equal in an impression and its outcomes.
        within: the window in seconds, if `outcomes` is a source.
        time: the column of event times of impressions, and of outcomes that name no other.
        unit: its unit, as in a schema ("s", "ms", "us", "ns", "iso" or a format); of a column that
            is the schema's `Time`, both have one unit.
        rule: when an impression becomes a sample.
        label: the name of the label, if `outcomes` is a source.
        where: only rows with these texts in these columns are impressions.
        lateness_seconds: how long after its end a window closes.
        idle_seconds: a partition without new events for this time holds no window open.
        spill: how much of the open impressions lies in memory, and where the rest.
        keeps_unmatched: an outcome of a stream that met no impression becomes a dead letter when
            its window is over. It is held with its columns until then.

    Raises:
        ConfigError: an argument is wrong, an input is a join of streams itself, or the schema's
            `Time` has another unit.
        SchemaError: a key is absent, or the types of its sides do not meet; a unit is wrong.
        DataError: reading an endless join resumes without the checkpoint of its open impressions.

    Example:
        >>> shown = hb.sources.Kafka("broker:9092", "impressions")
        >>> clicks = hb.sources.Kafka("broker:9092", "clicks")
        >>> hb.sources.Join(shown, clicks, on="impression_id", within=1800, time="at", unit="s")
    """

    impressions: Source
    outcomes: Source | Mapping[str, Outcome]
    on: str | Sequence[str]
    within: float | None = None
    time: str = "time"
    unit: str = "s"
    rule: JoinRule = field(default_factory=Wait)
    label: str = "label"
    where: Mapping[str, str] = field(default_factory=dict)
    lateness_seconds: float = 0.0
    idle_seconds: float = 60.0
    spill: Spill = field(default_factory=Spill)
    keeps_unmatched: bool = False

    def __post_init__(self) -> None:
        self._check_input("impressions", self.impressions)
        if not names_of(self.on):
            raise ConfigError(f"join.on: needs key columns, got {self.on!r}. Name one or more.")
        check_unit("join.unit", self.unit)
        checks.seconds("join.lateness_seconds", self.lateness_seconds, least=0)
        checks.seconds("join.idle_seconds", self.idle_seconds, above=0)
        check_where("join.where", self.where)
        self._check_kind("rule", self.rule, JoinRule, "hb.sources.Wait()")
        self._check_kind("spill", self.spill, Spill, 'hb.sources.Spill("/fast/disk")')
        is_mapping = isinstance(self.outcomes, Mapping)
        if is_mapping == (self.within is not None):
            raise ConfigError(
                f"join.within: the window of one source of outcomes, got within={self.within!r} "
                f"and {type(self.outcomes).__name__} as outcomes. Give a source and `within`, or "
                "an Outcome with a window for each label."
            )
        if not 1 <= len(self.kinds) <= MOST_LABELS:
            raise ConfigError(
                f"join.outcomes: 1 to {MOST_LABELS} labels, got {len(self.kinds)}. Join the others "
                "in a second model, or leave them out."
            )
        for name, outcome in self.kinds.items():
            example = "hb.sources.Outcome(source, within=1800)"
            self._check_kind(f"outcomes.{name}", outcome, Outcome, example)
            self._check_input(f"outcomes.{name}.source", outcome.source)
            if name in self.own_columns:
                raise ConfigError(
                    f"join.label: the join reads this column of the impressions, got {name!r} in "
                    f"{self.own_columns}. Give the label another name."
                )

    @staticmethod
    def _check_input(argument: str, source: Source) -> None:
        check_source(source, f"join.{argument}")
        if source.holds_rows:
            raise ConfigError(
                f"join.{argument}: checkpoints hold the open impressions of one join, got another "
                "join that never ends. Give one join an Outcome for each label."
            )

    @staticmethod
    def _check_kind(argument: str, value: object, kind: type, example: str) -> None:
        if not isinstance(value, kind):
            raise ConfigError(
                f"join.{argument}: takes a value of {kind.__name__}, got {value!r}. Give such as "
                f"{example}."
            )

    @property
    def kinds(self) -> dict[str, Outcome]:
        """The kind of outcome of each label."""
        if isinstance(self.outcomes, Mapping):
            return dict(self.outcomes)
        assert self.within is not None, "it was checked"
        return {self.label: Outcome(self.outcomes, self.within)}

    @property
    def inputs(self) -> list[Source]:
        """The sources that are read: the impressions, then those of outcomes, each one once."""
        sources = [self.impressions]
        for outcome in self.kinds.values():
            if outcome.source not in sources:
                sources.append(outcome.source)
        return sources

    @property
    def endless(self) -> bool:
        return any(source.endless for source in self.inputs)

    @property
    def holds_rows(self) -> bool:
        return self.endless

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        inputs = self.inputs
        outcomes: dict[str, Any] = {}
        for name, outcome in self.kinds.items():
            outcomes[name] = {
                "input": inputs.index(outcome.source),
                "within": float(outcome.within),
                "where": dict(outcome.where),
                "on": names_of(self.on if outcome.on is None else outcome.on),
                "time": outcome.time or self.time,
                "unit": outcome.unit or self.unit,
            }
        settings = {
            "on": names_of(self.on),
            "time": self.time,
            "unit": self.unit,
            "where": dict(self.where),
            "rule": described(self.rule),
            "lateness_seconds": float(self.lateness_seconds),
            "outcomes": outcomes,
        }
        if not self.endless:  # it reads its sources again from the start
            settings["inputs"] = [source.settings for source in inputs]
        return settings

    def _as_written(self, position: Position) -> Join:
        """Return this join with its labels in the order of a position: their names count."""
        names = position.state.get("labels", [])
        if list(self.kinds) == names or set(self.kinds) != set(names):
            return self
        return replace(self, outcomes={name: self.kinds[name] for name in names})

    def commit(self, position: Position) -> None:
        inputs = self._as_written(position).inputs
        for source, state in zip(inputs, position["inputs"], strict=True):
            if state["source"] is not None:
                source.commit(Position.from_json(state["source"]))

    def words_for(self, place: Mapping[str, Any]) -> str:
        return self.impressions.words_for(place)

    def schema(self) -> pa.Schema:
        whole = self.impressions.schema()
        missing = [name for name in self.own_columns if name not in whole.names]
        if missing:
            raise SchemaError(
                f"join.impressions: columns {missing} are absent, got {whole.names}. Correct `on`, "
                "`time` and `where`."
            )
        columns = [column for column in whole if column.name not in self.kinds]
        return pa.schema([*columns, *((name, pa.float64()) for name in self.kinds)])

    @property
    def inferred(self) -> pa.Schema:
        inferred = self.impressions.inferred
        names = [name for name in inferred.names if name not in self.kinds]
        return opened(self.schema(), pa.schema([inferred.field(name) for name in names]))

    @property
    def own_columns(self) -> list[str]:
        """The columns of impressions that the join itself needs."""
        return list(dict.fromkeys([*names_of(self.on), self.time, *self.where]))

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        join = self
        if position is not None and position.state:
            join = self._as_written(position)
            position.require("Join", join)
        reading = JoinReading(join, plan, position)
        return SourceReading(_batches(reading, batch_rows), lambda: reading.status)


def _batches(reading: JoinReading, batch_rows: int) -> Batches:
    try:
        yield from reading.batches(batch_rows)
    finally:
        reading.close()


__all__ = ["AsTheyCome", "Join", "Outcome", "Spill", "Wait"]
