# SPDX-License-Identifier: Apache-2.0
"""Answered requests as rows of a log."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from hotbed.connectors.request_log import OWN_COLUMNS, own_name
from hotbed.frozen import RowArray
from hotbed.serving.protocol.tensors import ColumnValues

_HASH_BYTES = 8
_VALUE_BYTES = 8


@dataclass(frozen=True)
class Anonymity:
    """What of a request the log does not hold.

    Attributes:
        omit: columns that are left out.
        hash: columns of which the log holds a keyed hash, as hexadecimal text.
        key: the key of the hash.
    """

    omit: frozenset[str] = frozenset()
    hash: frozenset[str] = frozenset()
    key: bytes = field(default=b"", repr=False)

    def stricter(self, omit: Iterable[str], hash: Iterable[str]) -> Anonymity:
        """Return one that also omits and hashes these columns.

        Without a key, it omits what it cannot hash.
        """
        if not self.key:
            return replace(self, omit=self.omit.union(omit, hash))
        return replace(self, omit=self.omit.union(omit), hash=self.hash.union(hash))

    def applied(self, name: str, values: pa.Array) -> pa.Array | None:
        """Return what the log holds of a column; None = nothing."""
        if name in self.omit:
            return None
        if name in self.hash:
            return self._hashed(values)
        return values

    def _hashed(self, values: pa.Array) -> pa.Array:
        """Return the hash of each value, of lists of their JSON; null of null."""
        coded = values.dictionary_encode() if not pa.types.is_nested(values.type) else None
        if coded is None:
            return pa.array([self._digest(value) for value in values.to_pylist()], pa.string())
        hashes = [self._digest(value) for value in coded.dictionary.to_pylist()]
        return pa.array(hashes, pa.string()).take(coded.indices)

    def _digest(self, value: object) -> str | None:
        if value is None:
            return None
        text = json.dumps(value, default=str).encode()
        return hashlib.blake2b(text, digest_size=_HASH_BYTES, key=self.key).hexdigest()


WHOLE = Anonymity()
"""Nothing is left out."""


@dataclass(slots=True)
class AnsweredRequest:
    """A request and its scores.

    Attributes:
        request_id: the client's name of it, or one that the server made.
        time: Unix time of the answer, in microseconds.
        latency: seconds from the decoded request to its scores.
        num_rows: number of candidates, n.
        columns: raw columns [n] as they were scored.
        context: raw columns [1] that hold for all candidates.
        outputs: scores by label, [n] or [n, width].
        version, digest: the version that scored.
        route: why this version scored, such as "stable".
        dropped: requests before this one that are not in the log.
        anonymity: what of it the log does not hold.
        lists: the columns of which the model takes lists.
    """

    request_id: str
    time: int
    latency: float
    num_rows: int
    columns: Mapping[str, ColumnValues]
    context: Mapping[str, ColumnValues]
    outputs: Mapping[str, RowArray]
    version: int
    digest: str
    route: str
    dropped: int = 0
    anonymity: Anonymity = WHOLE
    lists: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """About how much memory it keeps."""
        num_bytes = 0
        for columns in (self.columns, self.context, self.outputs):
            for values in columns.values():
                num_bytes += values.nbytes
        return num_bytes

    def make_lists(self) -> None:
        """Make lists of one value of columns of lists that were sent as values, [n] or [n, 1].

        A part of the log has one type for a column, and so has its reader.
        """
        if self.lists:
            self.columns = _with_lists(self.columns, self.lists)
            self.context = _with_lists(self.context, self.lists)

    def kind(self) -> tuple[tuple[str, str, bool], ...]:
        """Return name and type of each column, and whether it is context."""
        kinds = [(name, _type_of(values), False) for name, values in self.columns.items()]
        kinds += [(name, _type_of(values), True) for name, values in self.context.items()]
        return tuple(sorted(kinds))


def alike_requests(requests: Sequence[AnsweredRequest]) -> Iterable[list[AnsweredRequest]]:
    """Return requests, grouped by the types of their columns and by what the log holds of them."""
    kinds = defaultdict[object, list[AnsweredRequest]](list)
    for request in requests:
        request.make_lists()
        kinds[request.kind(), request.anonymity].append(request)
    return kinds.values()


def records_of(model: str, requests: Sequence[AnsweredRequest]) -> pa.RecordBatch:
    """Return a row for each of some requests that are alike; see `alike_requests`.

    Raw columns and scores are lists: of a value for each candidate, or of one that holds for all.
    """
    first = requests[0]
    columns = dict[str, pa.Array]()
    inputs = {*first.columns, *first.context}
    for name, values in _own_columns(requests).items():
        columns[own_name(name, inputs)] = values
    counts = [request.num_rows for request in requests]
    for label in first.outputs:
        name = "score" if len(first.outputs) == 1 else f"score_{label}"
        scores = _joined([request.outputs[label] for request in requests])
        columns[own_name(name, inputs)] = _lists(scores, counts)
    ones = [1] * len(requests)
    for name in sorted(inputs):
        is_context = name in first.context
        values = _joined(
            [(request.context if is_context else request.columns)[name] for request in requests]
        )
        shown = first.anonymity.applied(name, values)
        if shown is not None:
            columns[name] = _lists(shown, ones if is_context else counts)
    schema = pa.schema(
        [pa.field(name, values.type) for name, values in columns.items()],
        metadata={"hotbed.model": model},
    )
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _own_columns(requests: Sequence[AnsweredRequest]) -> dict[str, pa.Array]:
    """Return the columns that the log adds to those of the request, but its scores."""
    kinds: dict[str, tuple[str, pa.DataType]] = {
        "request_id": ("request_id", pa.string()),
        "candidates": ("num_rows", pa.int64()),
        "version": ("version", pa.int64()),
        "digest": ("digest", pa.string()),
        "route": ("route", pa.string()),
        "served_at": ("time", pa.timestamp("us", "UTC")),
        "latency": ("latency", pa.float64()),
        "dropped": ("dropped", pa.int64()),
    }
    assert kinds.keys() == set(OWN_COLUMNS)
    columns = {}
    for name, (attribute, kind) in kinds.items():
        columns[name] = pa.array([getattr(request, attribute) for request in requests], kind)
    return columns


def _with_lists(
    columns: Mapping[str, ColumnValues], lists: frozenset[str]
) -> dict[str, ColumnValues]:
    return {
        name: _list_of_each(values) if name in lists else values for name, values in columns.items()
    }


def _list_of_each(values: ColumnValues) -> ColumnValues:
    """Return a list of each value; lists as they are."""
    if isinstance(values, np.ndarray):
        if values.ndim > 1:
            return values
        values = pa.array(values)
    if pa.types.is_nested(values.type):
        return values
    return pa.LargeListArray.from_arrays(pa.array(np.arange(len(values) + 1)), values)


def _lists(values: pa.Array, counts: Sequence[int]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _joined(parts: Sequence[ColumnValues]) -> pa.Array:
    """Return columns of several requests, which have one type, as one."""
    if not isinstance(parts[0], np.ndarray):
        return pa.concat_arrays(parts)
    values = np.concatenate(parts)
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _type_of(values: ColumnValues) -> str:
    if isinstance(values, np.ndarray):
        return values.dtype.str
    return str(values.type)
