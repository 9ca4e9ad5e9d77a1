# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors in nested arguments, by the paths that lead to them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.data.batch import Ids

from .torchrec.jagged import Jagged

Path = tuple[Any, ...]
"""The parameter of a leaf, then the keys, fields and numbers that lead to it."""


def value_at(arguments: Mapping[str, Any], path: Path) -> Any:
    """Return the value at the end of a path, or None; of a value of TorchRec, its parts."""
    value: Any = arguments
    for key in path:
        try:
            if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
                value = getattr(value, key)
            else:
                value = value[key]
        except (AttributeError, LookupError, TypeError):
            return None
        jagged = Jagged.of(value)
        if jagged is not None:
            value = jagged.parts
    return value


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of nested values, each with the path that leads to it from `path` on."""
    jagged = Jagged.of(value)
    if jagged is not None:
        value = jagged.parts
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_of(value[key], (*path, key))
    elif isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        for key, item in zip(keys, value, strict=True):
            yield from tensors_of(item, (*path, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), (*path, field.name))


def belongs_to_ids(path: Path, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tensor is a part of the ids of a feature: their offsets have all ends."""
    return len(path) > 1 and isinstance(value_at(arguments, path[:-1]), Ids)


def title_of(path: Path, arguments: Mapping[str, Any]) -> Path:
    """Return the path by which a reader knows a tensor: the ids of a feature bear its name."""
    if not belongs_to_ids(path, arguments):
        return path
    *parents, feature, part = path
    return (*parents, feature if part == "values" else f"{feature}_{part}")


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last key, with as many of its parents as make it unique.

    >>> unique_names([("user",), ("batch", "item"), ("pair", 0), ("a", "x"), ("b", "x")])
    ['user', 'item', 'pair_0', 'a_x', 'b_x']
    """
    lengths = [_num_last_keys(path, 1) for path in paths]
    while True:
        names = []
        for path, length in zip(paths, lengths, strict=True):
            names.append("_".join(map(str, path[-length:])))
        counts = Counter(names)
        longer = []
        for path, name, length in zip(paths, names, lengths, strict=True):
            longer.append(_num_last_keys(path, length + 1) if counts[name] > 1 else length)
        if longer == lengths:
            break
        lengths = longer
    for number, path in enumerate(paths):
        if counts[names[number]] > 1:
            names[number] = "/".join(map(str, path))
    return names


def _num_last_keys(path: Path, least: int) -> int:
    """Return the number of last keys of a path, at least `least`, that begin with a word.

    All keys, if none of those before the last `least` ones is a word.
    """
    num_keys = least
    while num_keys < len(path) and not isinstance(path[-num_keys], str):
        num_keys += 1
    return min(num_keys, len(path))
