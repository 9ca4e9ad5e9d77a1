# SPDX-License-Identifier: Apache-2.0
"""Callbacks: validation, stopping, learning rates, best weights, clipping, eviction, history."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from rich.console import Console

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.optim.schedule import Hold, Warmup
from hotbed.training.callbacks import (
    BestWeights,
    ClipGradients,
    EarlyStopping,
    Evict,
    LearningRate,
    ReducePlateau,
    TensorBoard,
    Validate,
)
from hotbed.training.run import EVENTS, Callbacks
from hotbed.training.watching.history import History, ReliabilityWatch
from hotbed.training.watching.progress import ProgressBar
from hotbed.training.watching.report import write_report


class Script:
    """Overwrites the validation metric with given values, one a validation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_epoch_end(self, run: Any) -> None:
        run.metrics["valid.auc"] = self.values[run.epoch]


def fit(model: hb.RecModel, data: Any, values: list[float], *callbacks: Any) -> History:
    steps = [Validate(), Script(values), *callbacks]
    return model.fit(data, data, epochs=len(values), callbacks=steps, progress=False)


def test_a_misspelt_hook_is_an_error_that_suggests_the_right_one(
    dataset: Any, network: Any
) -> None:
    class Wrong:
        def on_step_ends(self, run: Any) -> None: ...

    with pytest.raises(ConfigError, match="Did you mean 'on_step_end'"):
        hb.RecModel(network(), "bce", "adam").fit(dataset(64), callbacks=Wrong(), progress=False)


def test_hooks_are_called_in_order(dataset: Any, network: Any) -> None:
    calls: list[str] = []
    recorder = type(
        "Recorder",
        (),
        {event: lambda self, run, event=event: calls.append(event) for event in EVENTS},
    )()
    hb.RecModel(network(), "bce", "adam").fit(
        dataset(128), epochs=2, callbacks=recorder, progress=False
    )
    step = ["on_step_begin", "on_gradients", "on_step_end"]
    epoch = ["on_epoch_begin", *step, *step, "on_epoch_end"]
    assert calls == ["on_fit_begin", *epoch, *epoch, "on_fit_end"]


def test_the_end_of_a_failed_fit_is_called_too(dataset: Any, network: Any) -> None:
    calls: list[str] = []

    class Fails:
        def on_step_end(self, run: Any) -> None:
            raise RuntimeError("disk full")

        def on_fit_end(self, run: Any) -> None:
            calls.append("end")

    with pytest.raises(RuntimeError, match="disk full"):
        hb.RecModel(network(), "bce", "adam").fit(dataset(64), callbacks=Fails(), progress=False)
    assert calls == ["end"]


def test_validation_runs_each_epoch_and_every_n_steps(dataset: Any, network: Any) -> None:
    seen: list[int] = []

    class Watch:
        def on_step_end(self, run: Any) -> None:
            seen.extend([run.step] if run.validated else [])

        def on_epoch_end(self, run: Any) -> None:
            seen.extend([run.step] if run.validated else [])

    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    model.fit(
        dataset(640),
        dataset(64),
        callbacks=[Validate(every_steps=4), Watch()],
        epochs=2,
        progress=False,
    )
    assert seen == [4, 8, 10, 12, 16, 20]


def test_validation_without_data_says_so(dataset: Any, network: Any) -> None:
    with pytest.raises(ConfigError, match="Validate: it needs data"):
        hb.RecModel(network(), "bce", "adam").fit(dataset(64), callbacks=Validate(), progress=False)


def test_training_stops_after_patience_without_progress(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    history = fit(
        model, dataset(64), [0.5, 0.6, 0.6, 0.59, 0.9, 0.9], EarlyStopping("auc", patience=2)
    )
    assert len(history.epochs) == 4


def test_a_smaller_loss_is_better_and_nan_never_is(dataset: Any, network: Any) -> None:
    judge = EarlyStopping("valid.log_loss", patience=1)
    model = hb.RecModel(network(), "bce", "adam", {"log_loss"})
    values = iter([0.7, 0.6, float("nan"), 0.1])

    class Loss:
        def on_epoch_end(self, run: Any) -> None:
            run.metrics["valid.log_loss"] = next(values)

    history = model.fit(dataset(64), dataset(64), 4, [Validate(), Loss(), judge], progress=False)
    assert len(history.epochs) == 3
    assert judge.best == 0.6


def test_an_unknown_metric_to_watch_lists_those_there_are(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    with pytest.raises(ConfigError, match=r"Did you mean 'valid\.auc'"):
        model.fit(dataset(64), dataset(64), callbacks=EarlyStopping("valid.acu"), progress=False)


def test_a_plateau_lowers_the_rates_of_dense_parameters_and_tables(
    dataset: Any, network: Any
) -> None:
    model = hb.RecModel(network(), "bce", hb.Adam(lr=0.01), {"auc"})
    fit(model, dataset(64), [0.6, 0.5, 0.5, 0.7], ReducePlateau("auc", patience=1, min_lr=2e-4))
    assert model.learner.dense.param_groups[0]["lr"] == pytest.approx(2e-4)
    assert [group["lr"] for group in model.learner.sparse.param_groups] == pytest.approx(
        [0.1 * 0.01]
    )


def test_the_best_weights_come_back_with_tables_optimizer_and_their_metrics(
    dataset: Any, network: Any, world: Any, tmp_path: Path
) -> None:
    states: list[Any] = []

    class Keep:
        def on_epoch_end(self, run: Any) -> None:
            states.append(world.snapshot(run.model))

    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    history = model.fit(
        _Each([dataset(128, seed) for seed in range(3)]),
        dataset(64),
        3,
        [Validate(), Script([0.5, 0.9, 0.7]), BestWeights("auc"), Keep()],
        progress=False,
    )
    assert not world.same(states[1], states[2])
    assert world.same(states[1], world.snapshot(model))
    _check_that_the_history_is_of_the_kept_epoch(history, model, dataset(64), tmp_path)


def _check_that_the_history_is_of_the_kept_epoch(
    history: Any, model: hb.RecModel, valid: Any, tmp_path: Path
) -> None:
    curves = ReliabilityWatch()
    loss = model.evaluate(valid, curves)["loss"]
    assert history.kept is not None
    assert (history.kept.epoch, history.metrics["valid.auc"]) == (2, 0.9)
    assert history.metrics["valid.loss"] == history.epochs[1]["valid.loss"] == pytest.approx(loss)
    assert history.reliability["valid"].curve() == curves.curves[""].curve()
    for name, table in model.tables.items():
        assert history.tables[name]["rows"] == len(table)
    later = model.fit(valid, progress=False)
    assert later.follows(history)
    page = write_report(tmp_path / "report.html", {"train": history}).read_text()
    assert "<b>2 of 3</b><span>kept epoch, train</span>" in page
    assert "<b>0.9</b><span>validation auc</span>" in page
    assert "2 (kept)" in page
    assert page.count(">kept</text>") >= 3  # of the loss, of metrics and of the rows


class _Each:
    """Another dataset each epoch, so that later epochs bring new ids."""

    def __init__(self, epochs: list[Any]) -> None:
        self.epochs = epochs

    def __iter__(self) -> Any:
        self.epochs.append(self.epochs.pop(0))
        return iter(self.epochs[-1])


def test_clipping_bounds_the_norm_of_dense_and_row_gradients_together(
    dataset: Any, network: Any, world: Any
) -> None:
    norms: list[float] = []

    class Norm:
        def on_gradients(self, run: Any) -> None:
            gradients = [parameter.grad for parameter in run.learner.parameters()]
            norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))

    model = hb.RecModel(network(), "bce", "adam")
    model.fit(dataset(256), callbacks=[Norm(), ClipGradients(1e-3), Norm()], progress=False)
    assert all(before > 1e-3 for before in norms[::2])
    assert norms[1::2] == pytest.approx([1e-3] * 4, rel=1e-3)

    class TorchClip:
        def on_gradients(self, run: Any) -> None:
            torch.nn.utils.clip_grad_norm_(run.learner.parameters(), 1e-3)

    other = hb.RecModel(network(), "bce", "adam")
    other.fit(dataset(256), callbacks=[TorchClip()], progress=False)
    assert world.same(world.snapshot(model), world.snapshot(other))


def test_a_schedule_moves_both_optimizers(dataset: Any, network: Any) -> None:
    rates: list[tuple[float, float]] = []

    class Rates:
        def on_gradients(self, run: Any) -> None:
            groups = (run.learner.dense.param_groups[0], run.learner.sparse.param_groups[0])
            rates.append((groups[0]["lr"], groups[1]["lr"]))

    model = hb.RecModel(network(), "bce", hb.Adam(lr=0.01))
    model.fit(dataset(256), callbacks=[LearningRate(Warmup(4)), Rates()], progress=False)
    np.testing.assert_allclose(rates, [(0.01 * f, 0.1 * f) for f in (0.25, 0.5, 0.75, 1.0)])
    rates.clear()
    model.dense_learning_rate = 0.04
    model.table_learning_rates = 0.2
    model.fit(dataset(256), callbacks=[LearningRate(Warmup(4)), Rates()], progress=False)
    np.testing.assert_allclose(rates, [(0.04 * f, 0.2 * f) for f in (0.25, 0.5, 0.75, 1.0)])
    torch_made = LearningRate(
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    model = hb.RecModel(network(), "bce", hb.Adam(lr=0.01))
    model.fit(dataset(128), callbacks=[torch_made], progress=False)
    assert model.learner.sparse.param_groups[0]["lr"] == pytest.approx(0.025)


def test_the_class_of_a_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got the class EarlyStopping\. Give EarlyStopping\(…\)"):
        Callbacks([EarlyStopping])


def test_a_schedule_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Hold\.steps"):
        Hold(0)


def test_eviction_happens_by_steps_in_event_time(dataset: Any, network: Any) -> None:
    # 64 events a batch, one a second
    model = hb.RecModel(network(evict=hb.Ttl(seconds=100)), "bce", "adam")
    seen: list[tuple[int, int]] = []

    class Watch:
        def on_step_end(self, run: Any) -> None:
            seen.append((run.step, run.tables["user"].stats["evicted"]))

    model.fit(dataset(640), callbacks=[Evict(step_interval=5), Watch()], progress=False)
    assert [step for step, _ in seen] == list(range(1, 11))
    assert seen[3][1] == 0
    assert 0 < seen[4][1] == seen[8][1] < seen[9][1]


def test_history_keeps_a_bounded_number_of_points(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.training.watching.history.MAX_POINTS", 32)
    model = hb.RecModel(network(), "bce", "adam")
    batch = hb.Batch(
        {"user": hb.Ids(np.arange(2)), "item": hb.Ids(np.arange(2))},
        {"x": np.ones(2, np.float32)},
        {"y": np.ones(2, np.float32)},
        time=np.arange(2),
    )
    history = model.fit([batch] * 140, progress=False)
    assert 16 <= len(history.points) < 32
    steps = [point.step for point in history.points]
    assert steps == sorted(steps)
    assert steps[-1] >= 136
    assert all(np.isfinite(point.loss) for point in history.points)


def test_progress_shows_bars_on_a_terminal_and_a_line_elsewhere(dataset: Any, network: Any) -> None:
    for terminal in (True, False):
        sink = io.StringIO()
        console = Console(force_terminal=terminal, width=120, record=True, file=sink)
        model = hb.RecModel(network(), "bce", "adam", {"auc"})
        with console.file:
            model.fit(dataset(256), dataset(64), callbacks=ProgressBar(console), progress=False)
            text = console.export_text()
        assert "epoch 1/1" in text
        assert "samples/s" in text
        assert "valid.auc" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_receives_loss_metrics_rates_and_table_sizes(
    tmp_path: Any, dataset: Any, network: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    model.fit(
        dataset(256), dataset(64), callbacks=TensorBoard(tmp_path, every_steps=2), progress=False
    )
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"loss", "valid.auc", "lr/dense", "lr/tables", "tables/user/rows"} <= set(
        events.Tags()["scalars"]
    )


def test_best_weights_remove_their_folder_where_another_callback_fails_at_the_end(
    dataset: Any, network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails:
        def on_fit_end(self, run: Any) -> None:
            raise RuntimeError("the end failed")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders: list[list[Path]] = []

    class Watch:
        def on_epoch_end(self, run: Any) -> None:
            folders.append(list(tmp_path.iterdir()))

    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    with pytest.raises(RuntimeError, match="the end failed"):
        fit(model, dataset(64), [0.9, 0.5], Fails(), BestWeights("auc"), Watch())
    assert [len(folder) for folder in folders] == [1, 1]
    assert list(tmp_path.iterdir()) == []
