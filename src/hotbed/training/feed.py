# SPDX-License-Identifier: Apache-2.0
"""The items that a pass reads; of a stream on several ranks the first rank reads them for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotbed.data.batch import Batch, changed
from hotbed.data.dataset import Dataset
from hotbed.training.run import Run


@contextmanager
def opened(data: Iterable[Any], run: Run) -> Iterator[Iterator[Any]]:
    """Yield the items of data; None is a tick.

    A Dataset reads and encodes ahead, on its own thread. An iterator that is made here is closed
    here, which ends that thread.
    """
    shard = run.learner.shard
    is_shared = run.online and shard.size > 1
    if is_shared and not shard.is_first:
        yield _from_first_rank(iter(()), run)
        return
    items = _items(data, run)
    try:
        yield _from_first_rank(items, run) if is_shared else items
    finally:
        if items is not data and hasattr(items, "close"):
            items.close()


def _items(data: Iterable[Any], run: Run) -> Iterator[Any]:
    if isinstance(data, Dataset):
        return data.stream(run.goal.wishes)
    stream = getattr(data, "stream", None)
    return stream() if callable(stream) else iter(data)


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
