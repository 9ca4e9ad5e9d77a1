# SPDX-License-Identifier: Apache-2.0
"""The datatype of each input of a model: the least that gives the scores of training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile

import numpy as np

from hotbed.data.arrow_types import decimal_of, holds_text, time_of
from hotbed.data.schema import Dense, Id, Schema
from hotbed.data.transforms import TimeOfDay

_EXACT = "exact"  # as training had it
_NEEDS = ("FP32", "FP64", _EXACT)  # each serves for the former
_EXACT_TYPES = {"boolean": "BOOL", "uint64": "UINT64", "number": "FP64"}
_UNITS = {"day": "D"}  # as NumPy writes them


def input_datatypes(schema: Schema) -> dict[str, str]:
    """Return the datatype of each raw column that serving reads.

    Integers are reported as floats where both give the same scores: a binary tensor has no other
    missing value than NaN.
    """
    needs = dict[str, str]()
    for name, need in _needs(schema):
        needs[name] = max(needs.get(name, need), need, key=_NEEDS.index)
    if schema.time is not None:  # optional where the model keeps histories
        needs.setdefault(schema.time.source, _EXACT)
    types = column_types(schema)
    return {name: _datatype(types.get(name, ""), need) for name, need in needs.items()}


def input_units(schema: Schema) -> dict[str, dict[str, str]]:
    """Return parameters of raw columns that hold times: their `unit`, and `arrow_type`.

    `unit`: what numbers count since 1970 (s, ms, us, ns, or D for days), or how text is read, as in
    `Time`. `arrow_type`: of columns that were times in training.
    """
    parameters = dict[str, dict[str, str]]()
    for column in _features(schema):
        if column.transforms and isinstance(column.transforms[0], TimeOfDay):
            parameters[column.source] = {"unit": column.transforms[0].unit}
    if schema.time is not None:
        parameters[schema.time.source] = {"unit": schema.time.unit}
    for name, kind in schema.types.items():
        time = time_of(kind)
        if time is not None:
            unit = kind.partition("[")[2].rstrip("]").partition(",")[0]
            parameters[name] = {"arrow_type": kind, "unit": _UNITS.get(unit, unit)}
    return parameters


def column_types(schema: Schema) -> dict[str, str]:
    """Return the recorded types of raw columns, and "text" for those that must be text."""
    types = dict[str, str]()
    for column in _features(schema):
        if column.transforms and column.transforms[0].reads_text:
            types[column.source] = "text"
    return {**types, **schema.types}


def _features(schema: Schema) -> list[Dense | Id]:
    return [*schema.dense, *schema.ids]


def _needs(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each raw column with what one of its uses needs."""
    for column in _features(schema):
        yield column.source, _need(column)
        for transform in column.transforms:
            for name in transform.inputs():
                yield name, _EXACT
        if isinstance(column, Id) and column.weights:
            yield column.weights, "FP32"


def _need(column: Dense | Id) -> str:
    """Return what a feature needs of the numbers of its raw column."""
    if isinstance(column, Id):
        return _EXACT
    steps = column.transforms
    if all(step.keeps_rounding(np.float32) for step in steps):
        return "FP32"
    rest = list(dropwhile(lambda step: step.keeps_rounding(np.float64), steps))
    return "FP64" if not rest or rest[0].reads_floats else _EXACT


def _datatype(kind: str, need: str) -> str:
    """Return the datatype of a column of a recorded type; "" = none was recorded."""
    if holds_text(kind):
        return "BYTES"
    if time_of(kind) is not None:
        return "INT64"
    if kind == "float32":
        return "FP32"
    if decimal_of(kind) is not None or (kind == "uint64" and need == "FP32"):
        return "FP64"  # training rounds to it first
    if need == _EXACT:
        return _EXACT_TYPES.get(kind, "INT64")
    return need
