# SPDX-License-Identifier: Apache-2.0
"""Arguments of earlier releases are those of later ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr.translate import translate
from hotbed.errors import ConfigError, DataError


def test_length_of_v4_3_masks_keys_for_any_query() -> None:
    layer = hugectr.DenseLayer(
        hugectr.Layer_t.SequenceMask, ["lengths"], ["mask"], max_sequence_len=10
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
        hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["score", "label"], ["loss"]),
    ]
    graph = hugectr.Graph(hugectr.Input(1, "label", 2, "dense", [sparse]), [table], layers)
    translation = translate(graph, hugectr.CreateOptimizer())
    assert set(translation.tensors) == {"embedding", "score"}
    assert translation.dense_weights == ()


def test_data_source_copies_files_where_they_are_mounted(tmp_path: Path) -> None:
    """The calls of v3.5 to v3.8, and that of v3.4, whose paths are among the params."""
    mounted = tmp_path / "mounted"
    (mounted / "rows").mkdir(parents=True)
    (mounted / "list.txt").write_text("1\nrows/key\n")
    (mounted / "rows" / "key").write_bytes(b"12345678")
    source = hugectr.data.DataSource(hugectr.data.DataSourceParams(True, "namenode", 9000))
    source.move_to_local(f"{tmp_path}/local/list.txt", f"{mounted}/list.txt")
    source.move_to_local(local_path=f"{tmp_path}/local/rows", hdfs_path=f"{mounted}/rows")
    assert (tmp_path / "local/list.txt").read_text() == "1\nrows/key\n"
    assert (tmp_path / "local/rows/key").read_bytes() == b"12345678"
    assert (mounted / "rows/key").exists()
    params = hugectr.data.DataSourceParams(
        use_hdfs=True,
        namenode="namenode",
        hdfs_train_filelist=f"{mounted}/list.txt",
        local_train_filelist=f"{tmp_path}/old/list.txt",
        hdfs_sparse_model=[f"{mounted}/rows"],
        local_sparse_model=[f"{tmp_path}/old/rows"],
    )
    assert params.server == "namenode"
    assert params.source is hugectr.FileSystemType_t.HDFS
    hugectr.data.DataSource(params).move_to_local()
    assert (tmp_path / "old/list.txt").read_text() == "1\nrows/key\n"
    assert (tmp_path / "old/rows/key").read_bytes() == b"12345678"


def test_data_source_copies_from_remote_file_systems(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec absent")
    remote = fsspec.filesystem("memory")
    remote.pipe("/bucket/rows/0.parquet", b"1234")
    remote.pipe("/bucket/list.txt", b"1\n0.parquet\n")
    source = hugectr.data.DataSource(hugectr.data.DataSourceParams())
    source.move_to_local(str(tmp_path / "new/list.txt"), "memory://bucket/list.txt")
    assert (tmp_path / "new/list.txt").read_bytes() == b"1\n0.parquet\n"
    source.move_to_local(str(tmp_path / "rows"), "memory://bucket/rows")
    assert (tmp_path / "rows/0.parquet").read_bytes() == b"1234"
    with pytest.raises(DataError, match="memory://bucket/none: cannot be copied, got FileNotFound"):
        source.move_to_local(str(tmp_path / "none"), "memory://bucket/none")


def test_data_source_needs_paths_that_are_there(tmp_path: Path) -> None:
    source = hugectr.data.DataSource(hugectr.data.DataSourceParams())
    with pytest.raises(ConfigError, match="two paths are needed, got 'a' and ''"):
        source.move_to_local("a")
    with pytest.raises(ConfigError, match="two paths are needed, got '' and ''"):
        source.move_to_local()
    with pytest.raises(DataError, match="no-such-kind://host/a: cannot be copied"):
        source.move_to_local(str(tmp_path / "a"), "no-such-kind://host/a")
    with pytest.raises(DataError, match="got nothing"):
        source.move_to_local(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=r"local_sparse_model: expected one path for each"):
        hugectr.data.DataSourceParams(hdfs_sparse_model=["a", "b"], local_sparse_model=["a"])
