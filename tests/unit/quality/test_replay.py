# SPDX-License-Identifier: Apache-2.0
"""A replay of a log, in a world whose click probabilities are known.

`tests/soak/test_replay.py` has more worlds and jobs.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from forked import SERVER, ending_signal, kill_at
from typer.testing import CliRunner

pytest.importorskip("torch", reason="torch absent")

from served_streams import WITHIN, write_log
from simulated_world import EXAMINATION, World, job, replay, scores_of, write_world

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.errors import ConfigError, DataError, FormatError, PersistError, SchemaError
from hotbed.job.states import has_state
from hotbed.metrics.clustered import Clustered
from hotbed.persist.container.format import open_checkpoint
from hotbed.quality.click_model import ClickModel, ShownLists, places_by
from hotbed.quality.prediction import predict
from hotbed.quality.replay import LoggedRows, Replayed
from hotbed.quality.scoring import ScoreWhenShown

WORLD = World.drawn(3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame]:
    """A folder with a log and outcomes, and what was served."""
    folder = tmp_path_factory.mktemp("world")
    rows = WORLD.served(WORLD.requests(1500, seed=4), seed=5)
    write_world(folder, rows)
    return folder, rows


def replayed(folder: Path, names: tuple[str, ...], output: Path, **settings: Any) -> Replayed:
    result = replay(folder, names, output, **settings).replay()
    assert result is not None
    return result


@pytest.mark.parametrize(
    "names",
    [
        ("item", "noise"),
        pytest.param(("coarse item", "crossed"), marks=pytest.mark.soak),
        ("noise",),
    ],
)
def test_the_better_job_is_predicted(
    names: tuple[str, ...], served: tuple[Path, pl.DataFrame], tmp_path: Path
) -> None:
    """The truth is what the simulator earns with the learned jobs from requests to come."""
    folder, _ = served
    prediction = replayed(folder, names, tmp_path / "replay").prediction
    fresh = WORLD.requests(4000, seed=6)
    rates = {"logged": WORLD.true_rate(fresh, WORLD.served(fresh)["score"].to_numpy())}
    for side in ("replay", "base")[: len(names)]:
        rates[side] = WORLD.true_rate(fresh, scores_of(tmp_path / "replay" / side, fresh))
    difference = rates["replay"] - rates[prediction.against]
    assert prediction.difference.value * difference > 0
    for side, rate in rates.items():
        assert prediction.rates[side].value == pytest.approx(rate, rel=0.1), side
    assert prediction.is_determined


def test_equal_jobs_do_not_differ(served: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    folder, _ = served
    result = replayed(folder, ("item", "item"), tmp_path, warm_up=0.25)
    difference = result.prediction.difference
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert result.prediction.same_first == 1
    assert result.prediction.lists == pytest.approx(1500 * 0.75, rel=0.02)
    (paired,) = [
        row
        for row in result.whole.differences.to_pylist()
        if row["route"] == "replay" and row["column"] is None
    ]
    assert paired["against"] == "base"
    assert paired["auc"] == paired["auc_low"] == paired["log_loss_high"] == 0
    windows = {
        row["route"]: row for row in result.quality.windows.to_pylist() if row["column"] is None
    }
    assert windows["replay"]["samples"] == windows[None]["samples"]
    table = pl.read_parquet(tmp_path / "prediction.parquet")
    assert table["side"].to_list() == ["logged", "base", "replay", "replay"]
    page = (tmp_path / "report.html").read_text()
    assert "cannot tell the two apart" in page
    assert "Other candidates would have been shown" in page


def test_a_score_depends_on_outcomes_known_before(tmp_path: Path) -> None:
    """Clicks from a moment on count for no candidate shown until the first of them was known."""
    rows = WORLD.served(WORLD.requests(500, seed=7, hours=4.0))
    moment = int(rows["served_at"][rows.height // 2])
    later = pl.col("served_at") >= moment
    turned = rows.with_columns(label=pl.when(later).then(1 - pl.col("label")).otherwise("label"))
    scores = []
    for number, world in enumerate((rows, turned)):
        folder = tmp_path / str(number)
        write_world(folder, world)
        replayed(folder, ("item",), folder / "replay")
        scores.append(np.fromfile(folder / "replay" / "replay" / "scores.f32", np.float32))
    num_known = min(map(len, scores))
    before = rows["served_at"].to_numpy()[:num_known] <= moment + WITHIN * 1_000_000
    is_equal = scores[0][:num_known] == scores[1][:num_known]
    assert is_equal[before].all()
    assert is_equal[~before].mean() < 0.5


def life(folder: str, output: str, every: int, passage: int) -> int:
    """Replay in a fork that is killed at a passage of `os.fsync`, in any thread; 0: it is not.

    `every`: steps between two states.
    """

    def replay_often() -> None:
        kill_at(passage, "fsync")
        replaying = replay(Path(folder), ("crossed",), Path(output))
        often = dataclasses.replace(replaying.job, checkpoint={"every_steps": every, "wait": True})
        dataclasses.replace(replaying, job=often).replay()

    return ending_signal(replay_often)


@pytest.mark.parametrize(
    ("every", "passages"), [(6, (50, 30)), pytest.param(1, range(15, 35), marks=pytest.mark.soak)]
)
def test_kills_change_nothing(
    every: int, passages: Sequence[int], served: tuple[Path, pl.DataFrame], tmp_path: Path
) -> None:
    """Scores and prediction have the bits of a replay that was never killed."""
    folder, _ = served
    assert SERVER.call(life, str(folder), str(tmp_path / "whole"), every, 0) == 0
    output = tmp_path / "killed"
    steps = []
    for passage in passages:
        assert SERVER.call(life, str(folder), str(output), every, passage) == signal.SIGKILL
        states = output / "replay" / "checkpoint"
        learned = open_checkpoint(states).manifest.counters["steps"] if has_state(states) else 0
        steps.append(learned)
    assert 0 < steps[-1] < 47, "the lives were killed while they learned"
    assert len(set(steps)) > len(steps) / 2
    assert SERVER.call(life, str(folder), str(output), every, 0) == 0
    for name in ("replay/scores.f32", "prediction.parquet"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_torn_files_of_a_replay_are_named(
    served: tuple[Path, pl.DataFrame], tmp_path: Path
) -> None:
    (tmp_path / "replay").mkdir()
    for content in ("", "[1]"):
        (tmp_path / "replay" / "replay.json").write_text(content)
        with pytest.raises(FormatError, match=r"replay\.json: expected the settings"):
            replayed(served[0], ("item",), tmp_path)
    file = tmp_path / "scores.f32"
    scoring = ScoreWhenShown(job("item", tmp_path), np.arange(3), 0, "label", file)
    for num_bytes, num_scores in ((None, 0), (11, 2)):
        if num_bytes is not None:
            file.write_bytes(bytes(num_bytes))
        with pytest.raises(PersistError, match=rf"scores\.f32: .* of 3 rows, got {num_scores}"):
            scoring.scores()


def lists_of(rows: pl.DataFrame, groups: int) -> ShownLists:
    """Return served rows as lists; users form some groups."""
    score = rows["score"].to_numpy().astype(np.float64)
    of_list = np.repeat(np.arange(rows.height // 8), 8)
    return ShownLists(
        rows["label"].to_numpy(),
        score,
        (rows["route"] == "canary").to_numpy().astype(np.int64),
        places_by(score, of_list),
        of_list,
        rows["user"].to_numpy() % groups,
    )


def test_examinations_are_found() -> None:
    """Of candidates that attract by their scores, the places explain the rest."""
    rows = WORLD.served(WORLD.requests(6000, seed=8))
    lists = lists_of(rows, 400)
    assert np.array_equal(lists.place, rows["place"].to_numpy())
    model = ClickModel(lists)
    assert model.examination == pytest.approx(EXAMINATION, abs=0.1)
    logged = model.rate(lists.place)
    assert logged.values["rate"] == pytest.approx(lists.label.mean(), abs=1e-12)


def test_an_interval_is_that_of_a_jackknife() -> None:
    """A jackknife fits the model anew without each of some groups of users."""
    rows = WORLD.served(WORLD.requests(2000, seed=8))
    groups = 25

    def difference(part: pl.DataFrame) -> Clustered:
        lists = lists_of(part, groups)
        model = ClickModel(lists)
        places = lists.ordered_by(part["attraction"].to_numpy())
        return model.rate(places).minus(model.rate(lists.place))

    values = [
        difference(rows.filter(pl.col("user") % groups != group)).values["rate"]
        for group in range(groups)
    ]
    deviation = np.std(values) * (groups - 1) ** 0.5
    assert difference(rows).error("rate") == pytest.approx(deviation, rel=0.15)


def test_places_that_scores_decide_are_not_determined() -> None:
    """Each list has the same scores in the same order: places or candidates may be the reason."""
    score = np.tile([0.9, 0.5, 0.1], 200)
    of_list = np.repeat(np.arange(200), 3)
    label = (np.random.default_rng(0).random(600) < score / 2).astype(np.float64)
    place = places_by(score, of_list)
    lists = ShownLists(label, score, np.zeros(600, np.int64), place, of_list, of_list)
    assert not ClickModel(lists).is_determined


def test_lists_without_a_choice_are_named() -> None:
    """One candidate cannot be shown in another order, and no click tells nothing."""
    columns = {
        "time": np.arange(40),
        "score": np.linspace(0.1, 0.9, 40),
        "label": np.tile([0.0, 1.0], 20),
        "request": [f"r{number}" for number in range(40)],
        "position": np.zeros(40, np.int64),
        "version": ["1"] * 40,
        "digest": ["d"] * 40,
        "route": ["stable"] * 40,
        "user": [f"u{number}" for number in range(40)],
    }
    scores = {"replay": np.ones(40, np.float32)}
    prediction = predict(pa.table(columns), scores, 0.95)
    assert prediction.difference.value == 0
    assert any("one candidate" in limit for limit in prediction.limits)
    with pytest.raises(DataError, match="needs clicks, got none of 40"):
        predict(pa.table({**columns, "label": np.zeros(40)}), scores, 0.95)


def test_the_column_of_places_is_read(served: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    """It says the places that scores say, so that the prediction is the same."""
    folder, rows = served
    write_world(tmp_path, rows, columns=["place"])
    by_score = replayed(folder, ("item",), tmp_path / "one").prediction
    by_column = replayed(tmp_path, ("item",), tmp_path / "two", place="place").prediction
    assert by_column.difference == by_score.difference


def test_a_job_begins_with_a_state(served: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    """It knows more than one that begins with nothing, and all rows count."""
    folder, _ = served
    first = replayed(folder, ("crossed",), tmp_path / "first", warm_up=0.0)
    start = tmp_path / "first" / "replay" / "checkpoint"
    second = replayed(folder, ("crossed",), tmp_path / "second", start=start)
    assert second.prediction.lists == first.prediction.lists
    losses = []
    for result in (first, second):
        rows = result.whole.windows.to_pylist()
        losses += [row["log_loss"] for row in rows if row["route"] == "replay"][:1]
    assert losses[1] < losses[0]
    with pytest.raises(ConfigError, match="its columns are not those"):
        replayed(folder, ("item",), tmp_path / "third", start=start)


def test_a_job_that_publishes_does_not_publish_in_a_replay(
    served: tuple[Path, pl.DataFrame], tmp_path: Path
) -> None:
    folder, _ = served
    spec = job("item", tmp_path / "own").to_json()
    place = tmp_path / "published"
    spec["checkpoint"] = {"publish": {"kind": "publish_directory", "path": str(place)}}
    spec["stream_callbacks"] = [{"kind": "prometheus", "port": 1}]
    replaying = replay(folder, ("item",), tmp_path / "out")
    hb.JobReplay(replaying.measure, hb.Job.from_json(spec)).replay()
    assert not place.exists()
    assert not (tmp_path / "own").exists()


def test_wrong_input_is_named(served: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    folder, rows = served
    good = replay(folder, ("item",), tmp_path / "out")
    lacking = hb.Job.from_json(
        {**job("item", tmp_path).to_json(), "schema": {"columns": [{"kind": "id", "name": "age"}]}}
    )
    with pytest.raises(SchemaError, match="age"):
        hb.JobReplay(good.measure, lacking).replay()
    with pytest.raises(ConfigError, match=r"replay of a job with other schema"):
        good.replay()
    with pytest.raises(SchemaError, match=r"replay\.place: the samples lack the column"):
        replay(folder, ("item",), tmp_path / "a", place="slot").replay()
    with pytest.raises(SchemaError, match=r"replay\.place: a place is a whole number"):
        replay(folder, ("item",), tmp_path / "a", place="segment").replay()
    with pytest.raises(ConfigError, match=r"replay\.warm_up"):
        replay(folder, ("item",), tmp_path / "a", warm_up=2)
    with pytest.raises(ConfigError, match=r"its `output` holds the states"):
        hb.JobReplay(hb.ServingQuality(good.measure.samples), good.job)
    silent = tmp_path / "silent"
    write_world(silent, rows.with_columns(label=pl.lit(0.0)))
    with pytest.raises(DataError, match="it needs candidates with an outcome"):
        replay(silent, ("item",), tmp_path / "b").replay()
    topic = hb.sources.Join(
        good.measure.samples.impressions,
        hb.sources.Kafka("localhost:1", "clicks"),
        on=["request_id", "item"],
        within=WITHIN,
        time="served_at",
        unit="us",
    )
    endless = hb.ServingQuality(topic, output=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"a log and outcomes that end, got \['Kafka'\]"):
        hb.JobReplay(endless, good.job)


def test_times_out_of_order_are_named(served: tuple[Path, pl.DataFrame], tmp_path: Path) -> None:
    """A job would learn the later day first; sorted, the log is the same as ever."""
    folder, rows = served
    half = rows.height // 2
    columns = ["item", "user", "segment"]
    write_log(tmp_path / "log", rows.tail(half), 0, columns)
    write_log(tmp_path / "log", rows.head(half), 1, columns)
    (tmp_path / "outcomes").symlink_to(folder / "outcomes")
    replaying = replay(tmp_path, ("item",), tmp_path / "out")
    with pytest.raises(DataError, match="must be in the order of time"):
        replaying.replay()
    measure = replaying.measure
    log = dataclasses.replace(
        measure.samples, impressions=hb.sources.Sort(measure.samples.impressions, "served_at")
    )
    sorted_rows = LoggedRows.read(dataclasses.replace(measure, samples=log), None)
    as_served = LoggedRows.read(replay(folder, ("item",), tmp_path / "out").measure, None)
    assert sorted_rows.table.equals(as_served.table)


def test_the_command_takes_a_log_or_a_file(
    served: tuple[Path, pl.DataFrame], tmp_path: Path
) -> None:
    folder, _ = served
    joined = {
        "kind": "join",
        "impressions": {"kind": "request_log", "where": "elsewhere"},
        "outcomes": {"kind": "parquet", "path": f"{folder}/outcomes/*.parquet"},
        "on": ["request_id", "item"],
        "within": WITHIN,
        "time": "served_at",
        "unit": "us",
    }
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**job("item", tmp_path / "own").to_json(), "stream": joined}))
    runner = CliRunner()
    command = ["replay", str(folder / "log"), "--job", str(other), "--set", "user=user"]
    printed = runner.invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert "Predicted click rate of replay minus logged" in printed.output
    assert "What this cannot know:" in printed.output
    measure = tmp_path / "measure.json"
    joined["impressions"] = {"kind": "request_log", "where": str(folder / "log")}
    measure.write_text(json.dumps({"samples": joined, "user": "user"}))
    again = runner.invoke(app, ["replay", str(measure), "--job", str(other)])
    assert again.exit_code == 0, again.output
    assert again.output.splitlines()[-8:] == printed.output.splitlines()[-8:]
