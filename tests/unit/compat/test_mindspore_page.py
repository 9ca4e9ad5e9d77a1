# SPDX-License-Identifier: Apache-2.0
"""The page of `mindspore_rec.RecModel`, line by line, on torch modules."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.compat.mindspore_rec import (
    Callback,
    CheckpointConfig,
    HashEmbeddingLookup,
    LossMonitor,
    ModelCheckpoint,
    RecModel,
    RunContext,
    TimeMonitor,
)
from hotbed.errors import ConfigError, DataError, HotbedError

Item = tuple[torch.Tensor, ...]


class Net(nn.Module):
    """Wide and deep over two tables."""

    def __init__(self, **names: str) -> None:
        super().__init__()
        self.deep = HashEmbeddingLookup(4, name=names.get("deep"))
        self.wide = HashEmbeddingLookup(1, name=names.get("wide"))
        self.head = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        deep = self.head(self.deep(ids).flatten(1)).squeeze(1)
        return deep + self.wide(ids).sum((1, 2))


class NetWithLoss(nn.Module):
    """A network that computes its loss from every item of the data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(ids), label)


class TrainStep(nn.Module):
    """A network that runs backward and updates itself, and returns two losses."""

    def __init__(self, net: NetWithLoss) -> None:
        super().__init__()
        self.net = net
        self.dense = torch.optim.Adam(hb.dense_parameters(net), 1e-2)
        self.rows = hb.SparseOptimizer(net)
        self.modes: list[bool] = []

    def forward(self, ids: torch.Tensor, label: torch.Tensor) -> Item:
        self.modes.append(self.training)
        loss = self.net(ids, label)
        loss.backward()
        for optimizer in (self.dense, self.rows):
            optimizer.step()
            optimizer.zero_grad()
        return loss, loss.detach() * 2


class EvalNet(nn.Module):
    """What evaluation runs: (loss, probability, label), by the modules of the trained network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, label: torch.Tensor) -> Item:
        logits = self.net(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        return loss, torch.sigmoid(logits), label


def net(**names: str) -> Net:
    torch.manual_seed(1)
    return Net(**names)


def data(steps: int = 20, seed: int = 0) -> list[Item]:
    """Batches of (ids [32, 3], label [32]); a label follows a hidden quality of the ids."""
    hidden = torch.randn(60, generator=torch.Generator().manual_seed(7))
    draws = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(steps):
        ids = torch.randint(0, 60, (32, 3), dtype=torch.int32, generator=draws)
        items.append((ids, (hidden[ids.long()].sum(1) > 0).float()))
    return items


def endless(seed: int = 0) -> Iterator[Item]:
    while True:
        yield from data(seed=seed)


def losses(model: RecModel) -> list[float]:
    """Learn a few batches and return their losses."""
    seen: list[float] = []

    class Collects(Callback):
        def step_end(self, run_context: RunContext) -> None:
            outputs = run_context.original_args().net_outputs
            seen.append(float(outputs[0] if isinstance(outputs, tuple) else outputs))

    model.online_train(data(), callbacks=Collects())
    return seen


# --- RecModel(network, loss_fn, optimizer, metrics, eval_network, eval_indexes, amp, boost) --------


def test_the_eight_arguments_have_their_order_and_defaults() -> None:
    parameters = list(inspect.signature(RecModel).parameters.values())
    assert [(p.name, p.default) for p in parameters[1:8]] == [
        ("loss_fn", None),
        ("optimizer", None),
        ("metrics", None),
        ("eval_network", None),
        ("eval_indexes", None),
        ("amp_level", "O0"),
        ("boost_level", "O0"),
    ]
    assert parameters[0].name == "network"
    more = [(p.name, p.kind) for p in parameters[8:]]
    assert more == [("boost_config_dict", 3), ("grains", 3), ("data_parallel", 3)]


def test_online_train_has_its_four_arguments() -> None:
    parameters = list(inspect.signature(RecModel.online_train).parameters.values())[1:5]
    assert [(p.name, p.default) for p in parameters] == [
        ("train_dataset", inspect.Parameter.empty),
        ("callbacks", None),
        ("dataset_sink_mode", True),
        ("sink_size", 1),
    ]


def test_a_network_alone_is_enough_if_it_updates_itself() -> None:
    step = TrainStep(NetWithLoss(net(deep="deep", wide="wide")))
    seen = losses(RecModel(step))
    assert len(seen) == 20
    assert np.mean(seen[-5:]) < np.mean(seen[:5])
    assert all(step.modes), "a network that updates itself is never run in eval mode"


def test_a_network_that_returns_its_loss_has_a_loss_in_its_history() -> None:
    model = RecModel(NetWithLoss(net()), optimizer=hb.Adam(lr=1e-2))
    history = model.online_train(data())
    assert set(history.metrics) == {"loss"}
    assert history.metrics["loss"] == pytest.approx(np.mean(losses_of_plain_torch()), rel=1e-6)
    assert not np.isnan([point.loss for point in history.points]).any()
    fitted = RecModel(NetWithLoss(net()), optimizer=hb.Adam(lr=1e-2)).train(1, data())
    assert fitted.epochs[0]["loss"] == pytest.approx(history.metrics["loss"])


def losses_of_plain_torch() -> list[float]:
    """Learn the same batches by two optimizers in a plain loop."""
    model = NetWithLoss(net())
    for path in ("deep", "wide"):
        lookup = getattr(model.net, path)
        lookup.embedding_table.settle(f"net.{path}.embedding_table", hb.Adam(lr=1e-2))
    dense = torch.optim.Adam(hb.dense_parameters(model), 1e-2)
    rows = hb.SparseOptimizer(model)
    seen = []
    for ids, label in data():
        loss = model(ids, label)
        loss.backward()
        seen.append(loss.item())
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_a_model_without_anything_to_measure_says_so_before_it_learns() -> None:
    model = RecModel(NetWithLoss(net()), optimizer="adam")
    with pytest.raises(ConfigError, match="nothing to compute"):
        model.fit(1, data(), data())
    assert model.engine.counters["steps"] == 0
    with pytest.raises(ConfigError, match="nothing to compute"):
        model.eval(data())


@pytest.mark.parametrize("metrics", [{"accuracy", "recall"}, {"a": "accuracy"}, ["auc"]])
def test_metrics_are_a_set_or_a_dict(metrics: Any) -> None:
    model = RecModel(net(), "bce", "adam", metrics)
    model.online_train(data())
    assert set(model.eval(data(3))) == {"loss", *metrics}


def test_an_eval_network_shares_modules_with_the_network_and_training_goes_on() -> None:
    shared = net(deep="deep", wide="wide")
    model = RecModel(
        NetWithLoss(shared),
        optimizer=hb.Adam(lr=1e-2),
        metrics={"auc"},
        eval_network=EvalNet(shared),
        eval_indexes=[0, 1, 2],
    )
    history = model.online_train(data(60))
    assert len(shared.deep.embedding_table) == 60
    assert shared.training
    alone = RecModel(net(deep="deep", wide="wide"), "bce", hb.Adam(lr=1e-2), {"auc"})
    assert alone.online_train(data(60)).metrics["auc"] == history.metrics["auc"] > 0.6
    assert model.eval(data(5, seed=9)) == alone.eval(data(5, seed=9))


def test_an_eval_network_that_is_a_function_runs_in_eval_mode() -> None:
    network = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.9), nn.Flatten(0))

    def evaluate(x: torch.Tensor, label: torch.Tensor) -> Item:
        return nn.functional.mse_loss(network(x), label), network(x), label

    indexes = [0, 1, 2]
    model = RecModel(network, "mse", "sgd", {"rmse"}, evaluate, indexes)
    rows = [(torch.ones(8, 3), torch.ones(8))]
    assert model.eval(rows) == model.eval(rows)
    assert network.training


@pytest.mark.parametrize("indexes", [[], [0, 1], [0, 1, 2, 3], (0,), 3, [0, 1.5, 2], "012"])
def test_eval_indexes_are_three_positions_of_an_eval_network(indexes: Any) -> None:
    with pytest.raises(ValueError, match="eval_indexes: three positions"):
        RecModel(net(), "bce", "adam", {"auc"}, EvalNet(net()), indexes)
    with pytest.raises(ValueError, match="without eval_network"):
        RecModel(net(), "bce", "adam", {"auc"}, None, [0, 1, 2])


def test_eval_indexes_say_where_loss_prediction_and_label_are() -> None:
    def judge(ids: torch.Tensor, label: torch.Tensor) -> tuple[Any, ...]:
        return label, "not this", label * 0.9, torch.tensor(0.25)

    # set_indexes wins over eval_indexes
    metrics = {"own": hb.metrics.AUC().set_indexes([2, 0]), "auc": "auc", "acc": "acc"}
    model = RecModel(net(), "bce", "adam", metrics, judge, [3, 2, 0])
    assert model.eval(data(3)) == {"own": 1.0, "auc": 1.0, "acc": 1.0, "loss": 0.25}
    assert model.eval_network is judge
    assert model.online_train(data(2)).metrics["loss"] == 0.25
    model = RecModel(net(), "bce", "adam", {"auc"}, judge, [3, 2, 7])
    with pytest.raises(ConfigError, match="eval_indexes: no output 7, got 4 outputs"):
        model.eval(data(3))
    without = RecModel(net(), "bce", "adam", None, judge, [3, 2, 0])
    assert without.eval(data(3)) == {"loss": 0.25}


def test_without_eval_indexes_each_metric_gets_every_output() -> None:
    class Counts(hb.metrics.Metric):
        def clear(self) -> None:
            self.outputs = 0

        def update(self, *outputs: Any, **_: Any) -> None:
            self.outputs = len(outputs)

        def add(self, other: Any) -> None: ...

        def eval(self) -> float:
            return self.outputs

        def state(self) -> dict[str, Any]:
            return {}

        def load_state(self, state: Any) -> None: ...

    shared = net()
    metrics = {"count": Counts(), "auc": hb.metrics.AUC().set_indexes([1, 2])}
    model = RecModel(shared, "bce", "adam", metrics, EvalNet(shared))
    results = model.eval(data(3))
    assert results["count"] == 3
    assert 0 < results["auc"] < 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_amp_levels_train(level: str) -> None:
    model = RecModel(net(), "bce", "adam", {"auc"}, amp_level=level)
    assert np.isfinite(model.online_train(data(3)).metrics["loss"])


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"amp_level.*O4"):
        RecModel(net(), "bce", "adam", amp_level="O4")
    with pytest.raises(ValueError, match=r"boost_level.*O3"):
        RecModel(net(), "bce", "adam", {"auc"}, boost_level="O3")
    with pytest.raises(ValueError, match="without an optimizer"):
        RecModel(NetWithLoss(net(deep="deep", wide="wide")), amp_level="O2")


def test_boost_config_dict_sets_the_compilation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    monkeypatch.setattr(torch, "compile", lambda network, **settings: network)

    def boost(level: str, config: dict[str, Any]) -> Any:
        model = RecModel(net(), "bce", "adam", {"auc"}, boost_level=level, boost_config_dict=config)
        return model.engine.arguments["compile"]

    assert boost("O1", {}) == hb.Compile("default")
    assert boost("O1", {"backend": "eager"}) == hb.Compile(backend="eager")
    assert boost("O2", {"dynamic": None}) == hb.Compile("max-autotune-no-cudagraphs", dynamic=None)
    assert boost("O0", {"backend": "eager"}) is None
    assert boost("O1", {"boost": {"mode": "disable_all"}}) is None
    mindspore = {"boost": {"mode": "auto", "less_bn": True}, "grad_freeze": {"freeze_p": 0.7}}
    assert boost("O1", mindspore) == hb.Compile()
    lines = [record.message for record in caplog.records if "boost_config_dict" in record.message]
    assert len(lines) == 1
    assert "boost, grad_freeze" in lines[0]
    with pytest.raises(ConfigError, match=r"'backed'.*Did you mean 'backend'"):
        boost("O1", {"backed": "eager"})


def test_boost_takes_effect_with_an_optimizer_and_an_evaluation_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def learn(*arguments: Any) -> None:
        network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        model = RecModel(network, *arguments, boost_level=hb.Compile(backend=backend))
        if model.engine.learner.dense is not None:
            model.online_train([(torch.ones(8, 3), torch.ones(8))])

    learn()
    assert "has no effect: no optimizer and no eval_network or metrics" in caplog.text
    caplog.clear()
    learn("mse", "adam")
    assert "has no effect: no eval_network or metrics" in caplog.text
    assert not compiled
    caplog.clear()
    learn("mse", "adam", {"accuracy"})
    assert compiled
    compiled.clear()
    torch.compiler.reset()
    learn("mse", "adam", None, lambda *items: items)
    assert compiled
    assert "has no effect" not in caplog.text


# --- online_train(train_dataset, callbacks, dataset_sink_mode, sink_size) --------------------------


def test_sink_mode_falls_back_on_a_cpu_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    RecModel(net(), "bce", "adam").online_train(data(2), sink_size=3)
    assert caplog.text.count("a CPU has nowhere to sink data to") == 1


@pytest.mark.parametrize("size", [0, -1, 2.5, "many"])
def test_sink_size_is_checked_in_sink_mode_and_ignored_without(size: Any) -> None:
    model = RecModel(net(), "bce", "adam")
    model.online_train(data(2), dataset_sink_mode=False, sink_size=size)
    assert model.engine.counters["steps"] == 2
    with pytest.raises(ValueError, match="sink_size"):
        model.online_train(data(2), sink_size=size)


@pytest.mark.parametrize("error", [TypeError, ValueError, ConfigError])
def test_a_sink_mode_that_is_not_a_bool_is_an_error(error: type[Exception]) -> None:
    with pytest.raises(error, match="must be a bool"):
        RecModel(net(), "bce", "adam").online_train(data(2), dataset_sink_mode="yes")  # type: ignore[arg-type]


class Events(Callback):
    """Records the names of its events with epoch and step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self, name: str, run_context: RunContext) -> None:
        args = run_context.original_args()
        self.calls.append(f"{name} {args.cur_epoch_num}.{args.cur_step_num}")

    def begin(self, run_context: RunContext) -> None:
        self.record("begin", run_context)

    def epoch_begin(self, run_context: RunContext) -> None:
        self.record("epoch_begin", run_context)

    def step_begin(self, run_context: RunContext) -> None:
        self.record("step_begin", run_context)

    def step_end(self, run_context: RunContext) -> None:
        self.record("step_end", run_context)

    def epoch_end(self, run_context: RunContext) -> None:
        self.record("epoch_end", run_context)

    def end(self, run_context: RunContext) -> None:
        self.record("end", run_context)


def test_events_have_mindspore_s_names_and_order() -> None:
    events = Events()
    RecModel(net(), "bce", "adam").train(2, data(2), callbacks=events)
    steps = [
        ["epoch_begin 1.0", "step_begin 1.1", "step_end 1.1", "step_begin 1.2", "step_end 1.2"],
        ["epoch_begin 2.2", "step_begin 2.3", "step_end 2.3", "step_begin 2.4", "step_end 2.4"],
    ]
    assert events.calls == [
        "begin 0.0",
        *steps[0],
        "epoch_end 1.2",
        *steps[1],
        "epoch_end 2.4",
        "end 2.4",
    ]


def test_a_stream_is_one_epoch_without_sink_mode() -> None:
    events = Events()
    RecModel(net(), "bce", "adam").online_train(data(2), events, dataset_sink_mode=False)
    assert events.calls == [
        "begin 0.0",
        "epoch_begin 1.0",
        "step_begin 1.1",
        "step_end 1.1",
        "step_begin 1.2",
        "step_end 1.2",
        "epoch_end 1.2",
        "end 1.2",
    ]


def test_a_sunk_call_is_an_epoch_with_step_end_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RecModel(net(), "bce", "adam")
    monkeypatch.setattr("hotbed.compat.mindspore_rec.rec_model._can_sink", lambda engine: True)
    events = Events()
    model.online_train(data(8), events, sink_size=3)
    assert events.calls == [
        "begin 0.0",
        "epoch_begin 1.0",
        "step_begin 1.3",
        "step_end 1.3",
        "epoch_end 1.3",
        "epoch_begin 2.3",
        "step_begin 2.6",
        "step_end 2.6",
        "epoch_end 2.6",
        "epoch_begin 3.6",
        "step_begin 3.9",
        "step_end 3.8",
        "epoch_end 3.8",
        "end 3.8",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "on_train_begin",
        "on_train_epoch_begin",
        "on_train_step_begin",
        "on_train_step_end",
        "on_train_epoch_end",
        "on_train_end",
    ],
)
def test_each_event_of_training_is_called_by_its_long_name(name: str) -> None:
    calls: list[str] = []
    long = type("Long", (Callback,), {name: lambda self, context: calls.append(name)})
    RecModel(net(), "bce", "adam").online_train(data(1), [long()])
    assert calls == [name]


def test_evaluation_has_events_of_its_own() -> None:
    calls: list[str] = []

    def recorder(name: str) -> Callable[..., None]:
        return lambda self, context: calls.append(f"{name} {context.original_args().mode}")

    names = ["begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end"]
    methods = {f"on_eval_{name}": recorder(name) for name in names}
    own = type("Own", (Callback,), methods)()
    model = RecModel(net(), "bce", "adam", {"auc"})
    model.online_train(data(1), own)
    assert calls == []
    model.eval(data(1), own)
    assert calls == [f"{name} eval" for name in names]


def test_the_context_of_an_evaluation_has_its_results() -> None:
    seen: dict[str, Any] = {}

    class Results(Callback):
        def on_eval_end(self, run_context: RunContext) -> None:
            seen.update(run_context.original_args()["metrics"])

    model = RecModel(net(), "bce", "adam", {"auc"})
    model.online_train(data(3))
    assert model.eval(data(2), Results()) == seen


def test_the_context_holds_what_stock_callbacks_read() -> None:
    class Reads(Callback):
        def step_end(self, run_context: RunContext) -> None:
            self.args = run_context.original_args()

    reads = Reads()
    items = data(4)
    model = RecModel(net(), "bce", "adam")
    model.train(1, items, reads)
    args = reads.args
    assert args.network is args.train_network is model.train_network
    assert (args.loss_fn, args.mode, args.epoch_num) == ("bce", "train", 1)
    assert isinstance(args.optimizer, torch.optim.Adam)
    assert args.train_dataset is items
    assert args.list_callback == [reads]
    assert (args.dataset_sink_mode, args.device_number) == (False, 1)
    assert args.net_outputs.asnumpy().shape == ()
    assert not args.net_outputs.requires_grad
    with pytest.raises(AttributeError, match=r"no 'lr'.*cur_step_num"):
        _ = args.lr


def test_request_stop_ends_an_endless_stream() -> None:
    class Stops(Callback):
        def step_end(self, run_context: RunContext) -> None:
            if run_context.original_args().cur_step_num == 7:
                run_context.request_stop()
                assert run_context.get_stop_requested()

    model = RecModel(net(), "bce", "adam")
    model.online_train(endless(), [Stops(), hb.callbacks.ClipGradients(5.0)])
    assert model.engine.counters["steps"] == 7


def test_the_end_is_not_called_after_an_error() -> None:
    class Fails(Events):
        def step_end(self, run_context: RunContext) -> None:
            raise RuntimeError("disk full")

    fails = Fails()
    with pytest.raises(RuntimeError, match="disk full"):
        RecModel(net(), "bce", "adam").online_train(data(2), fails)
    assert fails.calls[-1].startswith("step_begin")


def test_data_are_a_pair_with_a_loss_and_all_arguments_without() -> None:
    three = [(ids, torch.ones(32), label) for ids, label in data(2)]
    with pytest.raises(DataError, match="got 3 items"):
        RecModel(net(), "bce", "adam").online_train(three)

    class Weighted(NetWithLoss):
        def forward(self, *items: torch.Tensor) -> torch.Tensor:
            ids, weight, label = items
            return super().forward(ids, label * weight)

    model = RecModel(Weighted(net()), optimizer="adam")
    model.online_train(three)
    assert model.engine.counters["steps"] == 2


@pytest.mark.parametrize("sinks", [True, False])
def test_a_dataset_may_be_of_mindspore_s_kind(sinks: bool) -> None:
    class Streaming:
        """Blocks for each item, and has no length to ask for."""

        def __getitem__(self, item: int) -> tuple[Any, ...]:
            return tuple(part.numpy() for part in data(1, seed=item)[0])

        def __len__(self) -> int:
            raise RuntimeError("a stream has no end")

    model = RecModel(net(), "bce", "adam")
    model.online_train(Streaming(), None, sinks, max_steps=5)  # type: ignore[arg-type]
    assert model.engine.counters["steps"] == 5


def test_a_callback_of_neither_kind_is_named() -> None:
    class Foreign:
        def step_ends(self, run_context: Any) -> None: ...

    with pytest.raises(ConfigError, match="Foreign is not a callback"):
        RecModel(net(), "bce", "adam").online_train(data(1), Foreign())


def test_monitors_print_loss_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    model = RecModel(net(), "bce", "adam")
    model.online_train(data(6), [LossMonitor(3), TimeMonitor(4)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("epoch: 1 step: 3, loss is 0.")]
    assert [line for line in lines if line.startswith("epoch: 1 step: 6, loss is 0.")]
    times = [line for line in lines if line.startswith("Train epoch time: ")]
    assert len(times) == 2, "after four steps, and at the end"


def test_only_callbacks_that_use_tables_stop_mapping_ahead() -> None:
    from hotbed.compat.mindspore_rec.callback import Adapter, CallbackParams, Training

    model = RecModel(net(), "bce", "adam")
    training = Training(model.engine, [], CallbackParams())
    sunk = Training(model.engine, [], CallbackParams(), sink_size=1)

    class Epochs(Callback):
        def epoch_end(self, run_context: RunContext) -> None: ...

    assert not Adapter(LossMonitor(), training).barrier(1, None)
    assert Adapter(Events(), training).barrier(1, None)
    assert not Adapter(Epochs(), training).barrier(1, None)
    assert Adapter(Epochs(), sunk).barrier(1, None)


# --- checkpoints ----------------------------------------------------------------------------------


def clicks() -> hb.Dataset:
    """640 clicks in 20 batches, with positions."""
    random = np.random.default_rng(0)
    user = random.integers(0, 60, 640)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    return hb.Dataset(hb.sources.Memory({"y": user % 2, "user": user}), schema, 32)


class Batches(nn.Module):
    """A network that takes a `Batch`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lookup = HashEmbeddingLookup(4, evict_filter_value=6)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        return self.head(self.lookup(batch.ids["user"].values)).squeeze(1)


def saved_by(folder: Path, *, steps: int, ahead: bool = False) -> RecModel:
    model = RecModel(Batches(), "bce", hb.Adam(lr=1e-2))
    config = CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=2)
    saves = ModelCheckpoint("clicks", folder, config)
    data = hb.Ahead(clicks(), torch_threads=1) if ahead else clicks()
    model.online_train(data, [saves], max_steps=steps)
    assert Path(saves.latest_ckpt_file_name).is_dir()
    return model


def rows_of(model: RecModel) -> list[Any]:
    (table,) = model.engine.tables.values()
    return [row for batch in table.export() for row in batch.to_pylist()]


def test_a_checkpoint_resumes_to_the_bits_of_one_run(tmp_path: Path) -> None:
    whole = saved_by(tmp_path / "whole", steps=20)
    saved_by(tmp_path / "parts", steps=11, ahead=True)
    parts = saved_by(tmp_path / "parts", steps=20)
    assert rows_of(parts) == rows_of(whole)
    assert torch.equal(parts.train_network.head.weight, whole.train_network.head.weight)
    kept = [folder for folder in (tmp_path / "whole/clicks").iterdir() if folder.is_dir()]
    assert len(kept) == 2


def test_data_without_positions_are_saved_as_a_model(tmp_path: Path) -> None:
    model = RecModel(net(), "bce", "adam")
    saves = ModelCheckpoint("tuples", tmp_path, CheckpointConfig(5, keep_checkpoint_max=3))
    model.online_train(data(17), saves)
    kept = [folder for folder in (tmp_path / "tuples").iterdir() if folder.is_dir()]
    assert len(kept) == 3
    other = RecModel(net(), "bce", "adam")
    other.engine.restore(saves.latest_ckpt_file_name)
    assert other.engine.counters["steps"] == 17
    assert torch.equal(other.train_network.head.weight, model.train_network.head.weight)


def test_data_without_positions_are_saved_after_an_error_too(tmp_path: Path) -> None:
    """After a whole step; a step that fails half learned is not saved."""

    def fails(items: list[Item]) -> Iterator[Item]:
        yield from items
        raise RuntimeError("no more")

    class Fails(Callback):
        def step_end(self, run_context: RunContext) -> None:
            if run_context.original_args().cur_step_num == 7:
                raise RuntimeError("no more")

    for name, stream, callbacks, steps in (
        ("data", fails(data(7)), [], 7),
        ("step", data(9), [Fails()], 5),
    ):
        saves = ModelCheckpoint(name, tmp_path, CheckpointConfig(5))
        with pytest.raises(RuntimeError, match="no more"):
            RecModel(net(), "bce", "adam").online_train(stream, [*callbacks, saves])
        other = RecModel(net(), "bce", "adam")
        other.engine.restore(saves.latest_ckpt_file_name)
        assert other.engine.counters["steps"] == steps


def test_checkpoints_of_another_training_are_not_removed_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(tmp_path, steps=8)
    saves = ModelCheckpoint("clicks", tmp_path, CheckpointConfig(5))
    with pytest.raises(HotbedError, match=r"holds states of a stream, got a model to save"):
        RecModel(net(), "bce", "adam").online_train(data(6), saves)
    saves = ModelCheckpoint("tuples", tmp_path, CheckpointConfig(5))
    model = RecModel(net(), "bce", "adam")
    model.online_train(data(6), saves)
    model.online_train(data(6), saves)
    RecModel(net(), "bce", "adam").engine.restore(saves.latest_ckpt_file_name)
    assert "another training" not in caplog.text
    RecModel(net(), "bce", "adam").online_train(data(6), saves)
    assert (
        "tuples holds 4 checkpoints of another training, and keep_checkpoint_max=5" in caplog.text
    )


def test_saving_evicts_rows_that_were_not_seen_for_the_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    once = [(torch.arange(96).view(32, 3), torch.ones(32))]
    often = [(torch.arange(6).repeat(16).view(32, 3), torch.ones(32))] * 9
    network = Net()
    network.deep = HashEmbeddingLookup(4, evict_filter_value=4)
    model = RecModel(network, "bce", "adam")
    model.online_train([*once, *often], ModelCheckpoint("c", tmp_path, CheckpointConfig(8)))
    assert len(network.deep.embedding_table) == 6
    assert len(network.wide.embedding_table) == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_checkpoint_steps": -1}, "save_checkpoint_steps"),
        ({"save_checkpoint_steps": 0}, "needs an interval"),
        ({"keep_checkpoint_max": -1}, "keep_checkpoint_max"),
        ({"keep_checkpoint_max": 0, "keep_checkpoint_per_n_minutes": 5}, "per_n_minutes: the new"),
        ({"enc_key": b"0" * 16}, "not encrypted"),
        ({"saved_network": nn.Linear(1, 1)}, "whole network"),
    ],
)
def test_a_config_that_cannot_be_kept_is_an_error(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**arguments)


def test_settings_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    for _ in range(2):
        CheckpointConfig(integrated_save=False, async_save=True)
    for name in ("integrated_save", "async_save"):
        assert caplog.text.count(f"CheckpointConfig.{name} has no effect, because") == 1
    with pytest.raises(ValueError, match="prefix"):
        ModelCheckpoint("a/b")
    with pytest.raises(ValueError, match="must be a CheckpointConfig"):
        ModelCheckpoint(config={"save_checkpoint_steps": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="directory: must be a folder, got 3"):
        ModelCheckpoint("a", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got the class ModelCheckpoint. Give ModelCheckpoint\("):
        RecModel(net(), "bce", "adam").train(1, data(), callbacks=ModelCheckpoint)


# --- the rest of mindspore.train.Model -------------------------------------------------------------


def test_fit_train_eval_and_predict(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    model = RecModel(net(), "bce", hb.Adam(lr=1e-2), {"auc"})
    history = model.fit(3, data(), data(3, seed=5), dataset_sink_mode=True)
    assert history.metrics["valid.auc"] == model.eval(data(3, seed=5))["auc"] > 0.8
    assert model.predict(data(1)[0][0]).shape == (32,)
    assert "dataset_sink_mode has no effect" in caplog.text
    events = Events()
    model.train(3, data(1), events, initial_epoch=2)
    assert events.calls[1] == "epoch_begin 3.0"
    with pytest.raises(ConfigError, match="valid_frequency"):
        model.fit(2, data(), data(), valid_frequency=2)


def test_one_optimizer_updates_network_and_rows() -> None:
    """A rule, its name, and a torch optimizer over everything give the same bits."""

    def trained(make: Callable[[nn.Module], Any]) -> Any:
        network = net()
        RecModel(network, "bce", make(network)).online_train(data())
        return network.deep.embedding_table.get_values()

    by_rule = trained(lambda network: hb.Adam(lr=1e-3))
    by_name = trained(lambda network: "adam")
    by_torch = trained(lambda network: torch.optim.Adam(network.parameters()))
    by_dense = trained(lambda network: torch.optim.Adam(hb.dense_parameters(network)))
    assert by_rule.equal(by_name)
    assert by_rule.equal(by_torch)
    assert by_rule.equal(by_dense)


def test_a_table_keeps_the_rule_and_name_that_it_was_given() -> None:
    network = net()
    network.wide = HashEmbeddingLookup(1, name="wide", rule=hb.Ftrl(lr=0.05))
    model = RecModel(network, "bce", hb.Adam(lr=1e-3))
    rules = {name: type(table.rule).__name__ for name, table in model.engine.tables.items()}
    assert rules == {"deep.embedding_table": "Adam", "wide": "Ftrl"}


def test_wrong_epochs_and_settings_are_errors() -> None:
    model = RecModel(torch.nn.Linear(1, 1), "mse", "sgd")
    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    for wrong in (0, 1.5, "2"):
        with pytest.raises(ValueError, match=r"fit\.epoch: must be an integer"):
            model.train(wrong, data)
    for wrong in (-1, 2, "1"):
        with pytest.raises(ValueError, match=r"fit\.initial_epoch: must be an integer"):
            model.train(2, data, initial_epoch=wrong)
    with pytest.raises(TypeError, match="boost_config_dict: must be a dict, got 3"):
        RecModel(torch.nn.Linear(1, 1), "mse", "sgd", boost_config_dict=3)
