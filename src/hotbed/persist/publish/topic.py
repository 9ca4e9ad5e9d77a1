# SPDX-License-Identifier: Apache-2.0
"""Publishing versions as messages of a Kafka topic, and receiving them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hotbed.connectors.kafka import Kafka
from hotbed.connectors.kafka_client import kafka_library
from hotbed.errors import FormatError, PersistError
from hotbed.files import local_path
from hotbed.persist.format import CheckpointWriter, Link, Saved, open_checkpoint, open_link
from hotbed.persist.manifest import unsealed
from hotbed.persist.publish.follow import VersionFeed
from hotbed.persist.publish.version import Publisher, write_published
from hotbed.persist.store import CURRENT_FILE, MANIFEST_FILE, LocalStore, number_of

CHUNK_BYTES = 900_000
_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 300.0
log = logging.getLogger("hotbed.persist")


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
            with CheckpointWriter(folder) as writer:
                made = write_published(writer, reader, last, self.graph)
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
        kafka = kafka_library()
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
        send(_framed(head, link.store.read(f"{link.folder}/{MANIFEST_FILE}")))
        settle()


class TopicFeed(VersionFeed):
    """The topic of a `PublishTopic`, collected in a local folder `cache`; what an earlier one left
    there goes.

    Example: `Follower(TopicFeed("localhost:9092", "clicks-model", cache="/var/cache/clicks"))`
    """

    def __init__(
        self, servers: str, topic: str, cache: str | Path, options: Mapping[str, Any] | None = None
    ) -> None:
        self._kafka = Kafka(servers, topic, options=options or {})
        self._cache = local_path(cache, "TopicFeed.cache")
        self._cache.mkdir(parents=True, exist_ok=True)
        self.store = LocalStore(self._cache)
        if self.store.exists(CURRENT_FILE):
            raise PersistError(
                f"TopicFeed.cache: holds states, got {self._cache}. Give a folder that nothing else "
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
        (partial / MANIFEST_FILE).write_bytes(data)
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


# --- messages -----------------------------------------------------------------------------------


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


# --- the client ---------------------------------------------------------------------------------


def _client(kafka: Kafka) -> dict[str, Any]:
    """Options that producers and consumers share."""
    given = kafka.client_options()
    return {
        name: value
        for name, value in given.items()
        if name in kafka.options or name == "bootstrap.servers"
    }


def _consumer(kafka: Kafka) -> Any:
    return kafka_library().Consumer({**kafka.client_options(), "enable.partition.eof": False})


def _place(kafka: Kafka, offset: int) -> Any:
    return kafka_library().TopicPartition(kafka.topic, 0, offset)


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
    except kafka_library().KafkaException as error:
        raise PersistError(
            f"topic {partition.topic}: cannot be read — received {error} — create it with one "
            "partition, or "
            "look at the brokers"
        ) from error
    return low, high
