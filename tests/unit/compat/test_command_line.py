# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's training files and scripts run as they are: `--train`, `hotbed train` and `run`."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hotbed.compat.hugectr as hugectr
from hotbed.cli.commands import app
from hotbed.compat.hugectr.__main__ import main
from hotbed.compat.hugectr.clauses import FitParams
from hotbed.compat.hugectr.job import dialect, read_training
from hotbed.compat.hugectr.rehearsal import Reading, Rehearsal
from hotbed.compat.hugectr.run import main as run_main
from hotbed.errors import ConfigError, DataError, HotbedError

CONFIG: dict[str, Any] = {
    "solver": {
        "seed": 1,
        "lr_policy": "fixed",
        "display": 2,
        "max_iter": 7,
        "gpu": [0],
        "batchsize": 16,
        "snapshot": 4,
        "snapshot_prefix": "out/",
        "eval_interval": 3,
        "max_eval_batches": 2,
        "eval_metrics": ["AUC:1.0", "AverageLoss"],
        "export_predictions_prefix": "out/export",
    },
    "optimizer": {
        "type": "SGD",
        "update_type": "Global",
        "sgd_hparam": {"learning_rate": 0.1, "warmup_steps": 4},
    },
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "source": "data/train.txt",
            "eval_source": "data/valid.txt",
            "check": "Sum",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": 2},
            "sparse": [
                {
                    "top": "data1",
                    "type": "DistributedSlot",
                    "max_feature_num_per_sample": 3,
                    "slot_num": 3,
                }
            ],
        },
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "data1",
            "top": "embedding",
            "sparse_embedding_hparam": {
                "max_vocabulary_size_per_gpu": 300,
                "embedding_vec_size": 4,
                "combiner": 0,
            },
        },
        {"type": "Reshape", "bottom": "embedding", "top": "wide", "leading_dim": 12},
        {"type": "Concat", "bottom": ["wide", "dense"], "top": "all"},
        {"type": "InnerProduct", "bottom": "all", "top": "fc", "fc_param": {"num_output": 1}},
        {"type": "BinaryCrossEntropyLoss", "bottom": ["fc", "label"], "top": "loss"},
    ],
}

SCRIPT = """
import sys

import hugectr
from mpi4py import MPI

assert MPI.COMM_WORLD.Get_size() == 1
from hugectr.tools import DataGenerator
import hugectr.inference

solver = hugectr.CreateSolver(batchsize=320, batchsize_eval=320, max_eval_batches=30, seed=1)
reader = hugectr.DataReaderParams(
    hugectr.DataReaderType_t.Parquet,
    source=["./train/_file_list.txt"],
    eval_source="/valid/_file_list.txt",
    check_type=hugectr.Check_t.Non,
    slot_size_array=[1000, 0, 500],
)
optimizer = hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD)
model = hugectr.Model(solver, reader, optimizer)
sparse = hugectr.DataReaderSparseParam("data1", [2, 1, 1], False, 3)
model.add(hugectr.Input(1, "label", 2, "dense", [sparse]))
model.add(
    hugectr.SparseEmbedding(
        hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
        workspace_size_per_gpu_in_mb=1,
        embedding_vec_size=4,
        combiner="mean",
        sparse_embedding_name="embedding",
        bottom_name="data1",
        slot_size_array=[1000, 0, 500],
    )
)
model.add(
    hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["embedding"], ["wide"], leading_dim=12)
)
model.add(hugectr.DenseLayer(hugectr.Layer_t.Concat, ["wide", "dense"], ["all"]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["all"], ["fc"], num_output=1))
model.add(
    hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"])
)
model.summary()
model.compile()
model.summary()
model.fit(max_iter=2300, display=200, eval_interval=1000, snapshot=1000, snapshot_prefix="s")
print("arguments", sys.argv[1:], __name__)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with generated data of the training file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    parameters = hugectr.tools.DataGeneratorParams(
        hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=2,
        num_slot=3,
        i64_input_key=False,
        source="data/train.txt",
        eval_source="data/valid.txt",
        slot_size_array=[10, 20, 30],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
    hugectr.tools.DataGenerator(parameters).generate()
    return tmp_path


def _config(**solver: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["solver"] |= solver
    config["solver"] = {key: value for key, value in config["solver"].items() if value is not None}
    return config


def _written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_train_prints_and_saves_at_the_iterations_of_huge_ctr(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--train", _written(folder, CONFIG)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("Iter: ")]
    assert shown == ["2", "4", "6"]
    rates = [line.rpartition("lr:")[2] for line in lines if line.startswith("Iter: ")]
    assert rates == ["0.075000", "0.100000", "0.100000"]  # of the third, fifth, seventh step
    assert sum(line.startswith("Evaluation, AUC: ") for line in lines) == 2
    assert sum(line.startswith("Evaluation, AverageLoss: ") for line in lines) == 2
    assert sum(line.startswith("Eval Time for 2 iters: ") for line in lines) == 2
    saved = sorted(path.name for path in (folder / "out").iterdir())
    assert {"_dense_4.model", "0_sparse_4.model"} <= set(saved)
    assert not [name for name in saved if name.endswith(("_0.model", "_6.model"))]
    labels = (folder / "out" / "export_label_3").read_text().split()
    predictions = (folder / "out" / "export_prediction_3").read_text().split()
    assert len(labels) == len(predictions) == 32


def test_hotbed_train_recognises_a_training_file(folder: Path) -> None:
    path = _written(folder, CONFIG)
    outcome = CliRunner().invoke(app, ["train", path, "--set", "solver.max_iter=3"])
    assert outcome.exit_code == 0, outcome.exception
    assert "Iter: 2 " in outcome.output
    assert "Iter: 4 " not in outcome.output


def test_epochs_end_with_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(max_iter=None, num_epochs=2, display=1, eval_interval=0, snapshot=100)
    dialect.train(config)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch: ")] == ["Epoch: 0", "Epoch: 1"]
    shown = [int(line.split()[1]) for line in lines if line.startswith("Iter: ")]
    assert shown == list(range(1, 16))  # 2 * 128 / 16 batches, counted from 0


def test_training_ends_when_the_auc_equals_its_threshold(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugectr.Model, "get_eval_metrics", lambda self: [("AUC", 0.75)])
    dialect.train(_config(eval_metrics=["AUC:0.75"]))
    output = capsys.readouterr().out
    assert "Hit target accuracy AUC 0.750000 at 42.86% of training" in output
    assert "Iter: 4 " not in output


def test_loss_that_is_not_a_number_ends_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugectr.Model, "get_current_loss", lambda self: float("nan"))
    with pytest.raises(DataError, match="iteration 2: the loss is not a number"):
        dialect.train(CONFIG)


def test_recognised_are_files_whose_first_layer_is_data() -> None:
    assert dialect.recognises(CONFIG)
    assert dialect.recognises({"layers": CONFIG["layers"]})
    assert not dialect.recognises({"layers": CONFIG["layers"][1:]})
    assert not dialect.recognises({"layers": []})
    assert not dialect.recognises({"train": {"kind": "parquet"}})


def test_clause_that_training_does_not_read_is_not_checked() -> None:
    read_training({**CONFIG, "inference": {"max_batchsize": "?"}})
    with pytest.raises(ConfigError, match=r"config\.solvers: unknown key"):
        read_training({**CONFIG, "solvers": {}})
    with pytest.raises(ConfigError, match=r"config\.optimizer: missing key"):
        read_training({key: CONFIG[key] for key in ("solver", "layers")})


def test_version_and_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("Hotbed Version: ")
    assert main(["--train", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


@pytest.fixture
def rehearse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run script.py of a folder in this process, and return what it prints."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        modules = set(sys.modules)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", sys.argv)
            patch.setattr(sys, "path", [*sys.path])
            try:
                assert run_main(["script.py", *arguments]) == 0
            finally:
                for name in sys.modules.keys() - modules:
                    if name.partition(".")[0] in ("hugectr", "hugectr2onnx", "mpi4py"):
                        del sys.modules[name]
        return capsys.readouterr().out

    return run


def test_script_is_rehearsed_on_data_under_its_own_paths(
    tmp_path: Path, rehearse: Callable[..., str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    short = ["--max-iter", "6", "--data-scale", "0.1", "--data-root", "root"]

    command = [sys.executable, "-m", "hotbed.compat.hugectr.run", "script.py", *short]
    first = subprocess.run(
        [*command, "--own", "argument"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert first.returncode == 0, first.stderr
    assert "rehearsal: batches of 32 samples, 1 of 32 to evaluate" in first.stdout
    assert "rehearsal: generated ./train/_file_list.txt, with slots of 100, 0, 50 keys" in (
        first.stdout
    )
    assert "rehearsal: learned 6 iterations" in first.stdout
    for iteration in (1000, 2000):
        assert f"the snapshot of iteration {iteration} has 6 iterations" in first.stdout
        assert (tmp_path / f"s_dense_{iteration}.model").exists()
    assert "arguments ['--own', 'argument'] __main__" in first.stdout
    listed = tmp_path / "root" / "valid" / "_file_list.txt"
    before = listed.stat().st_mtime_ns

    assert "rehearsal: generated" not in rehearse(*short)
    assert listed.stat().st_mtime_ns == before
    with pytest.raises(HotbedError, match="was generated with other sizes"):
        rehearse(*short[2:], "--max-iter", "7")


def test_a_rehearsal_that_reads_a_graph_takes_the_data_of_the_one_that_wrote_it(
    tmp_path: Path,
) -> None:
    """Notebooks train, write the graph, and go on from it in a second script."""
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Norm,
        str(tmp_path / "list.txt"),
        eval_source=str(tmp_path / "eval.txt"),
        check_type=hugectr.Check_t.Sum,
    )
    sparse = hugectr.DataReaderSparseParam("data", 2, False, 3)
    inputs = hugectr.Input(1, "label", 2, "dense", [sparse])
    reading = Reading(reader, (8, 2))
    assert reading.generate(hugectr.CreateSolver(), inputs)
    of_graph = dataclasses.replace(inputs, slot_size_array=(), label_weights=(1.0,))
    assert reading.generate(hugectr.CreateSolver(), of_graph) == []
    wider = dataclasses.replace(inputs, dense_dim=3)
    with pytest.raises(HotbedError, match="was generated with other sizes"):
        reading.generate(hugectr.CreateSolver(), wider)


def test_rehearsal_never_writes_beside_data_of_the_user(
    tmp_path: Path, rehearse: Callable[..., str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "_file_list.txt").write_text("0\n")
    message = r"root/valid/_file_list.txt: does not exist, got train/_file_list.txt"
    with pytest.raises(HotbedError, match=message):
        rehearse("--max-iter", "2", "--data-root", "root")
    assert (tmp_path / "train" / "_file_list.txt").read_text() == "0\n"
    assert not (tmp_path / "root").exists()


EPOCHS = """
import hugectr
import hugectr2onnx

assert hugectr2onnx.converter.convert
assert hugectr.DataSourceType_t.HDFS is hugectr.FileSystemType_t.HDFS
solver = hugectr.CreateSolver(
    batchsize=16, batchsize_eval=16, repeat_dataset=False, max_eval_batches=2
)
kind = hugectr.DataReaderType_t.Norm
reader = hugectr.DataReaderParams(kind, ["data/0.txt"], "", "data/eval.txt", hugectr.Check_t.Sum)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Ftrl)
model = hugectr.Model(solver, reader, optimizer)
sparse = hugectr.DataReaderSparseParam("keys", 1, True, 1)
model.add(hugectr.Input(1, "label", 2, "dense", [sparse]))
embedding = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
model.add(hugectr.SparseEmbedding(embedding, 1, 4, "sum", "rows", "keys"))
layer = hugectr.Layer_t
model.add(hugectr.DenseLayer(layer.Reshape, ["rows"], ["flat"], leading_dim=4))
model.add(hugectr.DenseLayer(layer.Concat, ["flat", "dense"], ["x"]))
model.add(hugectr.DenseLayer(layer.InnerProduct, ["x"], ["logit"], num_output=1))
model.add(hugectr.DenseLayer(layer.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
model.compile()
model.fit(num_epochs=1, display=0, eval_interval=0, snapshot=0)
model.set_source("data/1.txt", "data/eval.txt")
steps = 0
while model.train():
    steps += 1
print("of the second source", steps)

again = hugectr.Model(solver, reader, optimizer)
again.graph = model.graph
again.compile()
again.start_data_reading()
print("of data that were there", sum(iter(again.train, False)))
"""


def test_rehearsal_ends_epochs_and_generates_what_is_read_later(
    tmp_path: Path, rehearse: Callable[..., str]
) -> None:
    (tmp_path / "script.py").write_text(EPOCHS)
    printed = rehearse("--max-iter", "5", "--release", "v4.3.1")
    for line in (
        "Ftrl is that of HugeCTR v4.3.1: nothing is added under each root",
        "rehearsal: generated data/0.txt",
        "rehearsal: learned 5 iterations",
        "rehearsal: generated data/1.txt",
        "of the second source 5\n",
        "of data that were there 5\n",
    ):
        assert line in printed


def test_training_files_and_sessions_have_the_arithmetic_of_the_release(
    folder: Path, rehearse: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"beta": 0.5, "lambda1": 0.0, "lambda2": 0.0, "learning_rate": 0.1}
    config = {**_config(max_iter=1), "optimizer": {"type": "Ftrl", "ftrl_hparam": optimizer}}
    assert run_main([_written(folder, config), "--release", "v3.0"]) == 0
    assert "Ftrl is that of HugeCTR v3.0: nothing is added" in capsys.readouterr().out
    script = "import hugectr\nprint('release', hugectr.solver_parser_helper(3).release)\n"
    (folder / "script.py").write_text(script)
    assert "release v3.0\n" in rehearse("--release", "v3.0")


def test_a_wrong_release_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["script.py", "--release", "newest"]) == 2
    assert "not a release of HugeCTR, got 'newest'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        ({"max_iter": 2300, "snapshot": 1000}, (1000, 2000)),
        ({"max_iter": 40, "snapshot": 20}, ()),
        ({"max_iter": 10**6, "snapshot": 1000}, tuple(range(991_000, 10**6 + 1, 1000))),
        ({"max_iter": 100, "snapshot": 0}, ()),
        ({"max_iter": 100, "snapshot": 30}, (60, 90)),
    ],
)
def test_rehearsal_writes_the_snapshots_that_it_does_not_reach(
    fit: dict[str, int], expected: tuple[int, ...]
) -> None:
    """`test_script_is_rehearsed_on_data_under_its_own_paths` finds the files of the first case."""
    assert Rehearsal(max_iter=50).left_out(FitParams(**fit), repeats=True) == expected


def test_training_file_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _written(tmp_path, _config(snapshot=1000, export_predictions_prefix=""))
    assert run_main([path, "--max-iter", "4", "--data-scale", "0.5"]) == 0
    output = capsys.readouterr().out
    assert "rehearsal: generated data/train.txt, with slots of 1000 keys" in output
    assert "rehearsal: learned 4 iterations" in output
    assert run_main([path, "--data-scale", "2"]) == 2
    assert "--data-scale: not in (0, 1], got 2.0" in capsys.readouterr().err
