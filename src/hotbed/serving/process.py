# SPDX-License-Identifier: Apache-2.0
"""Provide tokens, TLS, model names, JSON logs and an event loop to every server process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import signal
import ssl
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed import config
from hotbed.errors import ConfigError
from hotbed.serving.cache import Policy
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.stores.base import RowStore

LAST_PORT = 65_535  # bounds of settings; a day in seconds
DAY = 86_400


@dataclass(frozen=True)
class Elsewhere:
    """Settings for models at grpc://HOST:PORT and for the cache of their rows.

    Attributes:
        store_token_file: A file whose first line is the token to send.
        store_trusted: A PEM file of certificate authorities for grpcs://.
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

    def reach(self, url: str) -> RowStore:
        """Connect to the parameter server at an address."""
        token = None if self.store_token_file is None else tokens_of(self.store_token_file)[0]
        return ParameterServer.connect(url, token, self.store_trusted)

    def cache(self) -> dict[str, Any]:
        """Return the keywords of `EmbeddingCache`."""
        return {
            "max_bytes": self.cache_bytes,
            "policy": self.cache_policy,
            "preload": self.cache_preload,
            "deadline_seconds": self.cache_deadline_seconds,
        }


class Tokens:
    """Check tokens against those of a file, in constant time."""

    def __init__(self, path: str) -> None:
        lines = tokens_of(path)
        self._digests = [hashlib.sha256(line.encode()).digest() for line in lines]

    def admit(self, authorization: str | None) -> bool:
        """Return whether an Authorization header holds one of the tokens.

        It is `Bearer TOKEN`, or `Basic` with any user and the token as password.
        """
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # a list, so that every digest is compared
        return any([hmac.compare_digest(digest, expected) for expected in self._digests])


def tokens_of(path: str) -> list[str]:
    """Return the tokens of a file, one a line.

    Raises ConfigError for a file that cannot be read, that is empty, or that holds a line which
    is blank, begins with "#", or has a blank or a character outside ASCII in it. Messages name
    the line and not the token.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"token_file: cannot be read, got {path}: {error}. Give a file of tokens."
        ) from error
    if not text.strip():
        raise ConfigError(
            f"token_file: the file holds no token, got {path}, an empty file. Write one token a "
            "line."
        )
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            problem = "a blank line"
        elif line.startswith("#"):
            problem = "a comment"
        elif len(line.split()) > 1 or line != line.strip():
            problem = "a line with a blank in it"
        elif not line.isascii():
            problem = "a character outside ASCII, such as a byte order mark"
        else:
            continue
        raise ConfigError(
            f"token_file: not a token, got {problem}, {path} line {number}. Write one token a line "
            "and nothing else."
        )
    return lines


def tls(
    cert: str | None, key: str | None
) -> tuple[tuple[bytes, bytes] | None, ssl.SSLContext | None]:
    """Return key and certificate of PEM files, in the forms of gRPC and of Python's `ssl`.

    Both are None where neither file is set. Raises ConfigError where only one is set, or where
    the two cannot be read or do not fit together.
    """
    if cert is None and key is None:
        return None, None
    if cert is None or key is None:
        raise ConfigError("serve: TLS needs tls_cert and tls_key, got only one of them. Give both.")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        return (Path(key).read_bytes(), Path(cert).read_bytes()), context
    except OSError as error:
        raise ConfigError(
            f"serve: TLS cannot start, got {cert}, {key}: {error}. Give a certificate and its key "
            "as PEM files."
        ) from error


def models_of(sources: Sequence[str]) -> dict[str, str]:
    """Return the sources of `[NAME=]SOURCE` arguments by name.

    A source without a name takes that of its folder. Raises ConfigError for two of one name.
    """
    models = dict[str, str]()
    for argument in sources:
        name, source = _named(argument, "")
        if name in models:
            raise ConfigError(
                f"models: two models have one name, got {name!r} for {models[name]} and {source}. "
                "Give each its own name: NAME=SOURCE."
            )
        models[name] = source
    return models


def followed_of(watch: Sequence[str], models: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (model, source) of each `--watch [NAME=]SOURCE`; without a name, of the first model.

    Raises ConfigError for an unknown model, and for one that a parameter server serves.
    """
    followed = [_named(argument, next(iter(models))) for argument in watch]
    for name, _ in followed:
        if name not in models:
            raise ConfigError(
                f"--watch: unknown model, got {name!r}. {config.did_you_mean(name, models)}"
            )
        if models[name].startswith(("grpc://", "grpcs://")):
            raise ConfigError(
                f"--watch: model {name!r} follows its parameter server, got {models[name]}. Give "
                "--watch to hotbed parameter-server."
            )
    return followed


def _named(text: str, default: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if equals and name and not set(name) & set("/:"):
        return name, rest
    return default or Path(text.rstrip("/")).name or "model", text


class Stoppable(ABC):
    """Run a server on its own event loop.

    `run` blocks until `stop`; in the main thread also until SIGTERM or SIGINT. `started` is set
    once the server listens.
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serve until stopped."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    def stop(self) -> None:
        """Finish the running requests, then stop. Any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    @abstractmethod
    async def _serve(self, stopped: asyncio.Event) -> None:
        """Listen, set `started`, wait for `stopped`, and shut down."""

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopped.set)
        await self._serve(self._stopped)


def address(host: str, port: int) -> str:
    """Return HOST:PORT as gRPC accepts it, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class JsonLines(logging.Handler):
    """Write log records to stderr, each as a line of JSON.

    A line holds the number of the worker where there are several.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. Never raises: a full disk, say, must not end the thread that logs."""
        try:
            self._write(record)
        except Exception:
            with contextlib.suppress(Exception):
                self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        spec = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._worker,
        }
        if record.exc_info:
            spec["trace"] = "".join(traceback.format_exception(record.exc_info[1]))
        print(json.dumps(spec, ensure_ascii=False), file=sys.stderr, flush=True)
