# SPDX-License-Identifier: Apache-2.0
"""The bytes of HugeCTR's Norm files: their header, and samples to write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hotbed.connectors.files import Section
from hotbed.connectors.samples import keys_of, num_keys
from hotbed.errors import DecodeError

LIST_ENDING = ".txt"
_HEADER = struct.Struct("<8q")
_INT32 = struct.Struct("<i")
_FRAMED_BYTES = _INT32.size + _HEADER.size + 1
_MAX_DIMS = 1 << 20
_RESERVED = (0, 0, 0)


@dataclass(frozen=True)
class NormHeader:
    """The header of a Norm file; `num_bytes`: where its samples begin."""

    checksum: bool
    num_samples: int = 0
    label_dim: int = 0
    dense_dim: int = 0
    num_slots: int = 0

    @property
    def num_bytes(self) -> int:
        return _HEADER.size + 5 * self.checksum

    @property
    def num_floats(self) -> int:
        """Labels and dense values of a sample."""
        return self.label_dim + self.dense_dim

    @property
    def layout(self) -> tuple[bool, int, int]:
        """All that the samples of files must have in common."""
        return self.checksum, self.num_floats, self.num_slots

    def to_bytes(self) -> bytes:
        """Return the header as it stands in a file."""
        content = _HEADER.pack(
            int(self.checksum),
            self.num_samples,
            self.label_dim,
            self.dense_dim,
            self.num_slots,
            *_RESERVED,
        )
        if not self.checksum:
            return content
        length = _INT32.pack(len(content))
        sum_byte = bytes([_sum_of(content)])
        return length + content + sum_byte


def read_header(file: str) -> NormHeader:
    """Return the header of a file.

    Raises:
        DecodeError: it is not the header of a Norm file.
    """
    try:
        with Section(file).open() as stream:
            data: bytes = stream.read(_FRAMED_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DecodeError(f"{file}: cannot be read, got {error}. Check the file.", file) from error
    if len(data) < _HEADER.size:
        raise _not_norm(file, f"{len(data)} bytes")
    checksum = data.startswith(_INT32.pack(_HEADER.size))
    content = data[: _HEADER.size]
    if checksum:
        content = data[_INT32.size : -1]
        if len(data) < _FRAMED_BYTES or _sum_of(content) != data[-1]:
            raise _not_norm(file, "a header with a wrong checksum")
    fields = _HEADER.unpack(content)[:5]
    error_check, num_samples, *dims = fields
    label_dim, dense_dim, num_slots = dims
    is_sane = min(fields) >= 0 and 0 < sum(dims) <= _MAX_DIMS
    if error_check != checksum or not is_sane:
        raise _not_norm(file, f"a header of {fields}")
    return NormHeader(checksum, num_samples, label_dim, dense_dim, num_slots)


def _sum_of(content: bytes) -> int:
    return sum(content) % 256


def _not_norm(file: str, got: str) -> DecodeError:
    return DecodeError(
        f"{file}: not a Norm file, got {got}. Give files in the Norm format; a file list ends in "
        f"{LIST_ENDING}.",
        file,
    )


def samples_bytes(
    floats: np.ndarray, slots: Sequence[pa.Array], key_bytes: int, checksum: bool
) -> bytes:
    """Return the bytes of samples: values [n, floats] and the keys of each slot."""
    counts = [num_keys(slot) for slot in slots]
    float_bytes = 4 * floats.shape[1]
    sizes = np.full(len(floats), float_bytes, np.int64)
    for count in counts:
        sizes += 4
        sizes += key_bytes * count
    frame_bytes = 5 * checksum
    ends = np.cumsum(sizes + frame_bytes)
    data = np.zeros(ends[-1], np.uint8)
    # one byte of a frame stands after the sample
    starts = ends - sizes - checksum
    if checksum:
        lengths = sizes.astype("<i4")
        _put(data, starts - 4, lengths)
    _put(data, starts, floats)
    place = starts + float_bytes
    for count, slot in zip(counts, slots, strict=True):
        _put(data, place, count.astype("<i4"))
        place += 4
        keys = keys_of(slot).astype(f"<i{key_bytes}")
        _put(data, _places(place, count, key_bytes), keys)
        place += key_bytes * count
    if checksum:
        # sums of the samples and of what lies between them
        bounds = np.stack([starts, starts + sizes], axis=1)
        sums = np.add.reduceat(data, bounds.reshape(-1), dtype=np.uint8)
        data[starts + sizes] = sums[::2]
    return data.tobytes()


def _places(starts: np.ndarray, counts: np.ndarray, key_bytes: int) -> np.ndarray:
    """Return the places of all keys of a slot, whose first keys lie at `starts`."""
    before = np.cumsum(counts) - counts
    number = np.arange(counts.sum())
    within = number - np.repeat(before, counts)
    places: np.ndarray = np.repeat(starts, counts) + key_bytes * within
    return places


def _put(data: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
    """Store each row of `values` at its place, which need not be aligned."""
    if not values.size:
        return
    contiguous = np.ascontiguousarray(values)
    rows = contiguous.view(np.uint8).reshape(len(places), -1)
    columns = np.arange(rows.shape[1])
    data[places[:, None] + columns] = rows
