# SPDX-License-Identifier: Apache-2.0
"""Requests whose ids and numbers are encoded: the values that transforms would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.config import did_you_mean
from hotbed.data.arrow_types import Shape, Type
from hotbed.data.batch import Ids
from hotbed.data.schema import Column, Dense, Id, Schema
from hotbed.errors import DataError
from hotbed.frozen import IdArray
from hotbed.serving.request import RequestEncoder, ScoreRequest


class EncodedRequests:
    """Checks of requests whose values are already those of a `Batch`.

    The checks are those of raw columns, by the same code: the schema without its transforms
    encodes them. Padding, `max_length` and weights of features therefore hold as well.

    Args:
        schema: Schema of the model.
    """

    def __init__(self, schema: Schema) -> None:
        self._dense = schema.dense
        self._ids = {column.name: column for column in schema.ids}
        self._encode = RequestEncoder(_without_transforms(schema))

    def __call__(
        self, dense: Any, ids: Mapping[str, Any], time: IdArray | None = None
    ) -> ScoreRequest:
        """Return the request; the arguments are those of `InferenceSession.ask_encoded`.

        Raises:
            DataError: a column does not fit, or names are missing or unknown.
        """
        columns = self._dense_columns(dense)
        if not isinstance(ids, Mapping):
            raise DataError(
                f"ids: expected a mapping of features to ids, got {type(ids).__name__}. Give a "
                "dict of arrays, lists or hb.Ids."
            )
        for name, values in ids.items():
            column = self._ids.get(name)
            if column is None:
                raise _unknown("feature", name, self._ids)
            if isinstance(values, Ids):
                columns[name] = _bags(name, values)
                if values.weights is not None:
                    columns[_weights(column)] = _weight_bags(column, values)
            else:
                columns[name] = values
        request = self._encode(columns)
        return request if time is None else replace(request, time=_checked_times(time, request))

    def _dense_columns(self, dense: Any) -> dict[str, Any]:
        """Return the values of dense columns by name."""
        if dense is None:
            return {}
        widths = {column.name: column.width for column in self._dense}
        if not isinstance(dense, Mapping):
            return _parts(dense, widths)
        columns = {}
        for name, values in dense.items():
            if name not in widths:
                raise _unknown("dense column", name, widths)
            columns[name] = _lists(values)
        return columns


def _checked_times(times: Any, request: ScoreRequest) -> IdArray:
    """Return the times of the candidates of a request, [n] or [1]."""
    values = np.asarray(times)
    num_samples = request.num_samples
    if values.dtype.kind not in "iu" or values.shape not in ((num_samples,), (1,)):
        raise DataError(
            f"time: expected whole microseconds of shape [{num_samples}] or [1], got "
            f"{values.dtype} {list(values.shape)}. Give one time for each candidate, or one for "
            "all."
        )
    return values.astype(np.int64)


def _without_transforms(schema: Schema) -> Schema:
    """Return the schema that reads encoded values: each column by its own name."""
    columns = list[Column]()
    types = dict[str, Type]()
    shapes = dict[str, Shape]()
    for feature in schema.ids:
        types[feature.name] = "integer"
    for column in schema.columns:
        if isinstance(column, Dense):
            columns.append(replace(column, transforms=(), column=column.name))
        elif isinstance(column, Id):
            plain = replace(column, transforms=(), column=column.name)
            if column.weights is not None:
                plain = replace(plain, weights=_weights(column))
            columns.append(plain)
        elif schema.kept:  # they name labels and the time
            columns.append(column)
    encoded_columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in encoded_columns:
        if not column.transforms and column.source in schema.shapes:
            shapes[column.name] = schema.shapes[column.source]
    return Schema(columns, types, shapes, rules=schema.rules)


def _weights(feature: Id) -> str:
    """Return the name under which the weights of a feature's ids are encoded."""
    return f"{feature.name}.weights"


def _bags(name: str, ids: Ids) -> Any:
    """Return ids with offsets as a column of lists; without, their values."""
    if ids.offsets is None:
        return ids.values
    return _list_column(name, ids.offsets, pa.array(ids.values))


def _weight_bags(feature: Id, ids: Ids) -> Any:
    """Return the weights of ids, in the form of the ids."""
    if feature.weights is None:
        raise DataError(
            f"feature {feature.name!r}: its ids have no weights in the schema, got weights. Give "
            "ids alone."
        )
    if len(ids.weights) != len(ids.values):
        raise DataError(
            f"feature {feature.name!r}: expected one weight an id, got {len(ids.weights)} weights "
            f"for {len(ids.values)} ids. Give one each."
        )
    if ids.offsets is None:
        return ids.weights
    return _list_column(feature.name, ids.offsets, pa.array(ids.weights))


def _list_column(name: str, offsets: Any, items: pa.Array) -> pa.Array:
    """Return lists of items, `offsets` [n + 1] of which say where each list begins."""
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or not len(bounds) or bounds.dtype.kind not in "iu":
        raise DataError(
            f"feature {name!r}: expected whole offsets [n + 1], got {bounds.dtype} "
            f"{list(bounds.shape)}. Give where each sample's ids begin, and their number."
        )
    if bounds[0] != 0 or bounds[-1] != len(items) or (bounds[1:] < bounds[:-1]).any():
        raise DataError(
            f"feature {name!r}: expected offsets that rise from 0 to {len(items)}, the number of "
            f"ids, got {bounds.tolist()[:8]} of {len(bounds)}, ending in {int(bounds[-1])}."
            " Give one offset more than samples."
        )
    return pa.LargeListArray.from_arrays(pa.array(bounds.astype(np.int64)), items)


def _parts(matrix: Any, widths: Mapping[str, int]) -> dict[str, Any]:
    """Return the columns of a matrix [n, sum of widths] by name."""
    values = np.asarray(matrix)
    width = sum(widths.values())
    if values.ndim != 2 or values.shape[1] != width or values.dtype.kind not in "biuf":
        raise DataError(
            f"dense: expected numbers of shape [n, {width}], got {values.dtype} "
            f"{list(values.shape)}. Give the dense columns side by side, in the order of the "
            f"schema: {list(widths)}."
        )
    columns = {}
    first = 0
    for name, size in widths.items():
        columns[name] = _lists(values[:, first : first + size])
        first += size
    return columns


def _lists(values: Any) -> Any:
    """Return an array [n, width] as a column of lists, [n, 1] as one of numbers."""
    if not isinstance(values, np.ndarray) or values.ndim != 2:
        return values
    if values.shape[1] == 1:
        return np.ascontiguousarray(values[:, 0])
    items = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(items, values.shape[1])


def _unknown(kind: str, name: str, names: Mapping[str, Any]) -> DataError:
    return DataError(f"{kind} {name!r}: it is not in the schema. {did_you_mean(name, list(names))}")
