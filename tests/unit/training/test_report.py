# SPDX-License-Identifier: Apache-2.0
"""The report: one file, no network, every plot of what happened."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.metrics.chart import Chart, Series, figure, ticks
from hotbed.metrics.served import Answer, Served
from hotbed.metrics.windows import Window
from hotbed.training.report import add_serving, write_report
from hotbed.training.watch import History


def test_the_report_shows_loss_stream_tables_and_flows_and_fetches_nothing(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(admit=hb.MinCount(2), evict=hb.Ttl(seconds=300)), "bce", "adam", ["auc"])
    evict = hb.callbacks.Evict(step_interval=4)
    histories = {"train": model.fit(dataset(2048), dataset(256), 2, evict, progress=False)}
    histories["stream"] = model.fit(dataset(4096, 1), callbacks=evict, progressive=True, progress=False)
    page = write_report(tmp_path / "report.html", histories, title="A <title>", facts={"films": 9742},
                        summary=model.summary()).read_text()  # fmt: skip
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert {"Loss, train", "Loss, stream", "Validation auc", "AUC over event time", "Rows", "user", "item"} <= set(
        titles
    )
    assert "A &lt;title&gt;" in page
    assert "9,742" in page
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="(.*?)"', page)]
    flows = {series["name"] for chart in charts for series in chart["series"]}
    assert {"admitted", "refused", "evicted"} <= flows
    assert all(len(series["x"]) == len(series["y"]) > 0 for chart in charts for series in chart["series"])


def test_a_history_without_anything_is_still_a_page(tmp_path: Path) -> None:
    assert "</html>" in write_report(tmp_path / "report.html", {"train": History()}).read_text()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.7, 0.7), (0.0, 0.0), (-3.0, 12345.0), (0.6931, 0.6932)])
def test_ticks_are_few_and_enclose_the_values(low: float, high: float) -> None:
    steps = ticks(low, high)
    assert steps[0] <= low <= high <= steps[-1]
    assert 2 <= len(steps) <= 8


@pytest.mark.parametrize(("timed", "label"), [(True, "01 Jan 01:00"), (False, "120")])
def test_a_single_point_has_one_label_below_it(timed: bool, label: str) -> None:
    x = float(HOUR if timed else 120)
    drawn = figure(Chart("Freshness", "event time", [Series("seconds", [x], [2.0], dots=True)], time=timed))
    assert re.findall(r"<text x='([\d.-]+)' y='\d+' text-anchor='middle'>(.*?)</text>", drawn) == [("52.0", label)]


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Title of each chart -> its data."""
    figures = re.findall(r'data-chart="(.*?)"><figcaption>(.*?)</figcaption>', page)
    return {title: json.loads(unescape(data)) for data, title in figures}


def window(number: int, **observed: float) -> Window:
    tables = {
        name: {"rows": 10 + number, "admitted": 12 * number, "refused": 0, "evicted": 2 * number} for name in "ab"
    }
    values = {"auc": 0.5 + number / 100, "calibration": 1.1, "log_loss": 0.6 if number else float("nan")}
    return Window(number * HOUR, (number + 1) * HOUR, 50 + number, 50 * number, values, tables, observed)


HOUR = 3_600_000_000


def test_windows_are_drawn_over_event_time_beside_another_models(tmp_path: Path) -> None:
    history = History()
    history.windows = [window(i, freshness_seconds=2.0, lag_rows=7.0 * i, dead_letters=0.0) for i in range(5)]
    history.compared["frozen"] = [window(i) for i in (0, 2, 4)]
    history.metrics = {"auc": 0.55}
    charts = charts_of(write_report(tmp_path / "report.html", {"stream": history}).read_text())
    auc = charts["AUC over event time"]
    assert auc["time"]
    assert [line["name"] for line in auc["series"]] == ["window", "frozen", "whole stream"]
    assert auc["series"][0]["x"] == [(i + 1) * HOUR for i in range(5)]
    assert auc["series"][1]["y"] == [0.5, 0.52, 0.54]
    assert len(charts["Log loss over event time"]["series"][0]["x"]) == 4  # an undefined window is left out
    ids = {line["name"]: line["y"] for line in charts["Ids over event time"]["series"]}
    assert ids == {"admitted": [24.0] * 4, "evicted": [4.0] * 4}  # in each window, of both tables; nothing was refused
    assert charts["Rows of all tables over event time"]["series"][0]["y"] == [20.0, 22.0, 24.0, 26.0, 28.0]
    assert charts["Lag over event time"]["series"][0]["y"] == [0.0, 7.0, 14.0, 21.0, 28.0]
    assert "Freshness over event time" in charts
    assert "Dead letters over event time" not in charts  # there were none


def test_history_that_is_played_again_is_not_called_stale(tmp_path: Path) -> None:
    history = History()
    history.windows = [window(i, freshness_seconds=3e8) for i in range(3)]
    charts = charts_of(write_report(tmp_path / "report.html", {"stream": history}).read_text())
    assert "Freshness over event time" not in charts
    assert "Events over event time" in charts


def test_windows_without_times_are_drawn_over_samples(tmp_path: Path) -> None:
    history = History()
    history.windows = [Window(None, None, 10, 10 * (i + 1), {"auc": 0.6}) for i in range(3)]
    charts = charts_of(write_report(tmp_path / "report.html", {"stream": history}).read_text())
    assert charts["AUC over samples"]["series"][0]["x"] == [10, 20, 30]


def test_what_a_server_answered_meanwhile_is_added_to_the_report(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report.html", {}, title="t")
    answers = [
        Answer(100 + number / 100, 0.002 if number < 99 else 0.5, 1 if number < 60 else 4) for number in range(100)
    ]
    versions: list[dict[str, Any]] = [
        {"version": 1, "caught": 90.0, "published": 91.0},
        {"version": 3, "caught": 100.1, "published": 100.2},  # none of its answers was seen
        {"version": 4, "caught": 100.3, "published": 100.4},
        {"version": 2},  # a trainer that does not tell
    ]
    scores = {"<film>": [(100.0, 0.5), (100.6, 0.75)]}
    numbers = add_serving(page, Served(answers, versions, scores))
    assert numbers == {
        "requests answered": 100, "ms, half of the requests": 2.0, "ms, 99 % of them": 500.0, "versions served": 2,
        "s, learned to served": 0.3,
    }  # fmt: skip
    text = page.read_text()
    assert "<h2>Serving</h2>" in text
    assert "<span>s, learned to served</span>" in text
    assert "<film>" not in text
    charts = {
        name: json.loads(unescape(data))
        for data, name in re.findall(r'data-chart="(.*?)"><figcaption>(.*?)</figcaption>', text)
    }
    lines = {(name, line["name"]): line["y"] for name, chart in charts.items() for line in chart["series"]}
    assert lines["Freshness, seconds since its last event was learned", "served"] == [pytest.approx(0.3)]
    assert lines["Freshness, seconds since its last event was learned", "published"] == [pytest.approx(0.1)]
    assert lines["Version, in steps of the training", "served"] == [1, 1, 4, 4]
    assert lines["Version, in steps of the training", "learned"][-1] == 4
    assert lines["Scores of the same candidates, a point a version", "<film>"] == [0.5, 0.75]
