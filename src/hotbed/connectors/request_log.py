# SPDX-License-Identifier: Apache-2.0
"""RequestLog: what a server was asked and answered, as a source."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.connectors.follow import Follow
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.connectors.messages import Arrow
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.position import Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError

FORMAT = "hotbed.requests.1"
"""The key of what a part says of itself, in the metadata of its columns."""

OWN_COLUMNS = (
    "request_id",
    "position",
    "version",
    "digest",
    "route",
    "served_at",
    "latency",
    "dropped",
)
"""The columns that a log adds to the raw columns of a request, beside its scores."""

_KAFKA = "kafka://"
_PARTS = "*.parquet"


def own_name(column: str, inputs: Collection[str]) -> str:
    """Return the name of a column that the log adds: another one if an input has it."""
    return f"served_{column}" if column in inputs else column


def topic_of(where: str | Path) -> tuple[str, str] | None:
    """Return servers and topic of kafka://HOST:PORT[,…]/TOPIC; None of a folder.

    Raises ConfigError if one of them is absent.
    """
    if not str(where).startswith(_KAFKA):
        return None
    servers, _, topic = str(where).removeprefix(_KAFKA).partition("/")
    if not servers or not topic:
        raise ConfigError(
            f"request log: needs a server and a topic, got {str(where)!r}. Write "
            "kafka://HOST:PORT/TOPIC."
        )
    return servers, topic


@dataclass(frozen=True)
class RequestLog(Source):
    """The requests that `hotbed serve --set log=…` has logged, a row for each candidate.

    A row has the raw columns of the request as they were scored, and these of the server:

    * `request_id`, and `position`, the place of the candidate in its request, from 0 on
    * `score`, or `score_LABEL` for each of several labels
    * `version` and `digest` of the state that scored, and `route`, why it did
    * `served_at`, the time of the answer, and `latency` in seconds
    * `dropped`, the number of requests before this one that are not in the log

    If an input of the model has such a name, the column of the server is called `served_NAME`.

    Args:
        where: the folder of a model's log, or kafka://HOST:PORT[,…]/TOPIC.MODEL.
        follow: wait for further parts of a folder, as a source without end. Otherwise read the
            parts that are there. A topic has no end.
        options: options of a topic, as for `hb.sources.Kafka`.

    Raises:
        ConfigError: `where` names no topic, or `follow` is False for a topic.

    Example:
        >>> shown = hb.sources.RequestLog("/log/ranker")
        >>> clicks = hb.sources.Kafka("broker:9092", "clicks")
        >>> hb.sources.Join(shown, clicks, on=["request_id", "item"], within=1800)
    """

    where: str | Path
    follow: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if topic_of(self.where) is not None and not self.follow:
            raise ConfigError(
                f"request_log.follow: a topic has no end, got False for {self.where!r}. Leave it "
                "True, or read a folder."
            )

    @cached_property
    def _rows(self) -> Source:
        """The source that reads the parts."""
        address = topic_of(self.where)
        if address is not None:
            servers, topic = address
            return Kafka(servers, topic, decoder=Arrow(), options=self.options)
        if self.follow:
            return Follow(self.where, _PARTS)
        return Parquet(os.path.join(self.where, _PARTS))

    def schema(self) -> pa.Schema:
        return self._rows.schema()

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return self._rows.read(position, batch_rows, plan)

    @property
    def inferred(self) -> pa.Schema:
        return self._rows.inferred

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._rows.settings

    @property
    def endless(self) -> bool:
        return self._rows.endless

    @property
    def divisible(self) -> bool:
        return self._rows.divisible

    def commit(self, position: Position) -> None:
        self._rows.commit(position)

    def num_rows(self) -> int | None:
        return self._rows.num_rows()

    def locate(self, position: Position, back: int) -> RowPlace:
        return self._rows.locate(position, back)

    def words_for(self, place: Mapping[str, Any]) -> str:
        return self._rows.words_for(place)

    def parts(self, count: int) -> list[Source]:
        return self._rows.parts(count)

    def share(self, begin: Fraction, end: Fraction) -> Source:
        return self._rows.share(begin, end)
