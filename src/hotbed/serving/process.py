# SPDX-License-Identifier: Apache-2.0
"""What every server process needs: who may ask, TLS, names of models, logs as lines of JSON, a loop
and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
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
from hotbed.serving.stores.base import Store

LAST_PORT = 65_535  # bounds of settings; a day in seconds
DAY = 86_400


@dataclass(frozen=True)
class Elsewhere:
    """How models at grpc://HOST:PORT are reached, and which of their rows are kept here.

    `store_token_file`: a file whose first line is the token to send; `store_trusted`: a PEM file of
    authorities for grpcs://. The rest as in `EmbeddingCache`.
    """

    store_token_file: str | None = None
    store_trusted: str | None = None
    cache_bytes: int = 256 << 20
    cache_policy: Policy = "lfu"
    cache_preload: float = 0.5
    cache_deadline_seconds: float | None = 0.1

    def reach(self, url: str) -> Store:
        """The parameter server at an address."""
        token = None if self.store_token_file is None else tokens_of(self.store_token_file)[0]
        return ParameterServer.connect(url, token, self.store_trusted)

    def cache(self) -> dict[str, Any]:
        """Keywords of `EmbeddingCache`."""
        return {
            "max_bytes": self.cache_bytes,
            "policy": self.cache_policy,
            "preload": self.cache_preload,
            "deadline_seconds": self.cache_deadline_seconds,
        }


class Tokens:
    """The tokens of a file, compared in constant time."""

    def __init__(self, path: str) -> None:
        lines = tokens_of(path)
        self._digests = [hashlib.sha256(line.encode()).digest() for line in lines]

    def admit(self, authorization: str | None) -> bool:
        """Whether `Bearer TOKEN`, or `Basic` with any user and the token as password, is right."""
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        return any([hmac.compare_digest(digest, one) for one in self._digests])


def tokens_of(path: str) -> list[str]:
    """Return the tokens of a file, one a line.

    Raises ConfigError for a file that cannot be read, that is empty, or that holds a line which
    is blank, begins with "#", or has a blank or a character outside ASCII in it. Messages name
    the line and not the token.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"token_file: cannot be read — received {path}: {error}"
        raise ConfigError(f"{problem} — give a file of tokens") from error
    if not text.strip():
        problem = f"token_file: no token — received {path}, an empty file"
        raise ConfigError(f"{problem} — write one a line")
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
        where = f"token_file: not a token — received {problem}, {path} line {number}"
        raise ConfigError(f"{where} — write one token a line and nothing else")
    return lines


def tls(
    cert: str | None, key: str | None
) -> tuple[tuple[bytes, bytes] | None, ssl.SSLContext | None]:
    """Key and certificate of PEM files, as gRPC and as Python take them, where both are given and
    fit.
    """
    if cert is None and key is None:
        return None, None
    if cert is None or key is None:
        raise ConfigError(
            "serve: TLS needs tls_cert and tls_key — received one of them — give both"
        )
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        return (Path(key).read_bytes(), Path(cert).read_bytes()), context
    except OSError as error:
        raise ConfigError(
            f"serve: TLS cannot start — received {cert}, {key}: {error} — give a certificate and "
            "its key as PEM files"
        ) from error


def within(key: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raises ConfigError for a setting outside its bounds; one that is None has none."""
    if value is not None and not low <= value <= high:
        bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ConfigError(f"{key}: out of bounds — received {value!r} — give {bounds}")


def models_of(sources: Sequence[str]) -> dict[str, str]:
    """`[NAME=]SOURCE` of a command line, by name; a source without one has the name of its folder.
    Raises ConfigError for two of one name.
    """
    found = dict[str, str]()
    for name, source in (_named(one, "") for one in sources):
        if name in found:
            raise ConfigError(
                f"models: two of one name — received {name!r} for {found[name]} and {source} — "
                "name them apart: "
                "NAME=SOURCE"
            )
        found[name] = source
    return found


def followed_of(watch: Sequence[str], models: Mapping[str, str]) -> list[tuple[str, str]]:
    """(model, source) of `--watch [NAME=]SOURCE`; without a name the first model. Raises
    ConfigError for an unknown one.
    """
    found = [_named(one, next(iter(models))) for one in watch]
    for name, _ in found:
        if name not in models:
            raise ConfigError(
                f"--watch: no model of that name — received {name!r} — "
                f"{config.nearest(name, models)}"
            )
        if models[name].startswith(("grpc://", "grpcs://")):
            raise ConfigError(
                f"--watch: model {name!r} follows its parameter server — received {models[name]} "
                "— give --watch to "
                "hotbed parameter-server"
            )
    return found


def _named(text: str, default: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if equals and name and not set(name) & set("/:"):
        return name, rest
    return default or Path(text.rstrip("/")).name or "model", text


class Stoppable(ABC):
    """A server on a loop of its own. `run` blocks until `stop`; in the main thread also until
    SIGTERM or SIGINT.

    `started`: set once it listens.
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
        """From any thread: end what is under way, then stop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    @abstractmethod
    async def _serve(self, stopped: asyncio.Event) -> None:
        """Listen, set `started`, wait until `stopped`, and end."""

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopped.set)
        await self._serve(self._stopped)


def address(host: str, port: int) -> str:
    """As gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class JsonLines(logging.Handler):
    """Log records on stderr, each a line of JSON; with the number of the worker, where there are
    several.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: what cannot be written, to a full disk say, must not end the thread that
        tells of it.
        """
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
