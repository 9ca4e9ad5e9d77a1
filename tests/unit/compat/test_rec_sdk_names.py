# SPDX-License-Identifier: Apache-2.0
"""Programs for Rec SDK import the names of the door, read their settings, and get their rows out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec.constants.constants import (
    ASCEND_GLOBAL_HASHTABLE_COLLECTION,
    ASCEND_SPARSE_LOOKUP_ID_OFFSET,
    ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS,
    ASCEND_TIMESTAMP,
    LIBREC_EOS_OPS_SO,
    ApplyGradientsStrategy,
    BaseEnum,
    MxRecMode,
)
from hotbed.compat.mx_rec.graph.hooks import LookupSubgraphSlicerHook, OrphanLookupKeySlicerHook
from hotbed.compat.mx_rec.util.initialize import ConfigInitializer, clear_channel, set_if_load
from hotbed.compat.mx_rec.util.tf_version_adapter import hccl_ops

pytestmark = pytest.mark.usefixtures("rec_sdk")

IMPORTS = """
from mx_rec import optimizers
from mx_rec.constants import constants
from mx_rec.constants.constants import ASCEND_SPARSE_LOOKUP_LOCAL_EMB, ASCEND_SPARSE_LOOKUP_ID_OFFSET
from mx_rec.constants.constants import ASCEND_SPARSE_LOOKUP_LOCAL_EMB, ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS
from mx_rec.constants.constants import ASCEND_GLOBAL_HASHTABLE_COLLECTION, ASCEND_SPARSE_LOOKUP_ENTRANCE
from mx_rec.constants.constants import ASCEND_TIMESTAMP, ASCEND_CUTTING_POINT_INITIALIZER
from mx_rec.constants.constants import MxRecMode, ASCEND_TIMESTAMP
from mx_rec.constants.constants import ApplyGradientsStrategy, All2allGradientsOp
from mx_rec.constants.constants import BaseEnum
from mx_rec.core import sparse_lookup, create_table
from mx_rec.core.asc.feature_spec import FeatureSpec
from mx_rec.core.asc.helper import FeatureSpec, get_asc_insert_func
from mx_rec.core.asc.manager import start_asc_pipeline
from mx_rec.core.embedding import create_table, sparse_lookup
from mx_rec.core.feature_process import EvictHook
from mx_rec.graph import modify_graph_and_start_emb_cache
from mx_rec.graph import GraphModifierHook
from mx_rec.graph.merge_lookup import do_merge_lookup
from mx_rec.constants.constants import LIBREC_EOS_OPS_SO
from mx_rec.util import get_rank_id, get_rank_size, logger
from mx_rec.graph.hooks import LookupSubgraphSlicerHook, OrphanLookupKeySlicerHook
from mx_rec.graph.modifier import modify_graph_and_start_emb_cache, GraphModifierHook
from mx_rec.optimizers import lazy_adam
from mx_rec.optimizers.adagrad_by_addr import create_hash_optimizer_by_addr
from mx_rec.optimizers.gradient_descent import create_hash_optimizer
from mx_rec.optimizers.gradient_descent_by_addr import create_hash_optimizer_by_addr
from mx_rec.optimizers.lazy_adam import create_hash_optimizer
from mx_rec.optimizers.lazy_adam_by_addr import create_hash_optimizer_by_address
from mx_rec.util.communication.hccl_ops import get_rank_id, get_rank_size, get_local_rank_size
from mx_rec.util.initialize import ConfigInitializer, init, terminate_config_initializer
from mx_rec.util.initialize import get_initializer, get_rank_id, get_rank_size, clear_channel
from mx_rec.util.initialize import get_rank_id, init, terminate_config_initializer, set_if_load
from mx_rec.util.initialize import get_use_dynamic_expansion, get_host_pipeline_ops
from mx_rec.util.log import logger
from mx_rec.util.ops import import_host_pipeline_ops
from mx_rec.util.tf_version_adapter import hccl_ops
from mx_rec.util.variable import get_dense_and_sparse_variable
from mx_rec.constants.constants import LIBREC_EOS_OPS_SO, LIBREC_TF_REC_V1_CPU_SO
from mx_rec.saver.sparse import export
from mx_rec import __version__, version
"""
"""Lines of public programs."""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_import_lines_of_public_programs_work(line: str) -> None:
    exec(line.replace("from mx_rec", "from hotbed.compat.mx_rec"), {})


def test_enumerations_find_members_by_value_and_name_others() -> None:
    class UseMode(BaseEnum):
        TRAIN = "train"
        PREDICT = "predict"

    assert UseMode.mapping("train") is UseMode.TRAIN
    assert MxRecMode.mapping(MxRecMode.ASC) is MxRecMode.ASC
    with pytest.raises(ValueError, match=r"UseMode: a value of .* is needed, got None"):
        UseMode.mapping(None)
    with pytest.raises(ValueError, match="Did you mean 'predict'"):
        UseMode.mapping("predikt")


def test_settings_are_those_of_init() -> None:
    with pytest.raises(OSError, match="call before init"):
        ConfigInitializer.get_instance()
    mx.init(use_dynamic_expansion=True)
    settings = ConfigInitializer.get_instance()
    assert settings.use_dynamic_expansion
    assert not settings.if_load
    settings.if_load = True
    assert ConfigInitializer.get_instance().if_load
    set_if_load(False)
    assert not settings.if_load
    with pytest.raises(ValueError, match="set_if_load: if_load"):
        set_if_load(3)
    params = settings.train_params_config
    assert params.ascend_global_hashtable_collection == ASCEND_GLOBAL_HASHTABLE_COLLECTION
    params.ascend_global_hashtable_collection = "mine"
    assert settings.train_params_config.ascend_global_hashtable_collection == "mine"
    assert mx.get_collection("mine") == []
    with pytest.raises(ValueError, match="unknown key"):
        mx.get_collection(ASCEND_GLOBAL_HASHTABLE_COLLECTION)
    with pytest.raises(RuntimeError, match="get_target_batch"):
        params.get_target_batch(True)
    assert mx.version() == hb.__version__
    mx.import_host_pipeline_ops(LIBREC_EOS_OPS_SO).clear_channel(
        params.get_training_mode_channel_id(False)
    )
    clear_channel(is_train_channel=False)


def test_reductions_over_one_rank_return_their_tensor() -> None:
    tensor = torch.ones(2)
    assert hccl_ops.allreduce(tensor, "sum") is tensor
    with pytest.raises(ValueError, match="reduction"):
        hccl_ops.allreduce(tensor, "mean")


def test_arguments_of_older_programs_are_taken() -> None:
    mx.init()
    mx.optimizers.gradient_descent.create_hash_optimizer(1.0)
    spec = mx.FeatureSpec("u", feat_count=3)
    insert = mx.get_asc_insert_func(tgt_key_specs=[spec])
    strategy = ApplyGradientsStrategy.SUM_SAME_ID_GRADIENTS_AND_APPLY
    table = mx.create_table(
        torch.int64, 4, "u", hb.Zeros(), mode=MxRecMode.ASC, apply_gradients_strategy=strategy.value
    )
    assert table.table_name == "u"
    mx.start_asc_pipeline()
    (batch,) = insert.over([{"u": torch.tensor([1, 2])}])
    name = table.table_name + "_lookup"
    assert mx.sparse_lookup(table, spec, dim=None, name=name, batch=batch).shape == (2, 4)
    with pytest.raises(ValueError, match="dim is that of the table, 4, got 8"):
        mx.sparse_lookup(table, spec, dim=8, batch=batch)
    assert mx.get_collection(ASCEND_GLOBAL_HASHTABLE_COLLECTION) == [table]
    (keys,) = mx.get_collection(ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS)
    assert keys is mx.get_collection(ASCEND_SPARSE_LOOKUP_ID_OFFSET)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "DSC"}, "MxRecMode: a value of .* is needed, got 'DSC'"),
        ({"apply_gradients_strategy": "sum"}, "ApplyGradientsStrategy: a value of"),
    ],
)
def test_wrong_modes_and_strategies_are_errors(arguments: Mapping[str, Any], message: str) -> None:
    mx.init()
    with pytest.raises(ValueError, match=message):
        mx.create_table(torch.int64, 4, "u", hb.Zeros(), **arguments)


class Scorer(nn.Module):
    """Looks up the user of a batch in automatic mode, with an eviction threshold."""

    def __init__(self) -> None:
        super().__init__()
        thresholds = {"access_threshold": 0, "eviction_threshold": 100}
        self.table = mx.create_table(torch.int64, 2, "u", hb.Zeros())
        self.out = nn.Linear(2, 1)
        self.thresholds = thresholds

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        rows = mx.sparse_lookup(
            self.table, u, modify_graph=True, access_and_evict_config=self.thresholds
        )
        return self.out(rows)


BATCHES = [{"u": torch.tensor([1, 2]), "timestamp": torch.tensor([second])} for second in (5, 9)]


@pytest.mark.parametrize("times", ["timestamp", lambda batch: batch["timestamp"]])
def test_collection_of_timestamps_has_the_times_of_automatic_mode(times: Any) -> None:
    mx.init()
    mx.optimizers.gradient_descent.create_hash_optimizer(1.0)
    model = Scorer()
    mx.add_to_collection(ASCEND_TIMESTAMP, times)
    mx.modify_graph_and_start_emb_cache(model, BATCHES)
    assert mx.get_collection(ASCEND_TIMESTAMP) == []
    seconds = []
    for batch in mx.get_initializer(True)():
        model(batch["u"])
        seconds += [time.tolist() for time in mx.get_collection(ASCEND_TIMESTAMP)]
    assert seconds == [[5, 5], [9, 9]] or seconds == [[5], [9]]
    assert model.table.size() == 2


def test_collection_of_timestamps_takes_no_tensor_and_no_other_key() -> None:
    mx.init()
    with pytest.raises(ValueError, match="a function of a batch is needed"):
        mx.add_to_collection(ASCEND_TIMESTAMP, torch.tensor([1]))
    with pytest.raises(ValueError, match="only 'ASCEND_TIMESTAMP' can be added to"):
        mx.add_to_collection("losses", "timestamp")


def test_graph_modifier_hook_runs_step_8() -> None:
    mx.init()
    mx.optimizers.gradient_descent.create_hash_optimizer(1.0)
    model = Scorer()
    mx.add_to_collection(ASCEND_TIMESTAMP, "timestamp")
    report = mx.GraphModifierHook(model=model, train=BATCHES).begin()
    assert "ahead" in str(report)
    assert mx.GraphModifierHook(modify_graph=False).begin() is None
    assert len(list(mx.get_initializer(True)())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no model and no train"),
        ({"train": BATCHES}, "got no model"),
        ({"modify_graph": False, "train": BATCHES}, "takes no model and no data, got train"),
        ({"modell": None}, "unknown keyword, got 'modell'. Did you mean 'model'"),
    ],
)
def test_graph_modifier_hook_names_what_it_needs(
    arguments: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mx.GraphModifierHook(**arguments)


def test_slicer_hooks_have_no_effect() -> None:
    LookupSubgraphSlicerHook(op_types=["StringToNumber"]).begin()
    OrphanLookupKeySlicerHook().begin()


class Ranker(nn.Module):
    """A trained network over the tables of a program, as a server asks for it."""

    def __init__(self, schema: hb.Schema, tables: Mapping[str, hb.Table], net: nn.Module) -> None:
        super().__init__()
        self.inputs = hb.models.layers.FeatureInputs(schema, tables)
        self.net = net

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        return self.net(self.inputs(batch)).squeeze(-1)


def program() -> tuple[Any, Any, nn.Module, Any, Any]:
    """Steps 1 to 8 of one table and a network."""
    mx.init(save_steps=-1)
    optimizer = mx.optimizers.adagrad.create_hash_optimizer(0.1)
    user = mx.FeatureSpec("user", table_name="users")
    insert = mx.get_asc_insert_func(tgt_key_specs=[user])
    table = mx.create_table(torch.int64, 4, "users", hb.Normal(std=0.1))
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    mx.get_dense_and_sparse_variable(net)
    mx.start_asc_pipeline()
    return insert, user, net, table, optimizer


def test_saved_program_is_exported_and_served(tmp_path: Path) -> None:
    schema = hb.Schema([hb.Label("y"), hb.Id("user", table="users")])
    rows = hb.sources.Memory({"y": [1.0, 0.0, 1.0, 0.0], "user": [1, 2, 3, 4]})
    data = hb.Dataset(rows, schema, batch_size=4)
    insert, user, net, table, optimizer = program()
    for batch in data.map(insert):
        mx.sparse_lookup(table, user, batch=batch).sum().backward()
        optimizer.step()
    state = mx.Saver([net]).save(tmp_path / "state", global_step=1)
    trained = [part.to_pydict() for part in table.export()]
    mx.terminate_config_initializer()

    insert, user, net, table, _ = program()
    mx.Saver([net]).restore(state)
    assert [part.to_pydict() for part in table.export()] == trained
    (batch,) = hb.Dataset(rows, schema, batch_size=4).map(
        mx.get_asc_insert_func(tgt_key_specs=[user], is_training=False)
    )
    with torch.no_grad():
        logits = net(mx.sparse_lookup(table, user, batch=batch, is_train=False)).squeeze(-1)
    ranker = Ranker(schema, {"users": table.table}, net)
    model = hb.RecModel(ranker, "bce", metrics=["auc"])
    model.evaluate(data)
    model.export(tmp_path / "export")
    session = hb.InferenceSession(tmp_path / "export")
    scores = session.predict({"user": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="user"):
        session.predict({"user": ["1"]})  # requests have the types of the data set
    assert scores == pytest.approx(torch.sigmoid(logits).numpy(), abs=1e-6)


def test_rows_are_exported_from_step_8_on() -> None:
    mx.init()
    table = mx.create_table(torch.int64, 4, "users", hb.Zeros())
    with pytest.raises(RuntimeError, match="rows exist from step 8 on"):
        table.export()
