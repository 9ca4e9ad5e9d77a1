# SPDX-License-Identifier: Apache-2.0
"""Outcome, a kind of outcome; and what a reading asks of a join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotbed import checks
from hotbed.connectors.join.rules import JoinRule
from hotbed.connectors.join.spill import Spill
from hotbed.connectors.source import Source
from hotbed.connectors.times import check_unit
from hotbed.errors import ConfigError


@dataclass(frozen=True)
class Outcome:
    """A kind of outcome, such as clicks, which makes a label positive.

    Args:
        source: a topic, a followed folder, or a source that ends. Labels with equal sources share
            one reading.
        within: the window: how many seconds after an impression an outcome may happen.
        where: only rows with these texts in these columns are outcomes of this kind.
        on: the key columns, in the order of the join's; None = they have the same names.
        time: the column of event times; None = as of the impressions.
        unit: its unit; None = as of the impressions.

    Example:
        >>> actions = hb.sources.Kafka("broker:9092", "actions")
        >>> clicked = hb.sources.Outcome(actions, within=1800, where={"kind": "click"})
        >>> bought = hb.sources.Outcome(actions, within=7 * 86400, where={"kind": "purchase"})
        >>> hb.sources.Join(shown, {"clicked": clicked, "bought": bought}, on="impression_id")
    """

    source: Source
    within: float
    where: Mapping[str, str] = field(default_factory=dict)
    on: str | Sequence[str] | None = None
    time: str | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        advice = "Give the seconds after an impression."
        checks.seconds("outcome.within", self.within, above=0, advice=advice)
        check_where("outcome.where", self.where)
        if self.unit is not None:
            check_unit("outcome.unit", self.unit)


class JoinSettings(Protocol):
    """The arguments of a join, as its reading uses them."""

    @property
    def impressions(self) -> Source: ...

    @property
    def kinds(self) -> dict[str, Outcome]: ...

    @property
    def inputs(self) -> list[Source]: ...

    @property
    def endless(self) -> bool: ...

    @property
    def on(self) -> str | Sequence[str]: ...

    @property
    def time(self) -> str: ...

    @property
    def unit(self) -> str: ...

    @property
    def rule(self) -> JoinRule: ...

    @property
    def where(self) -> Mapping[str, str]: ...

    @property
    def lateness_seconds(self) -> float: ...

    @property
    def idle_seconds(self) -> float: ...

    @property
    def spill(self) -> Spill: ...

    @property
    def keeps_unmatched(self) -> bool: ...

    @property
    def own_columns(self) -> list[str]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


def check_where(name: str, where: Mapping[str, str]) -> None:
    """Raise ConfigError unless `where` maps names of columns to texts."""
    is_mapping = isinstance(where, Mapping)
    if not is_mapping or not all(isinstance(text, str) for text in (*where, *where.values())):
        raise ConfigError(
            f"{name}: must map names of columns to texts, got {where!r}. Write such as "
            "{'kind': 'click'}, and numbers as texts."
        )


def names_of(columns: str | Sequence[str]) -> list[str]:
    """Return one name or several as a list."""
    return list(checks.names(columns))
