# SPDX-License-Identifier: Apache-2.0
"""Nested values as JSON and arrays, and back without loss; docs/format.md says how under "Trees"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from hotbed.errors import PersistError

Arrays = dict[str, NDArray[Any]]


def encode(tree: Any, name: str = "") -> tuple[Any, Arrays]:
    """A nested value as JSON and the arrays in it, by the path that leads to them.

    dict, list, tuple, None, bool, int, float, str, bytes, and NumPy arrays and scalars of numbers
    or booleans come back as they were. Raises PersistError naming the path of anything else.

    >>> encode({"auc": [0.5, (1, 2)]})
    ({'auc': [0.5, {'$tuple': [1, 2]}]}, {})
    """
    arrays: Arrays = {}
    return _encoded(tree, name, arrays), arrays


def decode(plain: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """The inverse of `encode`."""
    if isinstance(plain, list):
        return [decode(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1 and (mark := next(iter(plain))).startswith("$"):
        value = plain[mark]
        match mark:
            case "$array":
                return arrays[value]
            case "$scalar":
                return arrays[value][()]
            case "$tuple":
                return tuple(decode(item, arrays) for item in value)
            case "$float":
                return float(value)
            case "$bytes":
                return bytes.fromhex(value)
            case "$pairs":
                return {decode(key, arrays): decode(item, arrays) for key, item in value}
    return {key: decode(item, arrays) for key, item in plain.items()}


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as the bytes of a safetensors file."""
    data: bytes = safetensors.numpy.save(dict(arrays))
    return data


def unpacked(data: memoryview | bytes) -> Arrays:
    """The inverse of `packed`."""
    arrays: Arrays = safetensors.numpy.load(bytes(data))
    return arrays


def _encoded(value: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise _refused(path, f"an array of {array.dtype}")
        # a copy, little-endian: the caller may go on writing into its own; 0-dim arrays stay 0-dim
        arrays[path] = array.astype(array.dtype.newbyteorder("<"), copy=True, order="C")
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": path}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{path}/{number}", arrays) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {
                key: _encoded(item, f"{path}/{quote(key, safe='')}", arrays)
                for key, item in value.items()
            }
        pairs = enumerate(value.items())
        return {
            "$pairs": [
                [_encoded(key, f"{path}/{n}.key", arrays), _encoded(item, f"{path}/{n}", arrays)]
                for n, (key, item) in pairs
            ]
        }
    raise _refused(path, type(value).__name__)


def _refused(path: str, what: str) -> PersistError:
    return PersistError(
        f"{path or 'state'}: cannot be saved — received {what} — keep numbers, text, bytes, "
        "lists, tuples, "
        "dicts and NumPy arrays of numbers there"
    )
