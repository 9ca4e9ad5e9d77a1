# SPDX-License-Identifier: Apache-2.0
"""The `layers` of JSON files of all releases become the clauses of the calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.errors import ConfigError

OLD_DATA: dict[str, Any] = {
    "name": "data",
    "type": "Data",
    "source": "./train/file_list.txt",
    "eval_source": "./test/file_list.txt",
    "check": "Sum",
    "label": {"top": "label", "label_dim": 1},
    "dense": {"top": "dense", "dense_dim": 13},
    "sparse": [
        {
            "top": "data1",
            "type": "DistributedSlot",
            "max_feature_num_per_sample": 30,
            "slot_num": 26,
        }
    ],
}
NEW_DATA: dict[str, Any] = {
    "type": "Data",
    "label": {"top": ["click", "buy"], "label_dim": [1, 2]},
    "dense": {"top": "dense", "dense_dim": 0},
    "sparse": [{"top": "user", "nnz_per_slot": [2, 3], "is_fixed_length": True, "slot_num": 2}],
}
OLD_EMBEDDING: dict[str, Any] = {
    "name": "sparse_embedding1",
    "type": "DistributedSlotSparseEmbeddingHash",
    "bottom": "data1",
    "top": "sparse_embedding1",
    "sparse_embedding_hparam": {
        "max_vocabulary_size_per_gpu": 1000,
        "embedding_vec_size": 16,
        "combiner": 1,
    },
}


def test_data_of_v3_0_holds_its_reader() -> None:
    expected = hugectr.Input(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source="./train/file_list.txt",
        eval_source="./test/file_list.txt",
        check_type=hugectr.Check_t.Sum,
        float_label_dense=False,
        label_dim=1,
        label_name="label",
        dense_dim=13,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 30, 30, 26)
        ],
        sparse_names=["data1"],
    )
    assert read_graph({"layers": [OLD_DATA]}).input == expected


def test_data_of_a_graph_has_no_reader() -> None:
    graph = read_graph({"layers": [NEW_DATA], "model_name": "dcn"})
    assert graph.model_name == "dcn"
    assert graph.input == hugectr.Input(
        [1, 2],
        ["click", "buy"],
        0,
        "dense",
        [hugectr.DataReaderSparseParam("user", [2, 3], True, 2)],
    )


def test_embeddings_of_both_dialects() -> None:
    new: dict[str, Any] = {
        "type": "LocalizedSlotSparseEmbeddingHash",
        "bottom": "data1",
        "top": "sparse_embedding2",
        "sparse_embedding_hparam": {
            "workspace_size_per_gpu_in_mb": 5,
            "max_vocabulary_size_global": 99,
            "embedding_vec_size": 8,
            "combiner": "sum",
            "slot_size_array": [3, 4],
        },
        "optimizer": {
            "type": "AdaGrad",
            "update_type": "Global",
            "adagrad_hparam": {"initial_accu_value": 0.1, "epsilon": 1e-8},
        },
    }
    graph = read_graph({"layers": [OLD_DATA, OLD_EMBEDDING, new]})
    assert graph.embeddings == (
        hugectr.SparseEmbedding(
            hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            max_vocabulary_size_per_gpu=1000,
            embedding_vec_size=16,
            combiner="mean",
            sparse_embedding_name="sparse_embedding1",
            bottom_name="data1",
        ),
        hugectr.SparseEmbedding(
            hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=5,
            max_vocabulary_size_global=99,
            embedding_vec_size=8,
            combiner="sum",
            sparse_embedding_name="sparse_embedding2",
            bottom_name="data1",
            slot_size_array=[3, 4],
            optimizer=hugectr.CreateOptimizer(
                hugectr.Optimizer_t.AdaGrad,
                hugectr.Update_t.Global,
                initial_accu_value=0.1,
                epsilon=1e-8,
            ),
        ),
    )


@pytest.mark.parametrize(
    "keys, arguments",
    [
        (
            {"type": "BatchNorm", "bn_param": {"factor": 0.9, "eps": 0.1, "gamma_init": "Zero"}},
            {"factor": 0.9, "eps": 0.1, "gamma_init_type": hugectr.Initializer_t.Zero},
        ),
        ({"type": "LayerNorm", "ln_param": {"eps": 0.1}}, {"eps": 0.1}),
        ({"type": "Dropout", "rate": 0.25}, {"dropout_rate": 0.25}),
        ({"type": "Dropout"}, {}),
        ({"type": "ELU", "elu_param": {"alpha": 0.3}}, {"elu_alpha": 0.3}),
        (
            {"type": "InnerProduct", "fc_param": {"num_output": 4, "weight_init": "Uniform"}},
            {"num_output": 4, "weight_init_type": hugectr.Initializer_t.Uniform},
        ),
        (
            {
                "type": "FusedInnerProduct",
                "position": "Head",
                "activation": "None",
                "fc_param": {"num_output": 4, "bias_init": "XavierNorm"},
            },
            {
                "num_output": 4,
                "bias_init_type": hugectr.Initializer_t.XavierNorm,
                "pos_type": hugectr.FcPosition_t.Head,
                "act_type": hugectr.Activation_t.Non,
            },
        ),
        (
            {
                "type": "MLP",
                "mlp_param": {
                    "num_output": 1,
                    "num_outputs": [8, 1],
                    "biases": [True, False],
                    "activations": ["Relu", "None"],
                },
            },
            {
                "num_outputs": [8, 1],
                "biases": [True, False],
                "activations": [hugectr.Activation_t.Relu, hugectr.Activation_t.Non],
            },
        ),
        (
            {"type": "MultiCross", "mc_param": {"num_layers": 2, "projection_dim": 3}},
            {"num_layers": 2, "projection_dim": 3},
        ),
        ({"type": "Reshape", "leading_dim": 6, "time_step": 2}, {"leading_dim": 6, "time_step": 2}),
        ({"type": "Reshape", "selected": [0, 2]}, {"selected": True, "selected_slots": [0, 2]}),
        ({"type": "Concat", "axis": 2}, {"axis": 2}),
        ({"type": "Slice", "ranges": [[0, 3], [1, 2]]}, {"ranges": [(0, 3), (1, 2)]}),
        ({"type": "ReduceMean"}, {}),
        ({"type": "ReduceSum", "axis": 2}, {"axis": 2}),
        ({"type": "Gather", "indices": [1]}, {"indices": [1]}),
        ({"type": "Select", "dim": 1, "index": [0]}, {"dim": 1, "index": [0]}),
        (
            {
                "type": "GRU",
                "gru_param": {"num_output": 2, "batchsize": 3, "SeqLength": 4, "vector_size": 5},
            },
            {"num_output": 2, "batchsize": 3, "SeqLength": 4, "vector_size": 5},
        ),
        (
            {"type": "PReLU_Dice", "prelu_dice_param": {"alpha": 0.2, "epsilon": 1e-4}},
            {"elu_alpha": 0.2, "eps": 1e-4},
        ),
        (
            {"type": "PReLU_Dice", "prelu_dice_param": {"elu_alpha": 0.2, "eps": 1e-4}},
            {"elu_alpha": 0.2, "eps": 1e-4},
        ),
        ({"type": "Scale", "scale_param": {"axis": 0, "factor": 3}}, {"axis": 0, "factor": 3}),
        ({"type": "Softmax", "factor": 2.0}, {"factor": 2.0}),
        ({"type": "WeightMultiply", "weight_dims": [2, 3]}, {"weight_dims": [2, 3]}),
        ({"type": "FmOrder2", "out_dim": 3}, {"out_dim": 3}),
        (
            {"type": "SequenceMask", "max_sequence_len_from": 2, "max_sequence_len_to": 3},
            {"max_sequence_len_from": 2, "max_sequence_len_to": 3},
        ),
        (
            {"type": "MultiHeadAttention", "num_attention_heads": 4, "transpose_b": True},
            {"num_attention_heads": 4, "transpose_b": True},
        ),
        (
            {"type": "BinaryCrossEntropyLoss", "regularizer": "L2", "lambda": 0.1},
            {"use_regularizer": True, "regularizer_type": hugectr.Regularizer_t.L2, "lambda": 0.1},
        ),
        (
            {"type": "MultiCrossEntropyLoss", "target_weight": [0.5, 1.0]},
            {"target_weight_vec": [0.5, 1.0]},
        ),
        ({"type": "Add"}, {}),
        ({"type": "DotProduct"}, {}),
    ],
)
def test_dense_layer_is_that_of_the_call(keys: dict[str, Any], arguments: dict[str, Any]) -> None:
    layer = {"name": "any", "bottom": ["a", "b"], "top": "c", **keys}
    (read,) = read_graph({"layers": [OLD_DATA, layer]}).layers
    assert read == hugectr.DenseLayer(
        layer_type=hugectr.Layer_t[keys["type"]],
        bottom_names=["a", "b"],
        top_names=["c"],
        **arguments,
    )


def test_multiply_of_v2_3_is_weight_multiply() -> None:
    layer = {"type": "Multiply", "bottom": "a", "top": "b", "weight_dims": [2, 3]}
    (read,) = read_graph({"layers": [OLD_DATA, layer]}).layers
    assert isinstance(read, hugectr.DenseLayer)
    assert read.layer_type is hugectr.Layer_t.WeightMultiply


@pytest.mark.parametrize(
    "layer, message",
    [
        ({"type": "InnerProdukt"}, "got 'InnerProdukt'. Did you mean 'InnerProduct'"),
        ({"type": "ReLU", "rate": 1}, "layers.1.rate: unknown key, got 'rate' with the value 1"),
        ({"type": "ReLU", "top": None}, "layers.1.top: missing key"),
        ({"type": "InnerProduct"}, "layers.1.fc_param: missing key"),
        ({"type": "InnerProduct", "fc_param": {}}, "layers.1.fc_param.num_output: missing key"),
        (
            {"type": "InnerProduct", "fc_param": {"num_output": 1, "weight_init": "Xavier"}},
            "layers.1.fc_param.weight_init: unknown name, got 'Xavier'",
        ),
        ({"type": "BinaryCrossEntropyLoss", "regularizer": "L1"}, "layers.1.lambda: missing key"),
        ({"rate": 1}, "layers.1.type: missing key"),
    ],
)
def test_wrong_layer_is_rejected(layer: dict[str, Any], message: str) -> None:
    layer = {"bottom": "a", "top": "b", **layer}
    layer = {key: value for key, value in layer.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_graph({"layers": [OLD_DATA, layer]})


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"check": "Yes"}, "layers.0.check: unknown name, got 'Yes'"),
        ({"format": "CSV"}, "layers.0.format: unknown name, got 'CSV'"),
        ({"check": None}, "layers.0.check: missing key"),
        ({"slots": 3}, "layers.0.slots: unknown key"),
        ({"sparse": [{"top": "a", "slot_num": 1}]}, "layers.0.sparse.0.nnz_per_slot: missing key"),
        ({"dense": {"top": "dense"}}, "layers.0.dense.dense_dim: missing key"),
        ({"type": "Date"}, "layers.0.type: not Data, got 'Date'"),
    ],
)
def test_wrong_data_is_rejected(keys: dict[str, Any], message: str) -> None:
    data = {key: value for key, value in {**OLD_DATA, **keys}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_graph({"layers": [data]})


def test_plan_that_samples_of_v3_0_name_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    knobs.KNOBS.logged.discard("sparse_embedding.plan_file1")
    layer = {**OLD_EMBEDDING, "plan_file1": "all2all_plan.json"}
    with caplog.at_level(logging.INFO, "hotbed.compat.hugectr"):
        read_graph({"layers": [OLD_DATA, layer]})
    assert "sparse_embedding.plan_file1 has no effect, because" in caplog.text
