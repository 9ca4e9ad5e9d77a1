# SPDX-License-Identifier: Apache-2.0
"""The quality of what was served, against an offline join and metrics by counting."""

from __future__ import annotations

import math
import random
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import served_streams
from forked import SERVER, ending_signal, kill_at
from served_streams import STREAMS, WITHIN, ServedStream, write, write_parts
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli import show
from hotbed.cli.commands import app
from hotbed.errors import ConfigError, PersistError, SchemaError
from hotbed.quality.cells import METRICS
from hotbed.quality.readings import readings
from hotbed.quality.results import Quality
from hotbed.training.watching.endpoint import Endpoint

HOUR = 3_600_000_000


def counted(rows: pl.DataFrame) -> dict[str, float]:
    """Return metrics of rows with `score`, `label` and `request_id`, by their definitions."""
    score = rows["score"].cast(pl.Float64).to_numpy()
    label = rows["label"].to_numpy()
    rate = label.mean()
    positive, negative = score[label > 0], score[label == 0]
    pairs = positive[:, None] - negative[None, :]
    above = np.count_nonzero(pairs > 0) + 0.5 * np.count_nonzero(pairs == 0)
    loss = -np.mean(np.where(label > 0, np.log(score), np.log1p(-score)))
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    gains = []
    hits = []
    for request in rows.partition_by("request_id"):
        values = request.sort("score", descending=True)["label"].to_list()
        if any(values):
            discounts = [1 / math.log2(place + 2) for place in range(len(values))]
            best = sum(discounts[: int(sum(values))])
            gain = sum(share * value for share, value in zip(discounts, values, strict=True))
            gains.append(gain / best)
            hits.append(values[0])
    return {
        "auc": above / pairs.size,
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "calibration": score.sum() / label.sum(),
        "rate": rate,
        "ndcg": float(np.mean(gains)),
        "hit_rate": float(np.mean(hits)),
    }


def known(stream: ServedStream, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose outcomes are known when the log ends."""
    last = max(rows["served_at"].max(), stream.outcomes["served_at"].dt.timestamp("us").max())
    return rows.filter(pl.col("served_at") + WITHIN * 1_000_000 < last)


def quality_of(folder: Path, **settings: Any) -> hb.ServingQuality:
    follow = settings.pop("follow", False)
    samples = served_streams.join(folder / "log", folder / "outcomes", follow=follow)
    return hb.ServingQuality(samples, **{"user": "user", "segments": ["segment"], **settings})


def check_equal(table: Any, rows: pl.DataFrame) -> int:
    """Compare each row of a table with figures counted from the rows; return how many."""
    rows = rows.with_columns(begin=pl.col("served_at") // HOUR * HOUR)
    num_rows = 0
    for row in table.to_pylist():
        part = rows.filter(pl.col("begin") == row["begin"].timestamp() * 1e6)
        if row["route"] is not None:
            part = part.filter(pl.col("route") == row["route"])
        if row["value"] is not None:
            part = part.filter(pl.col(row["column"]).cast(pl.String) == row["value"])
        assert row["samples"] == part.height
        assert row["users"] == part["user"].n_unique()
        assert row["positives"] == part["label"].sum()
        if 0 < row["positives"] < part.height:
            for name, value in counted(part).items():
                assert row[name] == pytest.approx(value, abs=1e-9), (row, name)
            num_rows += 1
    return num_rows


def test_metrics_equal_an_offline_join(tmp_path: Path) -> None:
    stream = served_streams.drawn()
    rows = stream.served(stream.versions())
    write(tmp_path, stream, rows)
    quality = quality_of(tmp_path).measure()
    of_known = known(stream, rows)
    assert check_equal(quality.windows, of_known) == quality.windows.num_rows > 50
    samples = pl.from_arrow(quality.windows).filter(
        pl.col("route").is_null(), pl.col("column").is_null()
    )
    assert samples["samples"].sum() == of_known.height


@pytest.mark.parametrize("name", STREAMS)
def test_metrics_of_recorded_streams_equal_an_offline_join(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    stream = STREAMS[name](shared_data)
    stream = ServedStream(stream.shown.head(6000), stream.outcomes)
    ids = stream.shown.select("request_id").unique()
    stream = ServedStream(stream.shown, stream.outcomes.join(ids, on="request_id", how="semi"))
    rows = stream.served(stream.versions())
    write(tmp_path, stream, rows)
    quality = quality_of(tmp_path, seconds=None, most=3).measure()
    whole = known(stream, rows).with_columns(served_at=pl.lit(0))
    table = pl.from_arrow(quality.windows).filter(
        pl.col("column").is_null() | pl.col("value").is_not_null()
    )
    table = table.with_columns(begin=pl.lit(0).cast(pl.Datetime("us", "UTC")))
    assert check_equal(table.to_arrow(), whole) >= 5


def test_versions_of_a_split_are_compared(tmp_path: Path) -> None:
    """The worse version has an interval below zero; the figures are those of both rows."""
    stream = served_streams.drawn(4000)
    write(tmp_path, stream, stream.served(stream.versions()))
    quality = quality_of(tmp_path, seconds=None, segments=()).measure()
    windows = {(row["route"], row["column"]): row for row in quality.windows.to_pylist()}
    version, route = quality.differences.to_pylist()
    assert (route["route"], route["against"]) == ("canary", "stable")
    assert (version["column"], version["value"], version["against"]) == ("version", "42", "41")
    for name in ("auc", "log_loss", "ndcg"):
        difference = windows["canary", None][name] - windows["stable", None][name]
        assert route[name] == pytest.approx(difference, abs=1e-12)
    assert route["auc_high"] < 0 < route["log_loss_low"]


def test_rare_values_are_measured_together(tmp_path: Path) -> None:
    stream = served_streams.drawn()
    write(tmp_path, stream, stream.served({"41": stream.versions()["41"]}))
    quality = quality_of(tmp_path, seconds=None, most=1).measure()
    table = pl.from_arrow(quality.windows).filter(
        pl.col("route").is_null(), pl.col("column") == "segment"
    )
    assert table["value"].is_null().to_list() == [False, True]
    assert table["samples"].sum() == known(stream, stream.shown).height


def test_a_shadow_is_compared_with_the_answers_to_the_same_requests(tmp_path: Path) -> None:
    """A shadow that scores as the version that answered differs by exactly nothing."""
    stream = served_streams.drawn()
    scores = stream.versions()
    answered = stream.served({"41": scores["41"]})
    shadow = answered.with_columns(route=pl.lit("shadow"), served_at=pl.col("served_at") + 7)
    some = shadow.filter(pl.col("request_id").str.ends_with("3"))
    for version, changed in ((42, some["score"]), (43, 1 - some["score"])):
        twice = some.with_columns(version=pl.lit(version).cast(pl.Int64), score=changed)
        folder = tmp_path / str(version)
        write(folder, stream, pl.concat([answered, twice.select(answered.columns)]))
        quality = quality_of(folder, seconds=None, segments=()).measure()
        (difference,) = [
            row
            for row in quality.differences.to_pylist()
            if row["route"] == "shadow" and row["column"] is None
        ]
        num_pairs = known(stream, some).height
        assert difference["samples"] == difference["against_samples"] == num_pairs
        if version == 42:
            assert difference["auc"] == difference["auc_low"] == difference["log_loss_high"] == 0
        else:
            assert difference["auc_high"] < 0
    routes = {row["route"]: row["samples"] for row in quality.windows.to_pylist()}
    assert routes[None] == routes["stable"] == known(stream, answered).height


def test_a_score_that_is_not_a_number_is_left_out_and_counted(tmp_path: Path) -> None:
    stream = served_streams.drawn(100)
    rows = stream.served({"41": stream.versions()["41"]})
    damaged = rows.with_columns(
        score=pl.when(pl.col("request_id") == "r3").then(float("nan")).otherwise("score")
    )
    write(tmp_path, stream, damaged.with_columns(pl.col("score").cast(pl.Float32)))
    quality = quality_of(tmp_path, seconds=None).measure()
    whole = quality.windows.to_pylist()[0]
    assert whole["without_score"] == 5
    assert whole["samples"] == known(stream, rows).height - 5
    assert not math.isnan(whole["auc"])


def test_few_users_have_no_interval(tmp_path: Path) -> None:
    stream = served_streams.drawn(60)
    write(tmp_path, stream, stream.served({"41": stream.versions()["41"]}))
    whole = quality_of(tmp_path, seconds=None).measure().windows.to_pylist()[0]
    assert whole["users"] < 20
    assert not math.isnan(whole["auc"])
    assert math.isnan(whole["auc_low"])


@pytest.mark.parametrize("unknown", [None, "", float("nan")])
def test_each_request_of_an_unknown_user_is_a_user_of_its_own(
    unknown: str | float | None, tmp_path: Path
) -> None:
    stream = served_streams.drawn(200)
    rows = stream.served({"41": stream.versions()["41"]})
    write(tmp_path, stream, rows.with_columns(user=pl.lit(unknown)))
    measured = quality_of(tmp_path, seconds=None).measure()
    alone = quality_of(tmp_path, seconds=None, user=None).measure()
    assert measured.windows["users"][0].as_py() > 100
    assert pl.from_arrow(measured.windows).equals(pl.from_arrow(alone.windows))


def test_results_are_files_of_a_window_each(tmp_path: Path) -> None:
    stream = served_streams.drawn()
    write(tmp_path, stream, stream.served(stream.versions()))
    output = tmp_path / "quality"
    measured = quality_of(tmp_path, output=str(output)).measure()
    again = Quality.read(output)
    whole = quality_of(tmp_path).measure()
    for quality in (measured, whole):  # as Polars compares them, nan is nan
        assert pl.from_arrow(again.windows).equals(pl.from_arrow(quality.windows))
        assert pl.from_arrow(again.differences).equals(pl.from_arrow(quality.differences))
    names = sorted(file.name for file in (output / "windows").iterdir())
    assert names[0] == "2025-10-09T09.00.00.parquet"
    assert Quality.read(output, most=1).windows["begin"].unique().to_pylist() == [
        whole.windows["begin"].to_pylist()[-1]
    ]


def test_prometheus_has_the_newest_window(tmp_path: Path) -> None:
    stream = served_streams.drawn(2000)
    write(tmp_path, stream, stream.served(stream.versions()))
    measured = quality_of(tmp_path, output=str(tmp_path / "quality")).measure()
    newest = Quality.read(tmp_path / "quality", most=1)
    endpoint = Endpoint(0)
    try:
        endpoint.show(readings(newest))
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        with urllib.request.urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        endpoint.close()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    row = measured.windows.to_pylist()[-1]
    cell = f'column="{row["column"]}",metric="auc",route="{row["route"]}",value="{row["value"]}"'
    assert float(values[f"hotbed_quality_low{{{cell}}}"]) == row["auc_low"]
    of_canary = 'against="stable",column="",metric="log_loss",route="canary",value=""'
    assert float(values[f"hotbed_quality_difference_value{{{of_canary}}}"]) > 0
    assert float(values["hotbed_quality_window_end_seconds"]) == row["end"].timestamp()


def test_settings_are_checked(tmp_path: Path) -> None:
    stream = served_streams.drawn(20)
    write(tmp_path, stream, stream.served(stream.versions()))
    with pytest.raises(SchemaError, match=r"lack the columns \['nobody'\]"):
        quality_of(tmp_path, user="nobody").measure()
    with pytest.raises(SchemaError, match="'request_id' needs one number for each sample"):
        quality_of(tmp_path, score="request_id").measure()
    with pytest.raises(ConfigError, match=r"measure\.seconds: .* got 1000000000000"):
        quality_of(tmp_path, seconds=1e12)
    with pytest.raises(ConfigError, match=r"measure\.samples: needs a join"):
        hb.ServingQuality(hb.sources.RequestLog(tmp_path / "log"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"measure\.label: the join has no such label"):
        quality_of(tmp_path, label="lable")
    with pytest.raises(ConfigError, match="never end need windows and an output"):
        quality_of(tmp_path, follow=True)


def test_a_measure_file_holds_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show.console, "width", 80)
    file = tmp_path / "measure.yaml"
    file.write_text(
        "samples:\n"
        "  kind: join\n"
        f"  impressions: {{kind: request_log, where: {tmp_path}/log, follow: false}}\n"
        f"  outcomes: {{kind: parquet, path: {tmp_path}/outcomes/*.parquet}}\n"
        '  "on": [request_id, item]\n'
        "  within: 1800\n"
        "  time: served_at\n"
        "  unit: us\n"
        "user: user\n"
    )
    stream = served_streams.drawn()
    write(tmp_path, stream, stream.served(stream.versions()))
    command = ["measure", str(file), "--set", f"output={tmp_path}/quality"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert "2025-10-09 09:00 to 10:00 UTC" in printed.output
    newest = Quality.read(tmp_path / "quality", most=1)
    for row in [*newest.windows.to_pylist(), *newest.differences.to_pylist()]:
        for name in METRICS:
            assert f"{row[name]:.4f}" in printed.output, "a terminal of 80 columns has room for all"
    page = (tmp_path / "quality" / "report.html").read_text()
    assert "canary minus stable" in page
    quality = hb.ServingQuality.read(file, {"segments": ["segment"], "seconds": 60})
    assert quality.samples.on == ("request_id", "item")
    assert (quality.user, quality.segments, quality.seconds) == ("user", ("segment",), 60)
    with pytest.raises(ConfigError, match=r"measure.usr.*Did you mean 'user'"):
        hb.ServingQuality.read(file, {"usr": "user"})


def follow(folder: Path, num_windows: int | None, **settings: Any) -> None:
    """Measure a followed log until so many windows are there, then save; None: for ever."""
    quality = quality_of(folder, follow=True, output=str(folder / "quality"), **settings)
    place = folder / "quality" / "windows"

    def are_there() -> bool:
        return num_windows is not None and len(list(place.glob("*.parquet"))) >= num_windows

    quality.measure(are_there)


def test_a_followed_log_resumes_after_a_stop(tmp_path: Path) -> None:
    """The windows have the bits of the closed log, also where the log came in three parts."""
    stream = served_streams.drawn()
    rows = stream.served(stream.versions())
    write(tmp_path / "whole", stream, rows)
    whole = quality_of(tmp_path / "whole").measure()
    times = sorted(set(whole.windows["begin"].to_pylist()))
    for _ in write_parts(tmp_path / "parts", stream, rows, 2):
        follow(tmp_path / "parts", 1, every_seconds=0.01)
    follow(tmp_path / "parts", len(times) - 2)
    check_equal_bits(Quality.read(tmp_path / "parts" / "quality"), whole, len(times) - 2)
    with pytest.raises(PersistError, match="measured with other most"):
        follow(tmp_path / "parts", 1, most=3)


MINUTES = {"seconds": 300.0, "segments": ()}


def life(folder: str, num_windows: int | None, passage: int) -> int:
    """Measure a followed log in a fork; return the signal that ended it, 0 for none.

    It is killed at a passage of what makes files durable; 0: it is not.
    """

    def measure() -> None:
        kill_at(passage, "fsync", "replace", "rename")
        follow(Path(folder), num_windows, every_seconds=0.0, **MINUTES)

    return ending_signal(measure)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_kills_change_nothing(kills: int, tmp_path: Path) -> None:
    """Each life is killed at a moment of its own; the windows have the bits of the closed log."""
    stream = served_streams.drawn(300, hours=6)
    rows = stream.served(stream.versions())
    write(tmp_path / "whole", stream, rows)
    whole = quality_of(tmp_path / "whole", **MINUTES).measure()
    num_windows = len(whole.windows["begin"].unique()) - 6
    folder = tmp_path / "killed"
    choose = random.Random(0)
    measured = set()
    for _ in write_parts(folder, stream, rows, kills):
        assert SERVER.call(life, str(folder), None, choose.randint(1, 60)) == signal.SIGKILL
        measured.add(len(list((folder / "quality" / "windows").glob("*.parquet"))))
    assert len(measured) > kills / 4, "the lives were killed too early to measure windows"
    assert SERVER.call(life, str(folder), num_windows, 0) == 0
    check_equal_bits(Quality.read(folder / "quality"), whole, num_windows)


def check_equal_bits(measured: Quality, whole: Quality, num_windows: int) -> None:
    """Check that windows have the bits of those of the closed log, and that no one lacks."""
    bounds = pl.from_arrow(measured.windows)["begin"].unique()
    assert len(bounds) >= num_windows
    for one, other in (
        (measured.windows, whole.windows),
        (measured.differences, whole.differences),
    ):
        expected = pl.from_arrow(other).filter(pl.col("begin").is_in(bounds.implode()))
        assert pl.from_arrow(one).equals(expected)
