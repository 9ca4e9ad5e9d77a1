# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes of a job, and what they send each other."""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
import zlib
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
from hotbed.parallel.world import trains_together

from .calls import CALL_WORDS, PLACE, Place, RankCall, check_one_call, named, reporting_errors
from .connections import call_timeout, connect, connect_again, group_over, hosts_of_ranks, shut
from .envelope import Envelope
from .hosts import HostMail, RankLink
from .log_lines import name_rank_in_logs
from .roll_call import WATCH, Departure, WatchedCall, absent_ranks, departures, report_departure
from .software import software
from .traffic import Traffic

LONGEST_PAUSE = 1.0
"""Seconds after which a rank that works for long says again that it does."""
HEAD_WORDS = CALL_WORDS + 2
"""int64 numbers before the values of a first message: the call, how many values follow to this
rank, and to the rank that gets most."""
ROOM = 2048
"""The most int64 values in a first message; more of them go in a second one."""
T = TypeVar("T")
_Message = tuple[bool, Any, Exception | None]
"""From rank 0: whether it is the last, what was made, and the error of making it."""


@dataclass(frozen=True)
class Requirement:
    """What ranks compare.

    Attributes:
        must: what all of them must do alike.
        advice: where they do not.
    """

    must: str
    advice: str


SETTINGS = Requirement(
    "train the same model with the same settings",
    "Start the same program with the same seed on each rank.",
)
STEP = Requirement(
    "get the same batches and random numbers, and hold the same weights and rates",
    "Give each rank the same data, order and seed, draw no random numbers on one rank alone, set "
    "rates and frozen alike, and clip gradients by ClipGradients or the loop of hb.shard.",
)


FAULT = "an error"
"""The name of the value of a rank that cannot compare the others: the error that all then raise."""


class Ranks:
    """The processes that train one job, connected by torch.distributed over gloo.

    Every rank makes the same calls in the same order; a call returns when all have made it.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        hosts: on which they are.
        mail: which carries messages between them.
        traffic: what is sent from here is added to it; assign another one to count anew.
        place: where this process is, which each call tells the others.
        envelope: of the messages of a step that go together.

    Raises:
        ConfigError: on every rank: they make different calls.
        RankLost: a call waits too long for another rank, or finds that it is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None, place: Place | None = None) -> None:
        self._group = group
        self.traffic = Traffic()
        self.place = Place() if place is None else place
        self.envelope = Envelope(self.exchange, self.gather)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.hosts = hosts_of_ranks()
        self.mail = HostMail(self.hosts, self.rank, self._exchange_over, self._gather_over)
        self._telling = threading.Lock()
        self._tell: Callable[[], Any] | None = None  # of the block under way
        self._began = 0.0
        self._has_thread = False
        self._failure: HotbedError | None = None  # of telling the others of a block under way
        self._last: RankCall | None = None  # that all ranks made last
        self._was_left = False  # an error of this rank has ended a call before its last message
        self._unlike: ConfigError | None = None  # the ranks have made different calls

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
        return cls(group, PLACE)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return these ranks: a copy of a model has the same connections."""
        return self

    def another(self) -> Ranks:
        """Return the same ranks with connections of their own, for another thread."""
        return Ranks(connect_again(call_timeout()))

    def _wait_for(self, message: Callable[[], Any]) -> None:
        """Send a message of all ranks; raise RankLost where another one does not come."""
        wait = WatchedCall(self._left, lambda: shut(self._group))
        if self.place is PLACE:  # of the program, which it may leave
            WATCH.begin(wait)
        began = time.perf_counter()
        try:
            message()
        except RuntimeError as error:
            WATCH.end(wait)
            raise self._lost(wait, error) from error
        finally:
            self.traffic.wait_seconds += time.perf_counter() - began
            WATCH.end(wait)

    def _lost(self, wait: WatchedCall, error: RuntimeError) -> RankLost:
        """Return why a wait has ended without the message of another rank."""
        left: dict[int, Departure] | None = {}
        if self.place is PLACE:
            left = wait.left or self._left()
        if left:
            rank = min(left)
            reason = f"rank {rank} {left[rank]}"
        else:
            reason = self._loss(error)
        last = "none" if self._last is None else self._last.place
        return RankLost(
            f"ranks: rank {self.rank} in {self.place}: {reason}. All ranks were last seen in "
            f"{last}. The newest state stays: start the same command again."
        )

    def _left(self) -> dict[int, Departure] | None:
        """Return which others have left the call of the program under way by an error.

        None: the process that keeps that is gone.
        """
        every = departures(self.rank, self.size)
        if every is None:
            return None
        here = (self.place.number, self.place.failures)
        return {rank: other for rank, other in every.items() if other.leaves(*here)}

    def _loss(self, error: RuntimeError) -> str:
        """Return which rank is lost, and how gloo says it."""
        if self.hosts.ranks > 1:
            shut(self._group)  # a rank of another host may wait for this one, not for the lost one
        absent = absent_ranks(self.rank, self.size)
        whose = named(absent) if absent else "another rank"
        reason = str(error).partition("\n")[0][:200]
        every = departures(self.rank, self.size) or {}
        before = [
            f"; rank {rank} {every[rank]}, in the call before"
            for rank in absent
            if rank in every and every[rank].number == self.place.number - 1
        ]
        return f"the connection to {whose} was lost, got {reason}{''.join(before)}"

    def meet(self, call: RankCall, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its part; return what each of them sent here: they all make this call.

        This is the first message of every call. Whatever call a rank makes, these messages meet,
        and say which it is. A receiver has room for more than most of them have, as it does not
        know the sizes of another call.

        Args:
            call: to the others.
            parts: int64 [n], one for each rank.

        Raises:
            ConfigError: on every rank: they make different calls.
        """
        own_part = parts[self.rank]
        parts = [*parts[: self.rank], own_part[:0], *parts[self.rank + 1 :]]
        words = call.words
        most = max(part.numel() for part in parts)
        pieces = []
        sizes = []
        for part in parts:
            length = part.numel()
            fits = length <= ROOM
            pieces += [np.array([*words, length, most]), part.numpy()[: length * fits]]
            sizes.append(HEAD_WORDS + length * fits)
        self.place.meet()
        if self.place.failures:
            report_departure(None)
        self._close_left_call()
        sent = torch.from_numpy(np.concatenate(pieces))
        of_hosts = self.mail.exchange_within(sent, sizes, [HEAD_WORDS + ROOM] * self.size)
        self.place.failures = 0
        heads, values = self._opened(of_hosts)
        try:
            check_one_call([head[:CALL_WORDS] for head in heads])
        except ConfigError as error:
            self._unlike = error
            raise
        self._last = call
        if max(head[-1] for head in heads) > ROOM:
            long = [part if part.numel() > ROOM else part[:0] for part in parts]
            coming = [head[-2] if head[-2] > ROOM else 0 for head in heads]
            rest = self.exchange([long], coming).split(coming)
            values = [big if len(big) else small for big, small in zip(rest, values, strict=True)]
        values[self.rank] = own_part
        return values

    def _opened(self, of_hosts: Sequence[Tensor]) -> tuple[list[list[int]], list[Tensor]]:
        """Return the heads and the values of first messages, by rank; `of_hosts`: by host."""
        heads: list[list[int]] = []
        values = []
        for of_host in of_hosts:
            first = 0
            for _ in range(self.hosts.ranks):
                start = first + HEAD_WORDS
                head = of_host[first:start].tolist()
                first = start + (head[-2] if head[-2] <= ROOM else 0)
                heads.append(head)
                values.append(of_host[start:first])
        return heads, values

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Send the messages of a call in this block: those after its first have no name.

        An error of one rank in it may leave the others in the call. The first message of this
        rank's next call must not meet their messages, whose sizes it does not know.
        """
        try:
            with reporting_errors():
                yield
        except BaseException as error:
            self._was_left = error is not self._unlike  # which all ranks have left
            raise

    def _close_left_call(self) -> None:
        """Meet the others in a message without values, where all have left a call before its end.

        gloo keeps it apart from messages with values.
        """
        if self._was_left:
            self._wait_for(lambda: dist.barrier(self._group))
            self._was_left = False

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
        return self.mail.exchange(values, sizes, received)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, [ranks, n]; `values` is [n] on each of them."""
        return self.mail.gather(values.contiguous())

    def _exchange_over(
        self, link: RankLink, values: Tensor, sizes: Sequence[int], room: Sequence[int]
    ) -> Tensor:
        """Send each rank of a link its part; see `hosts.Exchange`."""
        group = group_over(link, self._group)
        out = torch.empty(sum(room), dtype=values.dtype)
        splits = (list(room), list(sizes))
        self._wait_for(lambda: dist.all_to_all_single(out, values, *splits, group=group))
        own_size = sizes[dist.get_rank(group)]
        self.traffic.add_sent((values.numel() - own_size) * values.itemsize, len(sizes) - 1)
        return out

    def _gather_over(self, link: RankLink, values: Tensor) -> Tensor:
        """Return the values of all ranks of a link, [ranks, n]."""
        group = group_over(link, self._group)
        out = torch.empty(dist.get_world_size(group), values.numel(), dtype=values.dtype)
        self._wait_for(lambda: dist.all_gather(list(out.unbind()), values, group=group))
        others = len(out) - 1
        self.traffic.add_sent(others * values.numel() * values.itemsize, others)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small value of each rank; it is pickled on its way."""
        return self._gather_objects(self._call("gather"), value)

    def _gather_objects(self, call: RankCall, value: Any) -> list[Any]:
        return [_unpacked(part) for part in self.meet(call, [_packed(value)] * self.size)]

    def _call(self, kind: str) -> RankCall:
        return RankCall.of(kind, self.place)

    def collect(self, data: Any) -> list[memoryview]:
        """Send bytes to rank 0; return there those of each rank, and nothing elsewhere."""
        sent = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        length = torch.tensor([len(sent)])
        sizes = [int(part) for part in self.meet(self._call("collect"), [length] * self.size)]
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
        call = self._call("together")
        try:
            with self._at_work(lambda: self._gather_objects(call, (False, None))):
                yield
        except Exception as error:
            own_error = error
        outcome = (True, None if own_error is None else portable(own_error))
        try:
            every = self._gather_objects(call, outcome)
            while not all(is_done for is_done, _ in every):
                every = self._gather_objects(call, outcome)
        except (RankLost, ConfigError) as lost:
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
        call = self._call("from first")
        try:
            if self.rank == 0:
                with self._at_work(lambda: self._send_from_first(call, (False, None, None))):
                    try:
                        message = (True, make(), None)
                    except Exception as error:
                        own_error = error
                        message = (True, None, portable(error))
            message = self._send_from_first(call, message)
            while not message[0]:
                message = self._send_from_first(call, message)
        except (RankLost, ConfigError) as lost:
            raise own_error or lost from lost
        _, value, received = message
        if received is not None:
            raise own_error or received
        return cast(T, value)

    def _send_from_first(self, call: RankCall, message: _Message) -> _Message:
        """Return the message of rank 0: what fits into its first message goes in it."""
        values = _packed(message) if self.rank == 0 else torch.empty(0, dtype=torch.int64)
        length = torch.tensor([len(values)] if self.rank == 0 else [], dtype=torch.int64)
        fits = len(values) < ROOM
        part = torch.cat([length, values]) if fits else length
        first = self.meet(call, [part] * self.size)[0]
        size = int(first[0])
        if len(first) == 1:
            values = values if self.rank == 0 else torch.empty(size, dtype=torch.int64)
            self._wait_for(lambda: dist.broadcast(values, src=0, group=self._group))
            if self.rank == 0:
                self.traffic.add_sent((self.size - 1) * 8 * size, self.size - 1)
        else:
            values = first[1:]
        received: _Message = _unpacked(values)
        return received

    @contextmanager
    def _at_work(self, tell: Callable[[], Any]) -> Iterator[None]:
        """Let a thread tell the others now and then that this block is not done.

        They wait for it, but not for a process that stands still.

        Raises:
            RankLost: another rank is gone, or stands still.
            ConfigError: another rank makes another call.
        """
        with self._telling:
            self._tell = tell
            self._began = time.monotonic()
            self._failure = None
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
        if self._failure is not None:
            raise self._failure

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
                except HotbedError as error:
                    self._failure = error
                    self._tell = None

    def check_equal(self, settings: Mapping[str, Any], requirement: Requirement = SETTINGS) -> None:
        """Raise ConfigError, on every rank, if their software or a setting differs.

        Args:
            settings: plain values, of which each in a mapping is named by its path.
            requirement: what must be alike, for the message.
        """
        values = {**software(), **settings}
        own_digest = torch.tensor([digest_of_values(values)])
        digests = self.meet(self._call("compare"), [own_digest] * self.size)
        if any(digest != own_digest for digest in digests):
            name_difference(self, values, requirement)


def together() -> AbstractContextManager[None]:
    """Return a block whose errors are raised by every process of the job; see `Ranks.together`."""
    return Ranks.of_job().together() if trains_together() else nullcontext()


def name_difference(ranks: Ranks, values: Mapping[str, Any], requirement: Requirement) -> None:
    """Raise ConfigError, on every rank, with the first value that differs, if there is one.

    Where a rank has a `FAULT` instead, that of the first such rank is raised.
    """
    every = ranks.gather_objects(_by_path(values))
    for of_rank in every:
        if FAULT in of_rank:
            raise of_rank[FAULT]
    for name in dict.fromkeys(name for of_rank in every for name in of_rank):
        of_ranks = [of_rank.get(name) for of_rank in every]
        if any(repr(value) != repr(of_ranks[0]) for value in of_ranks):
            raise ConfigError(
                f"ranks: all ranks must {requirement.must}, got {name} {of_ranks} on ranks 0 to "
                f"{ranks.size - 1}. {requirement.advice}"
            )


def digest_of_values(values: Mapping[str, Any]) -> int:
    """Return a digest of plain values, for `Ranks.compare`."""
    return zlib.crc32(repr(values).encode())


def _by_path(values: Any, path: str = "") -> dict[str, Any]:
    """Return the values in a tree of them, by their dotted paths."""
    if not isinstance(values, Mapping):
        return {path: values}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _by_path(value, f"{path}.{name}" if path else str(name))
    return flat


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the values of tensors, for `Ranks.check_equal`."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(-1)
        if len(values):  # an empty array may have a stride of 0
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _packed(value: Any) -> Tensor:
    """Return a pickled value as int64 numbers, with zeros behind it, which pickle passes over."""
    data = bytearray(pickle.dumps(value))
    data.extend(bytes(-len(data) % 8))
    return torch.frombuffer(data, dtype=torch.int64)


def _unpacked(values: Tensor) -> Any:
    return pickle.loads(values.numpy().data)


def portable(error: Exception) -> Exception:
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
