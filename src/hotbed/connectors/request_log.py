# SPDX-License-Identifier: Apache-2.0
"""RequestLog: what a server was asked and answered, as a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.connectors.follow import Follow
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.connectors.messages import Arrow
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.position import MARKS, OPENED, Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.status import SourceReading, ended, status_of
from hotbed.connectors.types import is_list
from hotbed.errors import ConfigError, DataError, SchemaError

OWN_COLUMNS = (
    "request_id",
    "candidates",
    "version",
    "digest",
    "route",
    "served_at",
    "latency",
    "dropped",
)
"""The columns of a logged request that are not lists; raw columns and scores are."""

SHADOW = "shadow"
"""The route of scores that no client got: those of a version that is only compared."""

POSITION = "position"
"""The place of a candidate in its request, which `RequestLog` adds."""

_INTO = "into"
"""Member of a position: rows that were read of the requests behind it."""
_KAFKA = "kafka://"
_PARTS = "*.parquet"
_USUAL_ROWS = 64  # candidates of a request, to read about as many rows as are wanted
_LEAST_REQUESTS = 64  # that are read at once


def own_name(column: str, inputs: Collection[str]) -> str:
    """Return the name of a column that the server adds: another one if an input has it."""
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
    * `candidates`, the number of candidates of the request
    * `score`, or `score_LABEL` for each of several labels
    * `version` and `digest` of the state that scored, and `route`, why it did
    * `served_at`, the time of the answer, and `latency` in seconds
    * `dropped`, the number of requests before this request that are not in the log

    If an input of the model has such a name, the column of the server is called `served_NAME`.

    Args:
        where: the folder of a model's log, or kafka://HOST:PORT[,…]/TOPIC.MODEL.
        follow: wait for further parts of a folder, as a source without end. Otherwise read the
            parts that are there. A topic has no end.
        options: options of a topic, as for `hb.sources.Kafka`.
        shadows: read also what shadows scored, a further row for each candidate. Leave it False for
            training: a sample would count twice.

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
    shadows: bool = False

    def __post_init__(self) -> None:
        if topic_of(self.where) is not None and not self.follow:
            raise ConfigError(
                f"request_log.follow: a topic has no end, got False for {self.where!r}. Leave it "
                "True, or read a folder."
            )

    @cached_property
    def _requests(self) -> Source:
        """The source that reads the logged requests."""
        address = topic_of(self.where)
        if address is not None:
            servers, topic = address
            return Kafka(servers, topic, decoder=Arrow(), options=self.options)
        if self.follow:
            return Follow(self.where, _PARTS)
        return Parquet(os.path.join(self.where, _PARTS))

    def schema(self) -> pa.Schema:
        return _rows_schema(self._requests.schema())

    @property
    def inferred(self) -> pa.Schema:
        return _rows_schema(self._requests.inferred)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**self._requests.settings, "shadows": self.shadows}

    @property
    def endless(self) -> bool:
        return self._requests.endless

    def commit(self, position: Position) -> None:
        self._requests.commit(position)

    def locate(self, position: Position, back: int) -> RowPlace:
        place = self._requests.locate(position, 0)
        return replace(place, number=None)  # it counts requests

    def words_for(self, place: Mapping[str, Any]) -> str:
        return self._requests.words_for(place)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        names = None
        if plan.columns is not None:
            whole = self._requests.schema()
            names = {name: None for name in (*plan.columns, _own(whole, "candidates"))}
            names.pop(_position_name(whole), None)
            route = _route_name(whole)
            if route is not None and not self.shadows:
                names[route] = None
        wanted = replace(
            plan, columns=None if names is None else tuple(names), types={}, opens=True
        )
        at_once = max(_LEAST_REQUESTS, batch_rows // _USUAL_ROWS)
        requests = self._requests.read(position, at_once, wanted)
        wanted_of = _whole if self.shadows else _answered
        rows = _rows(requests, position, batch_rows, plan, wanted_of)
        return SourceReading(rows, lambda: status_of(requests))


def _whole(requests: pa.RecordBatch) -> pa.RecordBatch:
    return requests


def _answered(requests: pa.RecordBatch) -> pa.RecordBatch:
    """Return the requests without those that a shadow scored."""
    name = _route_name(requests.schema)
    if name is None:
        return requests
    is_shadow = pc.equal(requests[name], SHADOW).fill_null(fill_value=False)
    return requests.filter(pc.invert(is_shadow)) if is_shadow.true_count else requests


def _rows(
    requests: Batches,
    begin: Position | None,
    batch_rows: int,
    plan: ReadPlan,
    wanted_of: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> Iterator[tuple[pa.RecordBatch, Position]]:
    """Yield the candidates of requests; a position may lie within them."""
    before = begin
    skip = 0 if begin is None else int(begin.state.get(_INTO, 0))
    with ended(requests):
        for batch, after in requests:
            if not batch.num_rows:
                if batch is not OPENED or plan.opens or "block" in after.state:
                    yield batch, after
                before = after
                continue
            assert before is not None  # OPENED came first
            rows = _candidates(wanted_of(batch), plan)
            if not rows.num_rows:
                yield rows, after
            start = skip
            skip = max(0, skip - rows.num_rows)
            while start < rows.num_rows:
                end = min(start + batch_rows, rows.num_rows)
                is_whole = end == rows.num_rows
                place = after if is_whole else Position({**before.state, _INTO: end})
                yield rows.slice(start, end - start), place
                start = end
            before = after


def _candidates(requests: pa.RecordBatch, plan: ReadPlan) -> pa.RecordBatch:
    """Return a row for each candidate of some requests."""
    schema = requests.schema
    counts = _counts(requests[_own(schema, "candidates")])
    places = pa.array(np.repeat(np.arange(len(counts)), counts))
    columns = dict[str, pa.Array]()
    for name, kind in zip(schema.names, schema.types, strict=True):
        values = requests[name]
        if name in MARKS or (plan.columns is not None and name not in plan.columns):
            continue
        of_each = is_list(kind)
        columns[name] = _of_candidates(values, counts, name) if of_each else values.take(places)
    position = _position_name(schema)
    if plan.columns is None or position in plan.columns:
        starts = np.cumsum(counts) - counts
        columns[position] = pa.array(np.arange(counts.sum()) - np.repeat(starts, counts))
    marks = {name: requests[name].take(places) for name in MARKS if name in schema.names}
    whole = {**columns, **marks}
    return pa.RecordBatch.from_arrays(list(whole.values()), names=list(whole))


def _counts(values: pa.Array) -> NDArray[np.int64]:
    """Return the number of candidates of each request."""
    is_wrong = pc.fill_null(pc.less(values, 0), fill_value=True)
    if is_wrong.true_count:
        wrong = values.filter(is_wrong)[0].as_py()
        raise DataError(
            f"request log: the column 'candidates' needs a number >= 0 for each request, got "
            f"{wrong}. Keep it as the server wrote it."
        )
    return np.asarray(values.to_numpy(), np.int64)


def _of_candidates(values: pa.Array, counts: NDArray[np.int64], column: str) -> pa.Array:
    """Return the values of candidates, of which a request has one that holds for all, or each.

    The list of a request may be null: so are the values of its candidates.
    """
    lengths = pc.list_value_length(values).fill_null(0).to_numpy()
    is_missing = values.is_null().to_numpy(zero_copy_only=False)
    flat = values.flatten()
    if np.array_equal(lengths, counts):
        return flat
    is_wrong = (lengths != counts) & (lengths != 1) & ~is_missing
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise DataError(
            f"request log: the column {column!r} needs one value for each candidate, got "
            f"{lengths[first]} values for {counts[first]} candidates. Keep the lists of a request "
            "as the server wrote them."
        )
    starts = np.cumsum(lengths) - lengths
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    within[np.repeat(lengths == 1, counts)] = 0
    places = np.repeat(starts, counts) + within
    return flat.take(pa.array(places, mask=np.repeat(is_missing, counts)))


def _rows_schema(requests: pa.Schema) -> pa.Schema:
    """Return names and types of the rows of candidates."""
    fields = []
    for column in requests:
        kind = column.type.value_type if is_list(column.type) else column.type
        fields.append(pa.field(column.name, kind))
    return pa.schema([*fields, pa.field(_position_name(requests), pa.int64())])


def _own(requests: pa.Schema, column: str) -> str:
    """Return the name of a column of the server."""
    for name in (own_name(column, (column,)), column):
        if name in requests.names and not is_list(requests.field(name).type):
            return name
    raise SchemaError(
        f"request log: no column {column!r}, got {requests.names}. Give a folder or a topic that a "
        "server writes: hotbed serve --set log=…"
    )


def _route_name(requests: pa.Schema) -> str | None:
    """Return the name of the column of routes; None of a log that has none."""
    for name in (own_name("route", ("route",)), "route"):
        if name in requests.names and not is_list(requests.field(name).type):
            return name
    return None


def _position_name(requests: pa.Schema) -> str:
    return own_name(POSITION, requests.names)
