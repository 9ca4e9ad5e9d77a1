# SPDX-License-Identifier: Apache-2.0
"""The part of the encoder that transforms and learners may use, and how they refuse rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa


class BadRows(Exception):
    """Rows of a column that cannot be used: those where `mask`, bool [n], is true.

    A transform leaves `column` empty.
    """

    def __init__(self, column: str, mask: np.ndarray, message: str) -> None:
        super().__init__(message)
        self.column = column
        self.mask = mask
        self.message = message


class Context(Protocol):
    """The part of the encoder that a transform may use.

    `rules`: as `Schema.rules`.
    """

    rules: int

    def hash(self, values: pa.Array, seed: int) -> pa.Array:
        """Return XXH64 of strings' UTF-8 bytes or of integers' 8 little-endian bytes, int64."""

    def ids(self, values: pa.Array) -> np.ndarray:
        """Return int64 [n]: integers as they are, text as its XXH64; 0 for null."""

    def column(self, name: str) -> pa.Array:
        """Return a raw column of the same rows; null for all that is missing."""

    def with_nulls(self, values: pa.Array) -> pa.Array:
        """Return values with null for all that is missing, such as empty text."""
