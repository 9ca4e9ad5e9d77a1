# SPDX-License-Identifier: Apache-2.0
"""What rec_sdk_parameters.yaml says of descriptions holds: init, optimizers, features, tables."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from parameter_pages import REC_SDK

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework, no_effect
from hotbed.compat.mx_rec.graph.merge_lookup import do_merge_lookup
from hotbed.errors import TableFull

pytestmark = pytest.mark.usefixtures("rec_sdk")

SECTIONS = REC_SDK.sections
MOST = 2**31 - 1


# --- ranges -----------------------------------------------------------------------------------------

REQUIRED = {
    "optimizers.ftrl.create_hash_optimizer": {"learning_rate": 0.1},
    "optimizers.gradient_descent.create_hash_optimizer": {"learning_rate": 0.1},
    "optimizers.gradient_descent_by_addr.create_hash_optimizer_by_addr": {"learning_rate": 0.1},
    "core.asc.feature_spec.FeatureSpec": {"name": "user"},
    "core.embedding.create_table": {
        "key_dtype": torch.int64,
        "dim": 8,
        "name": "user",
        "emb_initializer": hb.Zeros(),
    },
}
"""Arguments without a default."""
STEP = 1e-9


def called(path: str, **arguments: Any) -> Any:
    """Call a function of the door after an `init` that fits it."""
    mx.terminate_config_initializer()
    if path == "options.Options":
        return mx.init(**({"max_steps": 10} | arguments))
    mx.init(use_dynamic_expansion="by_addr" in path)
    return REC_SDK.look_up(path)(**(REQUIRED.get(path, {}) | arguments))


def bounds(interval: str) -> tuple[float, bool, float, bool]:
    """Return the least value, whether it is allowed, the greatest, and whether that is."""
    low, high = re.fullmatch(r"[(\[](.*), (.*)[)\]]", interval).groups()
    number: Callable[[str], float] = int if re.fullmatch(r"-?\d+", low + high.strip("-")) else float
    return number(low), interval[0] == "[", number(high), interval[-1] == "]"


RANGES = [
    pytest.param(section["call"], name, interval, id=f"{section['call']}.{name}")
    for section in SECTIONS
    for name, interval in section.get("ranges", {}).items()
]


@pytest.mark.parametrize(("path", "name", "interval"), RANGES)
def test_range_of_a_parameter_is_checked(path: str, name: str, interval: str) -> None:
    least, with_least, greatest, with_greatest = bounds(interval)
    whole = isinstance(DEFAULTS.get((path, name)), int)
    step = 1 if whole else STEP
    inside = [least if with_least else least + step, greatest if with_greatest else greatest - step]
    outside = [
        least - step if with_least else least,
        greatest + step if with_greatest else greatest,
    ]
    for value in inside:
        called(path, **{name: value})
    for value in [*outside, "many"]:
        with pytest.raises(ValueError, match=name):
            called(path, **{name: value})


DEFAULTS = {
    (section.get("call"), name): value
    for section in SECTIONS
    for name, value in section.get("defaults", {}).items()
}


# --- init -------------------------------------------------------------------------------------------


def test_steps_are_not_all_zero() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        mx.init(max_steps=0, train_steps=0, eval_steps=0)
    mx.init(max_steps=0, train_steps=0, eval_steps=1)


@pytest.mark.parametrize("name", ["use_dynamic", "use_dynamic_expansion", "if_load"])
def test_booleans_are_taken_as_text(name: str) -> None:
    for text, value in (("True", True), ("False", False)):
        mx.init(**{name: text})
        assert getattr(framework.current().options, name) is value
        mx.terminate_config_initializer()
    for text in ("true", "1", "", 1):
        with pytest.raises(ValueError, match=name):
            mx.init(**{name: text})


def test_second_init_is_an_error() -> None:
    mx.init()
    with pytest.raises(EnvironmentError, match="terminate_config_initializer"):
        mx.init()


@pytest.mark.parametrize(
    "call",
    [
        lambda: mx.get_asc_insert_func(tgt_key_specs=[mx.FeatureSpec("user")]),
        lambda: mx.create_table(torch.int64, 8, "user", hb.Zeros()),
        lambda: mx.optimizers.lazy_adam.create_hash_optimizer(),
        lambda: mx.optimizers.adagrad_by_addr.create_hash_optimizer_by_address(),
        lambda: mx.get_dense_and_sparse_variable(),
        lambda: mx.start_asc_pipeline(),
        lambda: mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB"),
        lambda: mx.get_initializer(True),
    ],
)
def test_calls_before_init_are_errors(call: Callable[[], Any]) -> None:
    with pytest.raises(EnvironmentError, match="init"):
        call()


def test_terminating_twice_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    mx.init()
    mx.terminate_config_initializer()
    assert caplog.text == ""
    mx.terminate_config_initializer()
    assert "not initialized" in caplog.text


def test_init_after_terminating_starts_anew() -> None:
    mx.init()
    table()
    mx.terminate_config_initializer()
    mx.init()
    table()  # the name is free again
    assert list(framework.current().tables) == ["user"]


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="use_dynamic"):
        mx.init(use_dynamics=True)


def test_incremental_checkpoints_need_periods() -> None:
    periods = {"save_checkpoint_due_time": 60, "save_delta_checkpoints_secs": 10}
    for missing in periods:
        given = {name: value for name, value in periods.items() if name != missing}
        with pytest.raises(ValueError, match=missing):
            mx.init(is_incremental_checkpoint=True, **given)
    mx.init(is_incremental_checkpoint=True, **periods)


@pytest.mark.parametrize("name", ["save_checkpoint_due_time", "save_delta_checkpoints_secs"])
def test_periods_are_in_their_range(name: str) -> None:
    for value in (0, -1, MOST + 1, 1.5):
        with pytest.raises(ValueError, match=name):
            mx.init(**{name: value})
    for value in (1, MOST):
        mx.init(**{name: value})
        mx.terminate_config_initializer()


@pytest.mark.parametrize("name", REC_SDK.no_effect)
def test_what_has_no_effect_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed.compat.mx_rec")
    no_effect.ARGUMENTS.logged.discard(name)
    no_effect.ARGUMENTS.log_no_effect(name, when=False)
    assert not caplog.text
    for _ in range(2):
        no_effect.ARGUMENTS.log_no_effect(name)
    assert caplog.text.count(f"{name} has no effect, because {REC_SDK.no_effect[name]}") == 1


def test_arguments_of_a_table_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotbed.compat.mx_rec")
    no_effect.ARGUMENTS.logged.clear()
    mx.init(bind_cpu=False, use_lccl=True)
    mx.optimizers.gradient_descent.create_hash_optimizer(0.1, use_locking=True)
    table()
    assert sorted(re.findall(r"(\S+) has no effect", caplog.text)) == [
        "init.bind_cpu",
        "init.use_lccl",
        "optimizer.use_locking",
    ]
    table(is_dp=True, enable_merge="True", shard_num=2, name="other")
    assert "create_table.is_dp has no effect, because each rank" in caplog.text
    assert "create_table.enable_merge" in caplog.text
    assert "create_table.shard_num" in caplog.text


# --- optimizers -------------------------------------------------------------------------------------

FACTORIES = {
    section["call"]: REQUIRED.get(section["call"], {})
    for section in SECTIONS
    if section.get("call", "").startswith("optimizers.")
}


@pytest.mark.parametrize("path", FACTORIES)
def test_pairing_of_optimizers_and_expansion(path: str) -> None:
    for expansion in (False, True):
        mx.terminate_config_initializer()
        mx.init(use_dynamic_expansion=expansion)
        if expansion == ("by_addr" in path):
            REC_SDK.look_up(path)(**FACTORIES[path])
        else:
            with pytest.raises(ValueError, match="dynamic expansion"):
                REC_SDK.look_up(path)(**FACTORIES[path])


@pytest.mark.parametrize("path", FACTORIES)
def test_learning_rate_is_a_number_or_a_tensor(path: str) -> None:
    assert called(path, learning_rate=0.5).rule.lr == 0.5
    assert called(path, learning_rate=torch.tensor(0.5)).rule.lr == 0.5
    with pytest.raises(ValueError, match="learning_rate"):
        called(path, learning_rate=torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize("path", FACTORIES)
def test_a_schedule_sets_learning_rates_in_their_range(path: str) -> None:
    optimizer = called(path)
    optimizer.learning_rate = torch.tensor(0.5)
    for wrong in (float("nan"), -0.1, 11, "0.1"):
        with pytest.raises(ValueError, match="learning_rate"):
            optimizer.learning_rate = wrong
    assert optimizer.learning_rate == 0.5


@pytest.mark.parametrize("path", FACTORIES)
def test_names_of_optimizers_have_a_length(path: str) -> None:
    called(path, name="x" * 200)
    for name in ("", "x" * 201, 3):
        with pytest.raises(ValueError, match="name"):
            called(path, name=name)


def test_beta2_is_below_one() -> None:
    for value in (0.0, 0.5):
        called("optimizers.lazy_adam.create_hash_optimizer", beta2=value)
    for value in (-0.1, 1.0):
        with pytest.raises(ValueError, match="beta2"):
            called("optimizers.lazy_adam.create_hash_optimizer", beta2=value)


# --- features ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["name", "table_name"])
def test_names_of_features_have_a_length(argument: str) -> None:
    mx.init()
    mx.FeatureSpec(**({"name": "user"} | {argument: "x" * 255}))
    for value in ("", "x" * 256, 3):
        with pytest.raises(ValueError, match="FeatureSpec"):
            mx.FeatureSpec(**({"name": "user"} | {argument: value}))


def test_table_and_key_default_to_the_name() -> None:
    mx.init()
    spec = mx.FeatureSpec("user")
    assert (spec.table, spec.key) == ("user", "user")
    spec = mx.FeatureSpec("user", table_name="people", index_key="user_id")
    assert (spec.table, spec.key) == ("people", "user_id")


def test_index_key_is_a_number_or_a_text() -> None:
    mx.init()
    for key in (0, 255, "u", "u" * 255):
        assert mx.FeatureSpec("user", index_key=key).key == key
    for key in (-1, 256, "", "u" * 256, 1.5):
        with pytest.raises(ValueError, match="index_key"):
            mx.FeatureSpec("user", index_key=key)


def test_eviction_threshold_is_in_its_range() -> None:
    mx.init()
    for value in (-1, 0, MOST):
        mx.FeatureSpec("user", access_threshold=1, eviction_threshold=value)
    for value in (-2, MOST + 1, 1.5):
        with pytest.raises(ValueError, match="eviction_threshold"):
            mx.FeatureSpec("user", access_threshold=1, eviction_threshold=value)


@pytest.mark.parametrize("access", [None, -1])
def test_eviction_needs_admission(access: int | None) -> None:
    mx.FeatureSpec("user", access_threshold=access, eviction_threshold=-1)
    for eviction in (0, 60):
        with pytest.raises(ValueError, match="access_threshold should be configured before"):
            mx.FeatureSpec("user", access_threshold=access, eviction_threshold=eviction)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"access_threshold": 3},
        {"access_threshold": 2, "eviction_threshold": 9},
        {"access_threshold": 2, "faae_coefficient": 2},
    ],
    ids=str,
)
def test_features_of_one_table_agree(other: dict[str, int]) -> None:
    mx.init()
    mx.optimizers.lazy_adam.create_hash_optimizer()
    specs = [
        mx.FeatureSpec("time", is_timestamp=True),
        mx.FeatureSpec("viewed", table_name="user", access_threshold=2),
        mx.FeatureSpec("bought", table_name="user", **other),
    ]
    mx.get_asc_insert_func(tgt_key_specs=specs)
    table()
    with pytest.raises(ValueError, match=r"'user'.* must be same .*viewed.*bought"):
        mx.start_asc_pipeline()


def test_second_timestamp_is_an_error() -> None:
    mx.init()
    clocks = [mx.FeatureSpec(name, is_timestamp=True) for name in ("created", "seen")]
    with pytest.raises(EnvironmentError, match=r"created.*seen"):
        mx.get_asc_insert_func(tgt_key_specs=[*clocks, mx.FeatureSpec("user")])
    mx.get_asc_insert_func(tgt_key_specs=[*clocks, mx.FeatureSpec("user")], is_training=False)


def test_eviction_needs_a_timestamp() -> None:
    mx.init()
    mx.optimizers.lazy_adam.create_hash_optimizer()
    spec = mx.FeatureSpec("user", access_threshold=2, eviction_threshold=60)
    mx.get_asc_insert_func(tgt_key_specs=[spec])
    table()
    with pytest.raises(ValueError, match="timestamp"):
        mx.start_asc_pipeline()


# --- insert functions -------------------------------------------------------------------------------


def test_insert_function_has_one_source_of_keys() -> None:
    mx.init()
    spec = mx.FeatureSpec("user")
    for arguments in (
        {},
        {"tgt_key_specs": [spec], "args_index_list": [0], "table_names": ["user"]},
        {"args_index_list": [0]},
        {"table_names": ["user"]},
        {"args_index_list": [0, 1], "table_names": ["user"]},
        {"tgt_key_specs": []},
        {"tgt_key_specs": 5},
        {"args_index_list": [0, 1], "table_names": "ab"},
    ):
        with pytest.raises((RuntimeError, ValueError), match="get_asc_insert_func"):
            mx.get_asc_insert_func(**arguments)


def test_specs_may_be_one_a_list_or_a_tuple() -> None:
    mx.init()
    spec = mx.FeatureSpec("user")
    for specs in (spec, [spec], (spec,)):
        assert mx.get_asc_insert_func(tgt_key_specs=specs).specs == (spec,)


# --- tables -----------------------------------------------------------------------------------------


def table(**arguments: Any) -> mx.SparseTable:
    return mx.create_table(**(REQUIRED["core.embedding.create_table"] | arguments))


def test_key_dtype() -> None:
    mx.init()
    table(key_dtype=torch.int64, name="a")
    table(key_dtype=torch.int32, name="b")
    for dtype in (torch.float32, torch.uint8, "int64", None):
        with pytest.raises(ValueError, match="key_dtype"):
            table(key_dtype=dtype, name="c")


def test_dim_is_a_number_or_a_shape() -> None:
    mx.init()
    assert table(dim=4, name="a").dim == 4
    assert table(dim=torch.Size([4]), name="b").dim == 4
    assert table(dim=(4,), name="c").dim == 4
    for dim in ([4, 4], [], 4.5, None):
        with pytest.raises(ValueError, match="dim"):
            table(dim=dim, name="d")


def test_names_of_tables() -> None:
    mx.init()
    for name in ("a", "A_1.b", "x" * 100):
        table(name=name)
    for name in ("", "x" * 101, "a-b", "a b", "用户", 3):
        with pytest.raises(ValueError, match="name"):
            table(name=name)


def test_names_of_tables_are_unique() -> None:
    mx.init()
    table()
    with pytest.raises(ValueError, match="user"):
        table()


def test_merged_names_are_reserved() -> None:
    mx.init()
    with pytest.raises(ValueError, match="mergeable_table"):
        table(name="mergeable_table_1")


def test_initializers() -> None:
    mx.init()
    for number, init in enumerate([hb.Zeros(), hb.Constant(1.0), hb.Normal(0.1), hb.Uniform(0.1)]):
        assert table(emb_initializer=init, name=f"t{number}").initializer == init
    for init in ("normal", torch.nn.init.normal_, None):
        with pytest.raises(ValueError, match="emb_initializer"):
            table(emb_initializer=init, name="t")


def test_init_param_scales_initial_rows() -> None:
    ids = np.array([7, -1, 2**62])
    for start in (hb.Zeros(), hb.Constant(1.5), hb.Normal(0.1), hb.Uniform(0.1)):
        mx.init()
        scaled = table(emb_initializer=start, init_param=2.0).initializer
        mx.terminate_config_initializer()
        rows = [each.rows(0, 5, ids, dim=8) for each in (start, scaled)]
        assert np.array_equal(2 * rows[0], rows[1])


def test_sizes_of_host_and_ssd_are_in_their_range() -> None:
    mx.init()
    table(host_vocabulary_size=0, name="a")
    table(host_vocabulary_size=10**9, name="b")
    for name in ("host_vocabulary_size", "ssd_vocabulary_size"):
        for size in (-1, 10**9 + 1, 1.5):
            with pytest.raises(ValueError, match=name):
                table(**({"host_vocabulary_size": 1} | {name: size}))


def test_ssd_needs_the_host() -> None:
    mx.init()
    with pytest.raises(ValueError, match="host_vocabulary_size"):
        table(ssd_vocabulary_size=10)


def test_rows_of_the_device_and_the_host_stay_in_memory_and_the_others_lie_on_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    mx.init()
    sizes = {"device_vocabulary_size": 30, "host_vocabulary_size": 71, "ssd_vocabulary_size": 10}
    own = table(**sizes, ssd_data_path=[tmp_path], name="own")
    assert own.tier(1) == hb.Ssd(tmp_path, ram_rows=101)
    assert own.tier(2) == hb.Ssd(tmp_path, ram_rows=51)
    assert own.capacity() == own.expected_rows == 111
    assert table(**sizes, name="here").tier(1) == hb.Ssd(Path.cwd(), ram_rows=101)
    assert "no effect" not in caplog.text
    assert table(ssd_data_path=[tmp_path], name="memory").tier(1) == hb.Ram()
    assert "ssd_data_path has no effect" in caplog.text
    other = tmp_path / "other"
    other.mkdir()
    folders = [other, tmp_path]  # tables on a disk take one each, in turn; this is the third
    assert table(**sizes, ssd_data_path=folders, name="third").tier(1) == hb.Ssd(other, 101)
    assert table(**sizes, ssd_data_path=folders, name="fourth").tier(1) == hb.Ssd(tmp_path, 101)
    for paths in (str(tmp_path), [3]):
        with pytest.raises(ValueError, match="ssd_data_path is a list of folders"):
            table(**sizes, ssd_data_path=paths, name="several")


def test_a_batch_that_does_not_fit_into_memory_names_the_sizes_of_the_program(
    tmp_path: Path,
) -> None:
    mx.init()
    sizes = {"device_vocabulary_size": 3, "host_vocabulary_size": 2, "ssd_vocabulary_size": 10}
    rows = hb.Table("t", 2, tier=table(**sizes, ssd_data_path=[tmp_path], name="own").tier(1))
    name = r"device_vocabulary_size \+ host_vocabulary_size of each rank"
    with pytest.raises(TableFull, match=rf"use 9 rows, {name} is 5\. Raise {name} to at least 9"):
        rows.find_or_insert(np.arange(9))
    plain = hb.Table("t", 2, tier=hb.Ssd(tmp_path, 5))
    with pytest.raises(
        TableFull, match=r"use 9 rows, ram_rows is 5\. Raise ram_rows to at least 9"
    ):
        plain.find_or_insert(np.arange(9))


def test_expansion_sets_other_sizes_to_zero(caplog: pytest.LogCaptureFixture) -> None:
    no_effect.ARGUMENTS.logged.clear()
    mx.init(use_dynamic_expansion=True)
    own = table(host_vocabulary_size=100, ssd_vocabulary_size=1000, device_vocabulary_size=7)
    assert own.host_vocabulary_size == 0
    for name in ("host", "ssd"):
        assert f"create_table.{name}_vocabulary_size has no effect" in caplog.text


def test_all_to_all_operation() -> None:
    mx.init()
    table(all2all_gradients_op="sum_gradients", name="a")
    table(all2all_gradients_op="sum_gradients_and_div_by_ranksize", name="b")
    with pytest.raises(ValueError, match=r"all2all_gradients_op.*sum_gradients"):
        table(all2all_gradients_op="sum", name="c")


def test_value_dtype() -> None:
    mx.init()
    table(value_dtype=torch.float32)
    with pytest.raises(ValueError, match="value_dtype"):
        table(value_dtype=torch.float64, name="b")


def test_padding_keys_are_given_together() -> None:
    mx.init()
    given = {"padding_keys": [0], "padding_keys_mask": True, "padding_keys_len": 512}
    table(**given)
    for missing in given:
        some = {name: value for name, value in given.items() if name != missing}
        with pytest.raises(ValueError, match="padding_keys"):
            table(name="b", **some)


def test_padding_keys_are_one_or_several_integers() -> None:
    mx.init()
    given: dict[str, Any] = {"padding_keys_mask": True, "padding_keys_len": 512}
    for number, keys in enumerate((3, [3], torch.tensor([3]))):
        assert table(name=f"t{number}", padding_keys=keys, **given).padding == (3,)
    for wrong in (["a"], [0.5], [2**70]):
        with pytest.raises(ValueError, match="padding_keys: expected"):
            table(name="b", padding_keys=wrong, **given)


def test_optimizer_list_holds_one_optimizer() -> None:
    mx.init()
    optimizer = mx.optimizers.adagrad.create_hash_optimizer(0.1)
    assert table(name="t0", optimizer_list=[optimizer]).optimizer is optimizer
    assert table(name="t1", optimizer_list=None).optimizer is None
    for wrong in (3, [3], [optimizer, optimizer]):
        with pytest.raises(ValueError, match="optimizer_list holds the one optimizer"):
            table(name="b", optimizer_list=wrong)


# --- names and environment --------------------------------------------------------------------------


MODULES = {
    "core.asc.feature_spec": ["FeatureSpec"],
    "core.asc.helper": ["get_asc_insert_func"],
    "core.asc.manager": ["start_asc_pipeline"],
    "core.embedding": ["SparseTable", "create_table", "sparse_lookup"],
    "core.feature_process": ["EvictHook"],
    "graph.modifier": ["GraphModifierHook", "modify_graph_and_start_emb_cache"],
    "optimizers.optimizer": ["HashOptimizer"],
    "saver.hook": ["CheckpointSaverHook"],
    "saver.saver": ["Saver", "latest_checkpoint"],
    "saver.warm_start": ["WarmStartSettings", "warm_start"],
    "util.communication.hccl_ops": ["get_rank_id", "get_rank_size"],
    "util.initialize": [
        "ConfigInitializer",
        "get_initializer",
        "version",
        "init",
        "terminate_config_initializer",
    ],
    "util.ops": ["import_host_pipeline_ops"],
    "util.variable": ["add_to_collection", "get_collection", "get_dense_and_sparse_variable"],
}
"""Names of the door by the module that programs for Rec SDK import them from."""


def test_every_name_of_the_door_is_that_of_its_module() -> None:
    names = [name for names in MODULES.values() for name in names]
    assert sorted([*names, "optimizers"]) == mx.__all__
    for module, own in MODULES.items():
        for name in own:
            assert REC_SDK.look_up(f"{module}.{name}") is getattr(mx, name)
    for name in mx.optimizers.__all__:
        assert REC_SDK.look_up(f"optimizers.{name}") is getattr(mx.optimizers, name)


def test_merging_of_lookups_has_nothing_to_do() -> None:
    do_merge_lookup(is_train=True)
    with pytest.raises(ValueError, match="do_merge_lookup: is_train"):
        do_merge_lookup(3)


def test_environment_is_not_read() -> None:
    names = next(s["names"] for s in SECTIONS if s["title"] == "Environment variables")
    door = Path(mx.__file__).parent
    text = "".join(path.read_text() for path in door.rglob("*.py"))
    assert [name for name in names if name in text] == []
    assert "environ" not in text
