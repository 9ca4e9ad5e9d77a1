# SPDX-License-Identifier: Apache-2.0
"""What rec_sdk_parameters.yaml says of training holds: lookups, updates, admission, eviction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework

pytestmark = pytest.mark.usefixtures("rec_sdk")

Batch = Mapping[str, Any]


def batch(*ids: int, time: int | Sequence[int] | None = None) -> Batch:
    """One batch of a feature `item`, with its time in seconds."""
    columns = {"item": torch.tensor(ids)}
    if time is not None:
        columns["timestamp"] = torch.tensor(time)
    return columns


class Program:
    """One table of rows that begin at 1, one feature, and plain gradient descent of rate 1.

    The loss is the sum of what is looked up, so that an update takes 1 from a row for each
    occurrence of its id.
    """

    def __init__(
        self,
        *,
        spec: Mapping[str, Any] | None = None,
        timed: bool = False,
        options: Mapping[str, Any] | None = None,
        lookup: Mapping[str, Any] | None = None,
        **table: Any,
    ) -> None:
        mx.init(**(options or {}))
        self.optimizer = self.make_optimizer()
        self.spec = mx.FeatureSpec("item", **(spec or {}))
        self.specs = [self.spec]
        if timed:
            self.specs.append(mx.FeatureSpec("timestamp", is_timestamp=True))
        self.insert = mx.get_asc_insert_func(tgt_key_specs=self.specs)
        self.reading = mx.get_asc_insert_func(tgt_key_specs=self.specs, is_training=False)
        described = {"device_vocabulary_size": 100} | table
        self.table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0), **described)
        self.lookup = lookup or {}
        mx.start_asc_pipeline()

    def make_optimizer(self) -> Any:
        return sgd()

    @property
    def rows(self) -> hb.Table:
        return framework.current().started("test").tables["item"]

    def train(self, *batches: Batch) -> list[list[float]]:
        """Learn batches; return the first lanes of the rows that each of them has read."""
        read = []
        for columns in self.insert.over(list(batches)):
            values = mx.sparse_lookup(self.table, self.spec, batch=columns, **self.lookup)
            if values.requires_grad:
                values.sum().backward()
            self.optimizer.step()
            read.append(values[:, 0].tolist())
        return read

    def evaluate(self, *batches: Batch) -> list[list[float]]:
        read = []
        with torch.no_grad():
            for columns in self.reading.over(list(batches)):
                values = mx.sparse_lookup(
                    self.table, self.spec, batch=columns, is_train=False, **self.lookup
                )
                read.append(values[:, 0].tolist())
        return read


class Squares(Program):
    """The same with Adagrad, whose sum of squares begins at 1."""

    def make_optimizer(self) -> Any:
        factory = mx.optimizers.adagrad.create_hash_optimizer
        return factory(1.0, initial_accumulator_value=1.0)


def sgd(rate: float = 1.0) -> Any:
    if framework.current().options.use_dynamic_expansion:
        factory = mx.optimizers.gradient_descent_by_addr.create_hash_optimizer_by_addr
        return factory(rate, weight_decay=0.0)
    return mx.optimizers.gradient_descent.create_hash_optimizer(rate)


def state(table: hb.Table) -> list[Any]:
    """All that a table holds: rows, states, counts, times and candidates."""
    return [bits_of(table.export()), bits_of(table.candidates()), table.scalars()]


# --- init -------------------------------------------------------------------------------------------


def test_wrong_numbers_of_steps_change_nothing() -> None:
    batches = [batch(1, 2), batch(2, 3), batch(3, 3), batch(1, 4), batch(4, 1)]
    results = []
    for steps in ({}, {"train_steps": 2}, {"max_steps": 3, "train_steps": 100, "save_steps": 1}):
        program = Program(options=steps)
        results.append((program.train(*batches), state(program.rows)))
        mx.terminate_config_initializer()
    assert results[0] == results[1] == results[2]


# --- levels -------------------------------------------------------------------------------------------


def test_rows_beside_those_of_device_and_host_are_read_ahead_and_learn_as_in_memory(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    batches = [batch(*random.integers(0, 400, 32).tolist()) for _ in range(60)]
    levels = {"host_vocabulary_size": 20, "ssd_vocabulary_size": 400, "ssd_data_path": [tmp_path]}
    results = []
    for sizes in ({}, levels):
        program = Squares(**sizes)
        results.append((program.train(*batches), program.evaluate(*batches), state(program.rows)))
        rows = program.rows
        mx.terminate_config_initializer()
    assert rows.tier == hb.Ssd(tmp_path, 120)
    assert rows.tier_stats["misses"] >= rows.tier_stats["fetched"] > 0
    assert results[0] == results[1]


# --- thresholds -------------------------------------------------------------------------------------

LEARNED = [[1.0], [0.0], [-1.0]]


@pytest.mark.parametrize(
    ("threshold", "read"),
    [(None, LEARNED), (-1, LEARNED), (0, LEARNED), (1, LEARNED), (2, [[0.0], [1.0], [0.0]])],
)
def test_thresholds(threshold: int | None, read: list[list[float]]) -> None:
    program = Program(spec={"access_threshold": threshold})
    assert program.train(batch(7), batch(7), batch(7)) == read


@pytest.mark.parametrize("name", ["access_threshold", "eviction_threshold"])
def test_thresholds_below_minus_one_are_errors(name: str) -> None:
    mx.init()
    for value in (-2, -3):
        with pytest.raises(ValueError, match=name):
            mx.FeatureSpec("item", **({"access_threshold": 1} | {name: value}))


@pytest.mark.parametrize(("threshold", "left"), [(-1, 3), (0, 0), (1, 1), (30, 2), (31, 3)])
def test_eviction_thresholds(threshold: int, left: int) -> None:
    """A row goes when it was not seen for the threshold; 0 keeps none of the past."""
    spec = {"access_threshold": 0, "eviction_threshold": threshold}
    program = Program(spec=spec, timed=True)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=3)
    program.train(batch(1, time=10), batch(2, time=20), batch(3, time=40))
    hook.after_run(global_step=3)
    assert len(program.rows) == left


def test_admission_counts_the_current_batch() -> None:
    program = Program(spec={"access_threshold": 2})
    assert program.train(batch(5, 5), batch(6), batch(6)) == [[1.0, 1.0], [0.0], [1.0]]


def test_each_occurrence_counts() -> None:
    program = Program(spec={"access_threshold": 6, "faae_coefficient": 3})
    assert program.train(batch(5), batch(5), batch(6, 6)) == [[0.0], [1.0], [1.0, 1.0]]


def test_refused_ids_get_no_gradient() -> None:
    program = Program(spec={"access_threshold": 2})
    for columns in program.insert.over([batch(5, 6, 6)]):
        mx.sparse_lookup(program.table, program.spec, batch=columns).sum().backward()
        (rows,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        (addresses,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        assert addresses.tolist()[0] == -1
        assert addresses.tolist()[1] >= 0
        assert len(rows) == 2
        program.optimizer.step()
    assert program.train(batch(5, 6)) == [[1.0, -1.0]]


@pytest.mark.parametrize(("second", "reads"), [(86_399, 1.0), (86_400, 0.0), (31_536_000, 0.0)])
def test_an_eviction_forgets_ids_that_wait(second: int, reads: float) -> None:
    """Rec SDK walks the counts of all ids of a table, admitted or not."""
    program = Program(spec={"access_threshold": 2, "eviction_threshold": 86_400}, timed=True)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=2)
    program.train(batch(7, time=0), batch(8, 8, time=second))
    hook.after_run(global_step=2)
    assert program.train(batch(7, time=second)) == [[reads]]


def test_counts_are_never_lost_and_stay_in_their_memory() -> None:
    """Without eviction, ids wait for ever, in `admission_bytes`."""
    program = Program(spec={"access_threshold": 2}, admission_bytes=1 << 16)
    program.train(batch(*range(5_000)))
    assert program.rows.stats["sketched_partitions"] == 256
    assert program.rows.stats["candidate_bytes"] <= 1 << 16
    assert program.train(batch(*range(5_000))) == [[1.0] * 5_000]
    with pytest.raises(ValueError, match=r"create_table 'other': admission_bytes: must be .* 1000"):
        mx.create_table(torch.int64, 2, "other", hb.Zeros(), admission_bytes=1000)


def test_set_threshold() -> None:
    program = Program(spec={"access_threshold": 100})
    assert program.train(batch(5, 5)) == [[0.0, 0.0]]
    mx.import_host_pipeline_ops().set_threshold(3, emb_name="item", ids_name="item_lookup")
    assert program.train(batch(5)) == [[1.0]]
    mx.import_host_pipeline_ops().set_threshold(0)
    assert program.train(batch(6)) == [[1.0]]
    mx.import_host_pipeline_ops().set_threshold(torch.tensor(2))
    assert program.train(batch(7), batch(7)) == [[0.0], [1.0]]
    mx.import_host_pipeline_ops().set_threshold(3, emb_name=["item"], ids_name=["item_lookup"])
    assert program.train(batch(8), batch(8), batch(8)) == [[0.0], [0.0], [1.0]]
    with pytest.raises(ValueError, match=r"got 'items'\. Did you mean 'item'"):
        mx.import_host_pipeline_ops().set_threshold(1, emb_name="items")
    with pytest.raises(ValueError, match="input"):
        mx.import_host_pipeline_ops().set_threshold(-1)


# --- evaluation -------------------------------------------------------------------------------------


def test_evaluation_changes_nothing() -> None:
    program = Program(spec={"access_threshold": 2, "eviction_threshold": 100}, timed=True)
    program.train(batch(1, 1, 2, time=10))
    before = state(program.rows)
    assert program.evaluate(batch(1, 2, 3, time=50), batch(2, 2, time=90)) == [[-1, 0, 0], [0, 0]]
    assert state(program.rows) == before
    assert mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB") == []


def test_shapes_of_evaluation_are_free() -> None:
    program = Program(options={"use_dynamic": False}, lookup={"send_count": 4})
    program.train(batch(1, 2, 3, 4))
    assert program.evaluate(batch(1), batch(1, 2, 3)) == [[0.0], [0.0, 0.0, 0.0]]


# --- lookups ----------------------------------------------------------------------------------------


def test_default_value() -> None:
    for expansion in (False, True):
        for value, read in ((None, 0.0), (2.5, 2.5), (torch.full([1], 2.5), 2.5)):
            lookup = {} if value is None else {"serving_default_value": value}
            program = Program(
                spec={"access_threshold": 2},
                lookup=lookup,
                options={"use_dynamic_expansion": expansion},
            )
            assert program.train(batch(5)) == [[read]]
            assert program.evaluate(batch(9)) == [[read]]
            mx.terminate_config_initializer()
    program = Program(spec={"access_threshold": 0})  # refuses no id
    assert program.evaluate(batch(9)) == [[1.0]]


def test_default_value_without_a_threshold_is_that_of_ids_that_are_not_there(
    tmp_path: Path,
) -> None:
    """Training gives each id its row; evaluation, a restored program and a server read the value."""
    for value in (2.5, 0.0, torch.full([1], -3.0)):
        plain, program = [], []
        for lookup, results in (({}, plain), ({"serving_default_value": value}, program)):
            made = Program(lookup=lookup)
            results.append(made.train(batch(7), batch(7, 8)))
            results.append(made.evaluate(batch(8)))
            results.append(state(made.rows))
            absent = made.evaluate(batch(9))
            if lookup:
                saver = mx.Saver([])
                saver.save(str(tmp_path / "state"), global_step=2)
                served = hb.Table(**made.rows.config)
                assert served.lookup([9])[0, 0] == float(value)
            mx.terminate_config_initializer()
        assert plain == program
        assert absent == [[float(value)]]
        again = Program()
        mx.Saver([]).restore(str(tmp_path / "state"))
        assert again.evaluate(batch(9, 8)) == [[float(value), *plain[1][0]]]
        mx.terminate_config_initializer()


def test_ids_are_of_their_mode() -> None:
    program = Program()
    with pytest.raises(ValueError, match="modify_graph"):
        mx.sparse_lookup(program.table, torch.tensor([1]))
    with pytest.raises(ValueError, match="modify_graph"):
        mx.sparse_lookup(program.table, program.spec, modify_graph=True)


def test_feature_of_another_table_is_an_error() -> None:
    program = Program()
    for columns in program.insert.over([batch(1)]):
        with pytest.raises(ValueError, match="other"):
            mx.sparse_lookup(program.table, mx.FeatureSpec("other"), batch=columns)


def test_dynamic_shape_needs_the_batch() -> None:
    program = Program()
    with pytest.raises(ValueError, match="batch"):
        mx.sparse_lookup(program.table, program.spec)


def test_static_shape_needs_a_send_count() -> None:
    program = Program(options={"use_dynamic": False})
    for columns in program.insert.over([batch(1)]):
        for count in (None, 0, -1, 2**31, 1.5):
            with pytest.raises(ValueError, match="send_count"):
                mx.sparse_lookup(program.table, program.spec, count, batch=columns)
        mx.sparse_lookup(program.table, program.spec, 3, batch=columns)
        (rows,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        assert len(rows) == 3
        with pytest.raises(ValueError, match=r"give the same, .* got 4 and 3"):
            mx.sparse_lookup(program.table, program.spec, 4, batch=columns)


def test_overflow_of_send_count_is_an_error() -> None:
    program = Program(options={"use_dynamic": False}, lookup={"send_count": 2})
    program.train(batch(1, 2, 2, 1))
    with pytest.raises(RuntimeError, match=r"table 'item': .* static size of 2, got 3"):
        program.train(batch(1, 2, 3))


def test_names_of_lookups_have_a_length() -> None:
    program = Program()
    for columns in program.insert.over([batch(1)]):
        mx.sparse_lookup(program.table, program.spec, batch=columns, name="x" * 255)
        for name in ("", "x" * 256, 3):
            with pytest.raises(ValueError, match="name"):
                mx.sparse_lookup(program.table, program.spec, batch=columns, name=name)


def test_lookup_without_gradient() -> None:
    program = Program(lookup={"is_grad": False})
    assert program.train(batch(1), batch(1)) == [[1.0], [1.0]]


class Looked(torch.nn.Module):
    """Looks up ids that it computes, for automatic graph modification."""

    def __init__(self, **lookup: Any) -> None:
        super().__init__()
        self.table = mx.create_table(torch.int64, 2, "item", hb.Zeros())
        self.lookup = lookup

    def forward(self, item: Any) -> Any:
        return mx.sparse_lookup(self.table, item * 2, modify_graph=True, **self.lookup)


def test_keys_of_the_thresholds() -> None:
    mx.init()
    sgd()
    config = {"access_threshold": 1, "evict_threshold": 1}
    model = Looked(access_and_evict_config=config)
    with pytest.raises(ValueError, match=r"evict_threshold.*eviction_threshold"):
        mx.modify_graph_and_start_emb_cache(model, train=[batch(1)])


def test_initializer_before_the_start_is_an_error() -> None:
    mx.init()
    with pytest.raises(RuntimeError, match="step 8"):
        mx.get_initializer(True)


def test_initializers_begin_anew() -> None:
    mx.init()
    optimizer = sgd()
    model = Looked()
    data = [batch(1), batch(2, 3)]
    mx.modify_graph_and_start_emb_cache(model, train=data, evaluation=data[:1])
    for _ in range(2):
        seen = []
        for columns in mx.get_initializer(True)():
            model(**columns).sum().backward()
            optimizer.step()
            seen.append(columns["item"].tolist())
        assert seen == [[1], [2, 3]]
        assert [columns["item"].tolist() for columns in mx.get_initializer(False)()] == [[1]]


def test_graph_is_modified_before_the_loop() -> None:
    mx.init()
    sgd()
    report = mx.modify_graph_and_start_emb_cache(Looked(), train=[batch(1)])
    assert "item" in str(report)
    with pytest.raises(EnvironmentError, match="step 8"):
        mx.modify_graph_and_start_emb_cache(Looked.__new__(Looked), train=[batch(1)])


class Foreign(Looked):
    """Looks up ids that are not of the batch."""

    def forward(self, item: Any) -> Any:
        own = torch.randint(0, 9, item.shape)
        return mx.sparse_lookup(self.table, own, modify_graph=True)


class Deciding(Looked):
    """Computes ids by a number that only the data have."""

    def forward(self, item: Any) -> Any:
        return super().forward(item * int(item.sum()))


def test_ids_that_cannot_be_computed_ahead_are_reported() -> None:
    mx.init()
    sgd()
    report = mx.modify_graph_and_start_emb_cache(Foreign(), train=[batch(1)])
    assert "random numbers" in str(report)


def test_code_that_cannot_be_traced_is_an_error() -> None:
    mx.init()
    sgd()
    with pytest.raises(ValueError, match="Deciding"):
        mx.modify_graph_and_start_emb_cache(Deciding(), train=[batch(1)])


class Two(Program):
    """Two features of one table."""

    def lookups(self, first: Batch, num: int = 2) -> list[Any]:
        read = []
        for columns in self.insert.over([first]):
            for _ in range(num):
                read.append(mx.sparse_lookup(self.table, self.spec, batch=columns))
            sum(values.sum() for values in read).backward()
            self.optimizer.step()
        return read


def test_lookups_of_a_table_are_summed() -> None:
    program = Two()
    program.lookups(batch(1, 2))
    assert program.evaluate(batch(1, 2)) == [[-1.0, -1.0]]


def test_any_number_of_lookups() -> None:
    program = Two()
    program.lookups(batch(1), num=200)
    assert program.evaluate(batch(1)) == [[-199.0]]


def test_names_of_features_may_repeat() -> None:
    mx.init()
    optimizer = sgd()
    specs = [mx.FeatureSpec("item"), mx.FeatureSpec("item")]
    insert = mx.get_asc_insert_func(tgt_key_specs=specs)
    table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0))
    mx.start_asc_pipeline()
    for columns in insert.over([batch(1, 2)]):
        read = [mx.sparse_lookup(table, spec, batch=columns) for spec in specs]
        assert torch.equal(*read)
        sum(values.sum() for values in read).backward()
        optimizer.step()
    with torch.no_grad():  # a feature of another insert function reads the same ids
        again = mx.FeatureSpec("item")
        reading = mx.get_asc_insert_func(tgt_key_specs=[again], is_training=False)
        for columns in reading.over([batch(1, 2)]):
            values = mx.sparse_lookup(table, specs[1], batch=columns, is_train=False)
            assert values.tolist() == [[-1.0, -1.0]] * 2


class TwoLookups(torch.nn.Module):
    """Looks up its ids twice in one table, in automatic graph modification."""

    def __init__(self, table: Any, thresholds: Mapping[str, int]) -> None:
        super().__init__()
        self.table = table
        self.thresholds = thresholds

    def forward(self, item: Any) -> list[Any]:
        options = {"modify_graph": True, "access_and_evict_config": self.thresholds}
        return [mx.sparse_lookup(self.table, ids, **options) for ids in (item, item + 0)]


@pytest.mark.parametrize(("threshold", "rows"), [(2, 3), (4, 3), (5, 0)])
@pytest.mark.parametrize("automatic", [False, True])
def test_each_lookup_of_a_table_counts(threshold: int, rows: int, automatic: bool) -> None:
    """Rec SDK concatenates the lookups of a table: two batches of two lookups are four."""
    mx.init()
    optimizer = sgd()
    thresholds = {"access_threshold": threshold}
    feature = {"table_name": "item", "index_key": "item", **thresholds}
    specs = [mx.FeatureSpec("u", **feature), mx.FeatureSpec("u", **feature)]
    data = [batch(1, 2, 3)] * 2
    table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0))
    if automatic:
        model = TwoLookups(table, thresholds)
        mx.modify_graph_and_start_emb_cache(model, train=data)
        batches = mx.get_initializer(True)()
        look_up = lambda columns: model(columns["item"])  # noqa: E731
    else:
        batches = mx.get_asc_insert_func(tgt_key_specs=specs).over(data)
        mx.start_asc_pipeline()
        look_up = lambda columns: [  # noqa: E731
            mx.sparse_lookup(table, spec, batch=columns) for spec in specs
        ]
    for columns in batches:
        read = look_up(columns)
        loss = sum(values.sum() for values in read)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    assert table.size() == rows


def test_any_integer_is_an_id() -> None:
    ids = [-1, 0, -(2**63), 2**63 - 1, -2]
    program = Program()
    assert program.train(batch(*ids), batch(*ids)) == [[1.0] * 5, [0.0] * 5]


def test_unknown_arguments_of_a_lookup_are_errors() -> None:
    program = Program()
    with pytest.raises((TypeError, ValueError), match="send_counts"):
        mx.sparse_lookup(program.table, program.spec, send_counts=3)


# --- updates ----------------------------------------------------------------------------------------


def test_collections_hold_a_tensor_for_each_table() -> None:
    program = Program()
    for columns in program.insert.over([batch(3, 1, 3)]):
        mx.sparse_lookup(program.table, program.spec, batch=columns)
        mx.sparse_lookup(program.table, program.spec, batch=columns)
        (rows,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        (addresses,) = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        assert rows.shape == (2, 2)
        assert addresses.tolist() == program.rows.find(np.array([3, 1])).tolist()
        assert rows.requires_grad


@pytest.mark.parametrize("form", ["pairs", "lists", "tensors"])
@pytest.mark.parametrize("expansion", [False, True])
def test_gradients_by_address(form: str, *, expansion: bool) -> None:
    program = Program(options={"use_dynamic_expansion": expansion})
    for columns in program.insert.over([batch(1, 1, 2)]):
        values = mx.sparse_lookup(program.table, program.spec, batch=columns)
        rows = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        grads = torch.autograd.grad(values.sum(), rows)
        given = {
            "pairs": list(zip(grads, addresses, strict=True)),
            "lists": [grads, addresses],
            "tensors": [grads[0], addresses[0]],
        }
        program.optimizer.apply_gradients(given[form])
    assert mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB") == []
    assert program.evaluate(batch(1, 2)) == [[-1.0, 0.0]]


def test_foreign_addresses_are_errors() -> None:
    program = Program()
    for columns in program.insert.over([batch(1)]):
        mx.sparse_lookup(program.table, program.spec, batch=columns)
        with pytest.raises(ValueError, match="address"):
            program.optimizer.apply_gradients([(torch.ones(1, 2), torch.tensor([12345]))])


def test_gradients_of_another_optimizer_are_errors() -> None:
    mx.init()
    optimizers = [sgd(), mx.optimizers.lazy_adam.create_hash_optimizer(0.1)]
    specs = [mx.FeatureSpec("item"), mx.FeatureSpec("user")]
    insert = mx.get_asc_insert_func(tgt_key_specs=specs)
    tables = [
        mx.create_table(torch.int64, 2, spec.name, hb.Zeros(), optimizer_list=[optimizer])
        for spec, optimizer in zip(specs, optimizers, strict=True)
    ]
    mx.start_asc_pipeline()
    for columns in insert.over([{"item": torch.tensor([1]), "user": torch.tensor([2])}]):
        for table, spec in zip(tables, specs, strict=True):
            mx.sparse_lookup(table, spec, batch=columns)
        addresses = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        grads = [torch.ones(1, 2), torch.ones(1, 2)]
        before = [state(own) for own in framework.current().started("test").tables.values()]
        with pytest.raises(ValueError, match=r"updates the table 'user'.* to LazyAdam"):
            optimizers[0].apply_gradients([grads, addresses])
        after = [state(own) for own in framework.current().started("test").tables.values()]
        assert after == before


def test_gradients_of_one_id_are_summed() -> None:
    program = Squares()
    program.train(batch(1, 1, 1))
    expected = 1 - 3 / np.sqrt(1 + 9)
    assert program.evaluate(batch(1))[0][0] == pytest.approx(expected, rel=1e-6)


class Lazy(Program):
    def make_optimizer(self) -> Any:
        return mx.optimizers.lazy_adam.create_hash_optimizer(0.1)


def test_lazy_adam_moves_rows_of_the_batch_only() -> None:
    program = Lazy()
    program.train(batch(1, 2))
    before = program.evaluate(batch(1, 2))[0]
    program.train(batch(2), batch(2))
    after = program.evaluate(batch(1, 2))[0]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_lazy_adam_corrects_its_bias_by_all_steps() -> None:
    program = Lazy()
    program.train(batch(1), batch(1), batch(2))  # 2 is seen first in step 3
    m, v = 0.1, 0.001
    rate = 0.1 * np.sqrt(1 - 0.999**3) / (1 - 0.9**3)
    expected = 1 - rate * m / (np.sqrt(v) + 1e-8)
    assert program.evaluate(batch(2))[0][0] == pytest.approx(expected, rel=1e-5)


def test_several_optimizers_need_a_choice() -> None:
    mx.init()
    first = mx.optimizers.lazy_adam.create_hash_optimizer(name="one")
    mx.optimizers.adagrad.create_hash_optimizer(name="two")
    spec = mx.FeatureSpec("item")
    mx.get_asc_insert_func(tgt_key_specs=[spec])
    table = mx.create_table(torch.int64, 2, "item", hb.Zeros())
    with pytest.raises(ValueError, match=r"one.*two"):
        mx.start_asc_pipeline()
    table.optimizer = first
    mx.start_asc_pipeline()


def test_padding_keys_get_no_update() -> None:
    program = Program(padding_keys=[0], padding_keys_mask=True, padding_keys_len=512)
    assert program.train(batch(0, 5), batch(0, 5)) == [[1.0, 1.0], [1.0, 0.0]]


# --- tables -----------------------------------------------------------------------------------------


def test_sizes_never_bind() -> None:
    program = Program(device_vocabulary_size=2)
    program.train(batch(1, 2, 3, 4))
    assert program.table.size() == 4
    assert program.table.capacity() == 4


def test_tables_may_have_sizes_of_their_own() -> None:
    mx.init()
    sgd()
    specs = [mx.FeatureSpec("a"), mx.FeatureSpec("b")]
    mx.get_asc_insert_func(tgt_key_specs=specs)
    mx.create_table(torch.int64, 2, "a", hb.Zeros(), 10, host_vocabulary_size=1000)
    mx.create_table(torch.int64, 2, "b", hb.Zeros(), 10)
    mx.start_asc_pipeline()
    tables = framework.current().started("test").tables
    assert [tables[name].capacity for name in ("a", "b")] == [1010, 10]


def test_tables_after_the_start_are_errors() -> None:
    Program()
    with pytest.raises(EnvironmentError, match="step 8"):
        mx.create_table(torch.int64, 2, "late", hb.Zeros())


def test_start_without_tables_is_an_error() -> None:
    mx.init()
    with pytest.raises(RuntimeError, match="table"):
        mx.start_asc_pipeline()


def test_table_without_a_lookup() -> None:
    mx.init()
    optimizer = sgd()
    spec = mx.FeatureSpec("item")
    insert = mx.get_asc_insert_func(tgt_key_specs=[spec])
    table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0))
    mx.create_table(torch.int64, 2, "unused", hb.Zeros())
    mx.start_asc_pipeline()
    for columns in insert.over([batch(1)]):
        mx.sparse_lookup(table, spec, batch=columns).sum().backward()
        optimizer.step()
    assert table.size() == 1


def test_dense_and_sparse_variables() -> None:
    mx.init()
    table = mx.create_table(torch.int64, 2, "item", hb.Zeros())
    net = torch.nn.Linear(2, 1)
    dense, sparse = mx.get_dense_and_sparse_variable(net)
    assert [id(parameter) for parameter in dense] == [id(p) for p in net.parameters()]
    assert list(sparse) == [table]


# --- data -------------------------------------------------------------------------------------------


def test_insert_function_returns_batches() -> None:
    program = Program()
    (columns,) = program.insert.over([{"item": torch.tensor([1, 2]), "other": torch.ones(3)}])
    assert torch.equal(columns["item"], torch.tensor([1, 2]))
    assert torch.equal(columns["other"], torch.ones(3))


def test_insert_function_maps_data_of_pytorch() -> None:
    mx.init()
    optimizer = sgd()
    insert = mx.get_asc_insert_func(args_index_list=[0], table_names=["item"])
    table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0))
    mx.start_asc_pipeline()
    data = torch.utils.data.TensorDataset(torch.tensor([1, 1, 2, 3]), torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    labels = []
    for columns in insert.over(loader):
        values = mx.sparse_lookup(table, insert.specs[0], batch=columns)
        values.sum().backward()
        optimizer.step()
        labels += columns[1].tolist()
    assert labels == [0, 1, 2, 3]
    assert table.size() == 3


# --- eviction ---------------------------------------------------------------------------------------

EVICTING = {"access_threshold": 1, "eviction_threshold": 10}


def present(program: Program, *ids: int) -> list[bool]:
    return [bool(slot >= 0) for slot in program.rows.find(np.array(ids))]


@pytest.mark.parametrize("expansion", [False, True])
def test_eviction_is_inclusive(*, expansion: bool) -> None:
    program = Program(spec=EVICTING, timed=True, options={"use_dynamic_expansion": expansion})
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=1)
    program.train(batch(1, time=100))
    program.train(batch(2, time=101))
    program.train(batch(3, time=110))
    hook.after_run(global_step=3)
    assert present(program, 1, 2, 3) == [False, True, True]


def test_newest_time_never_goes_back() -> None:
    program = Program(spec=EVICTING, timed=True)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=1)
    program.train(batch(1, time=100), batch(2, time=115), batch(3, time=101))
    hook.after_run(global_step=3)
    assert present(program, 1, 2) == [False, True]


def test_evicted_ids_start_anew() -> None:
    program = Squares(spec=EVICTING | {"access_threshold": 2}, timed=True)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=3)
    program.train(batch(1, 1, time=100), batch(1, time=100), batch(2, 2, time=200))
    hook.after_run(global_step=3)
    assert present(program, 1, 2) == [False, True]
    assert program.train(batch(1, time=201)) == [[0.0]]  # its count begins at 0
    program.train(batch(3, time=201), batch(1, 3, time=202))  # 3 was never there
    rows = {row["id"]: row for part in program.rows.export() for row in part.to_pylist()}
    place = {"id": 1, "partition": rows[1]["partition"]}
    assert rows[1] == rows[3] | place


def test_timestamp_may_have_any_place() -> None:
    results = []
    for first in (True, False):
        mx.init()
        optimizer = sgd()
        spec = mx.FeatureSpec("item", **EVICTING)
        clock = mx.FeatureSpec("clock", index_key="timestamp", is_timestamp=True)
        specs = [clock, spec] if first else [spec, clock]
        insert = mx.get_asc_insert_func(tgt_key_specs=specs)
        table = mx.create_table(torch.int64, 2, "item", hb.Constant(1.0))
        mx.start_asc_pipeline()
        for columns in insert.over([batch(1, time=10), batch(2, time=20)]):
            mx.sparse_lookup(table, spec, batch=columns).sum().backward()
            optimizer.step()
        results.append(state(framework.current().started("test").tables["item"]))
        mx.terminate_config_initializer()
    assert results[0] == results[1]


def test_evict_hook_is_off_by_default() -> None:
    program = Program(spec=EVICTING, timed=True)
    hook = mx.EvictHook(evict_step_interval=1)
    program.train(batch(1, time=100), batch(2, time=200))
    hook.after_run(global_step=2)
    assert len(program.rows) == 2


def test_evict_hook_runs_after_its_step_also_if_an_evaluation_came_between() -> None:
    program = Program(spec=EVICTING, timed=True)
    hook = mx.EvictHook(evict_enable=True, evict_step_interval=1)
    evaluation_insert = mx.get_asc_insert_func([program.spec], is_training=False)
    for step in (1, 2):
        program.train(batch(step, time=100 * step))
        evaluation_insert(batch(1))
        hook.after_run(global_step=step)
        hook.after_run()  # that of the evaluation
    assert present(program, 1, 2) == [False, True]


def test_evict_hook_by_steps_and_by_seconds() -> None:
    program = Program(spec=EVICTING, timed=True)
    clock = [0.0]
    framework.current().clock.read = lambda: clock[0]
    hook = mx.EvictHook(evict_enable=True, evict_time_interval=60, evict_step_interval=3)
    for step, seconds in enumerate((0, 10, 20, 70, 90, 100, 200), start=1):
        clock[0] = float(seconds)
        program.train(batch(step, time=100 * step))
        hook.after_run(global_step=step)
        evicts = step in (3, 5, 6, 7)  # by steps, by seconds, by steps, by seconds
        assert (len(program.rows) == 1) == (evicts or step == 1), step
