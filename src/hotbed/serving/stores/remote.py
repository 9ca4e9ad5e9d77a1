# SPDX-License-Identifier: Apache-2.0
"""Read a parameter server in another process over gRPC. Needs the extra `serve`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from hotbed.data.batch import as_ids
from hotbed.errors import ConfigError, MissingExtra, NotServed, StoreError
from hotbed.serving.stores.base import ModelVersion, RowStore, read_weights, version_fields

try:
    import grpc

    from hotbed.serving.stores.messages import CALLS, MESSAGE_BYTES, MESSAGES, SERVICE
except ImportError as error:
    raise MissingExtra(
        f"RemoteParameterServer: {error.name} is not installed. Run pip install hotbed[serve]."
    ) from error

_ANSWER_BYTES = 16 << 20  # limit of the rows of one call; more rows take several calls
_DESCRIBE_SECONDS = 5.0  # limit of a call for the newest version: it is polled, so it fails early
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class RemoteParameterServer(RowStore):
    """Read the models of a `hotbed parameter-server` over the network.

    Safe to call from several threads. Reconnects by itself. Its methods raise StoreError, which
    names the server, where the server does not answer.

    Args:
        url: grpc://HOST:PORT, or grpcs:// for TLS.
        token: The token, where the server requires one.
        trusted: A PEM file of certificate authorities for TLS, instead of those of the system.
        deadline_seconds: Limit of the calls without a deadline of their own.

    Raises:
        ConfigError: `url` is not an address, or `trusted` cannot be read.

    Example:
        >>> store = hb.ParameterServer.connect("grpc://rows:8002")
        >>> store.model("ranker").find({"user": np.array([7, 8])}, seconds=0.1)
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        trusted: str | Path | None = None,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._place, secure = _address(url)
        self._seconds = deadline_seconds
        self._versions = dict[str, RemoteVersion]()
        self._lock = threading.Lock()
        self._metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        if secure:
            pem = None if trusted is None else _pem(trusted)
            self._channel = grpc.secure_channel(
                self._place, grpc.ssl_channel_credentials(pem), _OPTIONS
            )
        else:
            self._channel = grpc.insecure_channel(self._place, _OPTIONS)
        self._calls = {name: self._call(name, *rest) for name, rest in CALLS.items()}

    def close(self) -> None:
        """Close the connection; later calls raise StoreError."""
        self._channel.close()

    def model(self, name: str) -> RemoteVersion:
        """Return the newest version with its graph and weights.

        Raises NotServed where the server does not have this model.
        """
        cached = self._versions.get(name)
        request = {"model": name, "known": cached.digest if cached else ""}
        answer = self.ask("Describe", request, min(_DESCRIBE_SECONDS, self._seconds))
        if answer.same and cached is not None:
            return cached
        try:
            spec = json.loads(answer.json)
        except ValueError as error:
            raise StoreError(
                f"{self._place}: expected the description of a version, got {answer.json[:60]!r}. "
                "Look at the server."
            ) from error
        fields = version_fields(spec, self._place)
        blobs = {call: self._whole(call, name, fields["digest"]) for call in ("Graph", "Weights")}
        version = RemoteVersion(**fields, store=self, blobs=blobs)
        with self._lock:
            self._versions[name] = version
        return version

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        parts = dict[str, list[bytes]]()
        for part in self.stream("Changes", {"model": name, "since": since, "to": to}):
            parts.setdefault(part.name, []).append(part.data)
        return {table: _ids(b"".join(data)) for table, data in parts.items()} or None

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        parts = self.stream("Hot", {"model": name, "table": table, "n": n})
        return _ids(b"".join(part.data for part in parts))

    def ask(self, call: str, request: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Call the server and return its one answer, within `seconds`."""
        message = MESSAGES[CALLS[call][0]](**request)
        try:
            return self._calls[call](
                message, timeout=seconds or self._seconds, metadata=self._metadata
            )
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            raise self._error(error) from error

    def stream(self, call: str, request: Mapping[str, Any]) -> Iterator[Any]:
        """Call the server and yield the parts of its answer."""
        message = MESSAGES[CALLS[call][0]](**request)
        try:
            yield from self._calls[call](message, timeout=self._seconds, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self._error(error) from error

    def _whole(self, call: str, name: str, digest: str) -> bytes:
        return b"".join(part.data for part in self.stream(call, {"model": name, "digest": digest}))

    def _call(self, name: str, request: str, answer: str, streamed: bool) -> Callable[..., Any]:
        make = self._channel.unary_stream if streamed else self._channel.unary_unary
        call: Callable[..., Any] = make(
            f"/{SERVICE}/{name}", MESSAGES[request].SerializeToString, MESSAGES[answer].FromString
        )
        return call

    def _error(self, error: Exception) -> Exception:
        if not isinstance(error, grpc.RpcError):
            return StoreError(
                f"{self._place}: the connection is closed, got a call after close(). Connect again."
            )
        code = error.code()
        details = error.details() or ""
        codes = grpc.StatusCode
        if code == codes.NOT_FOUND:
            return NotServed(details)
        if code == codes.INVALID_ARGUMENT:
            return ConfigError(details)
        if code == codes.FAILED_PRECONDITION:
            return StoreError(details)
        return StoreError(
            f"{self._place}: the rows did not arrive, got {code.name}, {details[:200]!r}. Look at "
            "the parameter server."
        )


@dataclass(frozen=True, eq=False)
class RemoteVersion(ModelVersion):
    """A version whose rows another process holds.

    `find` raises StoreError, which names the version, once that process no longer keeps it.
    """

    store: RemoteParameterServer = field(repr=False)
    blobs: Mapping[str, bytes] = field(repr=False)

    def graph_bytes(self) -> bytes:
        return self.blobs["Graph"]

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield from read_weights(self.blobs["Weights"], f"weights of version {self.version}")

    def find(
        self, wanted: Mapping[str, NDArray[np.int64]], seconds: float | None = None
    ) -> dict[str, NDArray[np.float32]]:
        deadline = None if seconds is None else time.monotonic() + seconds
        data: dict[str, list[bytes]] = {table: [] for table in wanted}
        for tables in self._calls(wanted):
            seconds_left = None if deadline is None else deadline - time.monotonic()
            if seconds_left is not None and seconds_left <= 0:
                raise StoreError(
                    f"model {self.name!r}: the rows did not arrive in time, got {seconds} seconds. "
                    "Ask for fewer rows, or allow more time."
                )
            specs = [MESSAGES["Wanted"](table=table, ids=ids.tobytes()) for table, ids in tables]
            request = {"model": self.name, "digest": self.digest, "wanted": specs}
            answer = self.store.ask("Rows", request, seconds_left)
            for number, (table, ids) in enumerate(tables):
                rows = answer.rows[number] if number < len(answer.rows) else b""
                if len(rows) != 4 * len(ids) * self._dim(table):
                    raise StoreError(
                        f"model {self.name!r}: rows of table {table!r} have another size, got "
                        f"{len(rows)} bytes for {len(ids)} ids. Look at the parameter server."
                    )
                data[table].append(rows)
        return {table: _rows(parts, self._dim(table)) for table, parts in data.items()}

    def _calls(
        self, wanted: Mapping[str, NDArray[np.int64]]
    ) -> Iterator[list[tuple[str, NDArray[np.int64]]]]:
        """Yield the tables and ids of each call, so that an answer stays within its limit."""
        call = list[tuple[str, NDArray[np.int64]]]()
        call_bytes = 0
        for table, ids in wanted.items():
            ids = as_ids(ids).astype("<i8", copy=False)
            start = 0
            row_bytes = 4 * self._dim(table)
            while start < len(ids):
                n = max(1, min(len(ids) - start, (_ANSWER_BYTES - call_bytes) // row_bytes))
                call.append((table, ids[start : start + n]))
                start += n
                call_bytes += n * row_bytes
                if call_bytes + row_bytes > _ANSWER_BYTES:
                    yield call
                    call = []
                    call_bytes = 0
        if call:
            yield call

    def _dim(self, table: str) -> int:
        if table not in self.configs:
            raise ConfigError(
                f"model {self.name!r}: unknown table, got {table!r}. Choose one of "
                f"{sorted(self.configs)}."
            )
        return int(self.configs[table]["dim"])


def _rows(parts: list[bytes], dim: int) -> NDArray[np.float32]:
    flat = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), "<f4")
    return flat.astype(np.float32, copy=False).reshape(-1, dim)


def _ids(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data[: len(data) // 8 * 8], "<i8").astype(np.int64)


def _address(url: str) -> tuple[str, bool]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or port is None:
        raise ConfigError(
            f"ParameterServer.connect: expected an address, got {url!r}. Write grpc://HOST:PORT, "
            "or grpcs:// for TLS."
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "grpcs"


def _pem(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"ParameterServer.connect: trusted cannot be read, got {path}, {error}. Give a PEM "
            "file."
        ) from error
