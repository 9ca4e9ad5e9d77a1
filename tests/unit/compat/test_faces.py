# SPDX-License-Identifier: Apache-2.0
"""One network by HugeCTR's calls, by its JSON of both dialects, and by hb.models: equal losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import DenseLayer, Layer_t

STEPS = 6
BATCH_SIZE = 32
SEED = 5
LR = 0.01


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Random samples in Norm files."""
    params = hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=3,
        num_slot=2,
        i64_input_key=False,
        source=str(tmp_path / "train.txt"),
        eval_source=str(tmp_path / "test.txt"),
        slot_size_array=[10, 20],
        num_files=1,
        eval_num_files=1,
        num_samples_per_file=BATCH_SIZE * STEPS,
    )
    hugectr.tools.DataGenerator(params).generate()
    return tmp_path


def reader(folder: Path) -> hugectr.DataReaderParams:
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=str(folder / "train.txt"),
        eval_source=str(folder / "test.txt"),
        check_type=hugectr.Check_t.Sum,
    )


def solver() -> hugectr.Solver:
    return hugectr.CreateSolver(
        seed=SEED, lr=LR, batchsize=BATCH_SIZE, batchsize_eval=BATCH_SIZE, max_eval_batches=1
    )


def losses(model: Any) -> list[float]:
    """Train a model of the door by its low-level verbs."""
    model.start_data_reading()
    values = []
    for _ in range(STEPS):
        model.train()
        values.append(model.get_current_loss())
    return values


def by_calls(folder: Path) -> hugectr.Model:
    optimizer = hugectr.CreateOptimizer(update_type=hugectr.Update_t.Global, epsilon=1e-7)
    model = hugectr.Model(solver(), reader(folder), optimizer)
    slots = hugectr.DataReaderSparseParam("data1", 2, False, 2)
    model.add(hugectr.Input(1, "label", 3, "dense", [slots]))
    model.add(
        hugectr.SparseEmbedding(
            hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            embedding_vec_size=4,
            combiner="sum",
            sparse_embedding_name="rows",
            bottom_name="data1",
        )
    )
    model.add(DenseLayer(Layer_t.Reshape, ["rows"], ["flat"], leading_dim=8))
    model.add(DenseLayer(Layer_t.Concat, ["flat", "dense"], ["x"]))
    model.add(DenseLayer(Layer_t.MultiCross, ["x"], ["cross"], num_layers=2))
    model.add(DenseLayer(Layer_t.InnerProduct, ["x"], ["fc1"], num_output=8))
    model.add(DenseLayer(Layer_t.ReLU, ["fc1"], ["relu1"]))
    model.add(DenseLayer(Layer_t.Concat, ["relu1", "cross"], ["all"]))
    model.add(DenseLayer(Layer_t.InnerProduct, ["all"], ["fc2"], num_output=1))
    model.add(DenseLayer(Layer_t.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"]))
    return model


def by_graph_json(folder: Path) -> hugectr.Model:
    path = str(folder / "graph.json")
    first = by_calls(folder)
    first.graph_to_json(path)
    model = hugectr.Model(solver(), reader(folder), first.optimizer)
    model.construct_from_json(path, include_dense_network=True)
    return model


def old_json(folder: Path) -> dict[str, Any]:
    """Return the file that v3.0.1 reads."""
    return {
        "optimizer": {
            "type": "Adam",
            "update_type": "Global",
            "adam_hparam": {"learning_rate": LR, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7},
        },
        "layers": [
            {
                "name": "data",
                "type": "Data",
                "format": "Norm",
                "source": str(folder / "train.txt"),
                "eval_source": str(folder / "test.txt"),
                "check": "Sum",
                "label": {"top": "label", "label_dim": 1},
                "dense": {"top": "dense", "dense_dim": 3},
                "sparse": [
                    {
                        "top": "data1",
                        "type": "DistributedSlot",
                        "max_feature_num_per_sample": 2,
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
            {"type": "Reshape", "bottom": "rows", "top": "flat", "leading_dim": 8},
            {"type": "Concat", "bottom": ["flat", "dense"], "top": "x"},
            {"type": "MultiCross", "bottom": "x", "top": "cross", "mc_param": {"num_layers": 2}},
            {"type": "InnerProduct", "bottom": "x", "top": "fc1", "fc_param": {"num_output": 8}},
            {"type": "ReLU", "bottom": "fc1", "top": "relu1"},
            {"type": "Concat", "bottom": ["relu1", "cross"], "top": "all"},
            {"type": "InnerProduct", "bottom": "all", "top": "fc2", "fc_param": {"num_output": 1}},
            {"type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
        ],
    }


def by_session(folder: Path) -> hugectr.Session:
    path = folder / "old.json"
    path.write_text(json.dumps(old_json(folder)))
    old = hugectr.solver_parser_helper(seed=SEED, batchsize=BATCH_SIZE, batchsize_eval=BATCH_SIZE)
    session = hugectr.Session(old, str(path))
    session.set_learning_rate(LR)
    return session


def of_hotbed(folder: Path) -> list[float]:
    """Train the network as a user of Hotbed writes it."""
    rule = hb.Adam(LR, eps=1e-7, eps_hat=True, scope="all")
    table = hb.Table("rows", 4, rule=rule, init=hb.Uniform(0.05), seed=SEED)
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Dense("dense", width=3),
            hb.Id("data1_0", table="rows"),
            hb.Id("data1_1", table="rows"),
        ]
    )
    initial = {"bias_init": "fan_out_normal"}  # as HugeCTR's
    crosses = {"num_layers": 2, "weight_init": "fan_in_normal"}
    description = {
        "inputs": [
            {"input": "flat", "name": "flat", "columns": ["data1_0", "data1_1"]},
            {"input": "dense", "name": "dense", "columns": ["dense"]},
        ],
        "layers": [
            {"layer": "concat", "name": "x", "inputs": ["flat", "dense"]},
            {"layer": "cross_net", "name": "cross", "inputs": ["x"], **crosses},
            {"layer": "linear", "name": "fc1", "inputs": ["x"], "out_features": 8, **initial},
            {"layer": "relu", "name": "relu1", "inputs": ["fc1"]},
            {"layer": "concat", "name": "all", "inputs": ["relu1", "cross"]},
            {"layer": "linear", "name": "fc2", "inputs": ["all"], "out_features": 1, **initial},
        ],
        "outputs": {"label": "fc2"},
    }
    torch.manual_seed(SEED)
    network = hb.models.Graph(schema, {"rows": table}, description)
    model = hb.RecModel(network, "bce", hb.Adam(LR, eps=1e-7, eps_hat=True))
    source = hb.sources.Norm(folder / "train.txt", ["label"], ["data1_0", "data1_1"], dense="dense")
    data = hb.Dataset(source, schema, batch_size=BATCH_SIZE)
    return [float(model.step(batch)) for batch in data]


def test_every_face_gives_the_same_losses(folder: Path) -> None:
    expected = of_hotbed(folder)
    assert len(set(expected)) == STEPS
    calls = by_calls(folder)
    calls.compile()
    assert losses(calls) == expected
    graph = by_graph_json(folder)
    graph.compile()
    assert losses(graph) == expected
    assert losses(by_session(folder)) == expected
