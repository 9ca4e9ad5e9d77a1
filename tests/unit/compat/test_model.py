# SPDX-License-Identifier: Apache-2.0
"""Model: fit, the verbs of a loop of one's own, and what they promise, over data in memory."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.model import batches, model, ranks
from hotbed.errors import ConfigError, NotWritten

ROWS = 1024
Layer = hugectr.Layer_t


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rows in memory for every source; files are tested with the readers."""
    rng = np.random.default_rng(3)
    rows: dict[str, Any] = {"dense": rng.normal(size=(ROWS, 2)).astype(np.float32)}
    for slot in range(3):
        rows[f"data_{slot}"] = rng.integers(0, 20, ROWS)
    chance = 0.1 + 0.8 * (rows["data_0"] % 2)
    rows["label"] = (rng.random(ROWS) < chance).astype(np.float32)
    rows["other"] = (rng.random(ROWS) < 1 - chance).astype(np.float32)

    def training(
        reader: Any, input: Any, solver: Any, schema: Any, *, short_keys: bool = False
    ) -> hb.Dataset:
        source = hb.sources.Memory(rows)
        return hb.Dataset(source, schema, solver.batchsize, drop_last=True, shuffle=512)

    def evaluation(reader: Any, input: Any, solver: Any, schema: Any) -> hb.Dataset:
        return hb.Dataset(hb.sources.Memory(rows), schema, solver.batchsize_eval)

    monkeypatch.setattr(model, "columns_of", lambda reader, input: model.named_columns(input))
    monkeypatch.setattr(model, "training_data", training)
    monkeypatch.setattr(model, "evaluation_data", evaluation)
    return rows


def solver(**changes: Any) -> hugectr.Solver:
    settings = {
        "seed": 7,
        "batchsize": 64,
        "batchsize_eval": 128,
        "max_eval_batches": 8,
        "lr": 0.05,
        "warmup_steps": 4,
    }
    return hugectr.CreateSolver(**{**settings, **changes})


def made(
    solver: hugectr.Solver,
    labels: Mapping[str, int] = {"label": 1},
    compile: bool = True,
    **extra: Any,
) -> hugectr.Model:
    """A tower over dense values and one embedding, with a loss for each label."""
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Parquet,
        source="train.txt",
        eval_source="test.txt",
        check_type=hugectr.Check_t.Non,
    )
    built = hugectr.Model(solver, reader, hugectr.CreateOptimizer(**extra.pop("optimizer", {})))
    sparse = hugectr.DataReaderSparseParam("data", 1, True, 3)
    built.add(
        hugectr.Input(
            label_dims=list(labels.values()),
            label_names=list(labels),
            dense_dim=2,
            dense_name="dense",
            data_reader_sparse_param_array=[sparse],
        )
    )
    built.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            embedding_vec_size=4,
            combiner="sum",
            sparse_embedding_name="rows",
            bottom_name="data",
        )
    )
    dense = hugectr.DenseLayer
    built.add(dense(Layer.Reshape, ["rows"], ["flat"], leading_dim=12))
    built.add(dense(Layer.Concat, ["flat", "dense"], ["x"]))
    built.add(dense(Layer.InnerProduct, ["x"], ["fc"], num_output=8))
    built.add(dense(Layer.ReLU, ["fc"], ["relu"]))
    built.add(dense(Layer.Dropout, ["relu"], ["kept"], dropout_rate=0.2))
    for label in labels:
        built.add(dense(Layer.InnerProduct, ["kept"], [f"{label}_logit"], num_output=1))
        loss = Layer.BinaryCrossEntropyLoss
        built.add(dense(loss, [f"{label}_logit", label], [f"{label}_loss"]))
    if compile:
        built.compile(**extra)
    return built


def factorization_machine() -> hugectr.Model:
    """A compiled graph without dense parameters and buffers."""
    source = {"source": "train.txt", "eval_source": "test.txt", "check_type": hugectr.Check_t.Non}
    reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Parquet, **source)
    built = hugectr.Model(solver(), reader, hugectr.CreateOptimizer())
    sparse = hugectr.DataReaderSparseParam("data", 1, True, 3)
    built.add(hugectr.Input(1, "label", 2, "dense", [sparse]))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    built.add(hugectr.SparseEmbedding(kind, 1, 4, "sum", "rows", "data"))
    dense = hugectr.DenseLayer
    built.add(dense(Layer.Reshape, ["rows"], ["flat"], leading_dim=12))
    built.add(dense(Layer.FmOrder2, ["flat"], ["pairs"], out_dim=4))
    built.add(dense(Layer.ReduceSum, ["pairs"], ["logit"], axis=1))
    built.add(dense(Layer.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    built.compile()
    return built


@pytest.mark.parametrize("fits", [True, False], ids=["fit", "train"])
def test_a_graph_without_dense_parameters_learns(*, fits: bool, tmp_path: Path) -> None:
    built = factorization_machine()
    before = weights(built)
    if fits:
        built.fit(max_iter=4, snapshot=0, eval_interval=2)
    else:
        built.start_data_reading()
        assert built.train()
    assert 0 < built.get_current_loss() < 1
    assert not same(weights(built), before)
    assert np.abs(built.check_out_tensor("rows")).max() > 0
    built.save_params_to_files(f"{tmp_path}/fm", 1)
    read = factorization_machine()
    read.load_dense_weights(f"{tmp_path}/fm_dense_1.model")
    read.load_dense_optimizer_states(f"{tmp_path}/fm_opt_dense_1.model")
    read.load_sparse_weights([f"{tmp_path}/fm0_sparse_1.model"])
    assert same(weights(read), weights(built))


def weights(built: hugectr.Model) -> dict[str, np.ndarray]:
    """Every dense parameter, and the rows of every table by id."""
    values = {name: value.detach().numpy().copy() for name, value in parameters(built)}
    for name, table in built.learner.tables.items():
        values[name] = table.lookup(np.arange(20))
    return values


def parameters(built: hugectr.Model) -> Iterator[tuple[str, torch.Tensor]]:
    dense = {id(parameter) for parameter in hb.dense_parameters(built.network)}
    for name, value in built.network.named_parameters():
        if id(value) in dense:
            yield name, value


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


# --- ranks ----------------------------------------------------------------------------------------


def test_vvgpu_names_the_command_that_starts_as_many_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is started for it; training on several is tested with the ranks of the engine."""
    caplog.set_level("INFO", "hotbed.compat.hugectr")
    made(solver(vvgpu=[[0, 1], [0]]))
    assert "vvgpu names 3 devices, and 1 process(es) train" in caplog.text
    assert "torchrun --nproc-per-node 3 -m hotbed.compat.hugectr.run" in caplog.text
    caplog.clear()
    made(solver(vvgpu=[[0]]))
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks.log_devices(solver(vvgpu=[[0, 1], [0]]), torch.device("cpu"))
    assert "vvgpu" not in caplog.text


def test_several_processes_have_as_many_grains_as_the_batch_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ranks.grains_of(solver(batchsize=4096)) == 1
    assert ranks.grains_of(solver(batchsize=64, grains=2)) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {1024: 2, 2047: 2, 2048: 4, 4095: 4, 4096: 8, 100_000: 8}
    assert {size: ranks.grains_of(solver(batchsize=size)) for size in sizes} == sizes
    assert ranks.grains_of(solver(batchsize=64, grains=2)) == 2
    with pytest.raises(ConfigError, match=r"got 1 grains of a batchsize of 1023 .* of 2 ranks"):
        ranks.grains_of(solver(batchsize=1023))


# --- fit ------------------------------------------------------------------------------------------


def test_fit_gives_the_bits_of_a_recmodel_with_the_same_rates() -> None:
    """Against RecModel over the translation, its rates set by hand before each step."""
    fitted = made(solver())
    fitted.fit(max_iter=40, display=0, eval_interval=10, snapshot=0)
    plain = made(solver())
    data = model.training_data(None, None, plain.solver, plain.translation.schema)
    number = 0
    for _ in range(3):
        for batch in data:
            number += 1
            if number <= 40:
                rate = 0.05 * min(number / 4, 1.0)
                plain.learner.dense_learning_rate = rate
                plain.learner.table_learning_rates = rate
                plain.learner.step(batch)
    assert same(weights(fitted), weights(plain))


def test_fits_and_single_steps_follow_one_another_without_a_seam() -> None:
    """The second begins in the middle of an epoch, where the first ended."""
    whole = made(solver())
    whole.fit(max_iter=30, display=0, eval_interval=0, snapshot=0)
    parts = made(solver())
    parts.fit(max_iter=7, display=0, eval_interval=0, snapshot=0)
    scheduler = parts.get_learning_rate_scheduler()
    for _ in range(12):
        parts.set_learning_rate(scheduler.get_next())
        assert parts.train()
    parts.fit(max_iter=11, display=0, eval_interval=0, snapshot=0)
    assert scheduler.get_step() == 30
    assert same(weights(whole), weights(parts))


def test_fit_prints_what_hugectr_prints(capsys: Any) -> None:
    built = made(solver(metrics_spec={kind: 0.9999 for kind in hugectr.MetricsType}))
    built.summary()
    built.fit(max_iter=20, display=5, eval_interval=10, snapshot=0)
    lines = re.sub(r"\[HCTR\]\[[\d:.]+\]\[INFO\]\[RK0\]\[main\]: ", "", capsys.readouterr().out)
    assert re.findall(
        r"^Iter: (\d+) Time\(5 iters\): \S+s Loss: 0\.\d+ lr:0\.05$", lines, re.M
    ) == ["5", "10", "15", "20"]
    metrics = re.findall(r"^Evaluation, (\w+): \S+$", lines, re.M)
    assert metrics == ["AUC", "AverageLoss", "HitRate", "NDCG", "SMAPE"] * 2
    assert re.search(r"^Finish 20 iterations with batchsize: 64 in \d+\.\d\ds\.$", lines, re.M)
    assert "Reshape" in lines
    assert re.search(r"Table rows: rows of 4 floats, \d+ bytes each", lines)


def test_epoch_mode_reads_each_epoch_from_its_beginning(capsys: Any) -> None:
    built = made(solver(repeat_dataset=False))
    built.start_data_reading()
    built.train()
    built.fit(num_epochs=2, display=0, eval_interval=16, snapshot=0)
    assert built.learner.counters["steps"] == 1 + 2 * ROWS // 64
    printed = capsys.readouterr().out
    assert printed.count("Evaluation, AUC") == 2
    assert "Epoch 1" in printed


def test_training_ends_when_the_auc_is_above_its_threshold(capsys: Any, tmp_path: Path) -> None:
    built = made(solver(metrics_spec={hugectr.MetricsType.AUC: 0.4}))
    built.fit(max_iter=50, eval_interval=4, snapshot=4, snapshot_prefix=f"{tmp_path}/")
    assert built.learner.counters["steps"] == 4
    printed = capsys.readouterr().out
    assert "Hit target accuracy AUC 0.40000 at iteration 4" in printed
    assert "Finish" not in printed
    assert list(tmp_path.iterdir()) == []


class Recorder(hugectr.TrainingCallback):
    def __init__(self, stop_at: int = 1_000) -> None:
        self.stop_at = stop_at
        self.calls: list[Any] = []

    def on_training_start(self) -> None:
        self.calls.append("start")

    def on_training_end(self, current_iter: int) -> None:
        self.calls.append(("end", current_iter))

    def on_eval_start(self, current_iter: int) -> bool:
        self.calls.append(("eval", current_iter))
        return True  # not read

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        assert list(eval_results) == ["AUC"]
        return current_iter >= self.stop_at


class OldRecorder(Recorder):
    def on_training_end(self) -> None:  # type: ignore[override]
        self.calls.append("end")


def test_training_callbacks_are_called_and_may_end_training() -> None:
    stops, old = Recorder(stop_at=7), OldRecorder()
    built = made(solver(training_callbacks=[stops, old]))
    built.fit(max_iter=50, display=0, eval_interval=4, snapshot=0)
    assert stops.calls == ["start", ("eval", 3), ("eval", 7), ("end", 7)]
    assert old.calls == ["start", ("eval", 3), ("eval", 7), "end"]
    assert built.learner.counters["steps"] == 8
    ends = Recorder()
    built = made(solver(training_callbacks=[ends]))
    built.fit(max_iter=5, display=0, eval_interval=0, snapshot=0)
    assert ends.calls == ["start", ("end", 4)]
    epochs = Recorder()
    built = made(solver(training_callbacks=[epochs], repeat_dataset=False))
    built.fit(num_epochs=1, display=0, eval_interval=4, snapshot=0)
    assert epochs.calls == []


def test_fit_needs_the_number_of_its_mode() -> None:
    built = made(solver())
    with pytest.raises(ConfigError, match=r"fit\.max_iter: not above 0 with repeat_dataset=True"):
        built.fit(max_iter=0)
    with pytest.raises(ConfigError, match=r"fit\.max_iters: unknown argument.*'max_iter'"):
        built.fit(max_iters=3)
    built = made(solver(repeat_dataset=False))
    with pytest.raises(ConfigError, match=r"fit\.num_epochs: not above 0 with repeat_dataset=F"):
        built.fit(max_iter=10)


def test_the_solver_of_v30_has_the_arguments_of_fit(capsys: Any, tmp_path: Path) -> None:
    """Its `Input` has the reader, and its optimizer the learning rate."""
    old = hugectr.solver_parser_helper(
        seed=7,
        batchsize=64,
        batchsize_eval=128,
        max_eval_batches=8,
        max_iter=12,
        display=6,
        eval_interval=8,
        snapshot=100,
    )
    optimizer = hugectr.optimizer.CreateOptimizer(
        learning_rate=0.05, warmup_steps=4, use_mixed_precision=False
    )
    new = made(solver(), compile=False)
    built = hugectr.Model(old, optimizer)
    built.add(
        hugectr.Input(
            data_reader_type=hugectr.DataReaderType_t.Norm,
            source="train.txt",
            eval_source="test.txt",
            check_type=hugectr.Check_t.Sum,
            label_dim=1,
            label_name="label",
            dense_dim=2,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 3, 1, 3)
            ],
            sparse_names=["data"],
        )
    )
    for clause in (*new.graph.embeddings, *new.graph.layers):
        built.add(clause)
    built.compile()
    built.fit()
    printed = capsys.readouterr().out
    assert re.findall(r"Iter: (\d+) ", printed) == ["6", "12"]
    assert printed.count("Evaluation, AUC") == 1
    new.compile()
    new.fit(max_iter=12, display=0, eval_interval=0, snapshot=0)
    assert same(weights(built), weights(new))


def test_predictions_of_each_evaluation_are_exported_by_prefix(tmp_path: Path) -> None:
    params = hugectr.FitParams(
        max_iter=8,
        eval_interval=4,
        display=0,
        snapshot=0,
        export_predictions_prefix=f"{tmp_path}/run",
    )
    built = made(solver(fit=params))
    built.fit()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run_label_4", "run_label_8", "run_prediction_4", "run_prediction_8"]
    for name in names:
        assert len((tmp_path / name).read_text().split()) == ROWS


def test_the_last_loss_and_metrics_of_a_fit_are_returned_after_it(
    tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    built = made(solver())
    assert all(math.isnan(value) for _, value in built.get_eval_metrics())
    assert "get_eval_metrics: nothing was evaluated yet" in caplog.text
    built.fit(max_iter=6, display=6, eval_interval=3, snapshot=0)
    printed = capsys.readouterr().out
    assert f"Loss: {built.get_current_loss():g} " in printed
    metrics = dict(built.get_eval_metrics())
    last = printed.rindex("Evaluation, AUC: ")
    assert f"Evaluation, AUC: {metrics['AUC']:g}\n" in printed[last:]


def test_a_fit_that_does_not_evaluate_says_why(caplog: Any) -> None:
    built = made(solver(max_eval_batches=0))
    built.fit(max_iter=4, display=0, eval_interval=4, snapshot=0)
    assert "eval_interval=4, but nothing is evaluated: the solver has max_eval_batches=0" in (
        caplog.text
    )
    with pytest.raises(ConfigError, match=r"solver\.max_eval_batches"):
        solver(max_eval_batches=-1)


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    built = made(solver())
    for call in (built.save_params_to_files, built.graph_to_json):
        with pytest.raises(NotWritten, match="file/m"):
            call(f"{tmp_path}/file/m")
        with pytest.raises(ConfigError, match="expected a path of this machine, got 's3://b/m'"):
            call("s3://b/m")
    with pytest.raises(ConfigError, match="expected a path of this machine, got 's3:/"):
        built.load_dense_weights("s3://b/m")


def test_snapshots_hold_the_weights_of_their_iteration(tmp_path: Path) -> None:
    built = made(solver())
    built.fit(max_iter=6, display=0, eval_interval=0, snapshot=4, snapshot_prefix=f"{tmp_path}/")
    until_four = made(solver())
    until_four.fit(max_iter=4, display=0, eval_interval=0, snapshot=0)
    loaded = made(solver(seed=8))
    loaded.load_dense_weights(f"{tmp_path}/_dense_4.model")
    loaded.load_sparse_weights([f"{tmp_path}/0_sparse_4.model"])
    assert same(weights(loaded), weights(until_four))
    loaded.load_sparse_weights({"rows": f"{tmp_path}/0_sparse_4.model"})
    loaded.load_dense_optimizer_states(f"{tmp_path}/_opt_dense_4.model")
    loaded.load_sparse_optimizer_states([f"{tmp_path}/0_opt_sparse_4.model"])
    with pytest.raises(ConfigError, match="one file for each embedding is needed, got"):
        loaded.load_sparse_weights([])
    with pytest.raises(ConfigError, match=r"no such embedding, got 'row'.*'rows'"):
        loaded.load_sparse_weights({"row": "x"})


# --- verbs ----------------------------------------------------------------------------------------


def test_eval_gives_the_metrics_of_evaluate_and_begins_anew(columns: Any) -> None:
    kinds = [kind for kind in hugectr.MetricsType if kind.name != "AverageLoss"]
    built = made(
        solver(metrics_spec={kind: 1.0 for kind in [*kinds, hugectr.MetricsType.AverageLoss]})
    )
    built.fit(max_iter=60, display=0, eval_interval=0, snapshot=0)
    for _ in range(ROWS // 128):
        assert built.eval()
    metrics = dict(built.get_eval_metrics())
    data = model.evaluation_data(None, None, built.solver, built.translation.schema)
    scores, labels = built.learner.predict(data), columns["label"]
    above = scores > 0.8
    order = np.argsort(-scores, kind="stable")
    discount = 1.0 / np.log2(np.arange(ROWS) + 2.0)
    assert metrics["NDCG"] == pytest.approx(
        labels[order] @ discount / (np.sort(labels)[::-1] @ discount), rel=1e-3
    )
    assert above.any()
    assert metrics["HitRate"] == pytest.approx(labels[above].mean())
    wanted = np.mean(np.abs(scores - labels) / ((scores + labels) / 2))
    assert metrics["SMAPE"] == pytest.approx(wanted, rel=1e-5)
    positive, negative = scores[labels == 1], scores[labels == 0]
    pairs = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert metrics["AUC"] == pytest.approx(pairs)
    assert metrics["AverageLoss"] == pytest.approx(built.learner.evaluate(data)["loss"])
    assert dict(built.get_eval_metrics()) == metrics
    assert built.eval()
    assert dict(built.get_eval_metrics()) != metrics


def test_data_repeat_or_end_with_the_mode() -> None:
    built = made(solver())
    built.start_data_reading()
    assert all(built.train() for _ in range(ROWS // 64 + 3))
    ends = made(solver(repeat_dataset=False))
    with pytest.raises(ConfigError, match=r"does not read yet.*start_data_reading\(\)"):
        ends.train()
    reader = ends.get_data_reader_train()
    for _ in range(2):
        reader.set_source()
        assert [ends.train() for _ in range(ROWS // 64 + 2)] == [True] * (ROWS // 64) + [False] * 2


def test_take_wraps_around_or_stops_at_the_end() -> None:
    def open_rows(source: Any) -> hb.Dataset:
        rows = {"y": np.zeros(5, np.float32), "x": np.arange(5)}
        return hb.Dataset(hb.sources.Memory(rows), hb.Schema([hb.Label("y"), hb.Id("x")]), 2)

    def sizes(reader: Any, count: int) -> list[list[int]]:
        return [batch.ids["x"].values.tolist() for batch in reader.take(count)]

    repeats = batches.DataReader(open_rows, "a", {}, repeats=True)
    repeats.start()
    assert sizes(repeats, 2) == [[0, 1], [2, 3]]
    assert sizes(repeats, 2) == [[4], [0, 1]]
    ends = batches.DataReader(open_rows, "a", {}, repeats=False)
    ends.start()
    assert sizes(ends, 2) == [[0, 1], [2, 3]]
    assert sizes(ends, 2) == [[4]]
    assert sizes(ends, 3) == [[0, 1], [2, 3], [4]]
    assert sizes(ends, 3) == [[0, 1], [2, 3], [4]]


def test_set_source_is_for_epochs_and_opens_other_files() -> None:
    with pytest.raises(ConfigError, match="set_source: only a solver with repeat_dataset=False"):
        made(solver()).set_source("a", "b")
    built = made(solver(repeat_dataset=False))
    built.set_source("other.txt", "other_test.txt")
    assert built.get_data_reader_train().source == "other.txt"
    assert built.get_data_reader_eval().source == "other_test.txt"
    built.set_source(source=["c", "d"], keyset=["c.keyset", "d.keyset"], eval_source="e")
    assert built.get_data_reader_train().source == ("c", "d")
    built.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)


def test_verbs_before_compile_are_errors() -> None:
    built = made(solver(), compile=False)
    for call in (built.fit, built.train, built.eval, built.get_eval_metrics):
        with pytest.raises(ConfigError, match=r"model\.\w+: the model is not compiled"):
            call()
    built.compile()
    with pytest.raises(ConfigError, match=r"model\.add: the model is compiled, got DenseLayer"):
        built.add(hugectr.DenseLayer(Layer.ReLU, ["a"], ["b"]))


def test_a_graph_without_a_loss_is_scored_and_not_trained() -> None:
    whole = made(solver(), compile=False)
    built = hugectr.Model(whole.solver, whole.reader, whole.optimizer)
    built.graph = dataclasses.replace(whole.graph, layers=list(whole.graph.layers)[:-1])
    built.compile()
    built.start_data_reading()
    assert built.eval()
    for call in (built.fit, built.train):
        with pytest.raises(ConfigError, match="no loss, got 6 other layers"):
            call()


# --- what is inside -------------------------------------------------------------------------------


def test_tensors_are_gradients_of_the_last_step_and_values_of_the_last_evaluation() -> None:
    twin = made(solver())
    twin.start_data_reading()
    place = twin.translation.tensors["fc"]
    with hb.models.recorded(twin.network, [place]) as record:
        for _ in range(3):
            twin.train()
    built = made(solver())
    built.start_data_reading()
    for _ in range(3):
        built.train()
    gradient = built.check_out_tensor("fc", hugectr.Tensor_t.Train)
    np.testing.assert_array_equal(gradient, record.gradients[place])
    assert gradient.shape == (64, 8)
    assert gradient.any()
    assert gradient.dtype == np.float32
    with pytest.raises(ConfigError, match="nothing was evaluated yet, got 'rows'"):
        built.check_out_tensor("rows", hugectr.Tensor_t.Evaluate)
    built.eval()
    values = built.check_out_tensor("rows", hugectr.Tensor_t.Evaluate)
    assert values.shape == (128, 3, 4)
    batch = next(iter(model.evaluation_data(None, None, built.solver, built.translation.schema)))
    ids = batch.ids[built.translation.embeddings[0].slots[1]].values
    np.testing.assert_array_equal(values[:, 1], built.learner.tables["rows"].lookup(ids))
    np.testing.assert_array_equal(built.check_out_tensor("fc"), gradient)
    with pytest.raises(ConfigError, match=r"no such tensor, got 'f'"):
        built.check_out_tensor("f", hugectr.Tensor_t.Train)


def test_an_input_that_no_layer_takes_is_not_a_tensor() -> None:
    whole = made(solver(), compile=False)
    graph = whole.graph
    built = hugectr.Model(whole.solver, whole.reader, whole.optimizer)
    layers = [layer for layer in graph.layers if layer.top_names != ("x",)]
    layers[1] = dataclasses.replace(layers[1], bottom_names=["flat"])
    built.graph = dataclasses.replace(graph, layers=layers)
    built.compile()
    built.start_data_reading()
    assert built.train()
    with pytest.raises(ConfigError, match="no such tensor, got 'dense'"):
        built.check_out_tensor("dense", hugectr.Tensor_t.Train)


def test_a_model_whose_embedding_no_loss_needs_is_saved_and_loaded(tmp_path: Path) -> None:
    whole = made(solver(), compile=False)
    built = hugectr.Model(whole.solver, whole.reader, whole.optimizer)
    layers = [layer for layer in whole.graph.layers if layer.top_names not in (("flat",), ("x",))]
    layers[0] = dataclasses.replace(layers[0], bottom_names=["dense"])
    built.graph = dataclasses.replace(whole.graph, layers=layers)
    built.compile()
    built.start_data_reading()
    assert built.train()
    prefix = str(tmp_path / "m")
    built.save_params_to_files(prefix, 1)
    built.load_sparse_weights([f"{prefix}0_sparse_1.model"])
    built.load_sparse_optimizer_states([f"{prefix}0_opt_sparse_1.model"])


def test_the_gradients_of_the_last_iteration_of_a_fit_are_kept() -> None:
    fitted = made(solver())
    fitted.fit(max_iter=9, display=0, eval_interval=0, snapshot=0)
    stepped = made(solver())
    stepped.fit(max_iter=8, display=0, eval_interval=0, snapshot=0)
    stepped.set_learning_rate(0.05)
    stepped.train()
    gradient = fitted.check_out_tensor("relu", hugectr.Tensor_t.Train)
    np.testing.assert_array_equal(gradient, stepped.check_out_tensor("relu"))


@pytest.mark.parametrize("is_old", [False, True])
def test_slots_of_a_localized_embedding_are_those_of_the_data(
    is_old: bool, columns: dict[str, Any], tmp_path: Path
) -> None:
    """Norm files have no offsets; a key belongs to the slot that it was read for."""
    for slot in range(3):
        columns[f"data_{slot}"] += 20 * (2 - slot)
    changes = {"seed": 7, "batchsize": 64, "batchsize_eval": 128, "i64_input_key": True}
    settings = hugectr.solver_parser_helper(**changes) if is_old else solver(i64_input_key=True)

    def localized() -> hugectr.Model:
        built = made(settings, compile=False)
        kind = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
        embeddings = [
            dataclasses.replace(clause, embedding_type=kind) for clause in built.graph.embeddings
        ]
        built.graph = dataclasses.replace(built.graph, embeddings=embeddings)
        built.compile()
        return built

    def slots(path: Path) -> dict[int, int]:
        if is_old:
            kind = np.dtype([("key", "<i8"), ("slot", "<u8"), ("row", "<f4", 4)])
            rows = np.fromfile(path, kind)
            return dict(zip(rows["key"].tolist(), rows["slot"].tolist(), strict=True))
        keys = np.fromfile(path / "key", "<i8").tolist()
        return dict(zip(keys, np.fromfile(path / "slot_id", "<u8").tolist(), strict=True))

    built = localized()
    built.start_data_reading()
    for _ in range(16):
        built.train()
    built.save_params_to_files(str(tmp_path / "m"), 1)
    expected = {key: 2 - key // 20 for key in range(60)}
    assert slots(tmp_path / "m0_sparse_1.model") == expected
    again = localized()
    again.load_sparse_weights([str(tmp_path / "m0_sparse_1.model")])
    again.save_params_to_files(str(tmp_path / "m"), 2)
    assert slots(tmp_path / "m0_sparse_2.model") == expected


def test_one_path_in_place_of_a_list_of_files_is_rejected() -> None:
    built = made(solver())
    with pytest.raises(ConfigError, match=r"sparse_embedding_files: .* got 'rows.model'"):
        built.load_sparse_weights("rows.model")


def test_a_second_bias_of_a_gru_stays_frozen(caplog: pytest.LogCaptureFixture) -> None:
    """Its layer keeps it 0, as in HugeCTR, which is not worth a warning."""
    built = made(solver(), compile=False)
    gru = hugectr.DenseLayer(
        Layer.GRU, ["relu"], ["states"], num_output=3, batchsize=64, SeqLength=2, vector_size=4
    )
    ends = [
        gru,
        hugectr.DenseLayer(Layer.InnerProduct, ["states"], ["y"], num_output=1),
        hugectr.DenseLayer(Layer.BinaryCrossEntropyLoss, ["y", "label"], ["loss"]),
    ]
    built.graph = dataclasses.replace(built.graph, layers=(*built.graph.layers[:4], *ends))
    built.compile()
    built.freeze_dense()
    built.unfreeze_dense()
    built.fit(max_iter=2, eval_interval=0, snapshot=0)
    assert "does not hold the parameters" not in caplog.text
    for name, parameter in parameters(built):
        assert parameter.requires_grad != name.endswith("bias_hh_l0")


def test_a_graph_is_written_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "graph.json"
    made(solver(), compile=False).graph_to_json(str(path))
    assert json.loads(path.read_text())["layers"]


def test_frozen_parts_keep_their_bits() -> None:
    built = made(solver())
    built.fit(max_iter=20, display=0, eval_interval=0, snapshot=0)
    before = weights(built)
    built.freeze_embedding("rows")
    built.fit(max_iter=3, display=0, eval_interval=0, snapshot=0)
    after = weights(built)
    assert np.array_equal(before["rows"], after["rows"])
    assert not np.array_equal(before["layers.fc.weight"], after["layers.fc.weight"])
    built.unfreeze_embedding()
    built.freeze_dense()
    built.fit(max_iter=3, display=0, eval_interval=0, snapshot=0)
    last = weights(built)
    assert not np.array_equal(after["rows"], last["rows"])
    del after["rows"], last["rows"]
    assert same(after, last)
    with pytest.raises(ConfigError, match=r"freeze_embedding: .* got 'row'.*'rows'"):
        built.freeze_embedding("row")


def test_parts_frozen_before_compile_are_frozen_after_it() -> None:
    built = made(solver(), compile=False)
    built.freeze_embedding("rows")
    built.freeze_dense()
    built.unfreeze_dense()
    built.compile()
    before = weights(built)
    built.fit(max_iter=2, display=0, eval_interval=0, snapshot=0)
    assert built.learner.tables["rows"].frozen
    assert not np.array_equal(before["layers.fc.weight"], weights(built)["layers.fc.weight"])


def test_exported_predictions_are_those_of_the_last_batch(tmp_path: Path, columns: Any) -> None:
    built = made(solver())
    built.start_data_reading()
    built.eval()
    built.eval()
    files = [str(tmp_path / name) for name in ("predictions", "labels")]
    for _ in range(2):
        built.export_predictions(*files)
    predictions, labels = (np.array(Path(file).read_text().split(), float) for file in files)
    np.testing.assert_array_equal(labels, np.tile(columns["label"][128:256], 2))
    assert len(predictions) == 256
    data = model.evaluation_data(None, None, built.solver, built.translation.schema)
    scores = built.learner.predict(data)[128:256]
    np.testing.assert_allclose(predictions[:128], scores, rtol=1e-5)


def test_an_incremental_model_has_the_rows_since_the_last_call() -> None:
    update = {"update_type": hugectr.Update_t.Local}
    built = made(solver(), optimizer=update, compile=False)
    built.etc_params = hugectr.CreateETC([hugectr.TrainPSType_t.Staged])
    built.compile()
    built.start_data_reading()
    built.train()
    ((keys, vectors),) = built.get_incremental_model()
    table = built.learner.tables["rows"]
    assert set(keys.tolist()) <= set(range(20))
    np.testing.assert_array_equal(vectors, table.lookup(keys))
    ((none, _),) = built.get_incremental_model()
    assert len(none) == 0
    with pytest.raises(ConfigError, match="with an embedding training cache only"):
        made(solver()).get_incremental_model()
    every = made(solver(), compile=False)  # Global: each step moves every row
    every.etc_params = built.etc_params
    every.compile()
    every.start_data_reading()
    every.train()
    ((keys, _),) = every.get_incremental_model()
    assert len(keys) == len(every.learner.tables["rows"])


@pytest.mark.parametrize("by", ["the cache", "a call"])
def test_an_incremental_model_after_a_restart_has_what_changed_since_its_files(
    by: str, tmp_path: Path
) -> None:
    """Files and increments together hold the rows of a model that was not stopped."""

    def begun(source: Path) -> hugectr.Model:
        local = {"update_type": hugectr.Update_t.Local}
        built = made(solver(batchsize=2), optimizer=local, compile=False)
        paths = [str(source)] if by == "the cache" else []
        built.etc_params = hugectr.CreateETC([hugectr.TrainPSType_t.Staged], paths)
        built.compile()
        if by == "a call" and source.exists():
            built.load_sparse_weights([str(source)])
        built.start_data_reading()
        return built

    def rows(built: hugectr.Model, keys: Any) -> Any:
        return built.learner.tables["rows"].lookup(keys)

    first = begun(tmp_path / "rows")
    for _ in range(9):
        first.train()
    first.get_incremental_model()
    first.save_params_to_files(f"{tmp_path}/it-", 9)
    if by == "a call":
        (tmp_path / "it-0_sparse_9.model").rename(tmp_path / "rows")
    again = begun(tmp_path / "rows")
    ((keys, _),) = again.get_incremental_model()
    assert len(keys) == 0
    again.train()
    ((keys, vectors),) = again.get_incremental_model()
    assert 0 < len(keys) < len(again.learner.tables["rows"])
    np.testing.assert_array_equal(vectors, rows(again, keys))
    others = np.setdiff1d(np.arange(20), keys)
    np.testing.assert_array_equal(rows(again, others), rows(first, others))


# --- several labels -------------------------------------------------------------------------------


def test_losses_are_weighted_and_their_auc_is_the_mean_over_labels(capsys: Any) -> None:
    labels = {"label": 1, "other": 1}
    built = made(solver(), labels)
    built.fit(max_iter=20, display=0, eval_interval=20, snapshot=0)
    results = built.learner.evaluate(
        model.evaluation_data(None, None, built.solver, built.translation.schema)
    )
    mean = (results["label.AUC"] + results["other.AUC"]) / 2
    printed = capsys.readouterr().out
    assert f"Evaluation, AUC: {mean:g}" in printed
    assert f"AUC: {{{results['label.AUC']:f}, {results['other.AUC']:f}}}" in printed
    weighted = made(solver(), labels, loss_names=["other"], loss_weights=[0.0])
    weighted.start_data_reading()
    before = weights(weighted)
    weighted.train()
    after = weights(weighted)
    head = next(name for name in before if name.startswith("layers.other_logit"))
    assert np.array_equal(before[head], after[head])
    with pytest.raises(ConfigError, match=r"compile\.loss_names: .* got 'others'.*'other'"):
        made(solver(), labels, loss_names=["others"], loss_weights=[1.0])
    with pytest.raises(ConfigError, match=r"compile\.loss_weights: one weight for each"):
        made(solver(), labels, loss_names=["other"])


def test_columns_of_one_label_share_a_loss_and_have_an_auc_each(
    capsys: Any, columns: Any, tmp_path: Path
) -> None:
    columns["pair_0"], columns["pair_1"] = columns["label"], columns["other"]
    one = made(solver(), compile=False)
    graph = one.graph
    dense = hugectr.DenseLayer
    heads = (
        dense(Layer.InnerProduct, ["kept"], ["logits"], num_output=2),
        dense(Layer.MultiCrossEntropyLoss, ["logits", "pair"], ["loss"], target_weight_vec=[1, 1]),
    )
    built = hugectr.Model(one.solver, one.reader, one.optimizer)
    built.graph = dataclasses.replace(
        graph,
        input=dataclasses.replace(graph.input, label_dims=[2], label_names=["pair"]),
        layers=(*graph.layers[:5], *heads),
    )
    built.compile()
    built.fit(max_iter=30, display=0, eval_interval=30, snapshot=0)
    macro, first, second = re.search(
        r"AUC: (\S+)\n.*AUC: {(\S+), (\S+)}", capsys.readouterr().out
    ).groups()
    assert float(macro) == pytest.approx((float(first) + float(second)) / 2, rel=1e-4)
    assert float(first) > 0.8
    files = [str(tmp_path / name) for name in ("predictions", "labels")]
    built.export_predictions(*files)
    labels = np.array(Path(files[1]).read_text().split(), float).reshape(128, 2)
    np.testing.assert_array_equal(labels[:, 0], columns["label"][-128:])
    np.testing.assert_array_equal(labels[:, 1], columns["other"][-128:])


# --- summary, collections -------------------------------------------------------------------------


def test_a_summary_before_compile_is_that_after_it(capsys: Any) -> None:
    built = made(solver(), compile=False)
    built.summary()
    before = capsys.readouterr().out
    built.compile()
    capsys.readouterr()
    built.summary()
    assert capsys.readouterr().out == before
    assert "[n, 3, 4]" in before


def with_collection() -> hugectr.Model:
    """Two tables of an embedding collection, one of which two slots look up."""
    built = made(solver(), compile=False)
    graph = built.graph
    sparse = [hugectr.DataReaderSparseParam(f"data_{slot}", 1, True, 1) for slot in range(3)]
    tables = [hugectr.EmbeddingTableConfig(name, -1, 4) for name in ("users", "items")]
    collection = hugectr.EmbeddingCollectionConfig()
    collection.embedding_lookup(tables[0], "data_0", "first", "sum")
    for slot in (1, 2):
        collection.embedding_lookup(tables[1], f"data_{slot}", f"emb_{slot}", "mean")
    again = hugectr.Model(built.solver, built.reader, built.optimizer)
    again.add(dataclasses.replace(graph.input, data_reader_sparse_param_array=sparse))
    again.add(collection)
    concat = hugectr.DenseLayer(Layer.Concat, ["first", "emb_1", "emb_2"], ["rows"])
    for layer in (concat, *graph.layers):
        again.add(layer)
    again.compile()
    return again


def test_tables_of_a_collection_are_dumped_and_loaded_by_name(tmp_path: Path) -> None:
    trained = with_collection()
    trained.fit(max_iter=5, display=0, eval_interval=0, snapshot=0)
    trained.embedding_dump(str(tmp_path / "all"))
    trained.embedding_dump(str(tmp_path / "one"), ["items"])
    rows = {name: table.lookup(np.arange(20)) for name, table in trained.learner.tables.items()}
    assert sorted(rows) == ["items", "users"]
    loaded = with_collection()
    loaded.embedding_load(str(tmp_path / "one"), ["items"])
    tables = loaded.learner.tables
    np.testing.assert_array_equal(tables["items"].lookup(np.arange(20)), rows["items"])
    assert len(tables["users"]) == 0
    loaded.embedding_load(str(tmp_path / "all"))
    np.testing.assert_array_equal(tables["users"].lookup(np.arange(20)), rows["users"])
    with pytest.raises(ConfigError, match=r"no embedding collection has this table, got 'user'"):
        loaded.embedding_load(str(tmp_path / "all"), ["user"])


# --- what is logged -------------------------------------------------------------------------------


def test_performance_is_printed_when_the_solver_asks_for_it(capsys: Any) -> None:
    built = made(solver(perf_logging=True))
    built.fit(max_iter=4, display=0, eval_interval=4, snapshot=0)
    printed = re.findall(r": \[[\d.]+, (\w+), .*\]", capsys.readouterr().out)
    assert printed == ["epoch_start", "eval_start", "eval_accuracy", "run_stop", "train_samples"]
