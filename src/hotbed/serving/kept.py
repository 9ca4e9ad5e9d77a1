# SPDX-License-Identifier: Apache-2.0
"""Histories and counts of requests: read from the rows of a version, by the keys of a request."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hotbed.data.batch import Batch, Ids
from hotbed.data.histories import KeptByKey, see
from hotbed.data.histories.columns import MICROS
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.request import ScoreRequest
from hotbed.serving.stores.base import ModelVersion


class KeptColumns:
    """The columns of a model that no request has to bring. Safe to call from several threads.

    Args:
        model: the version whose rows are read.
    """

    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._schema = model.schema
        self._columns = [column for column in model.schema.kept if isinstance(column, KeptByKey)]

    def fill(self, request: ScoreRequest) -> ScoreRequest:
        """Return a request with the columns that it lacks, as they are at its time, or now.

        Raises:
            RowShapeError: a candidate has several keys.
        """
        ids = dict(request.ids)
        dense = dict(request.dense)
        for column in self._columns:
            features = (*column.ids_in(self._schema), *column.dense_in(self._schema))
            if all(feature.name in ids or feature.name in dense for feature in features):
                continue
            rows = _rows_of(column, request)
            seen, _ = see(column, self._schema, rows, self._read, leaves=False)
            more_ids, more_dense = column.features_of(seen, self._schema)
            ids = {**more_ids, **ids}
            dense = {**more_dense, **dense}
        return replace(request, ids=ids, dense=dense)

    def _read(self, table: str, ids: IdArray) -> RowArray:
        return self._model.find({table: ids})[table]


def _rows_of(column: KeptByKey, request: ScoreRequest) -> Batch:
    """Return the keys and times of the candidates: one row if they are the same for all."""
    keys = request.ids[column.by]
    if not isinstance(keys, Ids):
        keys = Ids(keys)
    times = request.time
    if times is None:
        times = np.array([int(time.time() * MICROS)])
    num_rows = max(len(keys), len(times))
    if len(keys) < num_rows:
        keys = keys.take(np.zeros(num_rows, np.int64))
    if len(times) < num_rows:
        times = np.repeat(times, num_rows)
    return Batch(ids={column.by: keys}, time=times, num_samples=num_rows)
