# SPDX-License-Identifier: Apache-2.0
"""Which columns of a joined request log are measured, and the samples in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.times import to_microseconds
from hotbed.connectors.types import present_keys
from hotbed.errors import DataError, SchemaError

Numbers = NDArray[np.int64]

VERSION = "version"
ROUTE = "route"
PLACE = "place"
"""The column of places in samples that have one."""
_SERVER_COLUMNS = (VERSION, "digest", ROUTE, "request_id", "position")
_TEXT_COLUMNS = (VERSION, "digest", ROUTE)


@dataclass(frozen=True)
class MeasuredColumns:
    """The columns of samples by what they mean.

    Attributes:
        time: of the answer.
        unit: of the time, as in a schema.
        score: the served score.
        label: 1 for a sample with an outcome.
        user: of the user; None = each request is a user of its own.
        segments: whose values are measured apart.
        served: the columns of the server by their usual names: another name if an input of the
            model has this one.
    """

    time: str
    unit: str
    score: str
    label: str
    user: str | None
    segments: Sequence[str]
    served: Mapping[str, str]

    @classmethod
    def of(
        cls, schema: pa.Schema, time: tuple[str, str], score: str, label: str
    ) -> MeasuredColumns:
        """Return the columns of samples of a schema, without user and segments.

        `time`: the column of times and its unit.
        """
        served = {}
        for name in _SERVER_COLUMNS:
            other = f"served_{name}"
            served[name] = other if other in schema.names else name
        of_score = f"served_{score}" if f"served_{score}" in schema.names else score
        return cls(*time, of_score, label, None, (), served)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are read, each once."""
        users = () if self.user is None else (self.user,)
        names = (self.time, self.score, self.label, *users, *self.segments, *self.served.values())
        return tuple(dict.fromkeys(names))

    def check(self, schema: pa.Schema) -> None:
        """Raise SchemaError if the samples lack a column."""
        missing = [name for name in self.names if name not in schema.names]
        if missing:
            raise SchemaError(
                f"measure: the samples lack the columns {missing}, got {schema.names}. Read a "
                "request log that a server wrote, and correct `user`, `segments` and `score`."
            )

    def samples(self, rows: pa.RecordBatch) -> pa.Table:
        """Return the measured columns of rows under names of their own.

        `time` (microseconds), `score`, `label` and `position` are numbers; `request`, `version`,
        `digest`, `route`, `user` and each `segment.NAME` are text.
        """
        columns = {
            "time": to_microseconds(rows[self.time], self.unit),
            "score": _numbers(rows[self.score], self.score).fill_null(np.nan),
            "label": rows[self.label].cast(pa.float64()),
            "request": _text(rows[self.served["request_id"]], "request_id"),
            "position": rows[self.served["position"]].cast(pa.int64()),
        }
        for name in _TEXT_COLUMNS:
            columns[name] = _text(rows[self.served[name]], name).fill_null("")
        columns["user"] = columns["request"]
        if self.user is not None:
            columns["user"] = _text(present_keys(_single(rows[self.user], self.user)), self.user)
        for name in self.segments:
            columns[f"segment.{name}"] = _text(rows[name], name)
        return pa.table(columns)


def _numbers(values: pa.Array, name: str) -> pa.Array:
    try:
        return values.cast(pa.float64())
    except pa.ArrowException as error:
        raise SchemaError(
            f"measure.score: the column {name!r} needs one number for each sample, got "
            f"{values.type}. Name the column of one score."
        ) from error


def _text(values: pa.Array, name: str) -> pa.Array:
    return _single(values, name).cast(pa.string())


def _single(values: pa.Array, name: str) -> pa.Array:
    """Return a column of single values as it is."""
    if pa.types.is_nested(values.type):
        raise DataError(
            f"measure: the column {name!r} needs one value for each sample, got {values.type}. "
            "Choose a column of single values."
        )
    return values


def joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the samples of several parts by time, request and place.

    Sums then have the same bits in whatever order the samples came.
    """
    order = [(name, "ascending") for name in ("time", "request", "position", *_TEXT_COLUMNS)]
    return pa.concat_tables(parts).sort_by(order).combine_chunks()


def codes(values: pa.ChunkedArray) -> Numbers:
    """Return the number of each value; a null has the number of some value."""
    encoded = values.combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def list_numbers(samples: pa.Table) -> Numbers:
    """Return the number of the list of each sample: of its request and time."""
    _, time = np.unique(samples["time"].to_numpy(), return_inverse=True)
    return codes(samples["request"]) * (int(time.max(initial=0)) + 1) + time


def user_numbers(samples: pa.Table) -> Numbers:
    """Return the number of the user of each sample; an unknown one is one of his request."""
    users = codes(samples["user"])
    is_unknown = samples["user"].is_null().to_numpy()
    return np.where(is_unknown, users.max(initial=0) + 1 + codes(samples["request"]), users)
