# SPDX-License-Identifier: Apache-2.0
"""Which requests a canary answers: a share of the values of a column, by a stable hash.

docs/routing.md defines the bytes that are hashed, so that other programs can compute a side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from hotbed.config import did_you_mean
from hotbed.data.arrow_types import holds_text
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError
from hotbed.serving.protocol.inputs import Candidates
from hotbed.serving.protocol.tensors import ColumnValues
from hotbed.serving.routes.rule import Canary

_HASHES = 2.0**64
_KINDS = ("", "mixed", "boolean", "integer", "uint64")  # "": not recorded


class UserSplit:
    """Divides the requests of a model between its stable version and a canary.

    A value on the side of the canary stays there if the share grows.

    Args:
        canary: column, share and salt.
        model: name of the model.
    """

    def __init__(self, canary: Canary, model: str) -> None:
        self.column = canary.by
        self._bound = canary.share * _HASHES
        self._prefix = f"{canary.salt}\0{model}\0".encode()

    def is_canary(self, candidates: Candidates) -> bool | None:
        """Return whether the canary answers a request; None without one value of the column."""
        text = _only_value(candidates, self.column)
        if text is None:
            return None
        return xxhash.xxh64_intdigest(self._prefix + text) < self._bound


def _only_value(candidates: Candidates, column: str) -> bytes | None:
    """Return the bytes of the value that a column has for all candidates; None if it has none."""
    values = candidates.context.get(column)
    if values is None:
        values = candidates.columns.get(column)
    if values is None or not len(values) or not _is_constant(values):
        return None
    return _bytes_of(values[0].item() if isinstance(values, np.ndarray) else values[0].as_py())


def _is_constant(values: ColumnValues) -> bool:
    if len(values) == 1:
        return True
    if isinstance(values, np.ndarray):
        return bool((values == values[0]).all())
    return len(values.unique()) == 1


def _bytes_of(value: Any) -> bytes | None:
    """Return the bytes that are hashed for a raw value; None for a missing one.

    Whole numbers are written in decimal digits, text is UTF-8.
    """
    if isinstance(value, float):
        if not value.is_integer():  # NaN, too
            return None
        value = int(value)
    if isinstance(value, (bool, int)):
        return b"%d" % value
    if isinstance(value, str):
        value = value.encode()
    return value or None if isinstance(value, bytes) else None


def check_column(schema: Schema, canary: Canary, where: str) -> None:
    """Raise ConfigError for a column whose values cannot name users."""
    columns = schema.raw_columns(labels=False)
    column = canary.by
    if column not in columns:
        raise ConfigError(
            f"{where}.canary.by: the model has no such input, got {column!r}. "
            f"{did_you_mean(column, columns)}"
        )
    kind = schema.types.get(column, "")
    if kind not in _KINDS and not holds_text(kind):
        raise ConfigError(
            f"{where}.canary.by: expected a column of text or whole numbers, got {column!r} of "
            f"type {kind}. Choose the one that names the user."
        )
    is_list = schema.shapes.get(column, "value") != "value"
    widths = {dense.source: dense.width for dense in schema.dense}
    if is_list or widths.get(column, 1) > 1:
        raise ConfigError(
            f"{where}.canary.by: expected a column with one value, got {column!r}, which holds "
            "lists. Choose the one that names the user."
        )
