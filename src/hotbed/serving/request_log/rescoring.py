# SPDX-License-Identifier: Apache-2.0
"""Logged requests, scored again and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hotbed.connectors.request_log import RequestLog, own_name
from hotbed.errors import DataError
from hotbed.frozen import RowArray

if TYPE_CHECKING:
    from hotbed.serving.session import InferenceSession


@dataclass
class Rescored:
    """The logged scores of one version beside those of a model.

    Attributes:
        version, digest: of the state that scored first.
        requests, scores: their numbers.
        different: scores that do not have the same bits.
        largest: the largest difference.
        logged_sum, model_sum: sums of the scores.
    """

    version: int
    digest: str
    requests: int = 0
    scores: int = 0
    different: int = 0
    largest: float = 0.0
    logged_sum: float = 0.0
    model_sum: float = 0.0

    def add(self, logged: RowArray, again: RowArray) -> None:
        """Count the scores of a request."""
        is_equal = (logged == again) | (np.isnan(logged) & np.isnan(again))
        self.requests += 1
        self.scores += logged.size
        self.different += int(np.count_nonzero(~is_equal))
        difference = np.abs(logged[~is_equal].astype(np.float64) - again[~is_equal])
        self.largest = max(self.largest, float(np.max(difference, initial=0.0)))
        self.logged_sum += float(logged.sum(dtype=np.float64))
        self.model_sum += float(again.sum(dtype=np.float64))


def rescore(log: RequestLog, session: InferenceSession) -> list[Rescored]:
    """Score each request of a log again; return the comparison by version, the oldest first.

    Raises:
        DataError: the log lacks a column that the model needs, or the scores of one of its outputs.
    """
    comparisons = dict[tuple[int, str], Rescored]()
    schema = session.model.schema
    inputs = schema.raw_columns(labels=False)
    inputs += [feature.source for feature in schema.kept_features]  # as they were at the time
    names = set(log.schema().names)
    missing = [name for name in inputs if name not in names]
    if missing:
        raise DataError(
            f"{log.where}: the log lacks columns that the model needs, got {sorted(names)}. "
            f"{missing} were left out when it was written (log_omit), or are of another model."
        )
    asked = {name for name in names if own_name(name, (name,)) in names}  # also beside the inputs
    for request in _requests(log, own_name("position", asked)):
        version = request[own_name("version", asked)][0].as_py()
        digest = request[own_name("digest", asked)][0].as_py()
        scores = session.ask({name: request[name] for name in inputs}).outputs
        comparison = comparisons.setdefault((version, digest), Rescored(version, digest))
        for label, again in scores.items():
            column = "score" if len(scores) == 1 else f"score_{label}"
            logged = _scores(log, request, own_name(column, asked))
            comparison.add(logged.reshape(again.shape), again)
    return [comparisons[key] for key in sorted(comparisons)]


def _scores(log: RequestLog, request: pa.RecordBatch, column: str) -> RowArray:
    if column not in request.schema.names:
        raise DataError(
            f"{log.where}: no column {column!r}, got {request.schema.names}. Give the model whose "
            "requests were logged."
        )
    values = request[column]
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float32)


def _requests(log: RequestLog, position: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each request, which lie behind each other."""
    pending = list[pa.RecordBatch]()
    for rows, _ in log.read():
        starts = np.flatnonzero(rows[position].to_numpy() == 0)
        for begin, end in zip([0, *starts], [*starts, rows.num_rows], strict=True):
            if begin in starts and pending:
                yield _joined(pending)
                pending = []
            if begin < end:
                pending.append(rows.slice(begin, end - begin))
    if pending:
        yield _joined(pending)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
