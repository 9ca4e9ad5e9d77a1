# SPDX-License-Identifier: Apache-2.0
"""Answer with the page, and with its values as JSON."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.pictures.numbers import Language
from hotbed.serving.server.tokens import read_tokens
from hotbed.signals import ended_by_signals
from hotbed.watch.asked import AskedServer
from hotbed.watch.page import RELOAD_SECONDS, DrawnParts, page
from hotbed.watch.run_folder import RunFolder
from hotbed.watch.seen import Watched

log = logging.getLogger("hotbed")
_IDLE_SECONDS = 10.0
_PAUSE_SECONDS = 0.2  # between two looks at whether a signal has come
_LANGUAGES: tuple[Language, ...] = ("en", "zh")


class WatchServer:
    """Serves one page over a run, its publisher and its servers at http://host:port/.

    `GET /` is the page and `GET /status` the same as JSON. It listens from the call on, and answers
    from `start` to `close`. Nobody needs a token.

    Attributes:
        watched: what the page shows.
        address: its URL.

    Args:
        watched: what the page shows.
        host: address to listen at.
        port: 0 takes a free one; `address` has it.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, watched: Watched, host: str = "127.0.0.1", port: int = 0) -> None:
        checks.between("watch.port", port, 0, 65_535)
        self.watched = watched
        handler = type("Handler", (_Handler,), {"watched": watched, "drawn": DrawnParts()})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"watch.port: cannot listen, got {host}:{port}, {error.strerror}. Give a free "
                "port, or 0."
            ) from error
        self.address = f"http://{host}:{self._server.server_port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="hotbed-page", daemon=True
        )

    def start(self) -> None:
        """Look at everything, and begin to answer."""
        self.watched.start()
        self._thread.start()

    def close(self) -> None:
        """Stop answering and looking, and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self.watched.close()


class _Handler(BaseHTTPRequestHandler):
    watched: Watched
    drawn: DrawnParts
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            self._page()
        elif path == "/status":
            body = json.dumps(self.watched.seen().to_json(), ensure_ascii=False).encode()
            self._answer(200, "application/json", body)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found: the page is at /\n")

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        text = page(self.watched.seen(), time.time(), self._language(), nonce, self.drawn)
        self.send_response(200)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; frame-ancestors 'none'"
        )
        self.send_header("Content-Security-Policy", policy)
        self._end("text/html; charset=utf-8", text.encode())

    def _language(self) -> Language:
        """Return the language of numbers: that of `?lang=`, else the first that a reader takes."""
        wanted = parse_qs(urlsplit(self.path).query).get("lang", [])
        wanted += self.headers.get("Accept-Language", "").split(",")
        for name in wanted:
            for language in _LANGUAGES:
                if name.strip().lower().startswith(language):
                    return language
        return "en"

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self._end(kind, body)

    def _end(self, kind: str, body: bytes) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


@dataclass(frozen=True)
class PageSettings:
    """The options of `hotbed watch`.

    Attributes:
        published: the folder of published versions; None = as the job says.
        quality: the output folder of `hotbed measure`; None = `quality` in the run, if it is there.
        token_file: a file of tokens, whose first one the servers get; None = no token.
        host, port: where the page is; port 0 takes a free one.
    """

    published: str | None = None
    quality: Path | None = None
    token_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0


def page_server(run: str, servers: Sequence[str], settings: PageSettings) -> WatchServer:
    """Return the server of the page over a run and servers.

    Args:
        run: the output folder of a job, its job file, or the folder of the states of a run.
        servers: addresses of servers, http://HOST:PORT.
        settings: where the rest is.

    Raises:
        ConfigError: an argument is wrong, or the port is taken.
    """
    token = None if settings.token_file is None else read_tokens(str(settings.token_file))[0]
    asked = [AskedServer(url, token) for url in servers]
    watched = Watched(RunFolder(run, settings.published), settings.quality, asked, RELOAD_SECONDS)
    return WatchServer(watched, settings.host, settings.port)


def serve_page(
    run: str, servers: Sequence[str], settings: PageSettings, report: Callable[[str], None]
) -> None:
    """Serve the page until SIGINT or SIGTERM; the command `hotbed watch`.

    `report` is called with the line that says where it is.
    """
    server = page_server(run, servers, settings)
    is_over = threading.Event()
    with ended_by_signals(lambda _: is_over.set()):
        server.start()
        report(f"watching at {server.address}")
        while not is_over.wait(_PAUSE_SECONDS):
            pass  # the handler that polars sets lets SIGINT interrupt no wait
    server.close()
