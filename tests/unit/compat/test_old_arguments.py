# SPDX-License-Identifier: Apache-2.0
"""Arguments of earlier releases are those of later ones."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import hotbed.compat.hugectr as hugectr
from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.inference import HPS
from hotbed.compat.hugectr.job import read_training
from hotbed.compat.hugectr.model import batches
from hotbed.compat.hugectr.translate import translate
from hotbed.compat.hugectr.translate.tiers import tiers_of
from hotbed.errors import ConfigError, DataError, HotbedError

ARGUMENTS: dict[str, list[str]] = {}
"""The arguments of each callable, by the bindings of all releases."""
for _line in (Path(__file__).parents[2] / "golden/hugectr_arguments.txt").read_text().splitlines():
    if not _line.startswith("#"):
        _callable, _argument, *_releases = _line.split()
        ARGUMENTS.setdefault(_callable, []).append(_argument)


def called(name: str) -> Callable[..., Any]:
    """The callable of the door; a method is that of a compiled model, or of an empty object."""
    owner, _, method = name.rpartition(".")
    for space in (hugectr, hugectr.inference, hugectr.data, hugectr.tools, batches):
        if not owner and hasattr(space, method):
            return getattr(space, method)
        if owner and hasattr(space, owner):
            kind = getattr(space, owner)
            if not isinstance(kind, type):
                return getattr(kind, method)  # of a module
            instance = object.__new__(kind)
            loss = hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["a", "b"], ["loss"])
            parts = {"_layers": [loss], "_scheduler": MagicMock(), "_files": MagicMock()}
            instance.__dict__.update(
                _is_compiled=True, solver=hugectr.CreateSolver(), _lookups=[], **parts
            )
            return getattr(instance, method)
    raise AssertionError(f"the door has no {name}")


def is_unknown(call: Callable[..., Any], argument: str) -> bool:
    """Whether a callable refuses an argument for its name."""
    signature = inspect.signature(call)
    if argument in signature.parameters:
        return False
    needed = [
        object()
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
        and not isinstance(call, type)
    ]
    try:
        call(*needed, **{argument: object()})
    except (HotbedError, TypeError, AttributeError, ValueError) as error:
        return bool(re.search(rf"unknown argument|unexpected keyword|\['{argument}'\]", str(error)))
    return False


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_all_releases_are_taken_by_their_names(name: str) -> None:
    call = called(name)
    assert [argument for argument in ARGUMENTS[name] if is_unknown(call, argument)] == []
    assert is_unknown(call, "no_such_argument")


def test_lookups_of_a_batch_major_collection_are_one_tensor() -> None:
    """The layout of v4.3.1 and v23.02, and the name that HugeCTR gives this tensor."""
    sparse = [hugectr.DataReaderSparseParam(name, 1, True, 1) for name in ("a", "b", "c")]
    graphs = {}
    for layout in ("batch_major", "feature_major"):
        collection = hugectr.EmbeddingCollectionConfig(layout, True)
        table = hugectr.EmbeddingTableConfig("t", -1, 4)
        for number, combiner in enumerate(("sum", "average", "concat")):
            collection.embedding_lookup(table, "abc"[number], f"top{number}", combiner)
        joined = ["top0,top1,top2"]
        layers = []
        if layout == "feature_major":
            tops = ["top0", "top1", "top2"]
            layers.append(hugectr.DenseLayer(hugectr.Layer_t.Concat, tops, ["wide"], axis=2))
            joined = ["flat"]
            layers.append(
                hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["wide"], joined, leading_dim=12)
            )
        layers += [
            hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, joined, ["y"], num_output=1),
            hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["y", "label"], ["loss"]),
        ]
        graph = hugectr.Graph(hugectr.Input(1, "label", 0, "dense", sparse), [collection], layers)
        graphs[layout] = translate(graph, hugectr.CreateOptimizer())
    batch_major = graphs["batch_major"]
    assert "top0,top1,top2" in batch_major.tensors
    assert [weight.shape for weight in batch_major.dense_weights] == [(12, 1), (1,)]
    assert batch_major.dense_weights == graphs["feature_major"].dense_weights
    with pytest.raises(ConfigError, match="output_layout: unknown layout, got 'row_major'"):
        hugectr.EmbeddingCollectionConfig(output_layout="row_major")


def test_passes_of_v3_2_1_are_those_of_later_releases() -> None:
    cached = hugectr.TrainPSType_t.Cached
    blocks = [hugectr.CreateHMemCache(1, 0.5, 0)]
    arguments = {"ps_types": [cached], "sparse_models": ["m"], "local_paths": ["p"]}
    params = hugectr.CreateMOS(**arguments, hmem_cache_configs=blocks)
    assert params == hugectr.CreateETC(**arguments, hcache_configs=blocks)
    scratch = hugectr.CreateMOS(True, dest_sparse_models=["a", "b"])
    assert scratch.ps_types == (hugectr.TrainPSType_t.Staged,) * 2
    assert hugectr.CreateMOS(False, False, ["c"], ["d"]).sparse_models == ("c",)
    assert tiers_of(hugectr.CreateMOS(train_from_scratch=True), [], 0) == {}
    with pytest.raises(ConfigError, match=r"mos\.trained_models: unknown argument"):
        hugectr.CreateMOS(train_from_scratch=True, trained_models=[])


HPS_SAMPLE = """{
  "supportlonglong": true, "db_type": "local", "redis_ip": "127.0.0.1:7000", "rocksdb_path": "/x",
  "cpu_memory_db": {"type": "parallel_hash_map", "num_partitions": 15},
  "volatile_db": {"type": "hash_map", "algorithm": "phm", "user_name": "default", "num_partitions": 8,
    "max_get_batch_size": 100000, "max_set_batch_size": 100000, "refresh_time_after_fetch": false,
    "overflow_policy": "evict_oldest", "overflow_margin": 10000000, "initial_cache_rate": 1.0},
  "persistent_db": {"type": "disabled", "max_get_batch_size": 1, "max_set_batch_size": 1},
  "update_source": {"type": "null", "max_receive_buffer_size": 2000},
  "models": [{"model": "m", "sparse_files": ["s.model"], "embedding_vecsize_per_table": [2],
    "hit_rate_threshold": 1.1, "mixed_precision": true, "gpucacheper": 0.5}]
}"""


def test_servers_of_v3_2_to_v4_3_are_read_with_a_warning_of_their_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.KNOBS, "logged", set())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.model").mkdir()
    (tmp_path / "s.model/key").write_bytes((7).to_bytes(8, "little"))
    (tmp_path / "s.model/emb_vector").write_bytes(bytes(8))
    (tmp_path / "ps.json").write_text(HPS_SAMPLE)
    with caplog.at_level(logging.WARNING, "hotbed.compat.hugectr"):
        assert HPS("ps.json").lookup([7], "m", 0).tolist() == [[0, 0]]
    for key in ("db_type", "redis_ip", "rocksdb_path", "cpu_memory_db", "volatile_db"):
        assert f"inference_params.{key} has no effect" in caplog.text


def training_file(**changed: Any) -> dict[str, Any]:
    """A training file of v2.1."""
    data = {
        "type": "Data",
        "source": "list.txt",
        "eval_source": "list.txt",
        "check": "Sum",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 1},
        "sparse": [
            {"top": "d", "type": "LocalizedSlot", "max_feature_num_per_sample": 2, "slot_num": 2}
        ],
        **changed.get("data", {}),
    }
    embedding = {
        "type": "LocalizedSlotSparseEmbeddingHash",
        "bottom": "d",
        "top": "e",
        "sparse_embedding_hparam": {
            "vocabulary_size": 160,
            "load_factor": 0.75,
            "embedding_vec_size": 4,
            "combiner": 0,
        },
        **changed.get("embedding", {}),
    }
    solver = {
        "lr_policy": "fixed",
        "display": 1,
        "max_iter": 9,
        "gpu": [0],
        "batchsize": 8,
        "snapshot": 5,
        "snapshot_prefix": "./",
        "eval_interval": 1,
        "eval_batches": 1,
        **changed.get("solver", {}),
    }
    moments = {"alpha": 0.005, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}
    optimizer = {"type": "Adam", "global_update": True, "adam_hparam": moments}
    layers = [data, embedding]
    return {"solver": solver, "optimizer": optimizer, "layers": layers, **changed.get("config", {})}


def test_training_files_of_v2_1_have_other_keys() -> None:
    file = read_training(training_file())
    assert file.solver.lr == 0.005
    assert file.optimizer.update_type is hugectr.Update_t.Global
    assert file.graph.embeddings[0].max_vocabulary_size_global == 160
    sizes = [100, 60]
    one_hot = {"type": "LocalizedSlotSparseEmbeddingOneHot", "slot_size": sizes}
    a100 = read_training(training_file(data={"slot_size": sizes}, embedding=one_hot))
    assert a100.graph.embeddings[0].slot_size_array == (100, 60)
    assert a100.graph.input.reader.slot_size_array == (100, 60)


def test_training_files_of_v3_1_have_settings_of_kernels_and_of_the_asynchronous_reader() -> None:
    reader = {
        "num_threads": 4,
        "num_batches_per_thread": 2,
        "io_block_size": 512,
        "io_depth": 1,
        "io_alignment": 512,
        "shuffle": True,
    }
    file = read_training(
        training_file(
            config={"all_reduce": {"algo": "Oneshot", "grouped": True}},
            solver={"enable_overlap": True, "holistic_cuda_graph": True, "is_dlrm": True},
            data={
                "format": "RawAsync",
                "async_param": reader,
                "num_iterations_statistics": 20,
                "dense": {"top": "dense", "dense_dim": 1, "aligned": "Auto"},
            },
        )
    )
    assert file.graph.input.reader.async_param.shuffle
    assert not file.graph.input.reader.async_param.multi_hot_reader
    with pytest.raises(ConfigError, match=r"async_param\.io_size: unknown key"):
        read_training(training_file(data={"async_param": {**reader, "io_size": 1}}))


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
    with pytest.raises(DataError, match="memory://bucket/none: there is no such object"):
        source.move_to_local(str(tmp_path / "none"), "memory://bucket/none")


def test_data_source_needs_paths_that_are_there(tmp_path: Path) -> None:
    source = hugectr.data.DataSource(hugectr.data.DataSourceParams())
    with pytest.raises(ConfigError, match="two paths are needed, got 'a' and ''"):
        source.move_to_local("a")
    with pytest.raises(ConfigError, match="two paths are needed, got '' and ''"):
        source.move_to_local()
    with pytest.raises(ConfigError, match="no-such-kind://host/a: fsspec cannot read this URL"):
        source.move_to_local(str(tmp_path / "a"), "no-such-kind://host/a")
    with pytest.raises(DataError, match="got nothing"):
        source.move_to_local(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=r"local_sparse_model: expected one path for each"):
        hugectr.data.DataSourceParams(hdfs_sparse_model=["a", "b"], local_sparse_model=["a"])
