# SPDX-License-Identifier: Apache-2.0
"""What breaks around a server, and values that make no sense: it answers on, or says why it does
not.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed import config
from hotbed.errors import ConfigError, DataError, NotServed, Overloaded, ServingError
from hotbed.logs import LogLines
from hotbed.serving.main import models_of
from hotbed.serving.protocol.bodies import Bounds
from hotbed.serving.protocol.inputs import ModelInputs
from hotbed.serving.protocol.rest import RequestReader
from hotbed.serving.server.endpoints.grpc_server import grpc_status
from hotbed.serving.server.endpoints.http import http_status
from hotbed.serving.server.options import Options, RowsOptions, ServerLimits
from hotbed.serving.stores.following import Following
from hotbed.serving.workers.wire import ProcessGone

from .conftest import Process, Running, draw, wait_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:table .* is fed both"
)  # wrong requests, and each is asked of one server


class _Broken(io.StringIO):
    """A stderr that takes nothing more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


FAILURES = [
    OSError(28, "No space left on device"),
    BrokenPipeError(),
    ValueError("I/O on closed file"),
]


def lose_stderr(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Log lines cannot be written from here on."""
    monkeypatch.setattr(logging.getLogger("hotbed.serving"), "handlers", [LogLines(as_json=True)])
    monkeypatch.setattr(sys, "stderr", _Broken(error))


@pytest.mark.parametrize("error", FAILURES)
def test_a_log_line_that_cannot_be_written_ends_no_thread_that_follows(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_stderr(monkeypatch, error)
    steps = list[int]()

    def step() -> None:
        steps.append(len(steps))
        raise OSError("the disk is full")

    following = Following(
        lambda name, error: logging.getLogger("hotbed.serving").warning("%s: %s", name, error)
    )
    following.repeat("m", step, 0.01)
    wait_for(lambda: len(steps) > 2, "the thread ended")
    following.close()


@pytest.mark.parametrize("error", FAILURES)
def test_a_log_line_that_cannot_be_written_leaves_the_scoring_thread_alive(
    error: Exception, running: Running, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, columns = running.models.named("m").queue(), draw(5, 1)
    monkeypatch.setattr(batcher, "_on_loop", False)
    with hb.Client(f"http://{running.http}", timeout_seconds=5) as client:
        with monkeypatch.context() as broken:
            lose_stderr(broken, error)
            broken.setattr(hb.InferenceSession, "ask", lambda *_: 1 / 0)
            for _ in range(2):
                with pytest.raises(ServingError, match="an error of the server"):
                    client.predict("m", columns)
        assert np.abs(client.predict("m", columns) - session.predict(columns)).max() < 1e-6


def test_a_log_line_that_cannot_be_made_is_reported_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    LogLines(as_json=True).handle(
        logging.LogRecord("hotbed", logging.INFO, __file__, 1, "%d", ("no number",), None)
    )
    assert "Logging error" in capsys.readouterr().err


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[hb.Client]:
    with hb.Client(f"http://{running.http}") as found:
        yield found


ASKED = {"user": [1, 2], "item": ["i1", "i2"], "genres": ["g1|g2", "g3"], "price": [1.0, 2.0]}
SAME = [
    {"item": ["i1", None]},
    {"item": [None, None]},
    {"item": pa.array(["i1", None]).dictionary_encode()},
    {"item": pa.array(["i1", "i2"], pa.string_view())},
    {"item": np.array(["i1", None], object)},
    {"item": np.array(["i1", "i2"])},
    {"item": [b"i1", b"i2"]},
    {"item": [b"i1", None]},
    {"item": pa.array([b"i1", None], pa.binary_view())},
    {"price": pa.array([1.5, 2.5], pa.float64()).dictionary_encode()},
    {"item": ["i1\0", ""]},
    {"genres": [None, "g2"]},
    {"genres": [None, None]},
    {"user": [1, None]},
    {"user": [2**62 + 1, None]},
    {"user": [2**64 - 1, None]},
    {"user": [2**64 - 1, 1]},
    {"user": [None, None]},
    {"user": pa.array([1, None])},
    {"user": pa.chunked_array([pa.array([1], pa.int32()), pa.array([None], pa.int32())])},
    {"user": np.ma.masked_array([1, 2], [False, True])},
    {"user": np.array([1, 2, 3, 4])[::2]},
    {"price": np.array([1, 2], np.float16)},
    {"price": [True, False]},
    {"price": pa.array([1.5, 2.5], pa.float16())},
    {name: [] for name in ASKED},
    {name: values[:1] for name, values in ASKED.items()},
]


@pytest.mark.parametrize("changed", SAME)
def test_our_client_and_the_session_make_the_same_of_a_column(
    client: hb.Client, session: Any, changed: dict[str, Any]
) -> None:
    columns = {**ASKED, **changed}
    expected = session.predict(columns)
    found = client.predict("m", columns)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max(initial=0) < 1e-6


NO_TENSOR = [
    ({"item": ["i1", 1]}, "column 'item'.*[Gg]ive"),
    ({"item": ["i1", 1.5]}, "column 'item'.*[Gg]ive"),
    ({"item": ["\ud800", "i1"]}, "column 'item'.*[Gg]ive"),
    ({"item": [b"\xff", b"i1"]}, "'item'.*in UTF-8"),
    ({"item": [b"\xff", None]}, "'item'.*in UTF-8"),
    ({"item": [{"a": 1}, {"a": 2}]}, "column 'item': a tensor cannot hold"),
    (
        {"item": [["i1", "i2"], ["i3"]]},
        "column 'item': a tensor holds lists of one length, got 1 to 2 values.*Split",
    ),
    (
        {"item": [["i1", "i2"], None]},
        "column 'item': a tensor holds lists of one length, got 0 to 2 values",
    ),
    ({"item": [[["i1"]], [["i2"]]]}, "column 'item': a tensor cannot hold"),
    ({"user": [2**64, 1]}, "column 'user'.*[Gg]ive"),
    ({"user": 5}, "column 'user'.*[Gg]ive"),
    ({"user": np.zeros((2, 1, 1))}, "column 'user'.*[Gg]ive"),
    ({"price": [1.0, None]}, "FillMissing"),
    ({"price": [float("nan"), 1.0]}, "FillMissing"),
    ({"user": [1]}, "expected one length.*context"),
    ({"user": []}, "expected one length"),
]


@pytest.mark.parametrize("changed, reason", NO_TENSOR)
def test_what_no_tensor_holds_is_refused_and_not_sent_as_something_else(
    client: hb.Client, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        client.predict("m", {**ASKED, **changed})


CONTEXTS = [7, None, np.int64(7), np.array([7]), pa.array([7]), pa.array([None], pa.int64())]


@pytest.mark.parametrize("user", CONTEXTS)
def test_our_client_and_the_session_make_the_same_of_context(
    client: hb.Client, session: Any, user: Any
) -> None:
    rest = {name: values for name, values in ASKED.items() if name != "user"}
    expected = session.predict(rest, {"user": user})
    assert np.abs(client.predict("m", rest, {"user": user}) - expected).max() < 1e-6


def test_context_is_one_value_of_a_column_of_its_own(client: hb.Client) -> None:
    rest = {name: values for name, values in ASKED.items() if name != "user"}
    with pytest.raises(DataError, match="given twice"):
        client.predict("m", ASKED, {"user": 7})
    with pytest.raises(DataError, match="context is one value"):
        client.predict("m", rest, {"user": pa.array([7, 8])})
    with pytest.raises(DataError, match="expected one length"):
        client.predict("m", {}, {name: values[0] for name, values in ASKED.items()})


def test_the_last_idle_connection_may_be_taken_by_another_thread(running: Running) -> None:
    class Taken(list[Any]):
        """As if another thread always came first."""

        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

    with hb.Client(f"http://{running.http}") as client:
        client._idle = Taken()
        assert client.models()[0]["state"] == "READY"


WRONG_SHAPES = [
    [3.0],
    [True],
    ["3"],
    [None],
    [[3]],
    [3.0, 1],
    [3, 1.0],
    [-1],
    [2**70],
    [float("inf")],
]


@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=str)
def test_a_shape_that_is_not_one_is_rejected_each_time(shape: list[Any]) -> None:
    inputs, asks = ModelInputs(hb.Schema([hb.Label("label"), hb.Id("user")])), RequestReader()
    size = {"binary_data_size": 24}
    head = json.dumps(
        {"inputs": [{"name": "user", "datatype": "INT64", "shape": shape, "parameters": size}]}
    ).encode()
    for _ in range(3):
        with pytest.raises(DataError, match=r"'user'.*shape"):
            inputs.columns(asks.read(head + bytes(24), str(len(head)), Bounds()).tensors, Bounds())


@pytest.mark.parametrize(
    "length", ["0" * 20 + "9" * 4400, "9" * 4400, "0" * 21, "-1", "+1", "", "1.0", "²"]
)
def test_a_header_length_that_is_not_a_number_is_rejected(length: str) -> None:
    with pytest.raises(DataError, match="Content-Length: expected a number of at most 2"):
        RequestReader().read(b"{}", length, Bounds())


def test_a_tensor_without_any_value_has_no_type(running: Running, session: Any) -> None:
    inputs = [
        {
            "name": name,
            "datatype": datatype,
            "shape": [2],
            "data": [None, None] if name == "user" else values,
        }
        for datatype, (name, values) in zip(
            ["FP32", "BYTES", "BYTES", "FP32"], ASKED.items(), strict=True
        )
    ]
    connection = HTTPConnection(running.http, timeout=60)
    connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": inputs}))
    found = json.loads(connection.getresponse().read())["outputs"][0]["data"]
    connection.close()
    assert np.abs(np.array(found) - session.predict({**ASKED, "user": [None, None]})).max() < 1e-6


SETTINGS = [
    (ServerLimits, "batch_rows", [0, -1]),
    (ServerLimits, "batch_seconds", [-1.0, float("nan"), float("inf")]),
    (ServerLimits, "queue_rows", [-1]),
    (ServerLimits, "body_bytes", [0, -1]),
    (ServerLimits, "list_length", [0, -1]),
    (Options, "port", [-1, 70_000]),
    (Options, "grpc_port", [-5, 65_536]),
    (Options, "workers", [0, -1]),
    (Options, "drain_seconds", [-1.0, float("inf")]),
    (Options, "request_seconds", [0.0, -1.0, float("inf")]),
    (Options, "idle_seconds", [0.0, -1.0, float("inf")]),
    (RowsOptions, "port", [-1, 70_000]),
    (RowsOptions, "calls", [0]),
    (RowsOptions, "drain_seconds", [-1.0]),
    (RowsOptions, "metrics_port", [-1, 70_000]),
]


@pytest.mark.parametrize("kind, key, values", SETTINGS, ids=str)
def test_a_setting_that_makes_no_sense_is_refused_by_its_key(
    kind: Any, key: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^serve\.{key}: must be .*, got {value!r}. Give "):
            config.build({key: value}, kind, "serve")
        with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.{key}: "):
            kind(**{key: value})


def test_settings_at_their_bounds_are_taken() -> None:
    ServerLimits(batch_rows=1, batch_seconds=0, queue_rows=0, body_bytes=1)
    Options(port=0, grpc_port=None, workers=1, drain_seconds=0)
    Options(port=65_535, grpc_port=65_535)
    RowsOptions(port=65_535, metrics_port=None, calls=1, drain_seconds=0)


@pytest.mark.parametrize("max_bytes", [-1, 0, 2**60, 2**64, 1e6, None])
def test_a_cache_of_a_size_that_is_none_is_refused(exported: Path, max_bytes: Any) -> None:
    server = hb.ParameterServer()
    server.load("m", exported)
    with pytest.raises(
        ConfigError,
        match=r"EmbeddingCache\.max_bytes: must be an integer from 1 to \d+, got .*\. Give 1 to \d+",
    ):
        hb.EmbeddingCache(server, "m", max_bytes=max_bytes)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"two models have one name, got 'export' for day1/export and day2/export. "
        r".*NAME=SOURCE",
    ):
        models_of(["day1/export", "day2/export"])
    with pytest.raises(ConfigError, match="two models have one name"):
        models_of(["m=day1/export", "m=day2/export"])
    assert models_of(["a=day1/export", "day2/export"]) == {
        "a": "day1/export",
        "export": "day2/export",
    }


def test_a_process_of_the_server_that_is_gone_is_not_an_error_of_the_client() -> None:
    for error in (ProcessGone("load: no answer"), ServingError("no answer")):
        assert http_status(error) == 503
        assert grpc_status(error) == grpc.StatusCode.UNAVAILABLE
    assert [http_status(error) for error in (NotServed(""), Overloaded(""), DataError(""))] == [
        404,
        429,
        400,
    ]


def test_rows_that_a_killed_server_left_in_the_temporary_folder_are_removed_by_the_next(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> set[Path]:
        return set(tmp_path.glob("hotbed-rows-*"))

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = Process(f"m={exported}")
    (held,) = left()
    ours = hb.ParameterServer()
    ours.load("m", exported)
    assert left() == {held, ours.folder}  # both run
    server.stop(signal.SIGKILL)
    newest = hb.ParameterServer()
    assert left() == {ours.folder, newest.folder}
    assert ours.lookup("m", "user", [1])[0].shape == (1, 4)


def test_of_temporary_folders_only_those_that_a_writer_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str, lock: str | None) -> Path:
        (tmp_path / name).mkdir()
        if lock is not None:
            (tmp_path / name / "LOCK").write_text(lock)
        return tmp_path / name

    gone = folder("hotbed-rows-dead", "123\n")
    stays = [
        folder("hotbed-rows-new", None),  # nothing was loaded yet
        folder("hotbed-rows-starts", ""),  # its writer is about to lock it
        folder("other-dead", "123\n"),
        tmp_path / "hotbed-rows-link",
        tmp_path / "hotbed-rows-file",
    ]
    stays[-2].symlink_to(stays[2])
    stays[-1].write_text("123\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        hb.ParameterServer()
    assert gone.exists()  # of another user
    hb.ParameterServer()
    assert not gone.exists()
    assert all(path.exists() for path in stays)
    assert (stays[2] / "LOCK").exists()
