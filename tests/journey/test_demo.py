# SPDX-License-Identifier: Apache-2.0
"""`make demo`, on a part of the events: demo.py, movielens.yaml and recommend.py together;
serve_and_ask.py is its last part.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as hb

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Printed output and folder of a demo on the events from 60 % to 83 % of the whole."""
    output = tmp_path_factory.mktemp("demo") / "movielens"
    sets = [f"output={output}", "train.start=0.6", "stream.stop=0.83", "fit.stream_batch_size=8"]
    arguments = [part for assignment in sets for part in ("--set", assignment)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments],
        cwd=output.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, output


def value(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in:\n{text}"
    return float(found.group(1).replace(",", ""))


def test_the_demo_prints_what_it_promises(demo: tuple[str, Path]) -> None:
    printed, _ = demo
    popularity = value(
        r"liked before has AUC [\d.]+ on the validation events and ([\d.]+) on the stream", printed
    )
    assert value(r"validation auc ([\d.]+)", printed) > 0.63
    assert value(r"progressive auc ([\d.]+)", printed) > popularity
    assert value(r"train: .*  ([\d,]+) samples/s", printed) > 0
    assert value(r"stream: .*  ([\d,]+) samples/s", printed) > 0


def test_films_are_admitted_refused_and_evicted(demo: tuple[str, Path]) -> None:
    row = next(line for line in demo[0].splitlines() if "│ movie" in line)
    after_train, after_stream, admitted, refused, evicted = (
        int(cell.replace(",", "")) for cell in re.findall(r"[\d,]+", row)[:5]
    )
    assert after_train > 0
    assert refused > 0
    assert evicted > 0
    assert after_stream == admitted - evicted


def test_a_new_process_recommends_ten_films_by_name(demo: tuple[str, Path]) -> None:
    lines = re.findall(r"^\s*(\d+)\. (0\.\d{3})  .+ \[.+\]$", demo[0], re.M)
    assert [int(place) for place, _ in lines] == list(range(1, 11))
    scores = [float(score) for _, score in lines]
    assert scores == sorted(scores, reverse=True)


def test_the_report_is_one_file_with_plots(demo: tuple[str, Path]) -> None:
    page = (demo[1] / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "<h2>Serving</h2>" in page
    assert not re.search(r'(src|href)="https?://', page)


def test_a_server_follows_the_stream_and_answers_all_the_while(demo: tuple[str, Path]) -> None:
    printed, output = demo
    assert value(r"served meanwhile\n +([\d,]+) requests answered", printed) > 10
    assert value(r"([\d.]+) learned to served, s", printed) > 0
    assert value(r"([\d.]+) versions served", printed) >= 2
    scores = re.findall(r"^  ([01]\.\d{3})  ([01]\.\d{3})  .+$", printed, re.M)
    assert len(scores) == 8  # four films, for the stream's busiest user and for a reference user
    assert any(first != last for first, last in scores)
    log = [json.loads(line) for line in (output / "serve.log").read_text().splitlines()]
    assert log[-1]["message"] == "stopped"
    told = [line["message"] for line in log if line["level"] != "INFO"]
    assert not [
        message for message in told if "once its trainer publishes the first" not in message
    ]
    mine = subprocess.run(["pgrep", "-f", str(output)], capture_output=True, text=True, check=False)
    assert not mine.stdout  # no part of it is left behind


def test_the_saved_model_is_the_trained_one(
    demo: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    job = hb.Job.read(demo[1] / "job.json")
    assert job.valid is not None
    model = hb.load(demo[1])
    assert model.evaluate(job.dataset(job.valid, model.schema))["auc"] > 0.6
    assert {"user", "movie", "genres", "year", "hour"} == set(model.tables)
