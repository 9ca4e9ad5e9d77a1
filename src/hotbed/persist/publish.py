# SPDX-License-Identifier: Apache-2.0
"""Handing saved states on to servers: values only, by a directory or a Kafka topic; and following
them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hotbed.config import described
from hotbed.connectors.kafka import Kafka
from hotbed.errors import (
    DeltaGap,
    ForkedLineage,
    FormatError,
    MissingExtra,
    PersistError,
    StoreAway,
)
from hotbed.files import Where, local_path
from hotbed.persist.chain import Lineage, retain, write_version
from hotbed.persist.format import (
    Link,
    Reader,
    Saved,
    Writer,
    newest_link,
    open_checkpoint,
    open_folder,
    open_link,
    refuse_states,
    unsealed,
)
from hotbed.persist.store import CURRENT, MANIFEST, LocalStore, Newest, Store, number_of, open_store

CHUNK_BYTES = 900_000
_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 300.0
log = logging.getLogger("hotbed.persist")

if TYPE_CHECKING:
    from hotbed.persist.export import Graph


class Publisher(ABC):
    """Hands saved states on. Publishing the same bits again changes nothing.

    `graph`: the network for servers, as `hotbed.persist.export.export_graph` gives it; each full
    brings it along, so that one is all that a server needs to start. None: servers start from an
    export.
    """

    graph: Graph | None = None

    @abstractmethod
    def publish(self, saved: Saved) -> Saved | None:
        """Publish a checkpoint, as a delta where the version published last is its parent, else in
        full.

        Returns what was published; None where it was published before. Raises PersistError, naming
        what is wrong.
        """


@described
class PublishDirectory(Publisher):
    """Versions in a directory or under a URL, in the container of docs/format.md; `keep` fulls
    stay, with their deltas.

    Example: `hb.callbacks.Checkpoint("runs/clicks", publish=PublishDirectory("published/clicks"))`
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        self._path = path
        self._keep = keep

    def publish(self, saved: Saved) -> Saved | None:
        reader = open_checkpoint(saved.folder)
        store = open_store(self._path)
        last = _newest(store)
        if last is not None and last.manifest["source"] == saved.digest:
            return None
        with Writer(store) as writer:
            made = write_version(writer, reader, last, self.graph)
        if made.kind == "full":
            retain(store, self._keep)
        return made


class PublishTopic(Publisher):
    """Versions as messages in partition 0 of a topic, which must exist. `options`: as for
    `hb.sources.Kafka`.

    Example: `PublishTopic("localhost:9092", "clicks-model")`
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, Any] | None = None) -> None:
        self._kafka = Kafka(servers, topic, options=options or {})
        self._last: Link | None = None

    @property
    def _described(self) -> dict[str, Any]:
        known = self._kafka._described
        return {name: known[name] for name in ("servers", "topic", "options")}

    def publish(self, saved: Saved) -> Saved | None:
        reader = open_checkpoint(saved.folder)
        last = self._last or self._newest()
        if last is not None and last.manifest["source"] == saved.digest:
            return None
        with tempfile.TemporaryDirectory(prefix="hotbed-publish-") as folder:
            if last is not None:  # numbers go on
                (Path(folder) / last.folder).mkdir()
            with Writer(folder) as writer:
                made = write_version(writer, reader, last, self.graph)
            link = open_link(LocalStore(Path(folder)), made.chain[-1]["folder"])
            self._send(link)
            self._last = link
        return made

    def _newest(self) -> Link | None:
        """What another process published last, if the topic ends with it."""
        with contextlib.closing(_consumer(self._kafka)) as consumer:
            low, high = _ends(consumer, _place(self._kafka, 0))
            if high == low:
                return None
            consumer.assign([_place(self._kafka, high - 1)])
            message = _next(consumer, self._kafka.topic)
        head, data = _unframed(message.value())
        if not head.get("manifest"):
            return None
        place = f"topic {self._kafka.topic}, offset {high - 1}"
        return Link(LocalStore(Path()), head["folder"], unsealed(bytes(data), place))

    def _send(self, link: Link) -> None:
        kafka = _confluent()
        failed: list[Any] = []
        options = {
            **_client(self._kafka),
            "acks": "all",
            "max.in.flight.requests.per.connection": 1,
            "message.timeout.ms": int(_SEND_SECONDS * 1000),
            "queue.buffering.max.kbytes": 1 << 16,
        }
        producer = kafka.Producer(options)

        def send(value: bytes) -> None:
            while not failed:
                try:
                    producer.produce(
                        self._kafka.topic,
                        value,
                        str(link.manifest["version"]),
                        0,
                        on_delivery=lambda error, _: failed.append(error) if error else None,
                    )
                    producer.poll(0)
                    return
                except BufferError:  # the queue is full: let it drain
                    producer.poll(0.1)

        def settle() -> None:
            left = producer.flush(_SEND_SECONDS)
            if failed or left:
                producer.purge()
                raise PersistError(
                    f"topic {self._kafka.topic}: version {link.manifest['version']} was not "
                    "published — "
                    f"received {failed[0] if failed else 'no answer'} — look at the brokers and "
                    "the topic"
                )

        for message in _messages(link):
            send(message)
        settle()
        head = {"digest": link.manifest["digest"], "folder": link.folder, "manifest": True}
        send(_framed(head, link.store.read(f"{link.folder}/{MANIFEST}")))
        settle()


def _newest(store: Store) -> Link | None:
    try:
        link = newest_link(store)
    except FormatError as error:  # a new full recovers
        log.warning("%s; publishing a full", error)
        return None
    refuse_states(link)
    return link


# --- messages -------------------------------------------------------------------------------------


def _messages(link: Link) -> Iterator[bytes]:
    for name in link.manifest["files"]:
        data = link.read(name)
        for at in range(0, len(data), CHUNK_BYTES) if data else (0,):
            head = {"digest": link.manifest["digest"], "file": name, "at": at}
            yield _framed(head, data[at : at + CHUNK_BYTES])


def _framed(head: Mapping[str, Any], data: memoryview) -> bytes:
    return json.dumps(head).encode() + b"\n" + data


def _unframed(value: bytes) -> tuple[dict[str, Any], memoryview]:
    line, _, _ = value.partition(b"\n")
    try:
        head = json.loads(line)
        bytes.fromhex(head["digest"])  # it names a folder
        return head, memoryview(value)[len(line) + 1 :]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"a message is no part of a published version — received {line[:60]!r} — "
            "give a topic of PublishTopic"
        ) from error


def _confluent() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise MissingExtra(
            "a topic needs confluent_kafka — it is not installed — pip install hotbed[kafka]"
        ) from error
    return confluent_kafka


def _client(kafka: Kafka) -> dict[str, Any]:
    """Options that producers and consumers share."""
    given = kafka.client_options()
    return {
        name: value
        for name, value in given.items()
        if name in kafka.options or name == "bootstrap.servers"
    }


def _consumer(kafka: Kafka) -> Any:
    return _confluent().Consumer({**kafka.client_options(), "enable.partition.eof": False})


def _place(kafka: Kafka, offset: int) -> Any:
    return _confluent().TopicPartition(kafka.topic, 0, offset)


def _next(consumer: Any, topic: str) -> Any:
    """The message that is known to be there."""
    message = consumer.poll(_CONNECT_SECONDS)
    if message is None or message.error():
        raise PersistError(
            f"topic {topic}: cannot be read — received {message and message.error()} — look at "
            "the brokers"
        )
    return message


def _ends(consumer: Any, partition: Any) -> tuple[int, int]:
    try:
        low, high = consumer.get_watermark_offsets(partition, timeout=_CONNECT_SECONDS)
    except _confluent().KafkaException as error:
        raise PersistError(
            f"topic {partition.topic}: cannot be read — received {error} — create it with one "
            "partition, or "
            "look at the brokers"
        ) from error
    return low, high


# --- following ------------------------------------------------------------------------------------


class Follower:
    """The versions that a publisher hands on: complete, in order, each once.

    `source`: the directory or URL of a `PublishDirectory`, or a `Topic`. A gap or a fork is logged
    and kept in `told`; the next version that can be loaded whole recovers. Versions only grow:
    where the source goes back to an earlier one, that is logged and kept in `told` as well, and not
    handed on. Feed what comes to `Replica.apply`.

    Example:
        >>> for reader in Follower("published/clicks"):
        ...     replica.apply(reader)
    """

    def __init__(self, source: Where | Topic, poll_seconds: float = 1.0) -> None:
        self._feed: Feed = source if isinstance(source, Topic) else _Directory(open_store(source))
        self._poll_seconds = poll_seconds
        self._lineage = Lineage()
        self._newest: Reader | None = None  # what was handed on last
        self.told: list[PersistError] = []

    def __iter__(self) -> Iterator[Reader]:
        while True:
            yield from self.poll()
            time.sleep(self._poll_seconds)

    def poll(self) -> Iterator[Reader]:
        """What is new now, without waiting for more."""
        try:
            for folder in self._feed.arrivals():
                try:
                    reader = open_folder(self._feed.store, folder)
                except FormatError as error:  # its chain, or itself, is not (or no longer) there
                    self._tell(
                        DeltaGap(f"{folder}: it cannot be read with what it rests on — {error}")
                    )
                    return
                yield from self._advance(reader)
        except StoreAway as error:  # the next poll asks again
            self._tell(error)

    def close(self) -> None:
        """Let go of connections."""
        self._feed.close()

    def _advance(self, reader: Reader) -> Iterator[Reader]:
        if self._is_earlier(reader):
            self._tell(self._rolled_back(reader))
            return
        for number, link in enumerate(reader.links, 1):
            try:
                if self._lineage.accepts(link.manifest):
                    self._lineage.took(link.manifest)
                    self._newest = Reader(reader.links[:number])
                    yield self._newest
            except (DeltaGap, ForkedLineage) as error:
                self._tell(error)
                self._lineage.took(reader.manifest)  # it is whole: what follows rests on it
                self._newest = reader
                yield reader
                return

    def _is_earlier(self, reader: Reader) -> bool:
        """Whether the source went back: its newest version is in an earlier folder than the last
        one, and was taken or published before it."""
        last = self._newest
        if last is None or _number(reader) >= _number(last):
            return False  # of a source that began anew the numbers are low, and the moments late
        if self._lineage.was_taken(reader.manifest):
            return True
        published = reader.manifest.get("published")
        before = last.manifest.get("published")
        return published is not None and before is not None and published < before

    def _rolled_back(self, reader: Reader) -> PersistError:
        assert self._newest is not None
        return PersistError(
            f"{reader.folder}: versions only grow, got version {reader.manifest['version']} after "
            f"version {self._newest.manifest['version']}, which stays. Publish the earlier state "
            "again to return to it."
        )

    def _tell(self, error: PersistError) -> None:
        if not self.told or str(self.told[-1]) != str(error):  # a poll later it is the same
            log.warning("%s", error)
            self.told = [*self.told[-99:], error]


def _number(reader: Reader) -> int:
    return number_of(reader.links[-1].folder)


class Feed(ABC):
    """Where published versions arrive. `store`: where they can be read."""

    store: Store

    @abstractmethod
    def arrivals(self) -> Iterator[str]:
        """Folders in `store` of versions that are complete since the last call, in order."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; the next call makes new ones."""


class _Directory(Feed):
    def __init__(self, store: Store) -> None:
        self.store = store
        self._seen = Newest("", None)

    def arrivals(self) -> Iterator[str]:
        newest = self.store.newest()
        if newest is not None and newest != self._seen:
            yield newest.folder
            self._seen = newest  # one that could not be read comes again

    def close(self) -> None: ...


class Topic(Feed):
    """The topic of a `PublishTopic`, collected in a local folder `cache`; what an earlier one left
    there goes.

    Example: `Follower(Topic("localhost:9092", "clicks-model", cache="/var/cache/clicks"))`
    """

    def __init__(
        self, servers: str, topic: str, cache: str | Path, options: Mapping[str, Any] | None = None
    ) -> None:
        self._kafka = Kafka(servers, topic, options=options or {})
        self._cache = local_path(cache, "Topic.cache")
        self._cache.mkdir(parents=True, exist_ok=True)
        self.store = LocalStore(self._cache)
        if self.store.exists(CURRENT):
            raise PersistError(
                f"Topic.cache: holds states, got {self._cache}. Give a folder that nothing else "
                "uses."
            )
        for path in [*self._cache.glob("checkpoint-*"), *self._cache.glob(".*.partial")]:
            shutil.rmtree(path)
        self._offset: int | None = None
        self._consumer: Any = None
        self._old: list[Path] = []

    def arrivals(self) -> Iterator[str]:
        for path in self._old:
            shutil.rmtree(path, ignore_errors=True)
        self._old, self._consumer = [], self._consumer or _consumer(self._kafka)
        low, high = _ends(self._consumer, _place(self._kafka, 0))
        # what retention took is a gap that the chain tells
        if self._offset is None or self._offset < low:
            self._offset = low
            self._consumer.assign([_place(self._kafka, low)])
        while self._offset < high:
            message = _next(self._consumer, self._kafka.topic)
            self._offset = message.offset() + 1
            folder = self._take(message.value())
            if folder is not None:
                yield folder

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = self._offset = None

    def _take(self, value: bytes) -> str | None:
        head, data = _unframed(value)
        partial = self._cache / f".{head['digest'][:32]}.partial"
        if not head.get("manifest"):
            path = partial / head["file"]
            if (
                ".." in PurePosixPath(head["file"]).parts
                or PurePosixPath(head["file"]).is_absolute()
            ):
                raise FormatError(
                    f"topic {self._kafka.topic}: a file outside of the version — received "
                    f"{head['file']!r} — "
                    "do not follow it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "r+b" if path.exists() else "xb") as file:
                file.seek(head["at"])
                file.write(data)
            return None
        partial.mkdir(exist_ok=True)
        (partial / MANIFEST).write_bytes(data)
        return self._finish(partial, head)

    def _finish(self, partial: Path, head: Mapping[str, Any]) -> str | None:
        """Make a version visible once its manifest has come; drop it, and what else is unfinished,
        where files are missing.
        """
        final = self._cache / f"checkpoint-{number_of(str(head['folder'])):08d}"
        try:
            link = open_link(LocalStore(partial.parent), partial.name)
            link.verify()
        except FormatError as error:
            log.warning(
                "topic %s: an incomplete version is passed over: %s", self._kafka.topic, error
            )
            shutil.rmtree(partial)
            return None
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        # it needs nothing before it; earlier ones can be read until the next call
        if link.manifest["kind"] == "full":
            self._old = [path for path in self._cache.glob("checkpoint-*") if path != final]
        for path in self._cache.glob(".*.partial"):
            shutil.rmtree(path)
        return final.name
