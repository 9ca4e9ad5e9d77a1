# SPDX-License-Identifier: Apache-2.0
"""Session: the loop of one's own of v2.3 to v3.0.1, over a JSON file and Norm files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.model import model
from hotbed.errors import ConfigError

ROWS = 512
DESCRIPTION = {
    "solver": {"eval_batches": "a stale clause that a session does not read"},
    "optimizer": {
        "type": "Adam",
        "update_type": "Global",
        "adam_hparam": {
            "learning_rate": 0.02,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-7,
            "warmup_steps": 5,
        },
    },
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "source": "train.txt",
            "eval_source": "test.txt",
            "check": "Sum",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": 2},
            "sparse": [
                {
                    "top": "data1",
                    "type": "DistributedSlot",
                    "max_feature_num_per_sample": 3,
                    "slot_num": 2,
                }
            ],
        },
        {
            "name": "rows",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "data1",
            "top": "rows",
            "sparse_embedding_hparam": {
                "max_vocabulary_size_per_gpu": 100,
                "embedding_vec_size": 4,
                "combiner": 0,
            },
        },
        {"name": "flat", "type": "Reshape", "bottom": "rows", "top": "flat", "leading_dim": 8},
        {"name": "x", "type": "Concat", "bottom": ["flat", "dense"], "top": "x"},
        {
            "name": "fc",
            "type": "InnerProduct",
            "bottom": "x",
            "top": "fc",
            "fc_param": {"num_output": 1},
        },
        {
            "name": "loss",
            "type": "BinaryCrossEntropyLoss",
            "bottom": ["fc", "label"],
            "top": "loss",
        },
    ],
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of the JSON file; every source gives the same rows in memory."""
    import hotbed as hb

    rng = np.random.default_rng(5)
    rows: dict[str, Any] = {
        "dense": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "data1_0": rng.integers(0, 9, ROWS),
        "data1_1": rng.integers(0, 9, ROWS),
    }
    rows["label"] = (rows["data1_0"] % 2).astype(np.float32)

    def training(reader: Any, input: Any, solver: Any, schema: Any, **checks: Any) -> hb.Dataset:
        return hb.Dataset(hb.sources.Memory(rows), schema, solver.batchsize, drop_last=True)

    monkeypatch.setattr(model, "columns_of", lambda reader, input: model.named_columns(input))
    monkeypatch.setattr(model, "training_data", training)
    monkeypatch.setattr(model, "evaluation_data", training)
    path = tmp_path / "dcn.json"
    path.write_text(json.dumps(DESCRIPTION))
    return str(path)


def solver(**changes: Any) -> hugectr.Solver:
    settings = {"seed": 3, "batchsize": 64, "batchsize_eval": 64, "max_eval_batches": 4}
    return hugectr.solver_parser_helper(**{**settings, **changes})


def test_the_loop_of_the_notebooks_learns(config: str, tmp_path: Path) -> None:
    scheduler = hugectr.get_learning_rate_scheduler(config)
    session = hugectr.Session(solver(), config)
    session.start_data_reading()
    losses = []
    for _ in range(60):
        session.set_learning_rate(scheduler.get_next())
        assert session.train()
        losses.append(session.get_current_loss())
    assert scheduler.get_lr() == 0.02
    assert losses[-1] < 0.5 * losses[0]
    session.check_overflow()
    session.copy_weights_for_evaluation()
    ((name, auc),) = session.evaluation()
    assert name == "AUC"
    assert auc > 0.95
    session.download_params_to_files(f"{tmp_path}/", 60)
    loaded = hugectr.Session(
        solver(
            model_file=f"{tmp_path}/_dense_60.model",
            embedding_files=[f"{tmp_path}/0_sparse_60.model"],
        ),
        config,
    )
    assert (tmp_path / "0_sparse_60.model").is_file()  # a folder from v3.1 on
    loaded.start_data_reading()
    session.get_data_reader_eval().set_source()
    assert loaded.evaluation() == session.evaluation()
    assert loaded.get_params_num() == session.get_params_num() == 11 + 9 * 4


def test_an_evaluation_of_epochs_reads_all_data_and_exports_it(config: str, tmp_path: Path) -> None:
    session = hugectr.Session(solver(repeat_dataset=False), config)
    files = [str(tmp_path / name) for name in ("predictions", "labels")]
    for _ in range(2):
        session.evaluation(*files)
        for file in files:
            assert len(Path(file).read_text().split()) == ROWS
    with pytest.raises(ConfigError, match="evaluation: predictions and labels are exported toge"):
        session.evaluation(files[0])
    reader = session.get_data_reader_train()
    reader.set_source("other.txt")
    steps = 0
    while session.train():
        steps += 1
    assert steps == ROWS // 64


def test_a_file_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"layers": []}')
    with pytest.raises(ConfigError, match="an object with optimizer and layers is needed"):
        hugectr.Session(solver(), str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON, got"):
        hugectr.get_learning_rate_scheduler(str(path))
