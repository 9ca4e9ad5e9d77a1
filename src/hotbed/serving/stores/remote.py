# SPDX-License-Identifier: Apache-2.0
"""Read a parameter server in another process over gRPC. Needs the extra `serve`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from hotbed.data.batch import as_ids
from hotbed.errors import ConfigError, MissingExtra, NotServed, StoreError
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.stores.base import (
    ModelVersion,
    RoutesInForce,
    RowStore,
    Weight,
    read_weights,
    version_fields,
)
from hotbed.serving.stores.fetched_maps import FetchedMaps
from hotbed.serving.trace_context import outgoing_call

try:
    import grpc

    from hotbed.serving.stores.messages import CALLS, MESSAGE_BYTES, MESSAGES, SERVICE, CallTypes
except ImportError as error:
    raise MissingExtra(
        f"RemoteParameterServer: {error.name} is not installed. Run pip install hotbed[serve]."
    ) from error

_Wanted: TypeAlias = list[tuple[str, IdArray]]
"""Tables and the ids to fetch of them."""
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
        token: the token, or a function that returns it, where the server requires one.
        trusted: a PEM file of certificate authorities for TLS, instead of those of the system.
        deadline_seconds: limit of the calls without a deadline of their own.

    Raises:
        ConfigError: `url` is not an address, or `trusted` cannot be read.

    Example:
        >>> store = hb.ParameterServer.connect("grpc://rows:8002")
        >>> store.model("ranker").find({"user": np.array([7, 8])}, seconds=0.1)
    """

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str] | None = None,
        trusted: str | Path | None = None,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._place, secure = _address(url)
        self._seconds = deadline_seconds
        self._versions = dict[str, RemoteVersion]()
        self._lock = threading.Lock()
        self._maps = FetchedMaps()
        self._token = token
        self._channel = _open_channel(self._place, secure, trusted)
        self._calls = {name: self._call(name, types) for name, types in CALLS.items()}

    def close(self) -> None:
        """Close the connection; later calls raise StoreError."""
        self._channel.close()

    def model(self, name: str) -> RemoteVersion:
        """Return the newest version, or the pinned one, with its graph and weights.

        Raises NotServed where the server does not have this model.
        """
        return self._described({"model": name})[0]

    def routed(self, name: str) -> tuple[RemoteVersion, RoutesInForce | None]:
        version, text = self._described({"model": name, "routed": True})
        if not text:
            return version, None
        try:
            return version, RoutesInForce.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{self._place}: expected the rule of model {name!r}, got {text[:60]!r}. Look at "
                "the server."
            ) from error

    def version_of(self, name: str, key: str) -> RemoteVersion:
        return self._described({"model": name, "key": key})[0]

    def _described(self, request: dict[str, Any]) -> tuple[RemoteVersion, bytes]:
        """Return the version that a request describes, and the rule as text."""
        name = request["model"]
        cached = None if "key" in request else self._versions.get(name)
        if cached is not None:
            request |= {"known": cached.digest, "mended": cached.mended}
        seconds = min(_DESCRIBE_SECONDS, self._seconds)
        answer = self.ask("Describe", request, seconds)
        if answer.same and cached is not None:
            return cached, answer.routes
        try:
            spec = json.loads(answer.json)
        except ValueError as error:
            raise StoreError(
                f"{self._place}: expected the description of a version, got {answer.json[:60]!r}. "
                "Look at the server."
            ) from error
        version = self._fetched(name, version_fields(spec, self._place))
        if "key" not in request:
            with self._lock:
                self._versions[name] = version
        return version, answer.routes

    def _fetched(self, name: str, fields: dict[str, Any]) -> RemoteVersion:
        """Return a version with these fields, with its graph and weights."""
        request = {"model": name, "digest": fields["digest"]}
        blobs = {"Weights": self._read_all("Weights", request)}
        blobs.update(self._read_graphs(request))
        fields["schema"] = self._maps.local(
            name, fields["schema"], lambda digest: self._map(request, digest)
        )
        return RemoteVersion(**fields, store=self, blobs=blobs)

    def _map(self, request: Mapping[str, Any], digest: str) -> Iterator[bytes]:
        """Yield the file of a fitted map in parts."""
        for part in self.stream("Map", {**request, "map": digest}):
            yield part.data

    def changes(self, name: str, since: str, to: str) -> Mapping[str, IdArray] | None:
        request = {"model": name, "since": since, "to": to}
        data = dict[str, list[bytes]]()
        for part in self.stream("Changes", request):
            data.setdefault(part.name, []).append(part.data)
        changes = {table: _ids(b"".join(parts)) for table, parts in data.items()}
        return changes or None

    def hot(self, name: str, table: str, n: int) -> IdArray:
        request = {"model": name, "table": table, "n": n}
        return _ids(self._read_all("Hot", request))

    def ask(self, call: str, request: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Call the server and return its one answer, within `seconds`."""
        make = MESSAGES[CALLS[call].request]
        message = make(**request)
        timeout = seconds or self._seconds
        try:
            with outgoing_call(f"{SERVICE}/{call}") as headers:
                metadata = [*self._metadata(), *headers.items()]
                return self._calls[call](message, timeout=timeout, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            raise self._error(error) from error

    def stream(self, call: str, request: Mapping[str, Any]) -> Iterator[Any]:
        """Call the server and yield the parts of its answer."""
        make = MESSAGES[CALLS[call].request]
        message = make(**request)
        try:
            yield from self._calls[call](message, timeout=self._seconds, metadata=self._metadata())
        except (grpc.RpcError, ValueError) as error:
            raise self._error(error) from error

    def _read_all(self, call: str, request: Mapping[str, Any]) -> bytes:
        """Return the joined data of a streamed answer."""
        return b"".join(part.data for part in self.stream(call, request))

    def _read_graphs(self, request: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the graph, and the id graph if the version has one."""
        data: dict[str, list[bytes]] = {"": [], "ids": []}
        for part in self.stream("Graph", request):
            data[part.name].append(part.data)
        return {"Graph": b"".join(data[""]), "Ids": b"".join(data["ids"])}

    def _metadata(self) -> list[tuple[str, str]]:
        if self._token is None:
            return []
        token = self._token if isinstance(self._token, str) else self._token()
        return [("authorization", f"Bearer {token}")]

    def _call(self, name: str, types: CallTypes) -> Callable[..., Any]:
        make = self._channel.unary_unary
        if types.is_streamed:
            make = self._channel.unary_stream
        encode = MESSAGES[types.request].SerializeToString
        decode = MESSAGES[types.answer].FromString
        call: Callable[..., Any] = make(f"/{SERVICE}/{name}", encode, decode)
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

    Attributes:
        store: the other process.
        blobs: graph, ids and weights.
        answer_bytes: limit of the rows of one call; more rows take several calls.
    """

    store: RemoteParameterServer = field(repr=False)
    blobs: Mapping[str, bytes] = field(repr=False)
    answer_bytes: int = field(default=16 << 20, repr=False)

    def graph_bytes(self) -> bytes:
        return self.blobs["Graph"]

    def ids_bytes(self) -> bytes:
        return self.blobs["Ids"]

    def weights(self) -> Iterator[Weight]:
        place = f"weights of version {self.version}"
        yield from read_weights(self.blobs["Weights"], place)

    def find(
        self, wanted: Mapping[str, IdArray], seconds: float | None = None
    ) -> dict[str, RowArray]:
        deadline = None if seconds is None else time.monotonic() + seconds
        data: dict[str, list[bytes]] = {table: [] for table in wanted}
        for tables in self._calls(wanted):
            seconds_left = None
            if deadline is not None:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise StoreError(
                        f"model {self.name!r}: the rows did not arrive in time, got {seconds} "
                        "seconds. Ask for fewer rows, or allow more time."
                    )
            for (table, _), rows in zip(tables, self._fetch(tables, seconds_left), strict=True):
                data[table].append(rows)
        return {table: _rows(parts, self._dim(table)) for table, parts in data.items()}

    def _fetch(self, tables: _Wanted, seconds: float | None) -> list[bytes]:
        """Return the rows of each table, fetched in one call."""
        wanted = []
        for table, ids in tables:
            wanted.append(MESSAGES["Wanted"](table=table, ids=ids.tobytes()))
        request = {"model": self.name, "digest": self.digest, "wanted": wanted}
        answer = self.store.ask("Rows", request, seconds)
        answers = list(answer.rows)
        answers += [b""] * (len(tables) - len(answers))
        for (table, ids), rows in zip(tables, answers, strict=False):
            if len(rows) != 4 * len(ids) * self._dim(table):
                raise StoreError(
                    f"model {self.name!r}: rows of table {table!r} have another size, got "
                    f"{len(rows)} bytes for {len(ids)} ids. Look at the parameter server."
                )
        return answers[: len(tables)]

    def _calls(self, wanted: Mapping[str, IdArray]) -> Iterator[_Wanted]:
        """Yield the tables and ids of each call, so that an answer stays within its limit."""
        call = list[tuple[str, IdArray]]()
        call_bytes = 0
        for table, table_ids in wanted.items():
            ids = as_ids(table_ids).astype("<i8", copy=False)
            row_bytes = 4 * self._dim(table)
            start = 0
            while start < len(ids):
                room = (self.answer_bytes - call_bytes) // row_bytes
                part = ids[start : start + max(1, room)]
                call.append((table, part))
                start += len(part)
                call_bytes += len(part) * row_bytes
                if call_bytes + row_bytes > self.answer_bytes:
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


def _rows(parts: list[bytes], dim: int) -> RowArray:
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    flat = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return flat.reshape(-1, dim)


def _ids(data: bytes) -> IdArray:
    num_bytes = len(data) // 8 * 8
    return np.frombuffer(data[:num_bytes], "<i8").astype(np.int64)


def _open_channel(place: str, secure: bool, trusted: str | Path | None) -> Any:
    if not secure:
        return grpc.insecure_channel(place, _OPTIONS)
    pem = None if trusted is None else _pem(trusted)
    credentials = grpc.ssl_channel_credentials(pem)
    return grpc.secure_channel(place, credentials, _OPTIONS)


def _address(url: str) -> tuple[str, bool]:
    """Return HOST:PORT of an address, and whether it uses TLS."""
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
    host = parts.hostname
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}", parts.scheme == "grpcs"


def _pem(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"ParameterServer.connect: trusted cannot be read, got {path}, {error}. Give a PEM "
            "file."
        ) from error
