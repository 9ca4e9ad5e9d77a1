# SPDX-License-Identifier: Apache-2.0
"""HPS looks keys up in HugeCTR's sparse files, as `ps.json` or values name them."""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotbed.compat.hugectr import knobs
from hotbed.compat.hugectr.enums import DatabaseType_t, EmbeddingCacheType_t
from hotbed.compat.hugectr.inference import (
    HPS,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    VolatileDatabaseParams,
)
from hotbed.compat.hugectr.json.inference import read_ps_config
from hotbed.errors import ConfigError, DataError, FormatError, RowShapeError


def sparse_folder(path: Path, rows: dict[int, tuple[float, ...]]) -> str:
    """A table of v3.1 and later, by hand."""
    path.mkdir()
    (path / "key").write_bytes(struct.pack(f"<{len(rows)}q", *rows))
    numbers = [one for row in rows.values() for one in row]
    (path / "emb_vector").write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        sparse_folder(tmp_path / "0_sparse_2.model", {3: (0.5, 1.0), 7: (2.0, 3.0)}),
        sparse_folder(tmp_path / "1_sparse_2.model", {3: (9.0,)}),
    ]


def ps_json(files: list[str], **changed: Any) -> dict[str, Any]:
    model = {
        "model": "wdl",
        "sparse_files": files,
        "dense_file": "",
        "network_file": "wdl.json",
        "num_of_worker_buffer_in_pool": 3,
        "deployed_device_list": [0],
        "max_batch_size": 1024,
        "default_value_for_each_table": [0.25, -1.0],
        "maxnum_catfeature_query_per_table_per_sample": [2, 26],
        "embedding_vecsize_per_table": [2, 1],
        "embedding_cache_type": "dynamic",
        "gpucache": True,
        "gpucacheper": 0.5,
        **changed,
    }
    databases = {
        "volatile_db": {"type": "parallel_hash_map", "initial_cache_rate": 0.5},
        "persistent_db": {"type": "disabled"},
    }
    return {"supportlonglong": True, "models": [model], **databases}


def test_keys_read_their_vectors_and_others_the_default(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "ps.json").write_text(json.dumps(ps_json(files)))
    hps = HPS(str(tmp_path / "ps.json"))
    keys = np.array([7, 1, 3])
    assert hps.lookup(keys, "wdl", 0).tolist() == [[2, 3], [0.25, 0.25], [0.5, 1]]
    assert hps.lookup(keys, "wdl", 1, device_id=0).tolist() == [[-1], [-1], [9]]
    out = torch.empty(3, 2)
    to_dlpack = torch.utils.dlpack.to_dlpack
    hps.lookup_fromdlpack(to_dlpack(torch.tensor(keys)), to_dlpack(out), "wdl", 0)
    assert out.tolist() == [[2, 3], [0.25, 0.25], [0.5, 1]]
    with pytest.raises(DataError, match="tensor of 3 numbers for 3 keys, got 6"):
        hps.lookup_fromdlpack(torch.tensor(keys), out, "wdl", 1)
    with pytest.raises(DataError, match=r"'wd1'.*Did you mean 'wdl'"):
        hps.lookup(keys, "wd1", 0)
    with pytest.raises(DataError, match="tables 0 to 1, got 2"):
        hps.lookup(keys, "wdl", 2)
    with pytest.raises(RowShapeError, match="expected whole numbers"):
        hps.lookup([0.5], "wdl", 0)


def test_values_name_the_tables_too(
    files: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.KNOBS, "logged", set())
    with caplog.at_level(logging.INFO, "hotbed.compat.hugectr"):
        params = InferenceParams(
            model_name="wdl",
            max_batchsize=64,
            hit_rate_threshold=1.0,
            dense_model_file="",
            sparse_model_files=files,
            device_id=0,
            use_gpu_embedding_cache=True,
            cache_size_percentage=0.9,
            i64_input_key=True,
            volatile_db=VolatileDatabaseParams(type=DatabaseType_t.RedisCluster),
            persistent_db=PersistentDatabaseParams(path="/nowhere"),
        )
    config = ParameterServerConfig(
        emb_table_name={"wdl": ["a", "b"]},
        embedding_vec_size={"wdl": [2, 1]},
        max_feature_num_per_sample_per_emb_table={"wdl": [2, 26]},
        inference_params_array=[params],
    )
    assert HPS(config).lookup([3], "wdl", 0).tolist() == [[0.5, 1]]
    assert "inference_params.use_gpu_embedding_cache has no effect" in caplog.text


def test_ps_json_becomes_values(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(ps_json(files)))
    config = read_ps_config(path)
    (params,) = config.inference_params_array
    assert params.number_of_worker_buffers_in_pool == 3
    assert params.embedding_table_names == ("sparse_embedding0", "sparse_embedding1")
    assert params.embedding_cache_type is EmbeddingCacheType_t.Dynamic
    assert config.volatile_db.initial_cache_rate == 0.5
    assert config.persistent_db.backend is DatabaseType_t.Disabled
    assert config.embedding_vec_size == {"wdl": (2, 1)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sparse_file": []}, r"models\[0\]\.sparse_file: unknown key.*'sparse_files'"),
        ({"embedding_vecsize_per_table": [2]}, "one size for each of 2 sparse files, got"),
        ({"embedding_cache_type": "static?"}, "unknown name, got 'static.'"),
        ({"max_batch_size": "many"}, "max_batchsize"),
        ({"gpucacheper": 50}, "cache_size_percentage: not from 0 to 1, got 50"),
        ({"hit_rate_threshold": -0.5}, "hit_rate_threshold.*got -0.5"),
        ({"default_value_for_each_table": [float("nan")]}, r"for_each_table\[0\]"),
    ],
)
def test_wrong_keys_of_ps_json_are_named(
    changed: dict[str, Any], message: str, files: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(ps_json(files, **changed)))
    with pytest.raises(ConfigError, match=message):
        HPS(path)


def test_two_models_of_one_name_are_refused(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    spec = ps_json(files)
    spec["models"] *= 2
    path.write_text(json.dumps(spec))
    with pytest.raises(
        ConfigError, match="a name of its own for each model, got 'wdl' of models 0"
    ):
        HPS(path)
    one = read_ps_config(_written(path, ps_json(files)))
    with pytest.raises(ConfigError, match="a name of its own for each model"):
        dataclasses.replace(one, inference_params_array=one.inference_params_array * 2)


def _written(path: Path, spec: dict[str, Any]) -> Path:
    path.write_text(json.dumps(spec))
    return path


def test_tables_of_another_size_are_refused(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(ps_json(files, embedding_vecsize_per_table=[2, 2])))
    with pytest.raises(FormatError, match="1 vectors of 2, got 4, 4 missing"):
        HPS(path)
