# SPDX-License-Identifier: Apache-2.0
"""DataReader: the batches of a dataset one by one, for `train`, `eval` and `fit` alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import nn

from hotbed.data.bad_rows import IdLimits, LimitCheck
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError, DataError
from hotbed.training.step.fetcher import Fetcher

__all__ = ["DataReader"]

Source = str | tuple[str, ...]


class DataReader:
    """What `get_data_reader_train()` and `get_data_reader_eval()` return.

    A reader of a solver with `repeat_dataset` begins again after its last batch. Otherwise it ends,
    and `set_source` begins again.

    Args:
        open: returns the dataset of a source.
        source: of the first dataset; "" without data.
        limits: what the graph says of the ids of each column.
        repeats: whether batches begin again.
        network: that learns the batches: while it learns one, its tables on a disk read the rows of
            those after it. None = it does not learn them.

    Attributes:
        limits: counts the ids that exceed it, and logs the first. HugeCTR reads rows of other slots
            for keys beyond `slot_size_array`, and writes beyond its buffers for samples of more
            keys than `nnz_per_slot`; here such keys are ordinary ones, and all of them are used.
    """

    def __init__(
        self,
        open: Callable[[Source], Dataset],
        source: Source,
        limits: Mapping[str, IdLimits],
        *,
        repeats: bool,
        network: nn.Module | None = None,
    ) -> None:
        self._open = open
        self.source = source
        self.limits = LimitCheck(limits)
        self._repeats = repeats
        self._network = network
        self._dataset: Dataset | None = None
        self._batches: Any = None  # a generator: closing it ends its threads
        self._position: Any = None
        self._ended = False
        self.is_started = False

    def start(self) -> None:
        """Allow reading."""
        self.is_started = True

    def set_source(self, file_name: Any = "") -> None:
        """Begin at the first batch of a source; without one, of the source that was read."""
        source = tuple(file_name) if isinstance(file_name, list) else file_name
        self._close()
        self._position = None
        if source and source != self.source:
            self.source = source
            self._dataset = None
        self.is_started = True

    @property
    def dataset(self) -> Dataset:
        """The dataset, at the place that was reached."""
        if self._dataset is None:
            if not self.source:
                raise ConfigError("source: there is nothing to read, got ''. Give a source.")
            self._dataset = self._open(self.source).map(self.limits)
        return self._dataset

    def next(self) -> Batch | None:
        """Return the next batch; None at the end of a reader that does not repeat."""
        if not self.is_started:
            raise ConfigError(
                "data reader: it does not read yet, got a request for a batch. Call "
                "start_data_reading() or set_source() first."
            )
        if self._ended:
            return None
        batch = self._read()
        if batch is None and self._repeats:
            batch = self._read()
            if batch is None:
                raise DataError(
                    f"{self.source}: there is not one whole batch, got the end of the data. Give "
                    "more rows, or a smaller batch size."
                )
        self._ended = batch is None
        return batch

    def take(self, count: int) -> Iterator[Batch]:
        """Yield the next `count` batches, or those up to the end of the data; then begin again."""
        if self._ended:
            self.set_source()
        for number in range(count):
            batch = self.next()
            if batch is None and not number:  # the last call ended right before the end
                self.set_source()
                batch = self.next()
            if batch is None:
                self.set_source()
                return
            yield batch

    def lend(self) -> Dataset:
        """Return the dataset for a `fit`, which begins after the batch that was read last."""
        self._close()
        if self._position is not None:
            self.dataset.resume(self._position)
        return self.dataset

    def arrive(self, position: Any) -> None:
        """Take over where a `fit` over the dataset that was lent has ended."""
        self._position = position

    def _read(self) -> Batch | None:
        """Return the next batch of this pass; None at its end, after which the next one begins."""
        if self._batches is None:
            self._batches = self._pass()
        batch: Batch | None = next(self._batches, None)
        if batch is None:
            self._batches = None
            self._position = None
        else:
            self._position = batch.position
        return batch

    def _pass(self) -> Iterator[Batch]:
        """Return the batches up to the end of the data."""
        dataset = self.lend()
        fetcher = None if self._network is None else Fetcher.of(self._network)
        return iter(dataset) if fetcher is None else _fetched(dataset, fetcher)

    def _close(self) -> None:
        """End the threads that read."""
        self._ended = False
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class KeysetReader:
    """Takes the keysets of an embedding training cache."""

    def update(
        self, keyset_file: str | Sequence[str] = "", keyset_file_list: Sequence[str] = ()
    ) -> None:
        """Do nothing: a table holds all of its rows."""


def _fetched(dataset: Dataset, fetcher: Fetcher) -> Generator[Batch, None, None]:
    """Yield the batches of a dataset, and let rows of coming ones be fetched meanwhile."""
    batches: Any = iter(dataset)  # a generator
    with closing(fetcher), closing(batches):
        for batch in batches:
            if dataset.reading is not None:
                dataset.reading.deepen(fetcher.depth)
                coming = dataset.reading.coming(fetcher.depth)
                fetcher.look([each for each in coming if each is not None])
            yield batch
