# SPDX-License-Identifier: Apache-2.0
"""The items that a pass reads; of a stream on several ranks the first rank reads them for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotbed.data.batch import Batch, changed
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError
from hotbed.parallel import Shard, SharedDecoding
from hotbed.training.run import Run
from hotbed.training.step.example import from_array


@contextmanager
def opened(data: Iterable[Any], run: Run) -> Iterator[Iterator[Any]]:
    """Yield the items of data; None is a tick.

    A Dataset reads and encodes ahead, on its own thread. An iterator that is made here is closed
    here, which ends that thread.
    """
    shard = run.learner.shard
    if isinstance(data, BatchesOfRanks):
        yield data.joined(shard)
        return
    if not run.online or shard.size == 1:
        with _items(data, run) as items:
            yield items
        return
    with _decoded_together(run):
        if shard.is_first:
            with _items(data, run) as items:
                yield _from_first_rank(items, run)
        else:
            yield _from_first_rank(iter(()), run)


class BatchesOfRanks:
    """Tuples that each rank has of its own: together, in the order of the ranks, they are a batch.

    They end with those of the rank that has fewest, after which all ranks are at the same step.

    Args:
        data: yields tuples of tensors or arrays, a row for each sample.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._rows: list[int] = []  # of each rank, in the last batch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)

    def joined(self, shard: Shard) -> Iterator[Any]:
        """Yield the batches of all ranks; each rank gets every batch.

        Raises:
            ConfigError: on each rank: an item is not a tuple, or those of two ranks differ in kind.
        """
        items = (_leaves_of(item) for item in self._data if item is not None)
        while True:
            with shard.together():
                item = next(items, None)
            # torch deprecates the pickle of a structure
            sent = None if item is None else (item[0], repr(item[1]))
            every = [of_rank for of_rank in shard.gathered(sent) if of_rank is not None]
            if item is None or len(every) < shard.size:
                return
            tensors = _side_by_side(every)
            self._rows = [len(leaves[0]) for leaves, _ in every]
            yield tree_unflatten(tensors, item[1])

    def own_rows(self, values: Any, shard: Shard) -> Any:
        """Return the values of the samples of this rank, of those of one batch of all ranks."""
        ends = [0, *accumulate(self._rows)]
        first, last = ends[shard.rank : shard.rank + 2]
        if isinstance(values, Mapping):
            return {name: of_label[first:last] for name, of_label in values.items()}
        return values[first:last]


def _leaves_of(item: Any) -> tuple[list[Any], Any]:
    """Return the tensors of a tuple, and its structure."""
    if isinstance(item, Batch):
        raise ConfigError(
            "data: batches of each rank are tuples, got those of a hb.Dataset. Give all ranks the "
            "whole Dataset without data_parallel: each computes its part of a batch."
        )
    item = tuple(item) if isinstance(item, list) else item
    leaves, structure = tree_flatten(item, is_leaf=lambda value: isinstance(value, list))
    tensors = [leaf if torch.is_tensor(leaf) else from_array(np.asarray(leaf)) for leaf in leaves]
    return tensors, structure


def _side_by_side(every: Sequence[tuple[list[Any], str]]) -> list[Any]:
    """Return the tensors of all ranks, those of a place of their tuples as one."""
    kinds = [
        (structure, [(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
        for leaves, structure in every
    ]
    if any(kind != kinds[0] for kind in kinds) or not kinds[0][1]:
        raise ConfigError(
            f"data: the tuples of all ranks have tensors of the same kinds, got {kinds} on ranks 0 "
            f"to {len(kinds) - 1}. Yield tuples of one structure."
        )
    return [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in every), strict=True)]


@contextmanager
def _items(data: Iterable[Any], run: Run) -> Iterator[Iterator[Any]]:
    stream = getattr(data, "stream", None)
    items: Any
    if isinstance(data, Dataset):
        items = data.stream(run.goal.wishes)
    else:
        items = stream() if callable(stream) else iter(data)
    try:
        yield items
    finally:
        if items is not data and hasattr(items, "close"):
            items.close()


@contextmanager
def _decoded_together(run: Run) -> Iterator[None]:
    """Let ranks decode the messages of the topics that the first one reads in this block."""
    dataset = run.dataset
    if not isinstance(dataset, Dataset) or not dataset.endless:
        yield
        return
    shard = run.learner.shard
    decoding = SharedDecoding(shard.rank, shard.size)
    live = dataset.live
    dataset.live = replace(live, decode=decoding.decode)
    try:
        yield
    except GeneratorExit:  # the loop has ended, or failed
        ending = run.ending
        decoding.close(waits=ending is None or ending.error is None)
        raise
    except BaseException:
        decoding.close(waits=False)
        raise
    else:
        decoding.close(waits=True)
    finally:
        dataset.live = live


def _from_first_rank(items: Iterator[Any], run: Run) -> Iterator[Any]:
    """Yield on every rank the items that the first one reads, ticks included.

    The source, its journal and its dead letters belong to the first rank: the others read nothing.
    An error of reading is raised on all of them.
    """
    shard = run.learner.shard
    dataset = run.dataset
    while True:
        sent = shard.from_first(lambda: _next(items))
        if sent is None:
            return
        if isinstance(dataset, Dataset) and isinstance(sent.item, Batch):
            yield dataset.received(sent.item, sent.types, sent.shapes)
        else:
            yield sent.item


@dataclass(frozen=True)
class _Sent:
    """An item on its way; `types` and `shapes`: of the raw columns of a batch so far."""

    item: Any
    types: Any = None
    shapes: Any = None


def _next(items: Iterator[Any]) -> _Sent | None:
    """Return the next item as it is sent; None at the end."""
    try:
        item = next(items)
    except StopIteration:
        return None
    if not isinstance(item, Batch) or item.encoder is None:
        return _Sent(item)
    encoder = item.encoder  # it stays here: each rank has one
    return _Sent(changed(item, {"encoder": None}), encoder.types, encoder.shapes)


def num_batches(data: Any, *, of_stream: bool = False) -> int | None:
    """Return the number of batches of one pass; None if it is not known."""
    number: int | None = getattr(data, "num_batches", None)
    if number:
        return number
    if of_stream and not isinstance(data, (list, tuple)):
        return None  # streams without an end claim lengths
    try:
        return len(data)
    except TypeError:
        return None
