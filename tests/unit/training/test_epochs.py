# SPDX-License-Identifier: Apache-2.0
"""fit over several calls: epochs are counted by the model, and a Checkpoint resumes inside an
epoch.

Kills are in tests/journey/test_kill.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.errors import ConfigError, DataError, PersistError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest
from hotbed.training.callbacks import (
    BestWeights,
    Checkpoint,
    EarlyStopping,
    Evict,
    ReducePlateau,
    Validate,
)

STEPS = 10  # of an epoch


@pytest.fixture
def shuffled(world: Any) -> Callable[[], hb.Dataset]:
    """shuffled(): 640 events, in another order each epoch."""

    def make() -> hb.Dataset:
        source = hb.sources.Memory(world.columns(640))
        return hb.Dataset(source, world.schema, 64, shuffle=100, prefetch=0)

    return make


@pytest.fixture
def model(network: Any) -> Callable[[], hb.RecModel]:
    return lambda: hb.RecModel(network(evict=hb.Ttl(seconds=200)), "bce", "adam", {"auc"})


def fit(model: hb.RecModel, data: Any, *rest: Any, **keywords: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return model.fit(data, *rest, progress=False, **keywords)


def digest(path: Path) -> str:
    return content_digest(open_checkpoint(path))


@pytest.mark.parametrize("saved", [False, True])
def test_fit_goes_through_the_epochs_as_one_fit_of_all_does(
    saved: bool, model: Any, shuffled: Any, network: Any, world: Any, tmp_path: Path
) -> None:
    whole, parts = model(), model()
    fit(whole, shuffled(), epochs=3)
    fit(parts, shuffled())
    if saved:
        parts.save(tmp_path)
        parts = hb.load(tmp_path)
    history = fit(parts, shuffled(), epochs=2)
    assert world.same(world.snapshot(whole), world.snapshot(parts))
    assert [row["epoch"] for row in history.epochs] == [2, 3]
    assert parts.counters["epochs"] == 3


def test_a_range_numbers_the_epochs_of_a_fit(model: Any, shuffled: Any, world: Any) -> None:
    first, second, other = model(), model(), model()
    for trained, epochs in ((first, 1), (second, range(1)), (other, range(4, 5))):
        fit(trained, shuffled(), epochs=epochs)
    assert world.same(world.snapshot(first), world.snapshot(second))
    assert not world.same(world.snapshot(first), world.snapshot(other))
    assert other.counters["epochs"] == 5
    for wrong in (range(-1, 2), range(2, 2), range(0, 4, 2), range(4, 2, -1)):
        with pytest.raises(ConfigError, match="epochs: expected consecutive numbers, got range"):
            fit(first, shuffled(), epochs=wrong)


def test_max_steps_ends_inside_an_epoch_which_is_then_not_counted(
    model: Any, shuffled: Any
) -> None:
    trained = model()
    history = fit(trained, shuffled(), shuffled(), epochs=3, max_steps=STEPS + 4)
    assert trained.counters == {"epochs": 1, "steps": STEPS + 4, "samples": (STEPS + 4) * 64}
    assert "valid.auc" in history.metrics
    fit(trained, shuffled(), epochs=3, max_steps=STEPS)
    assert trained.counters["epochs"] == 2


def test_evaluation_of_shuffled_data_gives_the_same_bits_each_time(
    model: Any, shuffled: Any
) -> None:
    trained, data = model(), shuffled()
    fit(trained, shuffled())
    first = trained.evaluate(data)
    assert [trained.evaluate(data) for _ in range(2)] == [first] * 2


def callbacks(path: Path, **keywords: Any) -> list[Any]:
    """Everything that remembers something of validations, and a Checkpoint that they are saved by."""
    return [
        Validate(every_steps=7),
        BestWeights("auc"),
        ReducePlateau("loss", patience=1),
        EarlyStopping("auc", patience=4),
        Evict(step_interval=6),
        Checkpoint(path, **{"every_steps": 3, "wait": True} | keywords),
    ]


def test_fit_left_at_any_step_resumes_to_the_bits_of_one_that_was_not(
    model: Any, shuffled: Any, world: Any, dataset: Any, tmp_path: Path
) -> None:
    """Epochs, validations, plateaus, the best weights and the history are those of an unbroken fit."""
    whole, parts = model(), model()
    torch.manual_seed(1)
    expected = fit(whole, shuffled(), dataset(256, 7), 4, callbacks(tmp_path / "whole"))
    for stop in (4, STEPS - 1, 2 * STEPS, 2 * STEPS + 1):
        broken = model()
        torch.manual_seed(1)
        fit(broken, shuffled(), dataset(256, 7), 4, callbacks(tmp_path / "parts"), max_steps=stop)
    torch.manual_seed(2)
    history = fit(parts, shuffled(), dataset(256, 7), 4, callbacks(tmp_path / "parts"))
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert world.same(world.snapshot(parts), world.snapshot(whole))
    wall = ("seconds", "samples_per_second")
    rows = [
        [{k: v for k, v in row.items() if k not in wall} for row in h.epochs]
        for h in (history, expected)
    ]
    assert rows[0] == rows[1]
    assert history.metrics == expected.metrics
    assert history.kept is not None
    assert expected.kept is not None
    assert (history.kept.step, history.kept.epoch) == (expected.kept.step, expected.kept.epoch)
    assert parts.counters == whole.counters


def test_fit_that_is_over_is_over_and_more_epochs_are_learned_on_top(
    model: Any, shuffled: Any, world: Any, tmp_path: Path, caplog: Any
) -> None:
    path = tmp_path / "parts"
    fit(model(), shuffled(), epochs=2, callbacks=Checkpoint(path))
    before = digest(path)
    again = model()
    fit(again, shuffled(), epochs=2, callbacks=Checkpoint(path))
    assert digest(path) == before
    assert "nothing to learn: 2 of 2 epochs are learned" in caplog.text
    fit(model(), shuffled(), epochs=3, callbacks=Checkpoint(path))
    fit(model(), shuffled(), epochs=3, callbacks=Checkpoint(tmp_path / "whole"))
    assert digest(path) == digest(tmp_path / "whole")
    fit(again, shuffled(), callbacks=Checkpoint(tmp_path / "own"))  # the model that has learned two
    assert again.counters["epochs"] == 3


def test_training_that_stopped_early_stays_stopped(
    model: Any, shuffled: Any, dataset: Any, tmp_path: Path
) -> None:
    def run() -> hb.RecModel:
        trained: hb.RecModel = model()
        stop = EarlyStopping("auc", patience=2, min_delta=1.0)
        fit(trained, shuffled(), dataset(256, 7), 9, [stop, Checkpoint(tmp_path / "state")])
        return trained

    assert [run().counters["epochs"] for _ in range(2)] == [3, 3]


def test_states_of_a_stream_and_of_a_fit_are_not_mixed(
    model: Any, shuffled: Any, tmp_path: Path
) -> None:
    fit(model(), shuffled(), callbacks=Checkpoint(tmp_path / "fit"))
    with pytest.raises(PersistError, match="no position in a stream"):
        model().online_train(shuffled(), Checkpoint(tmp_path / "fit"), progress=False)
    model().online_train(shuffled(), Checkpoint(tmp_path / "stream"), progress=False)
    for _ in range(2):  # the first leaves no lock behind
        with pytest.raises(PersistError, match="no position in a fit"):
            fit(model(), shuffled(), callbacks=Checkpoint(tmp_path / "stream"))


def test_fit_with_a_checkpoint_needs_a_dataset(model: Any, shuffled: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="Checkpoint: the data have no position to resume from, got list"
    ):
        fit(model(), list(shuffled()), callbacks=Checkpoint(tmp_path))


def test_error_in_a_fit_leaves_the_last_whole_step(
    model: Any, shuffled: Any, tmp_path: Path
) -> None:
    class Fails:
        def on_predicted(self, run: Any) -> None: ...

        def on_epoch_end(self, run: Any) -> None:
            raise RuntimeError("the end of the epoch")

    with pytest.raises(RuntimeError, match="the end of the epoch"):
        fit(
            model(),
            shuffled(),
            epochs=2,
            callbacks=[Fails(), Checkpoint(tmp_path / "parts", every_steps=4, wait=True)],
        )
    assert open_checkpoint(tmp_path / "parts").manifest.counters["steps"] == 8
    for path in (tmp_path / "parts", tmp_path / "whole"):
        fit(model(), shuffled(), epochs=2, callbacks=Checkpoint(path))
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_empty_training_data_are_an_error(model: Any, world: Any) -> None:
    empty = hb.Dataset(hb.sources.Memory(world.columns(0)), world.schema, 64)
    with pytest.raises(DataError, match=re.escape("train: an epoch needs a batch, got empty data")):
        fit(model(), empty)


def test_fit_leaves_out_a_damaged_file_whose_rows_it_cannot_count(tmp_path: Path) -> None:
    rows = pa.table({"y": [0, 1] * 50, "user": range(100)})
    for name in ("0", "1"):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    file = tmp_path / "1.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    source = hb.sources.Parquet(str(tmp_path / "*.parquet"))
    data = hb.Dataset(source, schema, batch_size=10, on_error="skip")
    assert data.num_batches is None
    network = hb.models.DCNv2(schema, hb.make_tables(schema, 2), hidden=(4,))
    model = hb.RecModel(network, "bce", "adam", grains=2)
    model.fit(data, valid=data, epochs=2, progress=False)
    assert (model.counters["steps"], data.num_batches) == (20, 10)
