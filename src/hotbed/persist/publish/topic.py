# SPDX-License-Identifier: Apache-2.0
"""Publishing versions as messages of a Kafka topic, and receiving them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hotbed.connectors.kafka.client import ClientEnded, KafkaClient, KafkaFailure, kafka_library
from hotbed.connectors.kafka.kafka import Kafka
from hotbed.errors import FormatError, PersistError
from hotbed.files import claim_folder, local_path, remove_all
from hotbed.persist.container.check.manifest import unsealed
from hotbed.persist.container.format import CheckpointWriter, Link, Reader, Saved, open_link
from hotbed.persist.container.store import CURRENT_FILE, MANIFEST_FILE, LocalStore, number_of
from hotbed.persist.publish.follow import VersionFeed
from hotbed.persist.publish.version import Publisher, opened, write_published

CHUNK_BYTES = 900_000
_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 300.0
_QUEUE_SECONDS = 0.1
_POLL_SECONDS = 0.2
_QUEUE_KBYTES = 1 << 16
_UNFINISHED = re.compile(r"\.[0-9a-f]{1,32}\.partial")
log = logging.getLogger("hotbed.persist")


class PublishTopic(Publisher):
    """Publish versions as messages in partition 0 of a topic, which must exist.

    `options`: as for `hb.sources.Kafka`.

    Example: `PublishTopic("localhost:9092", "clicks-model")`
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, Any] | None = None) -> None:
        self._kafka = Kafka(servers, topic, options=options or {})
        self._last: Link | None = None
        self._highest = -1  # of the numbers in the topic

    @property
    def _described(self) -> dict[str, Any]:
        arguments = self._kafka._described
        return {name: arguments[name] for name in ("servers", "topic", "options")}

    def check_ready(self) -> None:
        """Raise PersistError if the topic cannot be read, ConfigError if a secret is missing."""
        with contextlib.closing(KafkaClient(self._kafka.client_options())) as client:
            _ends(client, self._kafka.topic)

    def newest_source(self) -> str | None:
        last = self._last
        if last is None:
            last, self._highest = self._last_version()
        return None if last is None else last.manifest.source

    def publish(self, saved: Saved | Reader, *, forced: str | None = None) -> Saved | None:
        reader = opened(saved, forced)
        last = self._last
        if last is None:
            last, self._highest = self._last_version()
        if last is not None and last.manifest.source == reader.manifest.digest:
            return None
        with tempfile.TemporaryDirectory(prefix="hotbed-publish-") as name:
            folder = Path(name)
            if last is not None:  # the next number follows it
                (folder / last.folder).mkdir()
            with CheckpointWriter(folder) as writer:
                version = write_published(
                    writer, reader, last, self.graph, highest=self._highest, forced=forced
                )
            self._highest = version.version  # also if it arrives in part
            link = open_link(LocalStore(folder), version.chain[-1].folder)
            self._send(link)
            self._last = link
        return version

    def _last_version(self) -> tuple[Link | None, int]:
        """Return the version that another process published last, and its number.

        The version is None if nothing or only a part was published. The number is -1 if it is
        unknown.
        """
        topic = self._kafka.topic
        with contextlib.closing(KafkaClient(self._kafka.client_options())) as client:
            low, high = _ends(client, topic)
            if high == low:
                return None, -1
            client.request("assign", topic, {0: high - 1})
            _, value = _next(client, topic)
        head, data = _unframed(value)
        if not head.get("manifest"):
            return None, int(head.get("version", -1))
        place = f"topic {topic}, offset {high - 1}"
        manifest = unsealed(bytes(data), place)
        return Link(LocalStore(Path()), head["folder"], manifest), manifest.version

    def _send(self, link: Link) -> None:
        sending = _Sending(self._kafka, link.manifest.version)
        for message in _messages(link):
            sending.send(message)
        sending.wait()
        head = {"digest": link.manifest.digest, "folder": link.folder, "manifest": True}
        sending.send(_framed(head, link.store.read(f"{link.folder}/{MANIFEST_FILE}")))
        sending.wait()


class _Sending:
    """The messages of one version on their way to the brokers, in order."""

    def __init__(self, kafka: Kafka, version: int) -> None:
        self._topic = kafka.topic
        self._version = version
        self._errors: list[Any] = []
        self._producer = kafka_library().Producer(
            {
                **_client_options(kafka),
                "acks": "all",
                "max.in.flight.requests.per.connection": 1,
                "message.timeout.ms": int(_SEND_SECONDS * 1000),
                "queue.buffering.max.kbytes": _QUEUE_KBYTES,
            }
        )

    def send(self, value: bytes) -> None:
        """Hand a message to the client; wait while its queue is full."""
        while not self._errors:
            try:
                self._producer.produce(
                    self._topic, value, str(self._version), 0, on_delivery=self._on_delivery
                )
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(_QUEUE_SECONDS)

    def wait(self) -> None:
        """Wait until the brokers have all messages; raise PersistError if they do not take one."""
        num_unsent = self._producer.flush(_SEND_SECONDS)
        if self._errors or num_unsent:
            self._producer.purge()
            answer = self._errors[0] if self._errors else "no answer"
            raise PersistError(
                f"topic {self._topic}: version {self._version} was not published, got {answer}. "
                "Check the brokers and the topic."
            )

    def _on_delivery(self, error: Any, message: Any) -> None:
        if error:
            self._errors.append(error)


class TopicFeed(VersionFeed):
    """The versions of a `PublishTopic`, collected in a local folder.

    Args:
        servers: as for `hb.sources.Kafka`.
        topic: name of the topic.
        cache: the local folder. Versions that an earlier feed left there are removed.
        options: as for `hb.sources.Kafka`.

    Raises:
        ConfigError: `cache` is a link, or holds what no feed wrote.

    Example: `Follower(TopicFeed("localhost:9092", "clicks-model", cache="/var/cache/clicks"))`
    """

    def __init__(
        self, servers: str, topic: str, cache: str | Path, options: Mapping[str, Any] | None = None
    ) -> None:
        self._kafka = Kafka(servers, topic, options=options or {})
        self._cache = local_path(cache, "TopicFeed.cache")
        self.store = LocalStore(self._cache)
        if self.store.exists(CURRENT_FILE):
            raise PersistError(
                f"TopicFeed.cache: holds states, got {self._cache}. "
                "Give a folder that nothing else uses."
            )
        claim_folder(self._cache, "TopicFeed.cache", _is_version)
        remove_all(path for path in self._cache.iterdir() if _is_version(path))
        self._offset: int | None = None
        self._client: KafkaClient | None = None
        self._replaced: list[Path] = []

    def arrivals(self) -> Iterator[str]:
        for path in self._replaced:
            shutil.rmtree(path, ignore_errors=True)
        self._replaced = []
        try:
            yield from self._arrivals()
        except ClientEnded as error:
            self._client = None  # the next call starts another one at the same offset
            raise PersistError(
                f"topic {self._kafka.topic}: the client of Kafka ended, got {error}. It is started "
                "again."
            ) from error

    def _arrivals(self) -> Iterator[str]:
        topic = self._kafka.topic
        client = self._client or KafkaClient(self._kafka.client_options())
        low, high = _ends(client, topic)
        offset = self._offset
        # what the topic's retention removed is a gap, which the chain shows; a topic that was made
        # anew is read from its beginning
        if offset is None or not low <= offset <= high:
            offset = low
        if offset != self._offset or self._client is None:
            client.request("assign", topic, {0: offset})
        self._client = client
        self._offset = offset
        while self._offset < high:
            last_offset, value = _next(client, topic)
            self._offset = last_offset + 1
            folder = self._take(value)
            if folder is not None:
                yield folder

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
            self._offset = None

    def _take(self, value: bytes) -> str | None:
        """Store a message; return the folder of the version that it completes."""
        head, data = _unframed(value)
        partial = self._cache / f".{head['digest'][:32]}.partial"
        if head.get("manifest"):
            partial.mkdir(exist_ok=True)
            (partial / MANIFEST_FILE).write_bytes(data)
            return self._finish(partial, head)
        name = PurePosixPath(head["file"])
        if ".." in name.parts or name.is_absolute():
            raise FormatError(
                f"topic {self._kafka.topic}: a file outside of the version, got {head['file']!r}. "
                "Do not follow this topic."
            )
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if path.exists() else "xb") as file:
            file.seek(head["at"])
            file.write(data)
        return None

    def _finish(self, partial: Path, head: Mapping[str, Any]) -> str | None:
        """Make a version visible once its manifest has arrived, unless files are missing.

        Then it is dropped, with all other unfinished versions.
        """
        final = self._cache / f"checkpoint-{number_of(str(head['folder'])):08d}"
        try:
            link = open_link(LocalStore(partial.parent), partial.name)
            link.verify()
        except FormatError as error:
            log.warning("topic %s: an incomplete version is skipped: %s", self._kafka.topic, error)
            shutil.rmtree(partial)
            return None
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        if link.manifest.kind == "full":
            # it needs no version before it; they can be read until the next call
            versions = [path for path in self._cache.glob("checkpoint-*") if _is_version(path)]
            self._replaced = [path for path in versions if path != final]
        remove_all(path for path in self._cache.iterdir() if _UNFINISHED.fullmatch(path.name))
        return final.name


def _is_version(path: Path) -> bool:
    """Return whether a feed wrote a folder of its cache: a version, or an unfinished one."""
    if path.is_symlink() or not path.is_dir():
        return False
    is_whole = path.name in LocalStore(path.parent).folders() and (path / MANIFEST_FILE).is_file()
    return is_whole or _UNFINISHED.fullmatch(path.name) is not None


# --- messages -----------------------------------------------------------------------------------


def _messages(link: Link) -> Iterator[bytes]:
    for name in link.manifest.files:
        num_bytes = link.manifest.files[name].bytes
        with link.open(name) as file:
            for start in range(0, max(1, num_bytes), CHUNK_BYTES):  # an empty file is a message too
                head = {
                    "digest": link.manifest.digest,
                    "version": link.manifest.version,
                    "file": name,
                    "at": start,
                }
                yield _framed(head, file.read(CHUNK_BYTES))


def _framed(head: Mapping[str, Any], data: bytes) -> bytes:
    return json.dumps(head).encode() + b"\n" + data


def _unframed(value: bytes) -> tuple[dict[str, Any], memoryview]:
    line, _, _ = value.partition(b"\n")
    try:
        head = json.loads(line)
        bytes.fromhex(head["digest"])  # it names a folder
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"a message is not part of a published version, got {line[:60]!r}. "
            "Give a topic of PublishTopic."
        ) from error
    return head, memoryview(value)[len(line) + 1 :]


# --- the client ---------------------------------------------------------------------------------


def _client_options(kafka: Kafka) -> dict[str, Any]:
    """Return the options that producers and consumers share."""
    names = {"bootstrap.servers", *kafka.options}
    options = kafka.client_options()
    return {name: value for name, value in options.items() if name in names}


def _next(client: KafkaClient, topic: str) -> tuple[int, bytes]:
    """Return offset and value of the next message, which is known to exist."""
    answer = "no answer"
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        for entry in client.consume(1, _POLL_SECONDS):
            if entry.error is None:
                return entry.offset, entry.value or b""
            if entry.error.name != "_PARTITION_EOF":
                answer = entry.error.text
    raise PersistError(f"topic {topic}: cannot be read, got {answer}. Check the brokers.")


def _ends(client: KafkaClient, topic: str) -> tuple[int, int]:
    """Return the offsets of the first message and after the last."""
    bounds: dict[int, tuple[int, int]]
    question = (topic, [0], _CONNECT_SECONDS)
    try:
        bounds = client.request("ask", "bounds", question, seconds=_CONNECT_SECONDS)
    except ClientEnded:
        raise
    except KafkaFailure as failure:
        raise PersistError(
            f"topic {topic}: cannot be read, got {failure}. "
            "Create it with one partition, or check the brokers."
        ) from failure
    return bounds[0]
