# SPDX-License-Identifier: Apache-2.0
"""Arguments of earlier releases are those of later ones."""

from __future__ import annotations

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.translate import translate


def test_length_of_v4_3_masks_keys_for_any_query() -> None:
    layer = hugectr.DenseLayer(
        hugectr.Layer_t.SequenceMask,
        ["lengths"],
        ["mask"],
        max_sequence_len=10,
    )
    assert (layer.max_sequence_len_from, layer.max_sequence_len_to) == (1, 10)


def test_hybrid_embedding_takes_the_arguments_of_v3_9() -> None:
    new = hugectr.HybridEmbeddingParam(
        2,
        -1,
        0.03,
        1.3e11,
        2.6e11,
        1.0,
        hugectr.CommunicationType.IB_NVLink,
        hugectr.HybridEmbeddingType.Distributed,
    )
    old = hugectr.HybridEmbeddingParam(
        2,
        -1,
        0.03,
        1.3e11,
        2.6e11,
        1.0,
        True,
        False,
        hugectr.CommunicationType.IB_NVLink,
        hugectr.HybridEmbeddingType.Distributed,
    )
    assert old == new


def test_tensors_that_no_loss_needs_are_not_in_the_network() -> None:
    table = hugectr.SparseEmbedding(
        hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        embedding_vec_size=1,
        combiner="sum",
        sparse_embedding_name="embedding",
        bottom_name="data",
    )
    sparse = hugectr.DataReaderSparseParam("data", 1, True, 1)
    layers = [
        hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["embedding"], ["score"], leading_dim=1),
        hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["dense"], ["unused"], num_output=3),
        hugectr.DenseLayer(
            hugectr.Layer_t.BinaryCrossEntropyLoss,
            ["score", "label"],
            ["loss"],
        ),
    ]
    graph = hugectr.Graph(hugectr.Input(1, "label", 2, "dense", [sparse]), [table], layers)
    translation = translate(graph, hugectr.CreateOptimizer())
    assert set(translation.tensors) == {"embedding", "score"}
    assert translation.dense_weights == ()
