# SPDX-License-Identifier: Apache-2.0
"""Windows, Prometheus and TensorBoard show a stream as it was, and what they keep survives a
restart.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import urllib.request
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.connectors import Live, ReadPlan
from hotbed.connectors.status import status_of
from hotbed.errors import ConfigError, DataError, MissingExtra
from hotbed.logs import LogLines
from hotbed.testing import FakeStream
from hotbed.training.run import Counts
from hotbed.training.watching.history import History
from hotbed.training.watching.readings import readings
from hotbed.watch.run_status import read_status

from .conftest import SCHEMA, columns

SECOND = 1_000_000  # microseconds
FOUR = {"auc", "log_loss", "calibration", "normalized_entropy"}


def stream(model: hb.RecModel, data: Any, *callbacks: Any, **settings: Any) -> History:
    return model.fit(data, callbacks=list(callbacks), progressive=True, progress=False, **settings)


def model_of(network: Any, metrics: Any = ("auc",)) -> hb.RecModel:
    return hb.RecModel(network(), "bce", hb.Adam(lr=0.01), list(metrics))


def exact(scores: np.ndarray, labels: np.ndarray, name: str) -> float:
    metric = hb.metrics.get_metric(name)
    metric.update(scores, labels)
    return metric.eval()


def digested(state: Any) -> Any:
    """The part of a state that a content digest covers."""
    if not isinstance(state, dict):
        return state
    return {name: digested(value) for name, value in state.items() if not name.startswith("wall_")}


class Scores:
    """Keeps what the observer predicted, batch by batch."""

    def __init__(self) -> None:
        self.scores: list[np.ndarray] = []

    def on_predicted(self, run: Any) -> None:
        if self not in run.observer.watchers:
            run.observer.watchers.append(self)

    def watch(self, outputs: Any, example: Any) -> None:
        self.scores.append(outputs[1])


def test_windows_of_event_time_hold_the_progressive_metrics_of_their_samples(
    dataset: Any, network: Any
) -> None:
    """Event times are 0, 1, 2 … seconds: a window of 100 of them is cut inside batches of 64."""
    scores, windows = Scores(), hb.callbacks.Windows(seconds=100)
    history = stream(model_of(network), dataset(1000), scores, windows)
    seen = np.concatenate(scores.scores)
    labels = np.concatenate([batch.labels["y"] for batch in dataset(1000)])
    assert [(w.begin, w.end, w.rows, w.samples) for w in windows.points] == [
        (start * SECOND, (start + 100) * SECOND, 100, start + 100) for start in range(0, 1000, 100)
    ]
    for number, window in enumerate(windows.points):
        part = slice(number * 100, number * 100 + 100)
        assert set(window.values) == FOUR | {"loss"}
        for name in FOUR:
            assert window.values[name] == pytest.approx(
                exact(seen[part], labels[part], name), abs=1e-4
            )
        assert window.tables["user"]["rows"] > 0
        assert window.observed["bytes"] > 0
    assert history.windows == windows.points
    # the last one is open: no later sample has closed it
    assert windows.newest == windows.points[-2]


def test_windows_of_samples_close_when_they_are_full(dataset: Any, network: Any) -> None:
    windows = hb.callbacks.Windows(samples=256)
    stream(model_of(network), dataset(1024), windows)
    assert [(w.begin, w.end, w.rows) for w in windows.points] == [
        (i * SECOND, (i + 255) * SECOND, 256) for i in range(0, 1024, 256)
    ]
    assert windows.newest == windows.points[-1]


def test_metrics_of_windows_can_be_chosen(dataset: Any, network: Any) -> None:
    windows = hb.callbacks.Windows(samples=512, metrics=["accuracy", "gauc@user"])
    stream(model_of(network), dataset(1024), windows)
    assert set(windows.points[0].values) == {"loss", "accuracy", "gauc@user"}
    with pytest.raises(ConfigError, match="Did you mean 'auc'"):
        hb.callbacks.Windows(samples=5, metrics=["acu"])


def test_the_models_own_metrics_come_beside_the_four(dataset: Any, network: Any) -> None:
    windows = hb.callbacks.Windows(samples=512)
    stream(model_of(network, ["auc", "gauc@user"]), dataset(512), windows)
    assert set(windows.points[0].values) == FOUR | {"loss", "gauc@user"}


def test_without_predictions_the_training_forward_is_watched(dataset: Any, network: Any) -> None:
    windows = hb.callbacks.Windows(samples=256)
    history = model_of(network).fit(dataset(1024), epochs=2, callbacks=windows, progress=False)
    assert [w.rows for w in windows.points] == [256] * 8
    assert windows.points[-1].values["auc"] > windows.points[0].values["auc"]
    assert history.windows == windows.points


def test_a_stream_scored_by_the_training_forward_has_windows_too(
    dataset: Any, network: Any
) -> None:
    windows = hb.callbacks.Windows(samples=256)
    model_of(network).online_train(dataset(512), windows, progressive="training", progress=False)
    assert [(w.rows, set(w.values)) for w in windows.points] == [(256, FOUR | {"loss"})] * 2


def test_an_evaluation_has_windows_too_and_they_are_those_of_a_frozen_model(
    dataset: Any, network: Any
) -> None:
    model, windows = model_of(network), hb.callbacks.Windows(samples=256)
    stream(model, dataset(1024))
    values = model.evaluate(dataset(512, 3), callbacks=windows)
    assert np.average([w.values["log_loss"] for w in windows.points]) == pytest.approx(
        values["loss"], abs=1e-5
    )
    assert len(windows.points) == 2


def test_a_network_that_computes_its_own_loss_has_windows_of_counts(dataset: Any) -> None:
    import torch

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, batch: Any) -> Any:
            return self.layer(batch.dense["x"].reshape(-1, 1)).square().mean()

    windows = hb.callbacks.Windows(samples=256)
    hb.RecModel(Own(), None, hb.Adam()).fit(dataset(512), callbacks=windows, progress=False)
    assert [(w.rows, w.values) for w in windows.points] == [(256, {}), (256, {})]


def test_windows_of_seconds_without_times_are_an_error(network: Any, dataset: Any) -> None:
    data = [hb.Batch(b.ids, b.dense, b.labels) for b in dataset(64)]
    with pytest.raises(DataError, match="seconds are event time"):
        stream(model_of(network), data, hb.callbacks.Windows(seconds=1))


@pytest.mark.parametrize(
    "settings", [{"seconds": 150}, {"samples": 150}, {"samples": 64, "most": 4}]
)
def test_windows_and_history_go_on_from_their_states(
    dataset: Any, network: Any, settings: dict[str, Any]
) -> None:
    """Interrupted in the middle of a window and of a batch's window: what follows is what an
    unbroken run has.
    """
    batches = list(dataset(1536))

    def looks() -> tuple[hb.RecModel, hb.callbacks.Windows, History]:
        return model_of(network), hb.callbacks.Windows(**settings), History(every_steps=3)

    model, whole, history = looks()
    model.fit(batches, callbacks=[whole, history], progressive=True, progress=False)
    model, first, early = looks()

    class Save:
        """Takes the states as Checkpoint does, after a step."""

        runs_last = True
        states: tuple[Any, ...] = ()

        def on_step_end(self, run: Any) -> None:
            if run.step == 10:
                self.states = (first.state(), early.state(), run.observer.state())

    class Load:
        def __init__(self, states: tuple[Any, ...], *looks: Any) -> None:
            self.states, self.looks = states, looks

        def on_epoch_begin(self, run: Any) -> None:
            for state, one in zip(self.states, (*self.looks, run.observer), strict=True):
                one.load_state(state)
            run.counts = Counts(step=10, samples=640, now=639 * SECOND)

    save = Save()
    # two steps too many
    model.fit(batches[:12], callbacks=[first, early, save], progressive=True, progress=False)
    restored = model_of(network)
    stream(restored, batches[:10])
    _, second, late = looks()
    looks_again = [Load(save.states, second, late), second, late]
    restored.fit(
        batches[10:], callbacks=looks_again, epochs=range(1), progressive=True, progress=False
    )
    np.testing.assert_equal(digested(second.state()), digested(whole.state()))
    np.testing.assert_equal(digested(late.state()), digested(history.state()))
    for a, b in zip(whole.points, second.points, strict=True):
        assert (a.begin, a.end, a.rows, a.samples, a.values) == (
            b.begin,
            b.end,
            b.rows,
            b.samples,
            b.values,
        )


def test_states_before_the_first_batch_are_states(network: Any) -> None:
    for fresh in (lambda: hb.callbacks.Windows(samples=5), History):
        one, other = fresh(), fresh()
        other.load_state(one.state())
        np.testing.assert_equal(other.state(), one.state())


def test_the_state_of_windows_knows_neither_clock_nor_memory(dataset: Any, network: Any) -> None:
    states = []
    for clock in (1e9, 2e9):
        windows = hb.callbacks.Windows(samples=200)

        class At:
            def __init__(self, seconds: float) -> None:
                self.seconds = seconds

            def on_fit_begin(self, run: Any) -> None:
                run.clock.read = lambda: self.seconds

        stream(model_of(network), dataset(1024), At(clock), windows)
        assert windows.points[0].observed["freshness_seconds"] == pytest.approx(clock, rel=1e-6)
        states.append(digested(windows.state()))
    np.testing.assert_equal(states[0], states[1])


def test_a_stream_that_is_stopped_leaves_the_state_that_it_had(
    dataset: Any, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping looks at the open window and the last steps, and closes nothing: what follows is not
    moved by it.
    """
    # points are 4 steps apart at the end
    monkeypatch.setattr("hotbed.training.watching.history.MAX_POINTS", 8)
    batches = list(dataset(2048))
    seen: list[Any] = []

    class Save:
        runs_last = True

        def on_step_end(self, run: Any) -> None:
            history = next(one for one in run.callbacks.all if isinstance(one, History))
            seen.append(
                {
                    "windows": windows.state(),
                    "history": history.state(),
                    "observer": run.observer.state(),
                }
            )

        def on_fit_end(self, run: Any) -> None:
            self.on_step_end(run)

    windows = hb.callbacks.Windows(seconds=150)
    model = model_of(network)
    history = model.online_train(batches, [windows, Save()], max_steps=23, progress=False)
    np.testing.assert_equal(digested(seen[-1]), digested(seen[-2]))
    assert len(seen) == 24
    assert history.windows == windows.points
    assert [w.rows for w in history.windows] == [150] * 9 + [122]
    assert [point.step for point in history.points] == [4, 8, 12, 16, 20, 23]


def test_a_stream_resumed_from_a_checkpoint_has_the_windows_of_an_unbroken_one(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    """Killed after step 21 with the last checkpoint at step 16, of a table that evicts: steps 17 to
    21 come again.
    """

    class Kill:
        def on_step_end(self, run: Any) -> None:
            if run.step == 21:
                raise KeyboardInterrupt

    class Reasons:
        """What TensorBoard and Prometheus show of evictions after the newest step."""

        def on_step_end(self, run: Any) -> None:
            shown = [r for r in readings(run) if r.name == "table_evicted_by_reason"]
            self.counts = {tuple(r.labels.values()): r.value for r in shown}

    reasons = Reasons()

    def go(folder: str, *more: Any) -> tuple[hb.callbacks.Windows, History]:
        windows = hb.callbacks.Windows(seconds=150)
        evict = hb.callbacks.Evict(seconds_interval=200)
        model = hb.RecModel(
            network(evict=hb.Ttl(seconds=300)), "bce", hb.Adam(lr=0.01), ["auc", "gauc@user"]
        )
        checkpoint = hb.callbacks.Checkpoint(tmp_path / folder, every_steps=8, wait=True)
        with contextlib.suppress(KeyboardInterrupt):
            history = model.online_train(
                dataset(2048), [windows, evict, *more, reasons, checkpoint], progress=False
            )
            return windows, history
        return windows, History()

    whole, expected = go("whole")
    expected_reasons = reasons.counts
    go("killed", Kill())
    windows, history = go("killed")
    assert len(windows.points) == 14
    np.testing.assert_equal(digested(windows.state()), digested(whole.state()))
    np.testing.assert_equal(digested(history.state()), digested(expected.state()))
    assert history.metrics == expected.metrics
    assert expected_reasons["user", "expired"] > 0
    assert reasons.counts == expected_reasons
    assert history.evictions == expected.evictions
    page = Path(hb.report.write_report(tmp_path / "report.html", {"stream": history}))
    assert "Evicted rows by reason" in page.read_text()


def test_a_stream_without_a_terminal_says_where_it_is_now_and_then(
    dataset: Any, network: Any
) -> None:
    console = Console(force_terminal=False, width=300, record=True, file=io.StringIO())
    data = dataset(320)
    model_of(network).online_train(
        data, [hb.callbacks.ProgressBar(console, every_seconds=0)], progress=False
    )
    lines = console.export_text().splitlines()
    assert len(lines) == 6  # one a step, one at the end
    assert lines[0].startswith("stream  step 1  ")
    assert "event time 1970-01-01 00:05:19" in lines[-1]
    assert "auc" in lines[-1]
    assert "fresh" not in lines[-1]  # history that is played again has no freshness


def test_progress_lines_are_log_lines_where_these_are_json(
    dataset: Any,
    network: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [LogLines(as_json=True)])
    caplog.set_level(logging.INFO, "hotbed")  # loggers remember which levels are off
    console = Console(force_terminal=False, record=True, file=io.StringIO())
    bar = hb.callbacks.ProgressBar(console, every_seconds=0)
    model_of(network).online_train(dataset(64), [bar], progress=False)
    assert console.export_text() == ""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines if line["message"].startswith("stream  step 1  ")] == [
        "INFO"
    ] * 2


# --- Prometheus -----------------------------------------------------------------------------------


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line and line[0] != "#"
    }


def test_a_scrape_sees_the_stream_as_it_is(dataset: Any, network: Any) -> None:
    pages: list[dict[str, float]] = []
    prometheus = hb.callbacks.Prometheus(port=0, every_seconds=0)

    class Scrape:
        def on_step_end(self, run: Any) -> None:
            pages.append(scrape(prometheus.address))

    data, windows = dataset(640), hb.callbacks.Windows(samples=128)
    tower = network(admit=hb.MinCount(2, admission_bytes=1 << 16), capacity=9)
    model = hb.RecModel(tower, "bce", hb.Adam(lr=0.01), ["auc"])
    stream(model, data, windows, prometheus, Scrape())
    assert [page["hotbed_samples_total"] for page in pages] == [64 * (i + 1) for i in range(10)]
    last, tables = pages[-1], model.tables
    assert last["hotbed_steps_total"] == 10
    assert last['hotbed_table_rows{table="user"}'] == len(tables["user"])
    assert last['hotbed_table_capacity{table="user"}'] == 9
    assert last['hotbed_table_refused_total{table="item"}'] == tables["item"].stats["refused"] > 0
    sketched = tables["item"].stats["sketched_partitions"]
    assert last['hotbed_table_sketched_partitions{table="item"}'] == sketched
    assert last['hotbed_window_metric{metric="auc"}'] == windows.points[-1].values["auc"]
    assert last['hotbed_learning_rate{of="dense"}'] == 0.01
    assert last["hotbed_watermark_seconds"] == 639.0
    assert {"hotbed_loss", "hotbed_freshness_seconds", "hotbed_bytes"} <= set(last)
    assert {"hotbed_skipped_rows_total", "hotbed_dead_letters_total"} <= set(last)
    assert prometheus.address == ""  # the port is free again


def test_readings_of_a_stream_show_what_its_join_holds(
    dataset: Any, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FakeStream({"id": np.arange(90), "time": np.arange(90)}, then=30)
    clicks = hb.sources.Memory({"id": [3], "time": [5]})
    join = hb.sources.Join(shown, clicks, on="id", within=5, unit="s")
    rows = join.read(plan=ReadPlan(live=Live()))
    for _ in islice(rows, 30):
        pass
    seen: list[dict[tuple[str, ...], float]] = []

    class Look:
        def on_step_end(self, run: Any) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(hb.Dataset, "status", status_of(rows))
                values = readings(run)
            seen.append({(value.name, *value.labels.values()): value.value for value in values})

    stream(model_of(network), dataset(64), Look())
    values = seen[-1]
    assert values["join_impressions",] == 90
    assert values["join_open_impressions",] == 6  # of 84 to 89
    assert values["join_watermark_seconds",] == 89
    assert values["join_newest_seconds", "0", ""] == 89
    assert {("join_late",), ("join_unmatched",), ("join_spilled_bytes",)} <= set(values)


def test_the_endpoint_goes_with_an_error_and_comes_again(dataset: Any, network: Any) -> None:
    class Fail:
        def on_step_end(self, run: Any) -> None:
            raise RuntimeError("on purpose")

    prometheus = hb.callbacks.Prometheus(port=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            stream(model_of(network), dataset(64), prometheus, Fail())
        assert prometheus.address == ""


def test_a_port_that_is_taken_is_an_error_that_names_it(dataset: Any, network: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen, got 127.0.0.1:{port}"):
            stream(model_of(network), dataset(64), hb.callbacks.Prometheus(port=port))
    for arguments in ({"port": -1}, {"port": 65_536}, {"port": 0, "every_seconds": -1}):
        *_, key = arguments
        with pytest.raises(ConfigError, match=rf"Prometheus\.{key}: must be .*, got -?\d+\. Give"):
            hb.callbacks.Prometheus(**arguments)


def test_without_prometheus_client_the_error_says_what_to_install(
    dataset: Any, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"pip install hotbed\[prometheus\]"):
        stream(model_of(network), dataset(64), hb.callbacks.Prometheus(port=0))


# --- the status file ------------------------------------------------------------------------------


def test_status_file_says_what_a_run_did(dataset: Any, network: Any, tmp_path: Path) -> None:
    seen = []

    class Reader:
        def barrier(self, step: int, now: int | None) -> bool:
            return False

        def on_step_end(self, run: Any) -> None:
            seen.append(read_status(tmp_path))

    saves = hb.callbacks.Checkpoint(tmp_path, every_steps=4)
    writer = hb.callbacks.StatusFile(tmp_path, every_seconds=0)
    model = model_of(network)
    stream(model, dataset(512), Reader(), saves, writer)
    assert [status["step"] for status in seen] == list(range(8))
    assert {status["state"] for status in seen} == {"training"}
    last = read_status(tmp_path)
    assert (last["state"], last["step"], last["samples"]) == ("ended", 8, 512)
    assert last["rows"] == {name: table.stats["rows"] for name, table in model.tables.items()}
    assert last["watermark"] == 511
    assert last["saves"]["last_step"] == 8
    assert last["moments"]["samples"] == [*range(0, 513, 64), 512]
    assert last["moments"]["time"] == sorted(last["moments"]["time"])


def test_status_file_says_that_a_stream_waits_and_what_waits_for_it(
    network: Any, tmp_path: Path
) -> None:
    seen = []

    class Reader:
        runs_last = True

        def on_idle(self, run: Any) -> None:
            seen.append(read_status(tmp_path))
            run.stop("seen")

    events = FakeStream(columns(192), takes=[64, 0], then=0)
    dataset = hb.Dataset(events, SCHEMA, 64, prefetch=0)
    writer = hb.callbacks.StatusFile(tmp_path, every_seconds=0)
    model_of(network).online_train(dataset, [writer, Reader()], progress=False)
    assert [status["state"] for status in seen] == ["waiting"]
    assert seen[0]["observed"]["lag_rows"] == 128
    assert seen[0]["observed"]["source_reached"] == 1
    assert seen[0]["moments"]["lag_rows"][-1] == 128
    last = read_status(tmp_path)
    assert (last["state"], last["reason"], last["samples"]) == ("ended", "seen", 64)


def test_status_file_that_cannot_be_written_stops_no_training(
    dataset: Any, network: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.write_text("a file where the folder should be")
    writer = hb.callbacks.StatusFile(folder, every_seconds=0)
    with pytest.raises(ConfigError, match=r"StatusFile.folder: is not a folder"):
        writer.check_ready()
    with caplog.at_level(logging.WARNING, "hotbed"):
        history = stream(model_of(network), dataset(512), writer)
    assert history.points[-1].samples == 512
    assert caplog.text.count("not written, so that `hotbed watch` shows no news") == 1


def test_status_file_names_the_error_that_ended_a_run(
    dataset: Any, network: Any, tmp_path: Path
) -> None:
    class Fails:
        def on_step_end(self, run: Any) -> None:
            if run.step == 3:
                raise DataError("row 7 is bad")

    with pytest.raises(DataError):
        stream(model_of(network), dataset(512), Fails(), hb.callbacks.StatusFile(tmp_path))
    status = read_status(tmp_path)
    assert (status["state"], status["step"]) == ("failed", 3)
    assert status["error"] == "DataError: row 7 is bad"


# --- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_shows_windows_at_their_event_time(
    tmp_path: Path, dataset: Any, network: Any
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    windows, board = (
        hb.callbacks.Windows(samples=256),
        hb.callbacks.TensorBoard(tmp_path, every_steps=2),
    )
    stream(model_of(network), dataset(1024), windows, board)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "loss",
        "lr/dense",
        "lr/tables",
        "tables/user/rows",
        "tables/item/evicted",
        "tables/item/evicted_by_reason/expired",
        "tables/item/evicted_by_reason/restarted",
        "window/auc",
        "auc",
        "stream/watermark_seconds",
        "stream/freshness_seconds",
        "stream/bytes",
    } <= tags
    shown = events.Scalars("window/auc")
    assert [event.value for event in shown] == pytest.approx(
        [w.values["auc"] for w in windows.points]
    )
    assert [event.wall_time for event in shown] == pytest.approx(
        [w.end / 1e6 for w in windows.points]
    )
