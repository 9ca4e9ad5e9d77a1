# SPDX-License-Identifier: Apache-2.0
"""online_train: streams of any length, how they end, how they sink, what errors leave."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.errors import ConfigError


class Endless:
    """Batches again and again, with a tick before each; it has no length. `on_item(n)` is called
    before the n-th.
    """

    def __init__(self, batches: Any, on_item: Callable[[int], None] = lambda n: None) -> None:
        self.batches, self.on_item, self.closed = list(batches), on_item, 0

    def __iter__(self) -> Iterator[Any]:
        return (item for item in self.stream() if item is not None)

    def stream(self) -> Iterator[Any]:
        try:
            for n, batch in enumerate(itertools.cycle(self.batches)):
                self.on_item(n)
                yield None
                yield batch
        finally:
            self.closed += 1


class Recorder:
    """Keeps (event, step) of what it is told."""

    def __init__(self, events: tuple[str, ...]) -> None:
        self.seen: list[tuple[str, int]] = []
        for event in events:
            setattr(self, event, lambda run, event=event: self.seen.append((event, run.step)))


class Stop:
    """Ends training at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            run.stop("enough")


@pytest.fixture
def model(network: Any) -> hb.RecModel:
    return hb.RecModel(network(), "bce", "adam", {"log_loss"})


def test_a_stream_without_a_length_goes_on_until_a_callback_stops_it(
    model: Any, dataset: Any
) -> None:
    stream = Endless(dataset(192))
    history = model.online_train(stream, Stop(7), progress=False)
    assert model.counters["steps"] == 7
    assert stream.closed == 1
    assert np.isfinite(history.epochs[-1]["log_loss"])


def test_max_steps_and_max_seconds_end_it(model: Any, dataset: Any) -> None:
    model.online_train(Endless(dataset(192)), max_steps=5, progress=False)
    assert model.counters["steps"] == 5
    # the first tick is late enough
    model.online_train(Endless(dataset(192)), max_seconds=0.0, progress=False)
    assert model.counters["steps"] == 5
    model.online_train(Endless(dataset(192)), max_steps=0, progress=False)
    assert model.counters["steps"] == 5
    with pytest.raises(ConfigError, match="max_steps: must be an integer >= 0"):
        model.online_train(Endless(dataset(192)), max_steps=-1)


def test_a_finite_dataset_is_learned_once_as_a_progressive_fit_learns_it(
    dataset: Any, network: Any, world: Any
) -> None:
    models = [hb.RecModel(network(), "bce", "adam", {"auc"}) for _ in range(2)]
    torch.manual_seed(1)
    online = models[0].online_train(dataset(640), progress=False)
    torch.manual_seed(1)
    offline = models[1].fit(dataset(640), progressive=True, progress=False)
    assert world.same(world.snapshot(models[0]), world.snapshot(models[1]))
    # of a stream, the AUC has bounded memory
    assert online.metrics == pytest.approx(offline.metrics, abs=1e-4)
    assert models[0].counters["steps"] == 10


def test_each_batch_is_predicted_before_it_is_learned_unless_not_wanted(
    model: Any, dataset: Any
) -> None:
    first = next(iter(dataset(64)))
    before = model.evaluate([first])["log_loss"]
    assert model.online_train([first], progress=False).metrics["log_loss"] == before
    assert "log_loss" not in model.online_train([first], progressive=False, progress=False).metrics


def test_the_training_forward_may_give_the_predictions(
    dataset: Any, network: Any, world: Any
) -> None:
    """Cheaper by one forward a batch; what is learned is the same, and a stream that is left and
    resumed too.
    """
    calls: list[bool] = []
    models = [hb.RecModel(network(), "bce", "adam", {"log_loss"}) for _ in range(2)]
    models[0].network.register_forward_hook(
        lambda module, inputs, output: calls.append(module.training)
    )
    history = models[0].online_train(dataset(640), progressive="training", progress=False)
    models[1].online_train(dataset(640), progress=False)
    assert calls == [True] * 10
    assert world.same(world.snapshot(models[0]), world.snapshot(models[1]))
    # of the same forward
    assert history.metrics["log_loss"] == pytest.approx(history.epochs[-1]["loss"])
    own = hb.RecModel(network(), "bce", "adam", {"log_loss"}, lambda batch: batch)
    with pytest.raises(ConfigError, match="the training forward gives no prediction"):
        own.online_train(dataset(64), progressive="training", progress=False)


def test_tuples_of_data_and_label_are_learned_too(network: Any) -> None:
    from torch import nn

    model = hb.RecModel(nn.Linear(3, 1), "mse", hb.Sgd(lr=0.1))
    rows = (np.ones((4, 3), np.float32), np.ones(4, np.float32))
    history = model.online_train(itertools.repeat(rows), max_steps=50, progress=False)
    assert history.points[-1].loss < 1e-3


def test_an_iterator_of_the_users_own_is_left_open(model: Any, dataset: Any) -> None:
    batches = itertools.cycle(list(dataset(192)))
    own = (batch for batch in batches)
    model.online_train(own, max_steps=2, progress=False)
    assert next(own) is not None


def test_what_never_ends_is_followed_and_not_fitted_or_evaluated(model: Any, world: Any) -> None:
    from hotbed.testing import FakeStream

    endless = hb.Dataset(FakeStream(world.columns(640)), world.schema, 64)
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ConfigError, match="the data never end"):
            call(endless)
    model.online_train(endless, max_steps=2, progress=False)


def test_ticks_reach_callbacks_and_can_end_it(model: Any, dataset: Any) -> None:
    class Idle:
        def __init__(self) -> None:
            self.ticks = 0

        def on_idle(self, run: Any) -> None:
            self.ticks += 1
            if self.ticks == 4:
                run.stop("idle")

    model.online_train(Endless(dataset(192)), Idle(), progress=False)
    assert model.counters["steps"] == 3


def test_the_events_of_a_stream_come_in_order(model: Any, dataset: Any) -> None:
    events = (
        "on_fit_begin",
        "on_stream_begin",
        "on_epoch_begin",
        "on_idle",
        "on_predicted",
        "on_gradients",
        "on_step_end",
        "on_stop",
        "on_stream_end",
        "on_epoch_end",
        "on_error",
        "on_fit_end",
    )
    recorder = Recorder(events)
    model.online_train(Endless(dataset(192)), [recorder], max_steps=1, progress=False)
    assert [event for event, _ in recorder.seen] == [
        event for event in events if event != "on_error"
    ]


def test_an_error_reaches_the_callbacks_and_then_the_caller(model: Any, dataset: Any) -> None:
    recorder = Recorder(("on_error", "on_epoch_end", "on_fit_end"))

    def fail(n: int) -> None:
        if n == 3:
            raise OSError("the broker is gone")

    with pytest.raises(OSError, match="the broker is gone"):
        model.online_train(Endless(dataset(192), fail), recorder, progress=False)
    assert recorder.seen == [("on_error", 3), ("on_fit_end", 3)]
    assert model.counters["steps"] == 3


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT as in a terminal: what is started in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_a_whole_step(
    number: int, model: Any, dataset: Any, caplog: Any
) -> None:
    handler = signal.getsignal(number)
    caplog.set_level(logging.INFO, "hotbed")
    model.online_train(
        Endless(dataset(192), lambda n: os.kill(os.getpid(), number) if n == 3 else None),
        progress=False,
    )
    assert model.counters["steps"] == 3
    assert signal.Signals(number).name in caplog.text
    assert signal.getsignal(number) is handler


@pytest.mark.usefixtures("heard")
def test_a_second_signal_ends_it_at_once(model: Any, dataset: Any) -> None:
    def twice(n: int) -> None:
        if n == 3:
            # to this thread, at once: two of os.kill may arrive as one
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        model.online_train(Endless(dataset(192), twice), progress=False)


def test_a_signal_that_the_process_ignores_stays_ignored(model: Any, dataset: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        model.online_train(
            Endless(dataset(192), lambda n: signal.raise_signal(signal.SIGINT)),
            max_steps=3,
            progress=False,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.counters["steps"] == 3


def test_off_the_main_thread_signals_are_left_alone(model: Any, dataset: Any) -> None:
    thread = threading.Thread(
        target=model.online_train, args=(Endless(dataset(192)), Stop(2)), kwargs={"progress": False}
    )
    thread.start()
    thread.join()
    assert model.counters["steps"] == 2


def test_a_stream_with_a_group_ends_by_a_signal_while_its_topic_is_quiet(tmp_path: Path) -> None:
    """Commits wait for nothing, neither at a checkpoint while no event comes nor at the end."""
    import confluent_kafka as kafka

    schema = hb.Schema([hb.Label("label"), hb.Id("item")])
    model = hb.RecModel(hb.models.LR(schema, hb.make_tables(schema, dim=2)), "bce", "adam")
    values: list[bytes | None] = [b'{"label": %d, "item": %d}' % (k % 2, k) for k in range(200)]
    with hb.testing.Broker() as broker:
        broker.create("quiet")
        broker.produce("quiet", values)
        source = hb.sources.Kafka(broker.servers, "quiet", group="trainer")
        dataset = hb.Dataset(source, schema, 64, flush_seconds=0.2)
        monitor = kafka.Consumer({"bootstrap.servers": broker.servers, "group.id": "trainer"})
        place = kafka.TopicPartition("quiet", 0)

        def stop_when_committed() -> None:
            while monitor.committed([place], timeout=10)[0].offset != 200:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=stop_when_committed)
        thread.start()
        saving = hb.callbacks.Checkpoint(tmp_path / "run", every_seconds=0.2)
        model.online_train(dataset, [saving], progress=False)
        thread.join()
        monitor.close()
    assert model.counters["samples"] == 200


def test_user_who_is_removed_in_a_stream_is_gone_from_its_states_and_versions(
    dataset: Any, network: Any, tmp_path: Path
) -> None:
    """The recipe of docs/persist.md; a removal that no state holds is made again after a resume."""

    class Forget:
        def __init__(self) -> None:
            self.removed = 0

        def on_step_end(self, run: Any) -> None:
            if run.step >= 3:
                ids = run.model.schema.ids_of("user", gone)
                self.removed += run.tables["user"].remove(ids)

    gone = next(iter(dataset(640))).ids["user"].values[:1].tolist()
    publisher = hb.PublishDirectory(tmp_path / "published")
    forget = Forget()
    model = hb.RecModel(network(), "bce", "adam")
    checkpoint = hb.callbacks.Checkpoint(
        tmp_path / "state", every_steps=2, wait=True, publish=publisher
    )
    model.online_train(dataset(640), [forget, checkpoint], progress=False)
    assert forget.removed > 0
    assert model.tables["user"].find(gone).tolist() == [-1]
    for where in ("state", "published"):
        replica = hb.checkpoints.Replica()
        replica.apply(hb.checkpoints.open_checkpoint(tmp_path / where))
        assert replica.tables["user"].find(gone).tolist() == [-1]


def test_a_followed_file_of_headers_alone_tells_no_types(tmp_path: Path) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    (incoming / "a.csv").write_text("label,user\n")
    (incoming / "b.csv").write_text("label,user\n" + "1,7\n0,8\n" * 4)
    schema = hb.Schema([hb.Label("label"), hb.Id("user")])
    network = hb.models.DeepFM(schema, hb.make_tables(schema, dim=2), hidden=[4])
    model = hb.RecModel(network, "bce", "adam")
    follow = hb.sources.Follow(str(incoming))
    dataset = hb.Dataset(follow, schema, batch_size=4, flush_seconds=0.1)
    checkpoint = hb.callbacks.Checkpoint(tmp_path / "states", every_steps=1)
    model.online_train(dataset, [checkpoint, Stop(2)], progress=False)
    assert hb.load(tmp_path / "states").schema.types == {"user": "integer"}
