# SPDX-License-Identifier: Apache-2.0
"""The request log: what was asked and answered, read back, scored again and joined."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.errors import ConfigError, DataError
from hotbed.serving.request_log import folder as parts
from hotbed.serving.request_log.folder import LogFolder, PartLimits
from hotbed.serving.request_log.records import (
    Anonymity,
    AnsweredRequest,
    alike_requests,
    records_of,
)
from hotbed.serving.request_log.writer import RequestLogWriter
from hotbed.serving.server.options import LogOptions
from hotbed.serving.server.scoring.models import Models
from hotbed.testing import Broker

from .conftest import Running, Workers, check_logged, draw, flushed_requests, wait_for
from .test_http import KINDS, ask, body

LIMITS = PartLimits(1 << 20, 100.0, 1 << 30)
SOON = {"log_flush_seconds": 0.02, "log_part_seconds": 0.1}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The candidates of all closed parts, with the columns of each."""
    rows = []
    for part in sorted(folder.glob("*.parquet")):
        for batch, _ in candidates_of(hb.sources.Parquet(part)):
            rows += batch.to_pylist()
    return rows


def candidates_of(requests: hb.sources.Source) -> Any:
    """The rows of a log whose requests a source reads."""
    log = hb.sources.RequestLog("")
    vars(log)["_requests"] = requests
    return log.read()


def request(name: str = "r", columns: Any = None, n: int = 1, **changes: Any) -> AnsweredRequest:
    known: dict[str, Any] = {
        "request_id": name,
        "time": 1,
        "latency": 0.5,
        "num_rows": n,
        "columns": {"item": np.arange(n)} if columns is None else columns,
        "context": {},
        "outputs": {"y": np.linspace(0, 1, n, dtype=np.float32)},
        "version": 3,
        "digest": "d",
        "route": "stable",
    }
    return AnsweredRequest(**{**known, **changes})


@pytest.fixture
def logging(exported: Path, tmp_path: Path) -> Iterator[Running]:
    models = Models(hb.ParameterServer(), logs=LogOptions(str(tmp_path / "log"), **SOON))
    models.add("m", exported)
    running = Running(exported, models=models)
    yield running
    running.close()


def stock_tensors(client: Any, columns: dict[str, Any], **how: Any) -> list[Any]:
    tensors = []
    for name, values in columns.items():
        array = np.array(values, object) if KINDS[name] == "BYTES" else np.asarray(values)
        tensors.append(client.InferInput(name, list(array.shape), KINDS[name]))
        tensors[-1].set_data_from_numpy(array, **how)
    return tensors


def test_a_logged_row_scores_again_to_the_same_bits(
    logging: Running, session: Any, tmp_path: Path
) -> None:
    asked = draw(30, 7)
    answers: dict[str, Any] = {}
    with http_client.InferenceServerClient(logging.http) as client:
        for binary in (True, False):
            tensors = stock_tensors(http_client, asked, binary_data=binary)
            headers = {"X-Request-Id": f"rest-{binary}"}
            answer = client.infer("m", tensors, headers=headers, request_id="of the body")
            answers[f"rest-{binary}"] = answer.as_numpy(answer.get_response()["outputs"][0]["name"])
    with grpc_client.InferenceServerClient(logging.grpc) as client:
        tensors = stock_tensors(grpc_client, asked)
        answer = client.infer("m", tensors, request_id="of gRPC")
        answers["of gRPC"] = answer.as_numpy(answer.get_response().outputs[0].name)
    context = {**body(), "inputs": [*body()["inputs"][1:], {**body()["inputs"][0]}]}
    context["inputs"][-1] |= {"shape": [1], "data": [5]}
    _, headers, data = ask(logging.http, "POST", "/v2/models/m/infer", context)
    answers[headers["x-request-id"]] = json.loads(data)["outputs"][0]["data"]
    folder = tmp_path / "log" / "m"
    wait_for(lambda: {row["request_id"] for row in read_log(folder)} == answers.keys(), "all")
    rows = read_log(folder)
    for name, scores in answers.items():
        mine = [row for row in rows if row["request_id"] == name]
        assert [row["position"] for row in mine] == list(range(len(scores)))
        assert [row["score"] for row in mine] == [float(np.float32(score)) for score in scores]
        again = session.predict({key: [row[key] for row in mine] for key in KINDS})
        assert [row["score"] for row in mine] == again.tolist(), name
    served = session.model
    assert {(row["version"], row["digest"]) for row in rows} == {(served.version, served.digest)}
    assert {row["route"] for row in rows} == {"stable"}


EXTREMES = [-(2**63), -1, 0, 1, 2**63 - 1]
COLUMNS_OF_KINDS = {
    "id": pa.array(EXTREMES),
    "text": pa.array(["a", None, "", "å", "a\0b"]),
    "at": pa.array([0, None, 2**40, -(2**40), 5], pa.timestamp("us")),
    "number": pa.array([0.5, None, np.nan, 1e300, -0.0]),
    "vector": pa.array([[0.0, 1.0], [1e-40, -1.0], [0.1, 0.2], [3.0, 4.0], [5.0, 6.0]]),
    "tags": pa.array([["x"], [], ["x", "y"], ["z"], ["y", "y"]]),
}


def test_each_kind_of_value_scores_again_to_the_same_bits(tmp_path: Path) -> None:
    """Nulls, int64 extremes, texts, times, vectors and lists; alone, together, and as context."""
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Id("id"),
            hb.Id("text"),
            hb.Id("at", transforms=[hb.transforms.TimeOfDay()]),
            hb.Dense(
                "number", transforms=[hb.transforms.FillMissing(0.5), hb.transforms.Clip(-9, 9)]
            ),
            hb.Dense("vector", width=2),
            hb.Id("tags", pooling="mean"),
        ]
    )
    rows = pa.table({**COLUMNS_OF_KINDS, "label": [0.0, 1.0, 0.0, 1.0, 1.0]})
    network = hb.models.DNN(schema, hb.make_tables(schema, dim=4, init=hb.Normal(1)))
    model = hb.RecModel(network, "bce")
    model.fit(hb.Dataset(hb.sources.Memory(rows), schema, 5), progress=False)
    model.export(tmp_path / "export")
    whole = {**COLUMNS_OF_KINDS, "tags": pa.array([["x", "y"]] * 4 + [["z", "z"]])}
    items = {name: whole[name] for name in ("text", "at", "vector", "tags")}
    requests: list[tuple[dict[str, Any], dict[str, Any]]] = [(whole, {})]
    for n in range(5):
        one = {name: values.slice(n, 1) for name, values in COLUMNS_OF_KINDS.items()}
        context = {name: COLUMNS_OF_KINDS[name].slice(n, 1) for name in ("id", "number")}
        requests += [(one, {}), (items, context)]
    check_logged(tmp_path / "export", tmp_path / "log", requests)


def test_a_place_that_a_request_brings_is_logged_and_changes_no_score(tmp_path: Path) -> None:
    shown = hb.DisplayPosition("position", form="factor", size=4)
    schema = hb.Schema([hb.Label("label"), hb.Id("item"), shown])
    model = hb.RecModel(hb.models.LR(schema, hb.make_tables(schema, dim=4)), "bce", "adam")
    rows = {"item": np.arange(60), "label": np.arange(60) % 2, "position": np.arange(60) % 5}
    model.fit(hb.Dataset(hb.sources.Memory(rows), schema, 8), progress=False)
    model.export(tmp_path / "export")
    assert model.network.position.effects.detach().abs().max() > 0
    assert hb.InferenceSession(tmp_path / "export").model.schema.display_position == shown
    items = {"item": np.arange(3)}
    orders = np.array([[2, 1, 0], [1, 2, 0]])
    check_logged(
        tmp_path / "export",
        tmp_path / "log",
        [({**items, "position": each}, {}) for each in orders],
    )
    rows = read_log(tmp_path / "log" / "m")
    assert [row["served_position"] for row in rows] == [0, 1, 2] * 2
    assert {tuple(row["position"] for row in rows[n : n + 3]) for n in (0, 3)} == set(
        map(tuple, orders.tolist())
    )
    scores = hb.InferenceSession(tmp_path / "export").predict(items)
    assert [row["score"] for row in rows] == [*scores.tolist(), *scores.tolist()]


def test_a_request_id_that_no_header_can_hold_is_encoded_or_left_out(
    logging: Running, tmp_path: Path
) -> None:
    headers = {
        "plain %C3 id": "plain %C3 id",
        "a\r\nset-cookie: b=1\r\n\r\nc": "a%0D%0Aset-cookie: b=1%0D%0A%0D%0Ac",
        "Größe": "Gr%C3%B6%C3%9Fe",
        "9" * 10_000: None,
    }
    columns = draw(3, 1)
    with grpc_client.InferenceServerClient(logging.grpc) as client:
        for request_id, header in headers.items():
            status, answered, _ = ask(
                logging.http, "POST", "/v2/models/m/infer", body(id=request_id)
            )
            assert (status, answered.get("x-request-id")) == (200, header)
            assert "set-cookie" not in answered
            answer = client.infer("m", stock_tensors(grpc_client, columns), request_id=request_id)
            assert answer.get_response().id == request_id
    folder = tmp_path / "log" / "m"
    wait_for(lambda: {row["request_id"] for row in read_log(folder)} == headers.keys(), "all")


VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
    pa.bool_(): st.booleans(),
    pa.timestamp("us"): st.integers(0, 2**50),
    pa.large_list(pa.int64()): st.lists(st.integers(-9, 9), max_size=3),
    pa.large_list(pa.string()): st.lists(st.text(max_size=2), max_size=3),
    pa.null(): st.none(),
}


@st.composite
def columns(draw: Callable[[Any], Any]) -> list[tuple[int, dict[str, pa.Array], dict[str, Any]]]:
    """Requests of several kinds: number of candidates, columns and context."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 3))
        sides: list[dict[str, pa.Array]] = []
        for prefix, rows in (("a", n), ("b", 1)):
            side = {}
            for number in range(draw(st.integers(1, 2))):
                kind = draw(st.sampled_from(list(VALUES)))
                values = draw(st.lists(st.none() | VALUES[kind], min_size=rows, max_size=rows))
                side[f"{prefix}{number}"] = pa.array(values, kind)
            sides.append(side)
        requests.append((n, *sides))
    return requests


@given(columns())
def test_every_kind_of_column_comes_back(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("log")
    folder = LogFolder(root, "a/b", LIMITS)
    answered = [
        request(str(number), columns, n, context=context)
        for number, (n, columns, context) in enumerate(requests)
    ]
    for alike in alike_requests(answered):
        folder.append(records_of("a/b", alike))
    folder.close()
    found: dict[str, list[Any]] = {}
    for part in folder.path.glob("*.parquet"):
        for batch, _ in candidates_of(hb.sources.Parquet(part)):
            for row in batch.to_pylist():
                found.setdefault(row["request_id"], []).append((row, batch.schema))
    for number, (n, columns, context) in enumerate(requests):
        rows = found.pop(str(number))
        assert len(rows) == n
        for name, values in {**columns, **context}.items():
            expected = values if name in columns else pa.concat_arrays([values] * n)
            kind = rows[0][1].field(name).type
            back = pa.array([row[name] for row, _ in rows], kind)
            assert kind == values.type
            assert str(back) == str(expected)  # NaN is NaN
    assert not found


def test_a_column_of_the_log_takes_another_name_than_an_input(tmp_path: Path) -> None:
    columns = {name: np.array([7]) for name in ("position", "candidates", "score")}
    folder = LogFolder(tmp_path, "m", LIMITS)
    folder.append(records_of("m", [request(columns=columns)]))
    folder.close()
    (row,) = read_log(folder.path)
    assert [row[name] for name in columns] == [7, 7, 7]
    assert [row[f"served_{name}"] for name in columns] == [0, 1, 0.0]


def test_a_log_that_polars_wrote_again_has_the_same_candidates(tmp_path: Path) -> None:
    """Polars writes large lists and large texts, and null where a part lacks a column."""
    folder = LogFolder(tmp_path, "m", LIMITS)
    columns = {"item": np.arange(3), "tag": np.array(["a", "", "å"])}
    folder.append(records_of("m", [request("whole", columns, 3, context={"user": pa.array([7])})]))
    folder.rotate()
    folder.append(records_of("m", [request("part", {"item": np.arange(2)}, 2)]))
    folder.close()
    before = read_log(folder.path)
    parts_read = [pl.read_parquet(part) for part in sorted(folder.path.glob("*.parquet"))]
    pl.concat(parts_read, how="diagonal").write_parquet(tmp_path / "again.parquet")
    again = read_log(tmp_path)
    assert again == [{"user": None, "tag": None, **row} for row in before]
    assert [row["item"] for row in again] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("candidates", "error"),
    [
        (3, "'item' needs one .* got 2 values for 3 candidates"),
        (None, "'candidates' needs a number .* got None"),
        (-2, "'candidates' needs a number .* got -2"),
    ],
)
def test_a_wrong_number_of_candidates_is_named(candidates: int | None, error: str) -> None:
    numbers = pa.array([candidates], pa.int64())
    requests = pa.table({"request_id": ["r"], "candidates": numbers, "item": [[1, 2]]})
    with pytest.raises(DataError, match=error):
        list(candidates_of(hb.sources.Memory(requests)))


def test_columns_are_omitted_or_hashed_by_a_key() -> None:
    columns = {"user": np.array([5, 6, 5]), "email": pa.array(["a", None, "b"]), "ip": np.arange(3)}
    hidden = Anonymity(key=b"k" * 16).stricter(["ip"], ["user", "email"])
    rows = records_of("m", [request(columns=columns, n=3, anonymity=hidden)])
    hidden = Anonymity(key=b"q" * 16).stricter([], ["user"])
    other = records_of("m", [request(columns=columns, n=3, anonymity=hidden)])
    assert "ip" not in rows.schema.names
    users = rows["user"].to_pylist()[0]
    assert users[0] == users[2] != users[1]
    assert rows["email"].to_pylist()[0][1] is None
    assert users != other["user"].to_pylist()[0]
    keyless = Anonymity().stricter(["ip"], ["user"])  # a hash without a key can be undone
    rows = records_of("m", [request(columns=columns, n=3, anonymity=keyless)])
    assert {"ip", "user"}.isdisjoint(rows.schema.names)


def test_an_open_part_of_a_killed_process_is_closed_by_the_next(tmp_path: Path) -> None:
    gone = LogFolder(tmp_path, "m", LIMITS)
    gone.append(records_of("m", [request("whole")]))
    living = LogFolder(tmp_path, "m", LIMITS)  # does not touch what is still written
    assert read_log(living.path) == []
    gone.append(records_of("m", [request("torn")]))
    (part,) = gone._parts.values()
    part.leave()
    part.path.write_bytes(part.path.read_bytes()[:-9])  # as a kill in a write leaves it
    living.recover()
    assert [row["request_id"] for row in read_log(living.path)] == ["whole"]
    assert [path.suffix for path in living.path.iterdir()] == [".parquet"]


def test_a_part_whose_closing_was_cut_short_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed part is there, and the open one is not removed yet."""

    def cut(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(5, "cut short")

    gone = LogFolder(tmp_path, "m", LIMITS)
    gone.append(records_of("m", [request("first")]))
    with monkeypatch.context() as shortly:
        shortly.setattr(Path, "unlink", cut)
        with pytest.raises(OSError, match="cut short"):
            gone.close()
    living = LogFolder(tmp_path, "m", LIMITS)
    assert [row["request_id"] for row in read_log(living.path)] == ["first"]
    assert len(list(living.path.iterdir())) == 1


def test_parts_that_killed_processes_left_sort_by_their_last_flush(tmp_path: Path) -> None:
    for number, gone in enumerate([LogFolder(tmp_path, "m", LIMITS) for _ in range(8)]):
        gone.append(records_of("m", [request(str(number))]))
        (part,) = gone._parts.values()
        part.leave()
        os.utime(part.path, (number + 1, number + 1))
    living = LogFolder(tmp_path, "m", LIMITS)
    living.append(records_of("m", [request("living")]))
    living.close()
    expected = [*map(str, range(8)), "living"]
    assert [row["request_id"] for row in read_log(living.path)] == expected


def test_a_full_disk_leaves_no_files_and_its_parts_are_closed_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LogFolder(tmp_path, "m", LIMITS)
    folder.append(records_of("m", [request("before")]))
    is_full = True

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        if is_full:
            raise OSError(28, "No space left on device")
        return new_file(*arguments, **keywords)

    new_file = parts.new_file
    monkeypatch.setattr(parts, "new_file", refuse)
    with monkeypatch.context() as full:
        full.setattr(parts._OpenPart, "append", refuse)
        for _ in range(5):
            with pytest.raises(OSError, match="No space"):
                folder.append(records_of("m", [request("lost")]))
            with pytest.raises(OSError, match="No space"):
                folder.rotate()
    assert len(list(folder.path.iterdir())) == 1  # what was flushed
    is_full = False
    folder.append(records_of("m", [request("after")]))
    folder.rotate()
    folder.close()
    assert {row["request_id"] for row in read_log(folder.path)} == {"before", "after"}
    assert {path.suffix for path in folder.path.iterdir()} == {".parquet"}


def test_the_oldest_parts_go_beyond_the_bytes_of_a_log(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, "m", PartLimits(1, 100.0, 12_000))
    for number in range(6):
        folder.append(records_of("m", [request(str(number))]))
        folder.rotate()
    kept = [row["request_id"] for row in read_log(folder.path)]
    assert kept == [str(number) for number in range(6 - len(kept), 6)]
    assert 0 < len(kept) < 6


class Gate:
    """A sink that waits, or fails, until it is told not to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.failing = False
        self.rows = list[dict[str, Any]]()

    def append(self, rows: pa.RecordBatch) -> None:
        self.open.wait(20)
        if self.failing:
            raise OSError(28, "No space left on device")
        self.rows += rows.to_pylist()

    def rotate(self, most_bytes: int | None) -> None: ...
    def close(self) -> None: ...


def test_every_request_is_in_the_log_or_counted_there(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    size = request(n=10).num_bytes
    writer = RequestLogWriter("m", lambda: gate, queue_bytes=20 * size, flush_seconds=0.01)
    for number in range(100):  # the sink hangs: the queue is full after some
        writer.add(request(str(number), n=10))
    assert writer.dropped > 0
    gate.failing = True
    gate.open.set()
    wait_for(lambda: writer.logged + writer.dropped == 100, "all fail")
    assert writer.logged == 0
    gate.failing = False
    writer.add(request("last"))
    writer.close()
    assert [(row["request_id"], row["dropped"]) for row in gate.rows] == [("last", 100)]
    assert "requests are dropped and counted" in caplog.text


def test_a_sample_is_chosen_by_the_id_of_the_request() -> None:
    writer = RequestLogWriter("m", Gate, sample=0.25)
    names = [f"request-{number}" for number in range(4000)]
    chosen = {name for name in names if writer.wants(name)}
    again = {name for name in names if writer.wants(name)}
    writer.close()
    assert chosen == again
    assert 900 < len(chosen) < 1100


def test_a_hash_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_hash: needs a key"):
        LogOptions(str(tmp_path), log_hash=["user"])
    (tmp_path / "key").write_text("short")
    with pytest.raises(ConfigError, match="needs 16 to 64 bytes, got 5"):
        LogOptions(str(tmp_path), log_key_file=str(tmp_path / "key"))


@pytest.mark.soak  # a quick test of test_request_log_losses.py kills workers as well
def test_a_killed_worker_loses_no_flushed_request(exported: Path, tmp_path: Path) -> None:
    settings = [f"log={tmp_path / 'log'}", "log_flush_seconds=0.02", "log_part_seconds=60"]
    options = [word for setting in settings for word in ("--set", setting)]
    server = Workers(f"m={exported}", *options)
    for number in range(40):
        headers = {"X-Request-Id": str(number)}
        assert ask(server.http, "POST", "/v2/models/m/infer", body(), headers)[0] == 200
    folder = tmp_path / "log" / "m"
    wait_for(lambda: _num_flushed(folder) == 40, "all are flushed")
    for worker in server.children:
        os.kill(worker, signal.SIGKILL)
    assert server.stop() in (0, -signal.SIGKILL)
    LogFolder(tmp_path / "log", "m", LIMITS)
    rows = read_log(folder)
    assert {row["request_id"] for row in rows} == {str(number) for number in range(40)}
    assert len(rows) == 40 * 3


def _num_flushed(folder: Path) -> int:
    return len({request["request_id"] for request in flushed_requests(folder)})


def test_a_join_of_the_log_with_clicks_is_that_of_a_dict(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, "m", LIMITS)
    seed = np.random.default_rng(0)
    clicks = sorted({(str(number), int(item)) for number, item in seed.integers(0, 20, (80, 2))})
    for number in range(20):
        shown = request(str(number), n=20, time=1_000_000 * number)
        folder.append(records_of("m", [shown]))
        folder.rotate()
    folder.close()
    times = pa.array([1_000_000 * (int(name) + 1) for name, _ in clicks], pa.timestamp("us", "UTC"))
    clicked = {"request_id": [name for name, _ in clicks], "item": [item for _, item in clicks]}
    join = hb.sources.Join(
        hb.sources.RequestLog(folder.path, follow=False),
        hb.sources.Memory(pa.table({**clicked, "served_at": times})),
        on=["request_id", "item"],
        within=10,
        time="served_at",
        unit="us",
    )
    labels = {}
    for rows, _ in join.read():
        for row in rows.to_pylist():
            labels[row["request_id"], row["item"]] = row["label"]
    closed = [(str(number), item) for number in range(10) for item in range(20)]
    assert labels == {each: int(each in clicks) for each in closed}
    assert 0 < sum(labels.values()) < len(labels)


def test_a_topic_holds_the_log() -> None:
    with Broker() as broker:
        where = f"kafka://{broker.servers}/shown"
        broker.create("shown.m")
        options = LogOptions(where, log_flush_seconds=0.01)
        writer = options.writer("m")
        assert writer is not None
        for number in range(3):
            writer.add(request(str(number), n=2))
        writer.close()
        assert (writer.logged, writer.dropped) == (3, 0)
        rows = []
        for batch, _ in hb.sources.RequestLog(f"{where}.m").read():
            rows += [(row["request_id"], row["position"]) for row in batch.to_pylist()]
            if len(rows) == 6:
                break
    assert rows == [(str(number), place) for number in range(3) for place in range(2)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_reading_resumes_between_the_candidates_of_a_request(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], batch_rows: int, data: Any
) -> None:
    folder = LogFolder(tmp_path_factory.mktemp("log"), "m", LIMITS)
    for number, n in enumerate(counts):
        context = {"user": np.array([number])}
        row = request(str(number), {"item": np.arange(n)}, n, context=context)
        folder.append(records_of("m", [row]))
    folder.close()
    expected = [
        (str(number), place, number) for number, n in enumerate(counts) for place in range(n)
    ]
    log = hb.sources.RequestLog(folder.path, follow=False)

    def read(position: Any, batch_rows: int) -> Iterator[tuple[list[Any], Any]]:
        plan = hb.sources.ReadPlan(columns=("request_id", "position", "user"))
        for batch, after in log.read(position, batch_rows, plan):
            assert batch.num_rows <= batch_rows
            rows = [tuple(row.values()) for row in batch.to_pylist()]
            yield [(name, place, user) for name, user, place in rows], after

    places = list(read(None, batch_rows))
    assert [row for rows, _ in places for row in rows] == expected
    stop = data.draw(st.integers(0, len(places) - 1))
    done = [row for rows, _ in places[: stop + 1] for row in rows]
    position = hb.sources.Position.from_json(places[stop][1].to_json())
    rest = read(position, data.draw(st.integers(1, 9)))
    assert done + [row for rows, _ in rest for row in rows] == expected


def test_a_log_is_followed_while_it_grows(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, "m", PartLimits(1, 100.0, 1 << 30))
    rows = list[str]()
    reading = hb.sources.RequestLog(folder.path).read()
    for number in range(3):
        folder.append(records_of("m", [request(str(number))]))
        folder.rotate()
        while len(rows) <= number:
            batch, _ = next(reading)
            rows += [row["request_id"] for row in batch.to_pylist()]
    assert rows == ["0", "1", "2"]


def test_a_topic_has_no_end() -> None:
    with pytest.raises(ConfigError, match="a topic has no end"):
        hb.sources.RequestLog("kafka://localhost:9092/shown", follow=False)
    with pytest.raises(ConfigError, match="needs a server and a topic"):
        hb.sources.RequestLog("kafka://localhost:9092")


def test_a_log_is_scored_again_by_another_model(exported: Path, tmp_path: Path) -> None:
    session = hb.InferenceSession(exported)
    asked = {name: np.asarray(values) for name, values in draw(6, 3).items()}
    asked["item"], asked["genres"] = pa.array(asked["item"]), pa.array(asked["genres"])
    scores = session.predict(asked)
    folder = LogFolder(tmp_path, "m", LIMITS)
    for number, digest in enumerate([session.model.digest, "another"]):
        outputs = {"label": scores + np.float32(number)}
        row = request(str(number), asked, 6, outputs=outputs, version=number, digest=digest)
        folder.append(records_of("m", [row]))
    folder.close()
    result = CliRunner().invoke(app, ["rescore", str(folder.path), str(exported)])
    assert result.exit_code == 0, result.output
    own, other = (line.split() for line in result.output.splitlines()[-2:])
    assert own[0], own[2:6] == ("0", ["1", "6", "0", "0"])
    assert other[0], other[2:6] == ("1", ["1", "6", "6", "1"])
    wrong = {"label": np.nextafter(scores, np.float32(2))}
    row = request("wrong", asked, 6, outputs=wrong, digest=session.model.digest)
    folder.append(records_of("m", [row]))
    folder.close()
    assert CliRunner().invoke(app, ["rescore", str(folder.path), str(exported)]).exit_code == 1


def test_a_log_without_a_column_of_the_model_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, "m", LIMITS)
    folder.append(records_of("m", [request()]))
    folder.close()
    result = CliRunner().invoke(app, ["rescore", str(folder.path), str(exported)])
    assert isinstance(result.exception, DataError)
    assert "lacks columns that the model needs" in str(result.exception)
