# SPDX-License-Identifier: Apache-2.0
"""The settings of both servers, each checked when it is set."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.connectors.request_log import topic_of
from hotbed.errors import ConfigError
from hotbed.files import check_folder
from hotbed.frozen import RowDtype
from hotbed.serving.cache import Policy
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.protocol.bodies import Bounds
from hotbed.serving.request_log.folder import LogFolder, PartLimits
from hotbed.serving.request_log.records import Anonymity
from hotbed.serving.request_log.topic import LogTopic
from hotbed.serving.request_log.writer import LogSink, RequestLogWriter
from hotbed.serving.routes.rule import LogRule
from hotbed.serving.server.tokens import (
    RereadFile,
    Roles,
    Tokens,
    load_tls,
    read_roles,
    read_tokens,
)
from hotbed.serving.stores.base import RowStore
from hotbed.serving.stores.opening import open_row_store

_LAST_PORT = 65_535
_DAY_SECONDS = 86_400
_LEAST_BODY_BYTES = 1 << 20
_LEAST_KEY_BYTES = 16
_MOST_KEY_BYTES = 64
_VALUE_BYTES = 32  # bytes of a body for each candidate and column


@dataclass(frozen=True)
class AccessOptions:
    """The settings that both servers share: their address, access and rows.

    Args:
        host: address to listen at.
        token_file: file with one token a line, each maybe with its roles; requests without one of
            them are rejected. It is read again when it changes.
        tls_cert: PEM file of the certificate, for all ports.
        tls_key: PEM file of its key.
        tls_clients: PEM file of certificate authorities; connections need a certificate of theirs.
        rows: folder of mapped rows; None = a temporary folder.
        dtype: float32, float16 or int8 rows.
        check_seconds: time between two checks of the kept rows for damaged files.
    """

    host: str = "127.0.0.1"
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_clients: str | None = None
    rows: str | None = None
    dtype: RowDtype = "float32"
    check_seconds: float = 3600.0

    def __post_init__(self) -> None:
        checks.between("serve.check_seconds", self.check_seconds, 0.001, _DAY_SECONDS)

    def roles(self) -> RereadFile[Roles] | None:
        """Read the tokens; None = no token is needed. Raises ConfigError for a wrong file."""
        if self.token_file is None:
            return None
        return RereadFile(self.token_file, read_roles)

    def tokens(self) -> Tokens | None:
        """Return what finds the roles of tokens; see `roles`."""
        file = self.roles()
        return None if file is None else Tokens(file.content)

    def tls(self) -> ssl.SSLContext | None:
        """Return key and certificates; see `load_tls`."""
        return load_tls(self.tls_cert, self.tls_key, self.tls_clients)

    def parameter_server(self) -> ParameterServer:
        """Return a parameter server for the folder of rows."""
        return ParameterServer(self.rows, self.dtype)


@dataclass(frozen=True)
class Options(AccessOptions):
    """Settings of a server of models, beside `AccessOptions`.

    Args:
        port: port of REST; 0 = a free port.
        grpc_port: port of gRPC; 0 = a free port; None = no gRPC.
        drain_seconds: how long requests are still answered after SIGTERM, while readiness is
            false.
        request_seconds: limit for a request to arrive completely, and for a client to read an
            answer.
        idle_seconds: connections without a request are closed after this time.
        workers: number of processes that answer.
    """

    port: int = 8000
    grpc_port: int | None = 8001
    drain_seconds: float = 1.0
    request_seconds: float = 30.0
    idle_seconds: float = 60.0
    workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("Options.port", self.port, 0, _LAST_PORT)
        checks.between("Options.grpc_port", self.grpc_port, 0, _LAST_PORT)
        checks.at_least("Options.workers", self.workers, 1)
        checks.between("Options.drain_seconds", self.drain_seconds, 0, _DAY_SECONDS)
        checks.between("Options.request_seconds", self.request_seconds, 0.001, _DAY_SECONDS)
        checks.between("Options.idle_seconds", self.idle_seconds, 0.001, _DAY_SECONDS)


@dataclass(frozen=True)
class RowsOptions(AccessOptions):
    """Settings of a parameter server, beside `AccessOptions`.

    Args:
        port: port of gRPC; 0 = a free port.
        calls: calls that are answered at the same time; further calls are rejected at once.
        drain_seconds: how long calls under way may take to end after SIGTERM.
        metrics_port: port for Prometheus, without TLS or token; 0 = a free port; None = no metrics.
    """

    port: int = 8002
    calls: int = 256
    drain_seconds: float = 10.0
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("RowsOptions.port", self.port, 0, _LAST_PORT)
        checks.at_least("RowsOptions.calls", self.calls, 1)
        checks.between("RowsOptions.drain_seconds", self.drain_seconds, 0, _DAY_SECONDS)
        checks.between("RowsOptions.metrics_port", self.metrics_port, 0, _LAST_PORT)


@dataclass(frozen=True)
class LogOptions:
    """The log of requests and their scores, and the access log.

    Args:
        log: the folder of the logs, with a folder for each model; or kafka://HOST:PORT[,…]/TOPIC,
            with a topic TOPIC.MODEL for each. None = no log.
        log_options: options for librdkafka, as for `hb.sources.Kafka`.
        log_sample: the share of requests that is written, chosen by a hash of the request's id.
        log_omit: columns that are left out.
        log_hash: columns of which a keyed hash is written.
        log_key_file: file with the key of the hash, which replicas share.
        log_queue_bytes: memory of the requests that wait to be written, for each model; further
            ones are dropped and counted.
        log_flush_seconds: a request is in a file after this time.
        log_part_bytes: bytes of a part when it is closed.
        log_part_seconds: seconds after which a part is closed.
        log_max_bytes: bytes of the closed parts of a model; the oldest are removed.
        access_log: the share of answered requests for predictions that have a line in the log of
            the server, chosen as by `log_sample`; each request that ends with an error has one.
            0 = no such lines.
    """

    log: str | None = None
    log_options: Mapping[str, Any] = field(default_factory=dict)
    log_sample: float = 1.0
    log_omit: Sequence[str] = ()
    log_hash: Sequence[str] = ()
    log_key_file: str | None = None
    log_queue_bytes: int = 64 << 20
    log_flush_seconds: float = 1.0
    log_part_bytes: int = 128 << 20
    log_part_seconds: float = 300.0
    log_max_bytes: int = 10_000_000_000
    access_log: float = 0.0

    def __post_init__(self) -> None:
        checks.between("LogOptions.access_log", self.access_log, 0, 1)
        checks.between("LogOptions.log_sample", self.log_sample, 0, 1)
        checks.at_least("LogOptions.log_queue_bytes", self.log_queue_bytes, 1)
        checks.between("LogOptions.log_flush_seconds", self.log_flush_seconds, 0.001, _DAY_SECONDS)
        checks.at_least("LogOptions.log_part_bytes", self.log_part_bytes, 1)
        checks.between("LogOptions.log_part_seconds", self.log_part_seconds, 0.001, _DAY_SECONDS)
        checks.at_least("LogOptions.log_max_bytes", self.log_max_bytes, 1)
        if self.log is not None and topic_of(self.log) is None:
            check_folder(self.log, "serve.log")
        if self.log_hash and self.log_key_file is None:
            raise ConfigError(
                f"serve.log_hash: needs a key, got columns {list(self.log_hash)} and no "
                "log_key_file. Without a key, ids are found again by trying all of them."
            )
        self._key()

    def check_rule(self, rule: LogRule, where: str) -> None:
        """Raise ConfigError for a rule of a model that this log cannot follow."""
        if self.log is None:
            raise ConfigError(
                f"{where}: the server writes no request log, got a rule for one. Start the server "
                "with --set log=FOLDER."
            )
        if rule.hash and self.log_key_file is None:
            raise ConfigError(
                f"{where}.hash: needs a key, got columns {list(rule.hash)}. Start the server with "
                "--set log_key_file=FILE."
            )
        if rule.max_bytes is not None and topic_of(self.log) is not None:
            raise ConfigError(
                f"{where}.max_bytes: a topic keeps what its broker is set to, got "
                f"{rule.max_bytes}. Set retention.bytes of the topic."
            )

    def writer(self, model: str) -> RequestLogWriter | None:
        """Return what writes the log of a model; None = no log."""
        if self.log is None:
            return None
        open_sink: Callable[[], LogSink]
        address = topic_of(self.log)
        if address is None:
            limits = PartLimits(self.log_part_bytes, self.log_part_seconds, self.log_max_bytes)
            open_sink = partial(LogFolder, Path(self.log), model, limits)
        else:
            servers, topic = address
            open_sink = partial(LogTopic, servers, f"{topic}.{model}", self.log_options)
        return RequestLogWriter(
            model,
            open_sink,
            sample=self.log_sample,
            queue_bytes=self.log_queue_bytes,
            flush_seconds=self.log_flush_seconds,
            anonymity=Anonymity(frozenset(self.log_omit), frozenset(self.log_hash), self._key()),
        )

    def _key(self) -> bytes:
        """Return the key of hashes. Raises ConfigError if its file is unreadable or too short."""
        if self.log_key_file is None:
            return b""
        try:
            key = Path(self.log_key_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"serve.log_key_file: unreadable, got {error.strerror} for "
                f"{self.log_key_file!r}. Correct the path or its rights."
            ) from error
        if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
            raise ConfigError(
                f"serve.log_key_file: needs {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES} bytes, got "
                f"{len(key)}. Write random ones: openssl rand -hex 32."
            )
        return key


NO_LOGS = LogOptions()
"""Requests are not logged."""


@dataclass(frozen=True)
class ServerLimits:
    """The load that a server accepts.

    Args:
        batch_rows: candidates that are scored together, and the most of one request.
        batch_seconds: how long the first request of a batch may wait for others; 0 = batch only
            requests that already wait.
        queue_rows: candidates that may wait; a request beyond that is rejected at once.
        body_bytes: the largest body of a request. None = 32 bytes for each of `batch_rows`
            candidates and each column of the model, at least 1 MiB.
        list_length: values that a candidate may have in one column.
        request_entries: entries of histories, over all candidates, that the network may read for a
            request. A history of the context counts once for each candidate.
    """

    batch_rows: int = 4096
    batch_seconds: float = 0.0
    queue_rows: int = 65_536
    body_bytes: int | None = None
    list_length: int = 1024
    request_entries: int = 1 << 19

    def __post_init__(self) -> None:
        checks.at_least("ServerLimits.batch_rows", self.batch_rows, 1)
        checks.between("ServerLimits.batch_seconds", self.batch_seconds, 0, _DAY_SECONDS)
        checks.at_least("ServerLimits.queue_rows", self.queue_rows, 0)
        checks.at_least("ServerLimits.body_bytes", self.body_bytes, 1)
        checks.at_least("ServerLimits.list_length", self.list_length, 1)
        checks.at_least("ServerLimits.request_entries", self.request_entries, 1)

    def bounds(self, num_columns: int) -> Bounds:
        """Return the bounds of a request to a model of `num_columns` columns."""
        body_bytes = self.body_bytes
        if body_bytes is None:
            body_bytes = max(_LEAST_BODY_BYTES, self.batch_rows * num_columns * _VALUE_BYTES)
        return Bounds(num_columns, self.batch_rows, self.list_length, body_bytes)


@dataclass(frozen=True)
class RemoteOptions:
    """Settings for models at grpc://HOST:PORT and for the cache of their rows.

    Args:
        store_token_file: a file whose first line is the token to send. It is read again when it
            changes.
        store_trusted: a PEM file of certificate authorities for grpcs://.
        cache_bytes: `max_bytes` of `EmbeddingCache`.
        cache_policy: `policy` of `EmbeddingCache`.
        cache_preload: `preload` of `EmbeddingCache`.
        cache_deadline_seconds: `deadline_seconds` of `EmbeddingCache`.
    """

    store_token_file: str | None = None
    store_trusted: str | None = None
    cache_bytes: int = 256 << 20
    cache_policy: Policy = "lfu"
    cache_preload: float = 0.5
    cache_deadline_seconds: float | None = 0.1

    def connect(self, url: str) -> RowStore:
        """Connect to the parameter server at an address."""
        return open_row_store(url, self.token(), self.store_trusted)

    def token(self) -> Callable[[], str] | None:
        """Return what reads the token to send; None = no token. Raises ConfigError."""
        if self.store_token_file is None:
            return None
        file = RereadFile(self.store_token_file, read_tokens)
        return lambda: file.content()[0]

    def cache(self) -> dict[str, Any]:
        """Return the keywords of `EmbeddingCache`."""
        return {
            "max_bytes": self.cache_bytes,
            "policy": self.cache_policy,
            "preload": self.cache_preload,
            "deadline_seconds": self.cache_deadline_seconds,
        }
