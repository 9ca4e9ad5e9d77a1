# SPDX-License-Identifier: Apache-2.0
"""SharedDecoding: messages of a topic, which the first rank reads, are decoded by several ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from hotbed.connectors.files import first_line
from hotbed.connectors.messages import Decoded, Decoder, Json, decode_messages
from hotbed.errors import RankLost

from .connections import call_timeout, connect_first, release, shut
from .ranks import portable

MOST_RANKS = 8
"""More would not help: what else the first rank does takes longer than their shares."""
LEAST_BYTES = 1 << 17
"""Messages that are fewer bytes together are decoded by the first rank alone: in about 1.5 ms."""
OTHER_BYTES = 400
"""The first rank fetches, orders and encodes a message in the time of decoding so many bytes."""
GRACE_SECONDS = 5
"""How long a rank whose stream has ended waits for the first one to say so."""
END = "the end of the stream"
AT_WORK = "nothing to decode yet"

Answer = tuple[list[pa.RecordBatch], dict[int, str]] | Exception
"""Rows of some messages, and why others of them are bad, by number; or the error of decoding."""


class SharedDecoding:
    """Decodes JSON messages on several ranks, beside the steps: as `decode_messages` does, on one.

    Each rank makes it. The first one gives `decode` to its source. The others answer on a thread,
    over connections of their own, until `close`.

    Args:
        rank: the number of this one.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size = min(size, MOST_RANKS)
        self._group = connect_first(self._size, call_timeout())
        self._turn = threading.Lock()  # of a conversation with the other ranks
        self._ended = threading.Event()
        work = self._say_at_work if rank == 0 else self._serve
        self._thread = threading.Thread(target=work, name="hotbed-decode", daemon=True)
        self._is_first = rank == 0
        if self._group is not None:
            self._thread.start()

    def decode(self, decoder: Decoder, values: Sequence[bytes], schema: pa.Schema) -> Decoded:
        """Return what `decode_messages` returns, on the first rank.

        Raises:
            RankLost: another rank does not answer.
        """
        num_bytes = np.cumsum([len(value) for value in values])
        if type(decoder) is not Json or num_bytes[-1] < LEAST_BYTES:
            return decode_messages(decoder, values, schema)
        ends = _ends_of_shares(num_bytes, self._size)
        others = range(1, self._size)
        answers: list[Answer] = []
        with self._turn:
            for rank in others:
                share = list(values[ends[rank - 1] : ends[rank]])
                self._call(rank, partial(self._send, rank, (decoder, share, schema)))
            batches, counts, bad = decode_messages(decoder, values[: ends[0]], schema)
            for rank in others:
                answers.append(self._call(rank, partial(self._receive, rank)))
        for answer, (first, last) in zip(answers, pairwise(ends), strict=True):
            if isinstance(answer, Exception):
                raise answer
            more_batches, faults = answer
            batches = batches + more_batches
            counts = counts + [int(number not in faults) for number in range(last - first)]
            bad = bad | {first + number: ValueError(fault) for number, fault in faults.items()}
        return batches, counts, bad

    def _call(self, rank: int, message: Callable[[], Any]) -> Any:
        """Return what a message returns; raise RankLost where the rank does not take or send it."""
        try:
            return message()
        except RuntimeError as error:
            raise RankLost(
                f"ranks: the connection to rank {rank}, which decodes messages, was lost, got "
                f"{first_line(error)[:200]}. The newest state stays: start the same command again."
            ) from error

    def _serve(self) -> None:
        """Decode what the first rank sends."""
        with suppress(RuntimeError):  # of gloo: the main thread misses the first rank, too
            while (message := self._receive(0)) != END:
                if message != AT_WORK:
                    self._send(0, _answered(*message))

    def _say_at_work(self) -> None:
        """Say now and then to the other ranks that messages may come."""
        with suppress(RuntimeError):  # `decode` meets it, too
            while not self._ended.wait(call_timeout().total_seconds() / 4):
                self._tell(AT_WORK)

    def _tell(self, message: str) -> None:
        with self._turn:
            for rank in range(1, self._size):
                self._send(rank, message)

    def close(self, *, waits: bool) -> None:
        """End the threads and connections.

        Args:
            waits: whether all ranks close, as after the end of a stream; else a rank has failed,
                and an answer that is waited for does not come.
        """
        if self._group is None:
            return
        self._ended.set()
        if waits and self._is_first:
            with suppress(RuntimeError):
                self._tell(END)
        elif not waits:
            shut(self._group)
        self._thread.join(GRACE_SECONDS)
        if self._thread.is_alive():
            shut(self._group)
        else:
            release(self._group)

    def _send(self, rank: int, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), rank, self._group)
        dist.send(data, rank, self._group)

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, rank, self._group)
        return pickle.loads(data.numpy().data)


def _answered(decoder: Decoder, values: Sequence[bytes], schema: pa.Schema) -> Answer:
    try:
        batches, _, bad = decode_messages(decoder, values, schema)
    except Exception as error:
        return portable(error)
    return batches, {number: first_line(error) for number, error in bad.items()}


def _ends_of_shares(num_bytes: np.ndarray, size: int) -> list[int]:
    """Return the messages before which the share of each rank ends; that of the first is smaller.

    `num_bytes`: of the messages up to each one.
    """
    total = num_bytes[-1]
    other_work = OTHER_BYTES * len(num_bytes)
    first = max(0, (total + other_work) / size - other_work)
    shares = [first, *[(total - first) / (size - 1)] * (size - 1)]
    ends = np.searchsorted(num_bytes, np.cumsum(shares)).tolist()
    return [*ends[:-1], len(num_bytes)]
