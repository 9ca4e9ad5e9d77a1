# SPDX-License-Identifier: Apache-2.0
"""The live page shows what a run, its publisher, its measurement and its servers wrote."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.errors import ConfigError, FormatError, ServingError
from hotbed.persist.container.manifest import sealed
from hotbed.pictures.numbers import bytes_text, number_text, seconds_text
from hotbed.quality.cells import METRICS
from hotbed.quality.results import Quality
from hotbed.training.watching.history import History
from hotbed.watch.asked import AskedServer
from hotbed.watch.measured import drift_of
from hotbed.watch.page import page
from hotbed.watch.run_folder import RunFolder
from hotbed.watch.seen import Seen
from hotbed.watch.server import PageSettings, page_server

SCHEMA = hb.Schema([hb.Label("y"), hb.Time("t", unit="s"), hb.Id("user"), hb.Dense("x")])
HOUR = 3_600_000_000


def dataset(rows: int) -> hb.Dataset:
    random = np.random.default_rng(0)
    columns = {
        "y": random.integers(0, 2, rows),
        "t": np.arange(rows) + int(time.time()) - rows,
        "user": random.integers(0, 40, rows),
        "x": random.normal(size=rows).astype(np.float32),
    }
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, 64, prefetch=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The folder of a run that saved, published and ended, and its history."""
    folder = tmp_path_factory.mktemp("run") / "clicks"
    network = hb.models.DNN(SCHEMA, hb.make_tables(SCHEMA, 4), hidden=(8,))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), ["auc"])
    publish = hb.PublishDirectory(folder / "published", keep=9)
    callbacks = [
        hb.callbacks.Windows(samples=128),
        hb.callbacks.Checkpoint(folder, every_steps=3, publish=publish, keep=9, wait=True),
        hb.callbacks.StatusFile(folder, every_seconds=0),
    ]
    return folder, model.online_train(dataset(640), callbacks, progress=False)


@pytest.fixture
def run(trained: tuple[Path, History], tmp_path: Path) -> Path:
    """A copy of the folder, to be changed."""
    return Path(shutil.copytree(trained[0], tmp_path / "clicks"))


def change_status(run: Path, **values: Any) -> dict[str, Any]:
    """Change members of a run's status file, and return all of them."""
    file = run / "status.json"
    status = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps(status))
    return status


@contextmanager
def watching(run: Path, *servers: str, **settings: Any) -> Iterator[str]:
    """Yield the address of a page over a run."""
    settings = {"published": str(run / "published"), **settings}
    server = page_server(str(run), servers, PageSettings(**settings))
    server.start()
    try:
        yield server.address
    finally:
        server.close()


def got(url: str, language: str = "en") -> str:
    request = urllib.request.Request(url, headers={"Accept-Language": language})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_page_shows_what_the_run_wrote(trained: tuple[Path, History]) -> None:
    folder, history = trained
    with watching(folder) as address:
        seen = json.loads(got(f"{address}status"))
        page = got(address)
    value = seen["run"]["value"]
    assert seen["run"]["problem"] == ""
    assert value["problems"] == []
    assert value["state"] == "ended"
    assert value["status"]["samples"] == 640
    assert value["status"]["rows"] == {"user": 40}
    assert value["events_a_second"] is None
    windows = value["course"]["windows"]
    assert [window["rows"] for window in windows] == [128] * 5
    assert [window["values"]["auc"] for window in windows] == [
        window.values["auc"] for window in history.windows
    ]
    losses = [[point.samples, point.loss] for point in history.points]
    assert value["course"]["losses"] == losses[: len(value["course"]["losses"])]
    assert len(losses) - len(value["course"]["losses"]) <= 1
    pairs = [(pair["state"], pair["published"]) for pair in value["states"]]
    assert [state["version"] for state, _ in pairs] == [10, 9, 6, 3, 0]
    for state, version in pairs:
        assert version["version"] == state["version"]
        assert version["source"] == state["digest"]
    for text in ("The run has ended", "640", "AUC over event time", "Saved, held, published"):
        assert text in page
    assert "id='problems'" not in page


def test_speed_is_that_of_the_last_seconds(run: Path) -> None:
    now = time.time()
    times = [now - 60, now - 8, now - 4, now]
    moments = {
        "time": times,
        "samples": [0, 1_000_000, 1_400_000, 2_000_000],
        "lag_rows": [None, 5, 7, 12_345_678],
        "freshness_seconds": [3.0, 2.0, 2.0, 2.5],
        "resident_bytes": [1 << 30] * 4,
    }
    observed = {"lag_rows": 12_345_678, "freshness_seconds": 2.5}
    change_status(run, state="training", written=now, moments=moments, observed=observed)
    seen = RunFolder(str(run)).read()
    assert seen.state == "training"
    assert seen.events_a_second == pytest.approx(1_000_000 / 8)
    with watching(run) as address:
        english = html.unescape(got(address))
        chinese = html.unescape(got(f"{address}?lang=zh"))
        assert html.unescape(got(address, "zh-CN,en;q=0.8")).count("万") == chinese.count("万")
    for shown, texts in (
        (english, ("125,000", "12.35 M", "2.5 s")),
        (chinese, ("12.5 万", "1,235 万")),
    ):
        for text in texts:
            assert f"<b>{text}</b>" in shown
    assert "万" not in english


@pytest.mark.parametrize(
    ("language", "value", "text"),
    [
        ("en", 1234, "1,234"),
        ("zh", 1234, "1,234"),
        ("en", 1.2e6, "1.2 M"),
        ("zh", 1.2e6, "120 万"),
        ("zh", 2.5e9, "25 亿"),
        ("zh", -12_000, "-1.2 万"),
        ("en", 2.5e10, "25,000 M"),
        ("en", 0.51239, "0.5124"),
        ("zh", math.nan, "–"),
    ],
)
def test_numbers_are_written_as_readers_of_a_language_do(
    language: Any, value: float, text: str
) -> None:
    assert number_text(value, language) == text


def test_units_fit_the_size() -> None:
    assert [bytes_text(n) for n in (None, 5, 1536, 700 << 20, 3 << 30)] == [
        "–",
        "5 B",
        "1.5 KiB",
        "700 MiB",
        "3 GiB",
    ]
    assert [seconds_text(n) for n in (0.0123, 3.21, 42.0, 119.0, 7199.0, 7200.0, 2e5)] == [
        "12.3 ms",
        "3.2 s",
        "42 s",
        "119 s",
        "120 min",
        "2 h",
        "2 d",
    ]


def test_run_that_gives_no_sign_is_named_with_the_time_of_its_last_one(run: Path) -> None:
    written = time.time() - 34
    change_status(run, state="training", written=written, process=4711)
    with watching(run) as address:
        page = html.unescape(got(address))
    assert "The run has written nothing since" in page
    assert "34 s ago" in page or "35 s ago" in page
    assert "process 4711" in page
    change_status(run, written=time.time())
    assert RunFolder(str(run)).read().state == "training"
    change_status(run, state="failed", error="DataError: <b>row 7</b>")
    with watching(run) as address:
        page = got(address)
    assert "The run failed: DataError: &lt;b&gt;row 7&lt;/b&gt;" in page


def test_held_states_and_damaged_ones_are_named(run: Path) -> None:
    manifests = sorted(run.glob("checkpoint-*/MANIFEST.json"))
    plain = json.loads(manifests[-2].read_text())
    plain["held"] = [{"rule": "worse", "reason": "log loss 0.71 against 0.52 on 4,000 events."}]
    text, digest = sealed({k: v for k, v in plain.items() if k != "digest"})
    manifests[-2].write_text(text)
    forced = run / "published" / "checkpoint-00000004" / "MANIFEST.json"
    version = json.loads(forced.read_text()) | {"source": digest, "forced": "the fault is known"}
    forced.write_text(sealed({k: v for k, v in version.items() if k != "digest"})[0])
    manifests[1].write_bytes(manifests[1].read_bytes()[:-20])
    newest = next((run / "published").glob("checkpoint-*5"))
    shutil.rmtree(newest)
    with watching(run) as address:
        page = html.unescape(got(address))
        states = json.loads(got(f"{address}status"))["run"]["value"]["states"]
    assert (
        "published by force, the fault is known; held: log loss 0.71 against 0.52 on 4,000 events."
        in page
    )
    assert "states held by a gate" in page
    problem = re.search(r"<li>(.*?)</li>", page)
    assert problem is not None
    assert str(manifests[1]) in problem[1]
    assert [pair["state"]["version"] for pair in states[:2]] == [10, 9]
    assert states[0]["published"] is None
    assert states[1]["state"]["held"] == [plain["held"][0]["reason"]]


def test_torn_files_and_missing_folders_are_named_and_the_rest_is_shown(run: Path) -> None:
    (run / "status.json").write_text('{"state": "trai')
    (run / "job.json").write_text(
        json.dumps({"checkpoint": {"publish": {"kind": "publish_directory", "path": "gone"}}})
    )
    (run / "CURRENT").write_text("checkpoint-0000")
    with watching(run, published=None) as address:
        page = html.unescape(got(address))
        for text in (
            "status.json: cannot be read",
            "Give its place here with --published",
            "CURRENT",
        ):
            assert text in page
        assert "Saved, held, published" in page
        with pytest.raises(urllib.error.HTTPError, match="404"):
            got(f"{address}else")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("state", "paused"),
        ("written", 2**63 - 1),
        ("epoch", -1),
        ("observed", None),
        ("memory", {}),
        ("moments", {"time": [1.0], "samples": [1], "lag_rows": [], "freshness_seconds": []}),
    ],
)
def test_status_of_another_version_is_named_and_the_rest_is_shown(
    run: Path, member: str, value: Any
) -> None:
    change_status(run, **{member: value})
    with watching(run) as address:
        page = html.unescape(got(address))
    assert f"status.json: not the status of a run, got {member}" in page
    assert "Watch a run with the version of Hotbed that trains it." in page
    assert "Saved, held, published" in page


def test_moments_of_unequal_number_are_named(run: Path) -> None:
    moments = json.loads((run / "status.json").read_text())["moments"]
    change_status(run, moments={**moments, "lag_rows": []})
    with watching(run) as address:
        assert "moments must have one length" in got(address)


MODEL = {
    **dict.fromkeys(["published", "learned", "since", "cache", "log", "p50", "p99"]),
    "name": "m",
    "state": "READY",
    "version": "4",
    "reason": "",
    "rows": 7,
    "routes": {"rule": {}, "revision": None, "problem": "", "roles": {}, "traffic": []},
}


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("published", "today"),
        ("since", 1e18),
        ("version", 4),
        ("rows", "many"),
        ("p99", [1]),
        ("log", {"logged": -1, "dropped": 0}),
    ],
)
def test_value_of_another_type_in_the_answer_of_a_server_is_named(
    monkeypatch: pytest.MonkeyPatch, member: str, value: Any
) -> None:
    server = AskedServer("http://127.0.0.1:9")
    monkeypatch.setattr(server._client, "status", lambda: {"models": [MODEL], "memory": None})
    assert server.read().models[0].version == "4"
    status = {"models": [{**MODEL, member: value}], "memory": None}
    monkeypatch.setattr(server._client, "status", lambda: status)
    named = {"rows": "candidates", "log": "logged"}.get(member, member)
    with pytest.raises(ServingError, match=f"/status: not the answer of a server, got {named}: "):
        server.read()


def test_memory_of_another_type_in_the_answer_of_a_server_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = AskedServer("http://127.0.0.1:9")
    memory = {"used_bytes": 1, "limit_bytes": 0, "of": "the machine"}
    monkeypatch.setattr(server._client, "status", lambda: {"models": [], "memory": memory})
    with pytest.raises(ServingError, match=r"got memory.limit_bytes: .* Give the address"):
        server.read()


@pytest.mark.parametrize("answer", ["", "[]", '{"models": [{}]}'])
def test_address_of_another_service_is_named(run: Path, answer: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with watching(run, url) as address:
            page = html.unescape(got(address))
        server.shutdown()
        thread.join()
    assert f"{url}: /status: not the answer of a server, got" in page


@pytest.mark.parametrize("file", ["windows", "differences"])
def test_torn_and_foreign_windows_of_a_measurement_are_named(run: Path, file: str) -> None:
    Quality.of_rows(rows_of(0, {"DE": 5000}), []).write(run / "quality")
    path = run / "quality" / file / "2030-01-01T00.00.00.parquet"
    for content in (b"", b"PAR1 torn"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=re.escape(f"{path}: not a window of a measurement")):
            Quality.read(run / "quality")
    pq.write_table(pa.table({"begin": [1]}), path)
    with watching(run, quality=run / "quality") as address:
        page = html.unescape(got(address))
    assert f"{path}: not a window of a measurement, got" in page
    assert "Saved, held, published" in page


def test_page_waits_for_a_run_that_is_not_there_yet(
    trained: tuple[Path, History], tmp_path: Path
) -> None:
    folder = tmp_path / "later"
    watched = RunFolder(str(folder))
    with pytest.raises(ConfigError, match="there is no run yet, got no folder"):
        watched.read()
    with watching(folder) as address:
        assert "there is no run yet" in got(address)
    shutil.copytree(trained[0], folder)
    assert watched.read().status["samples"] == 640


def test_job_file_stands_for_its_output(trained: tuple[Path, History], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"output: {trained[0]}\n")
    assert RunFolder(str(job)).folder == trained[0]
    with pytest.raises(ConfigError, match=r"watch.run: must be a local path"):
        RunFolder("s3://bucket/run")


def rows_of(begin: int, segments: dict[str, int], version: str = "41") -> list[dict[str, Any]]:
    """Return the rows of a window of `Quality.windows`: all, a version, and values of a segment."""
    bounds = {"begin": begin, "end": begin + HOUR}
    figures = {f"{name}{end}": 0.5 for name in METRICS for end in ("", "_low", "_high")}
    total = sum(segments.values())
    rows = []
    for column, value, samples in (
        (None, None, total),
        ("version", version, total),
        *(("country", name, count) for name, count in segments.items()),
    ):
        counts = {"users": 9, "lists": 9, "samples": samples, "positives": 3, "without_score": 0}
        rows.append(
            {**bounds, "route": None, "column": column, "value": value, **counts, **figures}
        )
    return rows


def test_newest_state_of_a_run_that_saves_often_is_read_at_times_only(run: Path) -> None:
    change_status(run, state="training", written=time.time() + 3600)
    slow = RunFolder(str(run), state_seconds=3600)
    fast = RunFolder(str(run), state_seconds=0)
    first = slow.read().course
    assert fast.read().course == first
    older = sorted(run.glob("checkpoint-*"))[0]
    digest = hashlib.sha256((older / "MANIFEST.json").read_bytes()).hexdigest()
    (run / "CURRENT").write_text(f"{older.name} {digest}\n")
    assert slow.read().course is first
    second = fast.read().course
    assert second is not None
    assert Path(second.folder) == older
    assert fast.read().course is second
    change_status(run, state="ended")
    assert slow.read().course == second


def test_quality_by_version_and_drift_of_columns(run: Path) -> None:
    windows = [
        *rows_of(0, {"DE": 5000, "FR": 5000}),
        *rows_of(HOUR, {"DE": 5000, "FR": 5000}),
        *rows_of(2 * HOUR, {"DE": 9000, "FR": 1000}, "42"),
    ]
    with watching(run) as address:
        assert json.loads(got(f"{address}status"))["quality"] is None
    Quality.of_rows(windows, []).write(run / "quality")
    with watching(run) as address:
        page = html.unescape(got(address))
        quality = json.loads(got(f"{address}status"))["quality"]["value"]
    (drift,) = quality["drift"]
    index = (0.9 - 0.5) * math.log(0.9 / 0.5) + (0.1 - 0.5) * math.log(0.1 / 0.5)
    chance = 1 / 10_000 + 1 / 20_000
    assert drift["index"] == pytest.approx(index - chance, rel=1e-3)
    assert (drift["column"], drift["samples"], drift["before"]) == ("country", 10_000, 20_000)
    assert drift["values"][0] == ["DE", 0.9, 0.5]
    assert "version 42" in page
    assert "version 41" not in page
    assert "DE: 50 % → 90 %" in page
    assert quality["windows"][-1]["value"] == "FR"


def test_windows_of_one_distribution_drift_by_chance_alone() -> None:
    random = np.random.default_rng(0)
    indexes = []
    for _ in range(200):
        windows = []
        for hour, events in enumerate((4000, 500)):
            counts = random.multinomial(events, [0.1] * 10).tolist()
            windows += rows_of(hour * HOUR, dict(zip("abcdefghij", counts, strict=True)))
        rows = Quality.of_rows(windows, []).windows.to_pylist()
        indexes.append(drift_of(rows)[0].index)
    assert max(indexes) < 0.1
    assert np.mean(indexes) < 0.01  # without the chance it is 9 / 500 + 9 / 4000 = 0.02


def test_command_serves_the_page_without_torch_until_it_is_ended(
    trained: tuple[Path, History],
) -> None:
    code = (
        "import sys; from hotbed.cli.commands import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, flush=True)"
    )
    command = [sys.executable, "-c", code, "watch", str(trained[0]), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            page = got(line.split()[-1])
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            code_of_end = process.wait(60)
        finally:
            process.kill()
    assert line.startswith("watching at http://127.0.0.1:")
    assert "The run has ended" in page
    assert (rest, code_of_end) == ("False\n", 0)


def test_a_page_ends_by_sigint_also_where_it_interrupts_no_call(
    trained: tuple[Path, History],
) -> None:
    """As once polars has set a handler of its own."""
    code = (
        "import signal, sys\n"
        "from hotbed.watch.server import PageSettings, serve_page\n"
        "def report(line):\n"
        "    signal.siginterrupt(signal.SIGINT, False)\n"
        "    print(line, flush=True)\n"
        "serve_page(sys.argv[1], [], PageSettings(), report)"
    )
    command = [sys.executable, "-c", code, str(trained[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            time.sleep(0.2)  # it waits now
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_page_shows_news_in_a_browser_without_a_reload(
    run: Path, browsed: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_status(run, state="training", written=time.time(), host="<img src=x>")
    pages = []

    def page_with_its_number(seen: Seen, *rest: Any) -> str:
        value = seen.run.value
        assert value is not None
        status = {**value.status, "samples": 1000 * (len(pages) + 1)}
        look = replace(seen.run, value=replace(value, status=status))
        pages.append(page(replace(seen, run=look), *rest))
        return pages[-1]

    monkeypatch.setattr("hotbed.watch.server.page", page_with_its_number)
    with watching(run) as address:
        shown = browsed(address, 30_000)
    assert "<b>1,000</b>" in pages[0]  # it is whole without a script
    number = re.search(r"<b>([\d,]+)</b><span>events learned", shown)
    assert number is not None
    assert number[1] not in ("1,000", "640")
    assert shown.count("<main>") == 1
    assert "&lt;img src=x&gt;" in shown
    assert shown.count("<svg") >= 5
