# SPDX-License-Identifier: Apache-2.0
"""Fitted maps: files of what transforms learned for each key, which servers map into memory."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hotbed.errors import ConfigError, FormatError
from hotbed.files import digest_of, open_regular
from hotbed.frozen import FrozenRows, IdArray, RowArray, write_rows

_BATCH_KEYS = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FittedMap:
    """Keys, each with its place and maybe some numbers, in a file that processes share.

    A key is an id: integers as they are, text as its XXH64. Maps of the same digest are equal,
    wherever their files lie. The file is opened and its digest is checked at the first use.

    Args:
        path: a file of rows (docs/format.md).
        digest: its SHA-256, hex.

    Example:
        >>> ages = FittedMap.write("ages.rows", np.array([7, 9]), np.array([[31.0], [45.0]]))
        >>> ages.values(ages.slots(np.array([9, 8])))
        array([[45.], [nan]], dtype=float32)
    """

    path: Path = field(compare=False)
    digest: str
    _rows: FrozenRows | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.digest):
            raise ConfigError(
                f"fitted_map.digest: expected 64 hex digits, got {self.digest!r}. Give the SHA-256 "
                "of the file."
            )

    _open: ClassVar = weakref.WeakValueDictionary[tuple[Path, str], FrozenRows]()
    _opening: ClassVar = threading.Lock()

    @classmethod
    def write(cls, path: str | Path, keys: IdArray, values: Any = None) -> FittedMap:
        """Write a map whole, or not at all.

        Args:
            path: the new file.
            keys: int64 [n], each once. The place of a key is its slot.
            values: numbers [n, k] that become float32; None for keys alone.

        Raises:
            NotWritten: the disk is full or refuses.
        """
        path = Path(path)
        rows = np.empty((len(keys), 0), np.float32)
        if values is not None:
            rows = np.asarray(values, np.float32)
        write_rows(path, rows.shape[1], _batches(keys, rows))
        return cls(path, digest_of(path))

    def open(self) -> None:
        """Map the file into memory now, so that it may be removed from its folder.

        Raises FormatError, which names the file, for a missing or changed one.
        """
        self._mapped()

    def __len__(self) -> int:
        return len(self._mapped())

    @property
    def width(self) -> int:
        """The number of values of a key."""
        return self._mapped().dim

    def slots(self, keys: IdArray) -> IdArray:
        """Return the slot of each key, int64 [n]; -1 for an unknown key."""
        return self._mapped().slots(keys)

    def values(self, slots: IdArray) -> RowArray:
        """Return the values of slots, float32 [n, k]; NaN for negative slots."""
        return self._mapped().rows(slots)

    def keys(self) -> IdArray:
        """Return the keys in the order of their slots, int64 [n]."""
        rows = self._mapped()
        keys, _ = rows.entries()
        in_order = np.empty_like(keys)
        in_order[rows.slots(keys)] = keys
        return in_order

    def data(self) -> bytes:
        """Return the bytes of the file, after a check of their digest.

        Raises FormatError, which names the file, for a missing or changed one.
        """
        with self._reading(), open_regular(self.path) as file:
            data = file.readall()
        self._check(hashlib.sha256(data).hexdigest())
        return data

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"{self.path}: the fitted map cannot be read, got {str(error)!r}. Restore it from "
                "a copy."
            ) from error

    def _check(self, digest: str) -> None:
        if digest != self.digest:
            raise FormatError(
                f"{self.path}: the fitted map changed since it was written, got SHA-256 {digest} "
                f"instead of {self.digest}. Restore it from a copy."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return FittedMap, (self.path, self.digest)

    def _mapped(self) -> FrozenRows:
        if self._rows is None:
            object.__setattr__(self, "_rows", self._shared_rows())
        assert self._rows is not None
        return self._rows

    def _shared_rows(self) -> FrozenRows:
        """Return the open file, which equal maps of this process share."""
        key = (self.path, self.digest)
        with self._opening:
            rows = self._open.get(key)
            if rows is None:
                with self._reading():
                    digest = digest_of(self.path)
                self._check(digest)
                rows = FrozenRows(self.path)
                self._open[key] = rows
            return rows


def _batches(keys: IdArray, rows: RowArray) -> Iterable[pa.RecordBatch]:
    num_keys, width = rows.shape
    for start in range(0, num_keys, _BATCH_KEYS):
        part = slice(start, start + _BATCH_KEYS)
        columns = {"id": pa.array(keys[part])}
        if width:
            lanes = pa.array(rows[part].reshape(-1))
            columns["value"] = pa.FixedSizeListArray.from_arrays(lanes, width)
        yield pa.record_batch(columns)
