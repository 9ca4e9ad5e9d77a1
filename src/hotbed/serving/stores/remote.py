# SPDX-License-Identifier: Apache-2.0
"""A parameter server in another process, over gRPC. Needs the extra `serve`."""

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
from hotbed.serving.stores.base import ModelVersion, Store, read_weights, undescribed

try:
    import grpc

    from hotbed.serving.stores.messages import CALLS, MESSAGE_BYTES, MESSAGES, SERVICE
except ImportError as error:
    raise MissingExtra(
        f"a parameter server elsewhere needs {error.name} — it is not installed — pip install "
        "hotbed[serve]"
    ) from error

_ANSWER_BYTES = 16 << 20  # of rows in one call; more is asked for in several
_LOOK_SECONDS = 5.0  # for a look at what is newest: who looks again and again gives up early
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class RemoteParameterServer(Store):
    """What `hotbed parameter-server` holds, asked over the network. Safe to call from several
    threads; reconnects by itself.

    `url`: grpc://HOST:PORT, or grpcs:// for TLS; `token`: where the server wants one; `trusted`: a
    PEM file of authorities for TLS, where those of the system do not do. `deadline_seconds`: for
    what has no deadline of its own. Raises StoreError, naming the server, where it does not answer.

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
        """Let go of the connection; nothing can be asked any more."""
        self._channel.close()

    def model(self, name: str) -> RemoteVersion:
        """The newest version, graph and weights included. Raises NotServed where the server has no
        such model.
        """
        known = self._versions.get(name)
        request = {"model": name, "known": known.digest if known else ""}
        found = self.ask("Describe", request, min(_LOOK_SECONDS, self._seconds))
        if found.same and known is not None:
            return known
        try:
            spec = json.loads(found.json)
        except ValueError as error:
            raise StoreError(
                f"{self._place}: no description — received {found.json[:60]!r} — look at the server"
            ) from error
        fields = undescribed(spec, self._place)
        blobs = {call: self._whole(call, name, fields["digest"]) for call in ("Graph", "Weights")}
        version = RemoteVersion(**fields, store=self, blobs=blobs)
        with self._lock:
            self._versions[name] = version
        return version

    def changes(self, name: str, since: str, to: str) -> Mapping[str, NDArray[np.int64]] | None:
        parts = dict[str, list[bytes]]()
        for part in self.stream("Changes", {"model": name, "since": since, "to": to}):
            parts.setdefault(part.name, []).append(part.data)
        return {table: _ids(b"".join(found)) for table, found in parts.items()} or None

    def hot(self, name: str, table: str, n: int) -> NDArray[np.int64]:
        return _ids(
            b"".join(
                part.data for part in self.stream("Hot", {"model": name, "table": table, "n": n})
            )
        )

    def ask(self, call: str, request: Mapping[str, Any], seconds: float | None = None) -> Any:
        """One call, one answer, within `seconds`."""
        message = MESSAGES[CALLS[call][0]](**request)
        try:
            return self._calls[call](
                message, timeout=seconds or self._seconds, metadata=self._metadata
            )
        except (grpc.RpcError, ValueError) as error:  # ValueError: closed
            raise self._error(error) from error

    def stream(self, call: str, request: Mapping[str, Any]) -> Iterator[Any]:
        """The parts of an answer."""
        message = MESSAGES[CALLS[call][0]](**request)
        try:
            yield from self._calls[call](message, timeout=self._seconds, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self._error(error) from error

    def _whole(self, call: str, name: str, digest: str) -> bytes:
        return b"".join(part.data for part in self.stream(call, {"model": name, "digest": digest}))

    def _call(self, name: str, request: str, answer: str, streamed: bool) -> Callable[..., Any]:
        make = self._channel.unary_stream if streamed else self._channel.unary_unary
        found: Callable[..., Any] = make(
            f"/{SERVICE}/{name}", MESSAGES[request].SerializeToString, MESSAGES[answer].FromString
        )
        return found

    def _error(self, error: Exception) -> Exception:
        if not isinstance(error, grpc.RpcError):
            return StoreError(
                f"{self._place}: closed — received a call after close() — connect again"
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
            f"{self._place}: no rows — received {code.name}, {details[:200]} — look at the "
            "parameter server"
        )


@dataclass(frozen=True, eq=False)
class RemoteVersion(ModelVersion):
    """A version whose rows another process holds. `find` raises StoreError, naming it, once that
    has let go of it.
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
        until = None if seconds is None else time.monotonic() + seconds
        found: dict[str, list[bytes]] = {table: [] for table in wanted}
        for tables in self._calls(wanted):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise StoreError(
                    f"model {self.name!r}: rows came too late — received {seconds} seconds — ask "
                    "for fewer, or allow more"
                )
            asked = [MESSAGES["Wanted"](table=table, ids=ids.tobytes()) for table, ids in tables]
            answer = self.store.ask(
                "Rows", {"model": self.name, "digest": self.digest, "wanted": asked}, left
            )
            for number, (table, ids) in enumerate(tables):
                rows = answer.rows[number] if number < len(answer.rows) else b""
                if len(rows) != 4 * len(ids) * self._dim(table):
                    raise StoreError(
                        f"model {self.name!r}: rows of table {table!r} — received {len(rows)} "
                        f"bytes for {len(ids)} ids "
                        "— look at the parameter server"
                    )
                found[table].append(rows)
        return {table: _rows(parts, self._dim(table)) for table, parts in found.items()}

    def _calls(
        self, wanted: Mapping[str, NDArray[np.int64]]
    ) -> Iterator[list[tuple[str, NDArray[np.int64]]]]:
        """What is asked for in one call, and the next."""
        call = list[tuple[str, NDArray[np.int64]]]()
        held = 0
        for table, ids in wanted.items():
            ids = as_ids(ids).astype("<i8", copy=False)
            at = 0
            row_bytes = 4 * self._dim(table)
            while at < len(ids):
                n = max(1, min(len(ids) - at, (_ANSWER_BYTES - held) // row_bytes))
                call.append((table, ids[at : at + n]))
                at = at + n
                held = held + n * row_bytes
                if held + row_bytes > _ANSWER_BYTES:
                    yield call
                    call = []
                    held = 0
        if call:
            yield call

    def _dim(self, table: str) -> int:
        if table not in self.configs:
            raise ConfigError(
                f"model {self.name!r}: no table {table!r} — received {sorted(self.configs)} — "
                "name one of them"
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
            f"ParameterServer.connect: no address — received {url!r} — write grpc://HOST:PORT, or "
            "grpcs:// for TLS"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "grpcs"


def _pem(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"ParameterServer.connect: trusted — received {path}, {error} — give a PEM file"
        ) from error
