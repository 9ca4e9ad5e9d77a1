# SPDX-License-Identifier: Apache-2.0
"""What a program without Hotbed has saved: tensors by key, in memory or in a folder of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hotbed.errors import ConfigError

_OF_RANKS = ("ShardedTensor", "DTensor")
"""Names of the classes whose tensors lie in several processes."""


@dataclass(frozen=True)
class SavedTensor:
    """What is known of a tensor before it is read.

    Attributes:
        shape: of the whole tensor.
        dtype: of its numbers.
        widths: of the parts in which its columns were saved, from left to right; one if each part
            has all columns.
        is_grid: whether parts have neither all rows nor all columns.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    widths: tuple[int, ...] = ()
    is_grid: bool = False


class PlainValues(ABC):
    """Values by key: the path to a value in nested dicts, joined by dots."""

    tensors: Mapping[str, SavedTensor]
    others: tuple[str, ...]  # keys of values that are not tensors

    @abstractmethod
    def read(self, key: str) -> Any:
        """Return the value of a key."""


class StateDictValues(PlainValues):
    """The values of nested dicts and lists."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._values = dict(_leaves(state, ()))
        self.tensors = {}
        for key, value in self._values.items():
            kind = type(value).__name__
            if kind in _OF_RANKS:
                raise ConfigError(
                    f"load_plain_state: a state_dict must have whole tensors, got a {kind} at "
                    f"{key!r}. Save it with torch.distributed.checkpoint, and give the folder."
                )
            if torch.is_tensor(value):
                widths = tuple(value.shape[1:2])
                self.tensors[key] = SavedTensor(tuple(value.shape), value.dtype, widths)
        self.others = tuple(key for key in self._values if key not in self.tensors)

    def read(self, key: str) -> Any:
        return self._values[key]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the key of each value in nested dicts and lists, and the value."""
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    if items is None:
        yield ".".join(path), value
        return
    for key, item in items:
        yield from _leaves(item, (*path, str(key)))
