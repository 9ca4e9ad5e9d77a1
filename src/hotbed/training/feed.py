# SPDX-License-Identifier: Apache-2.0
"""The items that a pass reads; of a stream on several ranks the first rank reads them for all."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from hotbed.data.batch import Batch, changed
from hotbed.data.dataset import Dataset
from hotbed.training.run import Run


def items_of(data: Iterable[Any], run: Run) -> Generator[Any, None, None]:
    """Yield the items of data; None is a tick.

    A Dataset reads and encodes ahead, on its own thread, which ends with this generator.
    """
    if run.online and run.learner.shard.size > 1:
        yield from _from_first_rank(data, run)
        return
    with _opened(data) as items:
        yield from items


def _from_first_rank(data: Iterable[Any], run: Run) -> Generator[Any, None, None]:
    """Yield on every rank the items that the first one reads, ticks included.

    The source, its journal and its dead letters belong to the first rank: the others read nothing.
    A stop that any rank asks for ends the run on all of them, before the next item is read. An
    error of reading is raised on all of them.
    """
    shard = run.learner.shard
    with ExitStack() as stack:
        items: Iterator[Any] = iter(())
        if shard.is_first:
            items = stack.enter_context(_opened(data))
        while True:
            run.agree_to_stop()
            if run.stopped:
                return
            sent = shard.from_first(lambda: _next(items))
            if sent is None:
                return
            if isinstance(data, Dataset) and isinstance(sent.item, Batch):
                yield data.received(sent.item, sent.types, sent.shapes)
            else:
                yield sent.item


@contextmanager
def _opened(data: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Yield an iterator over data; one that is made here is closed here."""
    stream = getattr(data, "stream", None)
    items = stream() if callable(stream) else iter(data)
    try:
        yield items
    finally:
        if items is not data and hasattr(items, "close"):
            items.close()


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
