# SPDX-License-Identifier: Apache-2.0
"""The report: one file, no network, every plot of what happened."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.pictures.charts import Chart, Series, figure, ticks
from hotbed.pictures.numbers import number_text
from hotbed.training.watching.history import History
from hotbed.training.watching.points import Point
from hotbed.training.watching.report import add_serving, write_report
from hotbed.training.watching.served import Answer, Served
from hotbed.training.watching.window_log import Window


def test_the_report_shows_loss_stream_tables_and_flows_and_fetches_nothing(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(
        network(admit=hb.MinCount(2), evict=hb.Ttl(seconds=300)), "bce", "adam", ["auc"]
    )
    evict = hb.callbacks.Evict(step_interval=4)
    histories = {"train": model.fit(dataset(2048), dataset(256), 2, evict, progress=False)}
    histories["stream"] = model.fit(
        dataset(4096, 1), callbacks=evict, progressive=True, progress=False
    )
    page = write_report(
        tmp_path / "report.html",
        histories,
        title="A <title>",
        facts={"films": 9742},
        summary=model.summary(),
    ).read_text()
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert {
        "Loss, train",
        "Loss, stream",
        "Validation AUC",
        "AUC over event time",
        "Rows",
        "user",
        "item",
    } <= set(titles)
    assert "A &lt;title&gt;" in page
    assert "9,742" in page
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="(.*?)"', page)]
    flows = {series["name"] for chart in charts for series in chart["series"]}
    assert {"admitted", "refused", "evicted"} <= flows
    assert all(
        len(series["x"]) == len(series["y"]) > 0 for chart in charts for series in chart["series"]
    )


def test_runs_of_several_models_are_drawn_in_one_chart_each(tmp_path: Path) -> None:
    """In any order, also with other tables, as fits and as streams; the data are the histories'."""
    items = np.arange(2000) % 40
    source = hb.sources.Memory({"click": items % 2, "item": items})
    schema = hb.Schema([hb.Label("click"), hb.Id("item")])

    def model(kind: Any) -> hb.RecModel:
        network = kind(schema, hb.make_tables(schema, dim=2), hidden=[4])
        return hb.RecModel(network, "bce", "adam", ["auc"])

    def data() -> hb.Dataset:
        return hb.Dataset(source, schema, 64)

    kinds = {"one": hb.models.DNN, "two": hb.models.DNN, "other tables": hb.models.DeepFM}
    models = {name: model(kind) for name, kind in kinds.items()}
    fits = {name: own.fit(data(), data(), epochs=2, progress=False) for name, own in models.items()}
    streams = {
        name: model(kind).online_train(data(), progress=False) for name, kind in kinds.items()
    }
    for histories in (fits, dict(reversed(fits.items())), streams):
        page = write_report(tmp_path / "report.html", histories).read_text()
        titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
        assert len(set(titles)) == len(titles)
        charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="(.*?)"', page)]
        lines = {
            title: {line["name"]: line for line in chart["series"]}
            for title, chart in zip(titles, charts, strict=True)
        }
        for title in ("Training loss", "item, rows"):
            assert list(lines[title]) == list(histories)
        assert list(lines["item.linear, rows"]) == ["other tables"]
        metric = "AUC over samples" if histories is streams else "Validation AUC"
        for name, history in histories.items():
            drawn = lines[metric][name]["y"]
            expected = [epoch["valid.auc"] for epoch in history.epochs if "valid.auc" in epoch]
            if histories is streams:
                expected = [point.window["auc"] for point in history.points if point.window]
            assert drawn == pytest.approx(expected, abs=1e-5)
            kind = "" if histories is streams else " validation"
            assert f"{name}{kind} auc" in page
            assert f"rows in all tables, {name}" in page
            assert f"Tables at the end, {name}" in page
    # parts of one run stay on one axis
    later = models["one"].fit(data(), data(), progress=False)
    page = write_report(
        tmp_path / "report.html", {"first": fits["one"], "later": later}
    ).read_text()
    assert "Loss, later" in page
    assert "rows in all tables<" in page


def test_a_history_without_anything_is_still_a_page(tmp_path: Path) -> None:
    assert "</html>" in write_report(tmp_path / "report.html", {"train": History()}).read_text()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.7, 0.7), (0.0, 0.0), (-3.0, 12345.0), (0.6931, 0.6932)]
)
def test_ticks_are_few_and_enclose_the_values(low: float, high: float) -> None:
    steps = ticks(low, high)
    assert steps[0] <= low <= high <= steps[-1]
    assert 2 <= len(steps) <= 8


@pytest.mark.parametrize(("timed", "label"), [(True, "01 Jan 01:00"), (False, "120")])
def test_a_single_point_has_one_label_below_it(timed: bool, label: str) -> None:
    x = float(HOUR if timed else 120)
    drawn = figure(
        Chart("Freshness", "event time", [Series("seconds", [x], [2.0], dots=True)], time=timed)
    )
    assert re.findall(r"<text x='([\d.-]+)' y='\d+' text-anchor='middle'>(.*?)</text>", drawn) == [
        ("52.0", label)
    ]


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Title of each chart -> its data."""
    figures = re.findall(r'data-chart="(.*?)"><figcaption>(.*?)</figcaption>', page)
    return {title: json.loads(unescape(data)) for data, title in figures}


def window(number: int, **observed: float) -> Window:
    tables = {
        name: {"rows": 10 + number, "admitted": 12 * number, "refused": 0, "evicted": 2 * number}
        for name in "ab"
    }
    values = {
        "auc": 0.5 + number / 100,
        "calibration": 1.1,
        "log_loss": 0.6 if number else float("nan"),
    }
    return Window(
        number * HOUR, (number + 1) * HOUR, 50 + number, 50 * number, values, tables, observed
    )


HOUR = 3_600_000_000


def test_windows_are_drawn_over_event_time_beside_another_models(tmp_path: Path) -> None:
    history = History()
    history.windows = [
        window(i, freshness_seconds=2.0, lag_rows=7.0 * i, dead_letters=0.0) for i in range(5)
    ]
    history.compared["frozen"] = [window(i) for i in (0, 2, 4)]
    history.metrics = {"auc": 0.55}
    charts = charts_of(write_report(tmp_path / "report.html", {"stream": history}).read_text())
    auc = charts["AUC over event time"]
    assert auc["time"]
    assert [line["name"] for line in auc["series"]] == ["window", "frozen", "whole stream"]
    assert auc["series"][0]["x"] == [(i + 1) * HOUR for i in range(5)]
    assert auc["series"][1]["y"] == [0.5, 0.52, 0.54]
    # an undefined window is left out
    assert len(charts["Log loss over event time"]["series"][0]["x"]) == 4
    ids = {line["name"]: line["y"] for line in charts["Ids over event time"]["series"]}
    # in each window, of both tables; nothing was refused
    assert ids == {"admitted": [24.0] * 4, "evicted": [4.0] * 4}
    assert charts["Rows of all tables over event time"]["series"][0]["y"] == [
        20.0,
        22.0,
        24.0,
        26.0,
        28.0,
    ]
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
        Answer(100 + number / 100, 0.002 if number < 99 else 0.5, 1 if number < 60 else 4)
        for number in range(100)
    ]
    versions: list[dict[str, Any]] = [
        {"version": 1, "caught": 90.0, "published": 91.0},
        {"version": 3, "caught": 100.1, "published": 100.2},  # none of its answers was seen
        {"version": 4, "caught": 100.3, "published": 100.4},
        {"version": 2},  # a trainer that does not tell
    ]
    scores = {"a user": {"<film>": [(100.0, 0.5), (100.6, 0.75)]}}
    numbers = add_serving(page, Served(answers, versions, scores))
    assert numbers == {
        "requests answered": 100,
        "p50, ms": 2.0,
        "p99, ms": 500.0,
        "versions served": 2,
        "learned to served, s (p50)": 0.3,
    }
    text = page.read_text()
    assert "<h2>Serving</h2>" in text
    assert "<span>learned to served, s (p50)</span>" in text
    assert "<film>" not in text
    charts = {
        name: json.loads(unescape(data))
        for data, name in re.findall(r'data-chart="(.*?)"><figcaption>(.*?)</figcaption>', text)
    }
    lines = {
        (name, line["name"]): line["y"]
        for name, chart in charts.items()
        for line in chart["series"]
    }
    assert lines["Freshness, seconds since its last event was learned", "served"] == [
        pytest.approx(0.3)
    ]
    assert lines["Freshness, seconds since its last event was learned", "published"] == [
        pytest.approx(0.1)
    ]
    assert lines["Version, in steps of the training", "served"] == [1, 1, 4, 4]
    assert lines["Version, in steps of the training", "learned"][-1] == 4
    assert lines["Scores for a user, a point a version", "<film>"] == [0.5, 0.75]
    seconds = {(chart["x0"], round(chart["x1"], 2)) for chart in charts.values()}
    assert seconds == {(0.0, 0.99)}  # every chart of the server has the same axis, from 0


def test_a_single_answer_is_drawn_without_a_line_of_versions() -> None:
    charts = Served([Answer(at=5.0, seconds=0.25, version=3)], versions=[]).charts()
    assert [figure(chart).count("<polyline") for chart in charts] == [2]


def test_report_says_when_with_what_and_on_which_data_it_ran(
    tmp_path: Path, dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    data = dataset(256)
    history = model.fit(data, progress=False)
    about = {"seed": 7, "data, train": data.source}
    page = unescape(
        write_report(tmp_path / "report.html", {"train": history}, about=about).read_text()
    )
    assert re.search(r"<p>\d{4}-\d\d-\d\d \d\d:\d\d UTC · hotbed \S+ · torch \S+</p>", page)
    assert "<td>seed</td><td>7</td>" in page
    assert f"<td>data, train</td><td>{data.source}</td>" in page
    positives = world.columns(256)["y"].mean()
    assert history.mean_label == pytest.approx(positives)
    assert (
        f"<td>samples learned, train</td><td>256, mean label {number_text(positives)}</td>" in page
    )


def test_validation_loss_is_drawn_beside_the_training_loss(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    history = model.fit(dataset(512), dataset(256, 1), 3, progress=False)
    loss = charts_of(write_report(tmp_path / "report.html", {"train": history}).read_text())[
        "Loss, train"
    ]
    lines = {line["name"]: line for line in loss["series"]}
    assert set(lines) == {"training, smoothed", "training", "validation"}
    assert lines["validation"]["x"] == [512.0, 1024.0, 1536.0]
    assert lines["validation"]["y"] == [
        float(f"{epoch['valid.loss']:.6g}") for epoch in history.epochs
    ]


def test_reliability_curve_compares_predictions_with_what_happened(
    tmp_path: Path, dataset: Any, network: Any, world: Any
) -> None:
    model = hb.RecModel(network(), "bce", "adam", ["auc"])
    valid = dataset(512, 1)
    history = model.fit(dataset(512), valid, callbacks=[], progressive=True, progress=False)
    charts = charts_of(write_report(tmp_path / "report.html", {"run": history}).read_text())
    assert {"Share of positives, run", "Share of positives, run, validation"} <= set(charts)
    predicted = model.predict(valid)
    label = world.columns(512, 1)["y"]
    reliability = history.reliability["valid"]
    assert reliability.weight == 512
    curve = reliability.curve(points=1)
    assert curve == [(pytest.approx(predicted.mean(), rel=1e-6), pytest.approx(label.mean()))]
    x = [point for point, _ in reliability.curve()]
    assert x == sorted(x)
    assert 2 < len(x) <= 12


def test_many_tables_share_a_few_charts(tmp_path: Path) -> None:
    history = History()
    for step in (1, 2):
        tables = {
            f"t{i:02}": {"rows": 10 * i + step, "admitted": 10 * i + step, "refused": 0}
            for i in range(37)
        }
        history.points.append(Point(step, 0, step * 10, 1.0, None, 0.5, {}, tables))
    charts = charts_of(write_report(tmp_path / "report.html", {"train": history}).read_text())
    assert list(charts) == [
        "Loss, train",
        "Rows",
        "Rows, small tables",
        *(f"t{i}" for i in range(32, 37)),
        "32 other tables together",
    ]
    rows = {line["name"]: line["y"] for line in charts["Rows"]["series"]}
    assert len(rows) == 6
    assert rows["t36"] == [361, 362]
    admitted = [
        chart["series"][0]["y"] for title, chart in charts.items() if title.startswith(("t", "32"))
    ]
    assert sum(values[-1] for values in admitted) == sum(10 * i + 2 for i in range(37))
