# SPDX-License-Identifier: Apache-2.0
"""The download step of the HugeCTR examples, against a server on this machine."""

from __future__ import annotations

import hashlib
import io
import runpy
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/hugectr/download.py"
CONTENT = np.random.default_rng(0).bytes(3_000_000)


class Publisher(ThreadingHTTPServer):
    """Serves `content` with ranges, and breaks off after `limit` bytes of an answer."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.limit = len(content)
        self.version = '"one"'
        self.sent: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return f"{self.address}/day_0.gz"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers a request, or the rest that a resumed download asks for."""

    server: Publisher

    def do_GET(self) -> None:
        content, begin = self.server.content, 0
        asked = self.headers.get("Range", "")
        if asked and self.headers.get("If-Range") == self.server.version:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", self.server.version)
        self.end_headers()
        piece = content[begin : begin + self.server.limit]
        self.server.sent.append((asked, len(piece)))
        self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    server = Publisher(CONTENT)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def offered(script: dict[str, Any], server: Publisher) -> dict[str, Any]:
    """Return the data sets, all of them at the publisher's address."""
    data_set = script["DATA_SETS"]["mind"]
    return {"mind": replace(data_set, urls=[f"{server.address}/MINDlarge_train.zip"])}


def test_interrupted_download_resumes_where_it_ended(
    script: dict[str, Any], publisher: Publisher, tmp_path: Path
) -> None:
    publisher.limit = 1_000_000
    with pytest.raises(SystemExit, match="expected 3,000,000 bytes, got 1,000,000"):
        script["download"](publisher.url, tmp_path)
    assert not (tmp_path / "day_0.gz").exists()
    publisher.limit = len(CONTENT)
    path = script["download"](publisher.url, tmp_path)
    assert path.read_bytes() == CONTENT
    assert publisher.sent == [("", 1_000_000), ("bytes=1000000-", 2_000_000)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["day_0.gz"]
    script["download"](publisher.url, tmp_path)
    assert len(publisher.sent) == 2


def test_file_that_changed_meanwhile_is_downloaded_anew(
    script: dict[str, Any], publisher: Publisher, tmp_path: Path
) -> None:
    publisher.limit = 1_000_000
    with pytest.raises(SystemExit):
        script["download"](publisher.url, tmp_path)
    publisher.content = CONTENT[::-1]
    publisher.version = '"two"'
    publisher.limit = len(CONTENT)
    assert script["download"](publisher.url, tmp_path).read_bytes() == CONTENT[::-1]


def test_download_that_ended_before_its_name_was_given_is_whole(
    script: dict[str, Any], publisher: Publisher, tmp_path: Path
) -> None:
    (tmp_path / "day_0.gz.partial").write_bytes(CONTENT)
    (tmp_path / "day_0.gz.partial.version").write_text(publisher.version)
    assert script["download"](publisher.url, tmp_path).read_bytes() == CONTENT
    assert publisher.sent == []


def test_digest_that_a_publisher_states_is_compared(
    script: dict[str, Any], publisher: Publisher, tmp_path: Path
) -> None:
    stated = hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(SystemExit, match="expected SHA-256 00"):
        script["download"](publisher.url, tmp_path, "00")
    assert list(tmp_path.iterdir()) == []
    assert script["download"](publisher.url, tmp_path, stated).exists()


def test_nothing_is_downloaded_before_the_terms_are_accepted(
    script: dict[str, Any],
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(script["main"].__globals__, "DATA_SETS", offered(script, publisher))
    monkeypatch.setattr("sys.argv", ["download.py", "mind", str(tmp_path)])
    monkeypatch.setattr("builtins.input", lambda question: "no")
    with pytest.raises(SystemExit, match="Nothing was downloaded"):
        script["main"]()
    assert "Microsoft Research License Terms" in capsys.readouterr().out
    assert publisher.sent == []


def test_archives_are_unpacked(
    script: dict[str, Any], publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("behaviors.tsv", "1\tU1\n")
    publisher.content = packed.getvalue()
    monkeypatch.setitem(script["main"].__globals__, "DATA_SETS", offered(script, publisher))
    monkeypatch.setattr("sys.argv", ["download.py", "mind", str(tmp_path), "--accept-terms"])
    script["main"]()
    assert (tmp_path / "MINDlarge_train/behaviors.tsv").read_text() == "1\tU1\n"
    script["main"]()
    assert len(publisher.sent) == 1
