# SPDX-License-Identifier: Apache-2.0
"""Lookups, updates and modes of Rec SDK's door, beside something too simple to be wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("rec_sdk")

USER = "user"
FAR = 10**11


def table(name: str = USER, **keywords: Any) -> Any:
    given = {"key_dtype": torch.int64, "dim": 2, "emb_initializer": hb.Normal(std=0.1)}
    return mx.create_table(name=name, **{**given, **keywords})


def adagrad(rate: float = 0.5) -> Any:
    return mx.optimizers.adagrad.create_hash_optimizer(rate)


def rows_of(name: str = USER) -> hb.Table:
    return framework.current().started("test").tables[name]


def bits(name: str = USER) -> tuple[Any, ...]:
    own = rows_of(name)
    return list(own.export()), list(own.candidates()), own.scalars()


def weighted(rows: Tensor) -> Tensor:
    return (rows * torch.arange(1, rows.numel() + 1).view_as(rows)).sum()


class Program:
    """One feature in one table, up to step 8."""

    def __init__(
        self,
        feature: dict[str, Any] | None = None,
        optimizer: Any = None,
        table_keywords: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        mx.init(**options)
        self.sparse = adagrad() if optimizer is None else optimizer()
        self.spec = mx.FeatureSpec(USER, **feature or {})
        self.clock = mx.FeatureSpec("time", is_timestamp=True)
        self.insert = mx.get_asc_insert_func([self.clock, self.spec])
        self.table = table(**table_keywords or {})
        mx.start_asc_pipeline()

    def batch(self, ids: Any, time: Any = 0) -> Any:
        return self.insert({USER: torch.tensor(ids), "time": time})

    def look_up(self, batch: Any, **keywords: Any) -> Tensor:
        return mx.sparse_lookup(self.table, self.spec, batch=batch, **keywords)

    def learn(self, ids: Any, time: Any = 0, **keywords: Any) -> Tensor:
        rows = self.look_up(self.batch(ids, time), **keywords)
        weighted(rows).backward()
        self.sparse.step()
        return rows


# --- optimizers: TensorFlow's formulas, one row at a time


def by_formula(name: str, keywords: dict[str, float], row: np.ndarray, grads: Any) -> np.ndarray:
    rate = keywords["learning_rate"]
    first = np.full(2, keywords.get("initial_accumulator_value", 0.0))
    second = np.zeros(2)
    for step, grad in enumerate(grads, 1):
        if name == "adagrad":
            first = first + grad**2
            row = row - rate * grad / np.sqrt(first)
        elif name == "gradient_descent":
            row = row - rate * (grad + keywords.get("weight_decay", 0.0) * row)
        elif name == "lazy_adam":
            first = 0.9 * first + 0.1 * grad
            second = 0.999 * second + 0.001 * grad**2
            corrected = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            row = row - corrected * first / (np.sqrt(second) + keywords["epsilon"])
        else:
            l1 = keywords["l1_regularization_strength"]
            l2 = keywords["l2_regularization_strength"]
            grown = first + grad**2
            second = second + grad - (np.sqrt(grown) - np.sqrt(first)) / rate * row
            first = grown
            bounded = np.clip(second, -l1, l1)
            row = (bounded - second) / (np.sqrt(first) / rate + 2 * l2)
    return row


@pytest.mark.parametrize(
    ("module", "factory", "keywords"),
    [
        ("adagrad", "", {"initial_accumulator_value": 0.5}),
        ("adagrad_by_addr", "_by_address", {"initial_accumulator_value": 0.25}),
        ("gradient_descent", "", {}),
        ("gradient_descent", "", {"weight_decay": 0.01}),
        ("gradient_descent_by_addr", "_by_addr", {"weight_decay": 0.5}),
        ("lazy_adam", "", {"epsilon": 0.01}),
        ("lazy_adam_by_addr", "_by_address", {"epsilon": 0.1}),
        (
            "ftrl",
            "",
            {
                "initial_accumulator_value": 0.2,
                "l1_regularization_strength": 0.1,
                "l2_regularization_strength": 0.3,
            },
        ),
    ],
)
def test_optimizers_follow_their_formulas(
    module: str, factory: str, keywords: dict[str, float]
) -> None:
    keywords = {"learning_rate": 0.25, **keywords}
    create = getattr(getattr(mx.optimizers, module), f"create_hash_optimizer{factory}")
    program = Program(
        optimizer=lambda: create(**keywords), use_dynamic_expansion="by_addr" in module
    )
    before = rows_of().lookup([7])[0].astype(np.float64)
    for _ in range(3):
        program.learn([7])
    gradient = np.array([1.0, 2.0])
    expected = by_formula(module.removesuffix("_by_addr"), keywords, before, [gradient] * 3)
    assert np.allclose(rows_of().lookup([7])[0], expected, atol=1e-5)


def test_a_rate_may_change_between_steps() -> None:
    program = Program(optimizer=lambda: mx.optimizers.gradient_descent.create_hash_optimizer(0.5))
    before = rows_of().lookup([7])[0]
    program.sparse.learning_rate = 0.25
    program.learn([7])
    assert np.allclose(rows_of().lookup([7])[0], before - 0.25 * np.array([1, 2]))


def test_each_optimizer_updates_its_own_tables() -> None:
    mx.init()
    first = adagrad()
    second = mx.optimizers.gradient_descent.create_hash_optimizer(1.0)
    features = [mx.FeatureSpec("user"), mx.FeatureSpec("item")]
    insert = mx.get_asc_insert_func(features)
    tables = [table("user", optimizer_list=[first]), table("item", optimizer_list=[second])]
    mx.start_asc_pipeline()
    batch = insert({"user": torch.tensor([1]), "item": torch.tensor([2])})
    rows = [mx.sparse_lookup(t, f, batch=batch) for t, f in zip(tables, features, strict=True)]
    torch.stack(rows).sum().backward()
    item = rows_of("item").lookup([2])
    addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
    with pytest.raises(ConfigError, match=r"Adagrad\.apply_gradients: .*'item', .*GradientDescent"):
        first.apply_gradients([(torch.ones(1, 2), addresses[1])])
    first.step()
    assert [rows_of("user").step, rows_of("item").step] == [1, 0]
    assert len(mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")) == 1
    second.zero_grad()
    assert mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB") == []
    assert rows_of("item").lookup([2]).tolist() == item.tolist()


# --- shapes


def test_static_shape_fills_targets_and_keeps_bits() -> None:
    learned = []
    for options in ({"use_dynamic": True}, {"use_dynamic": "False"}):
        program = Program({"access_threshold": 2}, **options)
        for ids in ([1, 2, 1], [4, 4, 4], [1, 9, 2]):
            rows = program.look_up(program.batch(ids), send_count=5)
            emb = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
            addr = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
            if options["use_dynamic"] == "False":
                assert [own.shape for own in emb] == [(5, 2)]
                assert addr[0][len(set(ids)) :].tolist() == [-1] * (5 - len(set(ids)))
            (grad,) = torch.autograd.grad(weighted(rows), emb)
            program.sparse.apply_gradients([(grad, addr[0])])
        learned.append(bits())
        mx.terminate_config_initializer()
    assert learned[0] == learned[1]


def test_static_shape_of_several_tables_is_there_from_the_first_batch_on() -> None:
    mx.init(use_dynamic=False)
    sparse = adagrad()
    features = [mx.FeatureSpec("user"), mx.FeatureSpec("item"), mx.FeatureSpec("tag")]
    insert = mx.get_asc_insert_func(features)
    tables = [table(feature.name) for feature in features]
    counts = [3, 4, 5]
    mx.start_asc_pipeline()
    for _ in range(3):
        batch = insert({name: torch.tensor([1, 2]) for name in ("user", "item", "tag")})
        rows = [
            mx.sparse_lookup(own, feature, count, batch=batch)
            for own, feature, count in zip(tables, features, counts, strict=True)
        ]
        sizes = [len(own) for own in mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")]
        assert sizes == counts
        torch.stack(rows).sum().backward()
        sparse.step()
    assert [rows_of(feature.name).step for feature in features] == [3, 3, 3]


# --- evaluation and refused ids


def test_evaluation_changes_nothing() -> None:
    program = Program({"access_threshold": 2, "eviction_threshold": 60})
    program.learn([1, 1, 2], 5)
    before = bits()
    evaluation = mx.get_asc_insert_func([program.clock, program.spec], is_training=False)
    data = [{USER: torch.tensor([1, 2, 3]), "time": FAR}] * 2
    for batch in evaluation.over(data):
        rows = program.look_up(batch, is_train=False)
        assert rows.tolist() == rows_of().lookup([1, 2, 3]).tolist()
        assert not rows.requires_grad
        with pytest.raises(ConfigError, match="the batch is one of evaluation, got is_train=True"):
            program.look_up(batch)
    program.look_up({USER: torch.tensor([4]), "time": FAR}, is_train="False")
    assert mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB") == []
    assert bits() == before


def test_evaluation_inside_a_training_step_leaves_the_step_as_it_is() -> None:
    learned = []
    for evaluates in (False, True):
        program = Program()
        evaluation = mx.get_asc_insert_func([program.clock, program.spec], is_training=False)
        for ids in ([1, 2], [2, 3]):
            batch = program.batch(ids)
            if evaluates:
                for other in evaluation.over([{USER: torch.tensor([2, 9]), "time": 0}]):
                    program.look_up(other, is_train=False)
            rows = program.look_up(batch)
            if evaluates:
                program.look_up(batch, is_train=False)
            weighted(rows).backward()
            program.sparse.step()
        learned.append(bits())
        mx.terminate_config_initializer()
    assert learned[0] == learned[1]


def test_an_id_that_is_refused_reads_as_the_default_and_takes_no_update() -> None:
    program = Program({"access_threshold": 3, "faae_coefficient": 2})
    batch = program.batch([1, 2, 2])
    rows = program.look_up(batch, serving_default_value=torch.tensor(0.5))
    assert rows[0].tolist() == [0.5, 0.5]
    assert rows[1].tolist() != [0.5, 0.5]
    (addresses,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
    assert sorted(addresses.tolist()) == [-1, 0]
    weighted(rows).backward()
    program.sparse.step()
    assert len(rows_of()) == 1
    assert rows_of().default == 0.5
    assert program.look_up(batch, is_train=False)[0].tolist() == [0.5, 0.5]
    with pytest.raises(ConfigError, match=r"give the same, .* got 1 and 0\.5"):
        program.look_up(batch, serving_default_value=1)
    program.look_up(batch, serving_default_value=torch.full([2], 0.5))  # as little_demo has it
    for alike in (np.full(2, 0.5), [0.5, 0.5], (0.5,)):
        program.look_up(batch, serving_default_value=alike)
    for wrong in (torch.tensor([0.5, 1.0]), torch.full([3], 0.5), torch.full([1, 3], 0.5)):
        with pytest.raises(ConfigError, match=r"serving_default_value: .* all of its 2 lanes"):
            program.look_up(batch, serving_default_value=wrong)
    with pytest.raises(ConfigError, match=r"give the same, .* got 1\.0 and 0\.5"):
        program.look_up(batch, serving_default_value=torch.ones(2))


def test_a_default_of_a_lookup_is_saved_and_restored(tmp_path: Path) -> None:
    """Lookups say it after the first batch, which comes after the restoration."""
    program = Program({"access_threshold": 2})
    program.learn([1, 2, 2], serving_default_value=0.5)
    mx.Saver([]).save(str(tmp_path / "state"))
    before = bits()
    mx.terminate_config_initializer()
    program = Program({"access_threshold": 2})
    mx.Saver([]).restore(str(tmp_path / "state"))
    assert bits() == before
    assert rows_of().lookup([1]).tolist() == [[0.5, 0.5]]
    rows = program.look_up(program.batch([9]), serving_default_value=0.5)
    assert rows.tolist() == [[0.5, 0.5]]


def test_collections_are_in_the_order_of_the_first_lookup() -> None:
    mx.init()
    adagrad()
    features = {name: mx.FeatureSpec(name) for name in ("user", "item", "tag")}
    insert = mx.get_asc_insert_func(list(features.values()))
    tables = {name: table(name, dim=dim) for dim, name in enumerate(features, 2)}
    mx.start_asc_pipeline()
    for names in (("tag", "user", "item"), ("item", "user", "tag")):
        batch = insert({name: torch.tensor([1]) for name in features})
        for name in names:
            mx.sparse_lookup(tables[name], features[name], batch=batch)
    rows = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
    assert [own.shape[1] for own in rows] == [4, 2, 3, 4, 2, 3]
    addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
    assert len(addresses) == 6


def test_the_end_of_a_program_ends_reading_and_mapping_ahead() -> None:
    before = set(threading.enumerate())
    program = Program()
    data = program.insert.over([{USER: torch.tensor([1]), "time": 0}] * 9)
    batches = iter(data)
    next(batches)
    (reader,) = set(threading.enumerate()) - before
    assert reader.name == "hotbed-read-ahead"
    mx.terminate_config_initializer()
    assert not reader.is_alive()
    assert list(batches) == []


# --- thresholds


def test_a_table_without_counts_takes_no_threshold() -> None:
    Program({"access_threshold": 0})
    for name in (USER, ""):
        with pytest.raises(ConfigError, match="access threshold above 0"):
            mx.import_host_pipeline_ops().set_threshold(2, emb_name=name)


def test_off_thresholds_are_the_same_however_they_are_written() -> None:
    mx.init()
    adagrad()
    table()
    off = mx.FeatureSpec("friend", USER, access_threshold=-1, eviction_threshold=-1)
    mx.get_asc_insert_func([mx.FeatureSpec(USER), off])
    mx.start_asc_pipeline()
    assert rows_of().admit is None
    assert rows_of().evictions == ()


# --- times


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (5, 70, [2, 3]),
        (torch.tensor([5, 5]), torch.tensor([2, 70]), [3]),
        (5.25, torch.tensor([65.5]), [2, 3]),
        (5.75, torch.tensor([65.5]), [1, 2, 3]),
    ],
    ids=str,
)
def test_seconds_of_a_batch_are_the_times_of_its_rows(
    first: Any, second: Any, kept: list[int]
) -> None:
    program = Program({"access_threshold": 0, "eviction_threshold": 60})
    hook = mx.EvictHook(True, evict_time_interval=None, evict_step_interval=2)
    program.learn([1, 1], first)
    hook.after_run(global_step=1)
    program.learn([2, 3], second)
    hook.after_run(global_step=2)
    assert sorted(np.flatnonzero(rows_of().find(np.arange(4)) >= 0)) == kept


def test_times_that_do_not_fit_are_an_error() -> None:
    program = Program({"access_threshold": 0, "eviction_threshold": 60})
    with pytest.raises(DataError, match="one for all samples or one each is needed, got 3 for 2"):
        program.batch([1, 2], torch.tensor([1, 2, 3]))


# --- batches


def test_a_batch_without_a_feature_is_an_error_that_names_it() -> None:
    program = Program()
    with pytest.raises(DataError, match=r"no values at its index_key, got 'user' and .*'time'"):
        program.insert({"time": 1})


def test_int32_ids_are_looked_up() -> None:
    program = Program(table_keywords={"key_dtype": torch.int32})
    ids = torch.tensor([[[1], [2]], [[3], [1]]], dtype=torch.int32)
    rows = program.look_up(program.insert({USER: ids, "time": 0}))
    assert rows.shape == (2, 2, 1, 2)
    assert torch.equal(rows[0, 0], rows[1, 1])


def test_mapping_ahead_has_the_bits_of_one_batch_at_a_time() -> None:
    """An evaluation every 5 steps, and evictions: nothing is mapped past them."""
    random = np.random.default_rng(0)
    data = [
        {USER: torch.from_numpy(random.integers(0, 40, 16)), "time": 10 * number}
        for number in range(30)
    ]
    seen = []
    for ahead in (False, True):
        program = Program({"access_threshold": 3, "eviction_threshold": 60}, train_steps=5)
        hook = mx.EvictHook(True, evict_time_interval=None, evict_step_interval=7)
        batches = program.insert.over(data) if ahead else map(program.insert, data)
        read = []
        for step, batch in enumerate(batches, 1):
            weighted(program.look_up(batch)).backward()
            program.sparse.step()
            hook.after_run(global_step=step)
            if step % 5 == 0:
                other = {USER: torch.arange(40), "time": 0}
                read.append(program.look_up(other, is_train=False).tolist())
        seen.append((read, bits()))
        mx.terminate_config_initializer()
    assert seen[0] == seen[1]
    assert seen[0][1][2]["evicted"] > 0


@pytest.mark.parametrize(("train_steps", "warnings"), [(-1, 1), (1, 0)])
def test_an_evaluation_past_which_ids_are_mapped_is_logged_once(
    train_steps: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program({"access_threshold": 2}, train_steps=train_steps)
    for batch in program.insert.over([{USER: torch.tensor([1, 2]), "time": 0}] * 40):
        weighted(program.look_up(batch)).backward()
        program.sparse.step()
        program.look_up({USER: torch.tensor([3]), "time": 0}, is_train=False)
    messages = [record.message for record in caplog.records if "mapped already" in record.message]
    assert len(messages) == warnings
