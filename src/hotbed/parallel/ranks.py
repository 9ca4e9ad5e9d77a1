# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes of a job, and what they send each other."""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.errors import ConfigError, HotbedError, RankLost
from hotbed.optim.ranks import trains_together

from .connections import call_timeout, connect, connect_again
from .log_lines import name_rank_in_logs
from .software import software
from .traffic import Traffic

LONGEST_PAUSE = 1.0
"""Seconds after which a rank that works for long says again that it does."""
T = TypeVar("T")
_Message = tuple[bool, Any, Exception | None]
"""From rank 0: whether it is the last, what was made, and the error of making it."""


@dataclass
class Place:
    """Where a rank is in a training.

    Attributes:
        step: the number of the step under way; 0 = none is.
        phase: of the step.
    """

    step: int = 0
    phase: str = "start"

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class Ranks:
    """The processes that train one job, connected by torch.distributed over gloo.

    Every rank makes the same calls in the same order; a call returns when all have made it.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        traffic: what is sent from here is added to it; assign another one to count anew.
        place: where this process is, for the message when another one is lost.

    Raises:
        RankLost: a call waits too long for another rank, or finds that it is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.traffic = Traffic()
        self.place = Place()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._telling = threading.Lock()
        self._tell: Callable[[], Any] | None = None  # of the block under way
        self._began = 0.0
        self._has_thread = False
        self._lost: RankLost | None = None

    @classmethod
    def of_job(cls, timeout: timedelta | None = None) -> Ranks:
        """Return the ranks that the launcher started, such as torchrun.

        A process group that exists is used; gloo carries its tensors in any case. From now on log
        lines name the rank.

        Args:
            timeout: of each call, for a process group that is made here; None: that of the
                environment.
        """
        group = connect(timeout or call_timeout())
        name_rank_in_logs(dist.get_rank())
        return cls(group)

    def another(self) -> Ranks:
        """Return the same ranks with connections of their own, for another thread."""
        return Ranks(connect_again(call_timeout()))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Wait for the other ranks in this block; raise RankLost where one does not come."""
        try:
            with self.traffic.waiting():
                yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise RankLost(
                f"ranks: rank {self.rank} in {self.place}: the connection to another rank was "
                f"lost, got {reason}. The newest state stays: start the same command again."
            ) from error

    def exchange(self, parts: Sequence[Sequence[Tensor]], received: Sequence[int]) -> Tensor:
        """Send each rank its parts; return what all ranks sent here, [m], in their order.

        Args:
            parts: of each of my blocks, a tensor for each rank, [n], all of one dtype.
            received: how much comes from each rank.
        """
        by_rank = list(zip(*parts, strict=True))
        sizes = [sum(map(len, of_rank)) for of_rank in by_rank]
        sent = torch.cat([part for of_rank in by_rank for part in of_rank])
        return self.send(sent, sizes, received)

    def send(self, values: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its part of the values, [n]; return what all sent here, in their order.

        Args:
            values: one rank's part after the other.
            sizes: how much each rank gets.
            received: how much comes from each rank.
        """
        out = torch.empty(sum(received), dtype=values.dtype)
        with self._calling():
            dist.all_to_all_single(out, values, list(received), list(sizes), group=self._group)
        self.traffic.sent_bytes += (values.numel() - sizes[self.rank]) * values.itemsize
        return out

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, [ranks, n]; `values` is [n] on each of them."""
        out = torch.empty(self.size, values.numel(), dtype=values.dtype)
        with self._calling():
            dist.all_gather(list(out.unbind()), values.contiguous(), group=self._group)
        self.traffic.sent_bytes += (self.size - 1) * values.numel() * values.itemsize
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of each rank; it is pickled on its way."""
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(sent)])).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(sent)] = sent
        every = self.gather(padded)
        return [
            pickle.loads(received[:size].numpy().data)
            for received, size in zip(every, sizes, strict=True)
        ]

    def collect(self, data: Any) -> list[memoryview]:
        """Send bytes to rank 0; return there those of each rank, and nothing elsewhere."""
        sent = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        sizes = self.gather(torch.tensor([len(sent)])).view(-1).tolist()
        nothing = sent[:0]
        parts = [sent] + [nothing] * (self.size - 1)
        received = self.exchange([parts], sizes if self.rank == 0 else [0] * self.size)
        if self.rank:
            return []
        return [part.numpy().data for part in received.split(sizes)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of the block on every rank: that of the first rank that has one.

        Its message names the rank, unless all of them have one. The block may take as long as it
        must: this rank says meanwhile that it is at work. No other call is made within.
        """
        own_error: Exception | None = None
        try:
            with self._at_work(lambda: self.gather_objects((False, None))):
                yield
        except Exception as error:
            own_error = error
        outcome = (True, None if own_error is None else _portable(own_error))
        try:
            every = self.gather_objects(outcome)
            while not all(is_done for is_done, _ in every):
                every = self.gather_objects(outcome)
        except RankLost as lost:
            raise own_error or lost from lost
        failed = [rank for rank, (_, received) in enumerate(every) if received is not None]
        if not failed:
            return
        first = failed[0]
        raised = every[first][1] if own_error is None or first != self.rank else own_error
        if len(failed) < self.size:
            _name_rank(raised, first)
        raise raised

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0, on every rank; an error is raised on each.

        `make` may take as long as it must: rank 0 says meanwhile that it is at work.
        """
        message: _Message = (False, None, None)
        own_error: Exception | None = None
        try:
            if self.rank == 0:
                with self._at_work(lambda: self._send_from_first((False, None, None))):
                    try:
                        message = (True, make(), None)
                    except Exception as error:
                        own_error = error
                        message = (True, None, _portable(error))
            message = self._send_from_first(message)
            while not message[0]:
                message = self._send_from_first(message)
        except RankLost as lost:
            raise own_error or lost from lost
        _, value, received = message
        if received is not None:
            raise own_error or received
        return cast(T, value)

    def _send_from_first(self, message: _Message) -> _Message:
        """Return the message of rank 0."""
        messages = [message]
        with self._calling():
            dist.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]

    @contextmanager
    def _at_work(self, tell: Callable[[], Any]) -> Iterator[None]:
        """Let a thread tell the others now and then that this block is not done.

        They wait for it, but not for a process that stands still.

        Raises:
            RankLost: another rank is gone, or stands still.
        """
        with self._telling:
            self._tell = tell
            self._began = time.monotonic()
            self._lost = None
            if not self._has_thread:
                self._has_thread = True
                thread = threading.Thread(target=self._tell_of_work, name="hotbed-at-work")
                thread.daemon = True
                thread.start()
        try:
            yield
        finally:
            with self._telling:
                self._tell = None
        if self._lost is not None:
            raise self._lost

    def _tell_of_work(self) -> None:
        """Tell of blocks that take long; end when none is under way, so quick ones cost little."""
        pause = min(LONGEST_PAUSE, call_timeout().total_seconds() / 4)
        while True:
            time.sleep(pause)
            with self._telling:
                if self._tell is None:
                    self._has_thread = False
                    return
                if time.monotonic() - self._began < pause:
                    continue
                try:
                    self._tell()
                except RankLost as error:
                    self._lost = error
                    self._tell = None

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError, on every rank, if their software or a setting differs."""
        every = self.gather_objects({**software(), **settings})
        names = dict.fromkeys(name for of_rank in every for name in of_rank)
        for name in names:
            values = [of_rank.get(name) for of_rank in every]
            if any(value != values[0] for value in values):
                raise ConfigError(
                    f"ranks: all ranks must train the same model with the same settings, got "
                    f"{name} {values} on ranks 0 to {self.size - 1}. Start the same program with "
                    "the same seed on each rank."
                )


def together() -> AbstractContextManager[None]:
    """Return a block whose errors are raised by every process of the job; see `Ranks.together`."""
    return Ranks.of_job().together() if trains_together() else nullcontext()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the values of tensors, for `Ranks.check_equal`."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process: those of others may not be."""
    is_plain = isinstance(error, OSError) and type(error).__module__ == "builtins"
    if is_plain or isinstance(error, HotbedError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _name_rank(error: Exception, rank: int) -> None:
    """Let the message of an error say which rank raised it."""
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} (rank {rank})"
    else:
        error.args = (f"rank {rank}: {error}",)
