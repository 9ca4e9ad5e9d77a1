# SPDX-License-Identifier: Apache-2.0
"""MapParameter and HashEmbeddingLookup: their verbs beside a dict, their values in steps."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.compat.mindspore_rec import (
    Callback,
    CheckpointConfig,
    HashEmbeddingLookup,
    MapParameter,
    ModelCheckpoint,
    RecModel,
)
from hotbed.errors import ConfigError, RowShapeError, TableError
from hotbed.persist import content_digest, open_checkpoint

Item = tuple[torch.Tensor, torch.Tensor]


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values)


class Net(nn.Module):
    """A linear model over keys."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.map = MapParameter(value_shape=1, default_value="zeros", **arguments)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.map.get(ids).sum((1, 2))


def steps(*batches: list[int]) -> list[Item]:
    """Batches of one sample each, with these keys."""
    return [(torch.tensor([batch]), torch.ones(1)) for batch in batches]


def trained(*batches: list[int], **arguments: Any) -> MapParameter:
    network = Net(**arguments)
    RecModel(network, "mse", hb.Sgd(lr=0.5)).online_train(steps(*batches))
    return network.map


# --- MapParameter ---------------------------------------------------------------------------------


def test_the_signatures_are_mindspore_s() -> None:
    expected = {
        MapParameter: [
            ("key_dtype", None),
            ("value_dtype", None),
            ("value_shape", None),
            ("key_tensor", None),
            ("value_tensor", None),
            ("default_value", "normal"),
            ("permit_filter_value", 1),
            ("evict_filter_value", sys.maxsize),
            ("name", None),
            ("requires_grad", True),
        ],
        HashEmbeddingLookup: [
            ("embedding_size", inspect.Parameter.empty),
            ("key_dtype", torch.int32),
            ("param_init", "normal"),
            ("sparse", True),
            ("max_norm", None),
            ("permit_filter_value", 1),
            ("evict_filter_value", sys.maxsize),
            ("vocab_cache_size", 0),
        ],
    }
    for cls, arguments in expected.items():
        parameters = list(inspect.signature(cls).parameters.values())
        assert [(p.name, p.default) for p in parameters[: len(arguments)]] == arguments
        assert {p.kind for p in parameters[len(arguments) :]} == {inspect.Parameter.KEYWORD_ONLY}


def test_verbs_equal_those_of_a_dict() -> None:
    values = MapParameter(value_shape=2, default_value=0.5)
    model: dict[int, list[float]] = {}
    random = np.random.default_rng(4)
    chosen: list[int] = [*range(-8, 9), 2**63 - 1, -(2**63)]
    for _ in range(60):
        some = random.choice(len(chosen), 4, replace=False)
        ids = [chosen[place] for place in some]
        verb = random.integers(4)
        if verb == 0:
            fresh = random.normal(size=(4, 2)).astype(np.float32)
            values.put(keys(*ids), torch.from_numpy(fresh))
            model.update(zip(ids, fresh.tolist(), strict=True))
        elif verb == 1:
            values.erase(keys(*ids))
            for gone in ids:
                model.pop(gone, None)
        elif verb == 2:
            got = values.get(keys(*ids)).tolist()
            assert got == [model.setdefault(one, [0.5, 0.5]) for one in ids]
        else:
            got = values.get(keys(*ids), insert_default_value=False).tolist()
            assert got == [model.get(one, [0.5, 0.5]) for one in ids]
        all_keys, all_values = values.get_data()
        pairs = zip(all_keys.tolist(), all_values.tolist(), strict=True)
        assert dict(pairs) == model
        assert len(values) == len(model)
    assert values.get_keys().asnumpy().dtype == np.int64
    assert values.get_values().asnumpy().shape == (len(model), 2)


def test_keys_and_values_may_be_given_at_once() -> None:
    values = MapParameter(key_tensor=keys(3, -1), value_tensor=torch.tensor([[1.0], [2.0]]))
    assert values[keys(-1, 3)].tolist() == [[2.0], [1.0]]
    values[keys(3)] = [[7.0]]
    assert values.get(keys(3), insert_default_value=False).tolist() == [[7.0]]
    assert MapParameter().value_shape == (1,)


def test_values_may_have_several_dimensions() -> None:
    values = MapParameter(value_shape=(2, 3), default_value="ones")
    assert values.get(torch.zeros(4, 5, dtype=torch.int32)).shape == (4, 5, 2, 3)
    values.put(keys(7), torch.arange(6.0).view(1, 2, 3))
    assert values.get(keys(7)).tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert values.export_data().values.shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("start", "expected"), [("zeros", 0.0), ("ones", 1.0), (0.25, 0.25), ("normal", None)]
)
def test_new_keys_start_by_the_default_value(start: Any, expected: float | None) -> None:
    rows = MapParameter(value_shape=64, default_value=start).get(torch.arange(200)).detach()
    if expected is None:
        assert rows.std().item() == pytest.approx(0.01, rel=0.05)
    else:
        assert (rows == expected).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MapParameter(default_value="norml"), "Did you mean 'normal'"),
        (lambda: MapParameter(default_value=None), "default_value"),
        (lambda: MapParameter(value_dtype=torch.float16), "Give float32"),
        (lambda: MapParameter(key_dtype=torch.float32), "Give int32 or int64"),
        (lambda: MapParameter(permit_filter_value=-1), "permit_filter_value"),
        (lambda: MapParameter(evict_filter_value=1.5), "evict_filter_value"),  # type: ignore[arg-type]
        (lambda: MapParameter(key_tensor=keys(1)), "belong together"),
        (lambda: MapParameter().put(keys(1), [[1.0, 2.0]]), r"must have the shape \[1, 1\]"),
        (lambda: MapParameter().put(torch.ones(1), [[1.0]]), "keys"),
        (lambda: MapParameter().import_data(None), r"keys and values .* got None"),  # type: ignore[arg-type]
        (lambda: MapParameter(value_shape=1.5), r"value_shape: must be an integer .* got 1\.5"),  # type: ignore[arg-type]
        (lambda: MapParameter(value_shape="3"), "value_shape: must be a number or a tuple"),  # type: ignore[arg-type]
        (lambda: MapParameter(value_shape=(2, 0)), "value_shape: must be an integer >= 1, got 0"),
        (lambda: MapParameter(key_dtype=np.zeros(3)), "Give int32 or int64"),
        (lambda: MapParameter(requires_grad="no"), "requires_grad"),  # type: ignore[arg-type]
        (lambda: MapParameter(key_tensor=[1], value_tensor="a"), "value_tensor: must be numbers"),
        (lambda: MapParameter().get(["a"]), "get: keys: expected whole numbers, got 'a'"),
        (lambda: MapParameter().get("a"), "get: keys: expected integers"),
        (lambda: MapParameter().get(None), "get: keys: expected integers"),
        (lambda: MapParameter().get([[1, 2], [3]]), r"get: keys: .* got \[1, 2\]"),
        (
            lambda: MapParameter().get([2**64]),
            "expected numbers of 64 bits, got 18446744073709551616",
        ),
        (lambda: MapParameter().put([1], [["a"]]), r"put: value_tensor: .* got \[\['a'\]\]"),
        (lambda: MapParameter().put([1, 2], [[1.0], [1.0, 2.0]]), "put: value_tensor: must be num"),
        (lambda: MapParameter().put([1], {"a": 1.0}), "put: value_tensor: must be numbers"),
        (lambda: MapParameter().import_data(([1], [[1.0]], [0, 0])), "each key has a status"),
        (lambda: MapParameter().import_data(([1], [[1.0]], [9])), "got the status 9"),
        (lambda: HashEmbeddingLookup(0), "embedding_size"),
        (lambda: HashEmbeddingLookup(4, max_norm=0.0), "max_norm"),
        (lambda: HashEmbeddingLookup(4, vocab_cache_size=-1), "vocab_cache_size"),
        (lambda: HashEmbeddingLookup(4, sparse="yes"), "sparse"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, (ConfigError, RowShapeError))


def test_no_key_has_no_value_and_every_64_bits_are_a_key() -> None:
    values = MapParameter(value_shape=2, default_value="ones")
    assert values.get([]).shape == (0, 2)
    assert values.get([[2**64 - 1], [-(2**63)]]).tolist() == [[[1.0, 1.0]], [[1.0, 1.0]]]
    assert sorted(values.get_keys().tolist()) == [-(2**63), -1]


def test_an_import_that_does_not_fit_erases_nothing() -> None:
    values = MapParameter(key_tensor=[1, 2], value_tensor=[[1.0], [2.0]])
    with pytest.raises(RowShapeError, match=r"import_data: values must have the shape \[1, 1\]"):
        values.import_data(([1, 2], [[1.0, 2.0]], [2, 1]))
    assert sorted(values.get_keys().tolist()) == [1, 2]


def test_a_parameter_without_gradient_stays() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__(requires_grad=False)
            self.scale = nn.Linear(1, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.scale(super().forward(ids)[:, None]).squeeze(1)

    network = Scaled()
    network.map.put(keys(1), [[3.0]])
    RecModel(network, "mse", hb.Sgd(lr=0.5)).online_train(steps([1], [2]))
    assert network.map.get_data()[1].tolist() == [[3.0]]


# --- permit and evict values, in steps ------------------------------------------------------------


def test_permit_filter_value_counts_steps_not_occurrences() -> None:
    values = trained([5, 5, 5], [5], [7, 7], permit_filter_value=2)
    assert values.get_keys().tolist() == [5]


def test_evict_filter_value_is_an_age_in_steps_at_the_export() -> None:
    values = trained([1, 2], [1], [1], evict_filter_value=3)
    assert sorted(values.get_keys().tolist()) == [1, 2]
    assert sorted(values.export_data().keys.tolist()) == [1, 2]
    values = trained([1, 2], [1], [1], [1], evict_filter_value=3)
    assert values.export_data().keys.tolist() == [1]


def test_lookups_without_training_make_no_key_older_which_is_logged_once(caplog: Any) -> None:
    values = MapParameter(evict_filter_value=2, name="map")
    for key in range(3):
        values.get(keys(key))
    assert len(values.export_data().keys) == 3
    values.export_data()
    (record,) = caplog.records
    assert "'map': evict_filter_value=2 counts training steps, got 3 lookups" in record.message
    caplog.clear()
    trained([1], [1], [1], evict_filter_value=1).export_data()
    assert not caplog.records


def test_keys_that_wait_for_their_permit_expire_too() -> None:
    values = trained([1], [2], [2], [2], permit_filter_value=2, evict_filter_value=3)
    values.export_data()
    network = Net(permit_filter_value=2, evict_filter_value=3)
    network.map = values
    RecModel(network, "mse", None).engine.network(torch.tensor([[1]]))
    assert values.get_keys().tolist() == [2]


@pytest.mark.parametrize("kind", [MapParameter, HashEmbeddingLookup])
def test_keys_that_wait_for_their_permit_take_the_memory_that_is_given(kind: Any) -> None:
    size = {"value_shape": 2} if kind is MapParameter else {"embedding_size": 2}
    module = kind(**size, permit_filter_value=2, admission_bytes=1 << 16)
    values = getattr(module, "embedding_table", module)
    module(torch.arange(5_000))
    assert values.table.stats["sketched_partitions"] == 256
    assert values.table.stats["candidate_bytes"] <= 1 << 16
    module(torch.arange(5_000))
    assert len(values) == 5_000
    with pytest.raises(ValueError, match="admission_bytes: must be"):
        kind(**size, admission_bytes=7)


def test_a_key_that_was_put_is_as_young_as_a_trained_one() -> None:
    network = Net(evict_filter_value=3)
    model = RecModel(network, "mse", hb.Sgd(lr=0.5))
    model.online_train(steps([1], [1], [1]))
    network.map.put(keys(9), [[4.0]])
    assert sorted(network.map.export_data().keys.tolist()) == [1, 9]
    model.online_train(steps([1], [1], [1], [1]))
    assert network.map.export_data().keys.tolist() == [1]


# --- export and import ----------------------------------------------------------------------------


def test_a_full_export_and_import_are_a_copy() -> None:
    values = trained([1, 2], [2, 3])
    exported = values.export_data()
    assert exported.statuses.tolist() == [1, 1, 1]
    *sliced, is_last = values.export_slice_data()
    assert is_last
    for mine, theirs in zip(sliced, exported, strict=True):
        assert np.array_equal(mine, theirs)
    copy = MapParameter(default_value="zeros")
    copy.import_data(exported)
    for mine, theirs in zip(copy.get_data(), values.get_data(), strict=True):
        assert mine.equal(theirs)


def test_incremental_exports_hold_what_changed_and_what_was_erased() -> None:
    network = Net()
    model = RecModel(network, "mse", hb.Sgd(lr=0.5))
    model.online_train(steps([1, 2], [3]))
    copy = MapParameter(default_value="zeros")
    first = network.map.export_data(incremental=True)
    assert sorted(first.keys.tolist()) == [1, 2, 3], "nothing was exported before: everything"
    copy.import_data(first)
    model.online_train(steps([2, 4]))
    network.map.erase(keys(3, 77))
    news = network.map.export_data(incremental=True)
    assert dict(zip(news.keys.tolist(), news.statuses.tolist(), strict=True)) == {2: 1, 4: 1, 3: 2}
    assert len(news.values) == 2
    copy.import_data(news)
    for mine, theirs in zip(copy.get_data(), network.map.get_data(), strict=True):
        assert mine.equal(theirs)


def test_an_interval_of_erasures_alone_is_exported() -> None:
    values = trained([1, 2])
    values.export_data()
    values.erase(keys(1))
    news = values.export_data(incremental=True)
    assert (news.keys.tolist(), news.statuses.tolist()) == ([1], [2])
    assert news.values.shape == (0, 1)
    copy = MapParameter(key_tensor=keys(1, 2), value_tensor=torch.ones(2, 1))
    copy.import_data(news)
    assert copy.get_keys().tolist() == [2]
    assert values.export_data(incremental=True).keys.tolist() == []


def test_incremental_exports_go_on_beside_checkpoints_of_the_door(tmp_path: Any) -> None:
    network = OfBatches(name="values")
    copy = MapParameter(default_value="zeros")

    class Exports(Callback):
        def step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num % 3 == 0:
                copy.import_data(network.map.export_data(incremental=True))

    model = RecModel(network, "mse", hb.Sgd(lr=0.5))
    saves = ModelCheckpoint("m", tmp_path, CheckpointConfig(2))
    model.online_train(stream(*(key % 17 for key in range(40))), [Exports(), saves])
    copy.import_data(network.map.export_data(incremental=True))
    for mine, theirs in zip(copy.get_data(), network.map.get_data(), strict=True):
        assert mine.equal(theirs)


class OfBatches(Net):
    """The same for batches of a Dataset."""

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        return super().forward(batch.ids["key"].values[:, None])


def stream(*ids: int) -> hb.Dataset:
    """Batches of two keys each, with positions."""
    schema = hb.Schema([hb.Label("y"), hb.Id("key")])
    rows = {"y": np.ones(len(ids), np.int64), "key": np.array(ids)}
    return hb.Dataset(hb.sources.Memory(rows), schema, 2)


def test_checkpoints_with_deltas_and_incremental_exports_exclude_each_other(tmp_path: Any) -> None:
    network = OfBatches(name="values")

    class Exports(Callback):
        def step_end(self, run_context: Any) -> None:
            network.map.export_data(incremental=True)

    model = RecModel(network, "mse", hb.Sgd(lr=0.5))
    saves = hb.callbacks.Checkpoint(tmp_path, every_steps=1, wait=True)
    with pytest.raises(TableError, match="full_every=1"):
        model.online_train(stream(*range(12)), [Exports(), saves])


# --- HashEmbeddingLookup --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (0,)])
def test_rows_have_the_shape_of_the_keys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    lookup = HashEmbeddingLookup(6)
    assert lookup(torch.ones(shape, dtype=dtype)).shape == (*shape, 6)


def test_minus_one_and_minus_two_are_keys() -> None:
    lookup = HashEmbeddingLookup(2)
    lookup(keys(-1, -2))
    assert sorted(lookup.embedding_table.get_keys().tolist()) == [-2, -1]


def test_evaluation_inserts_nothing() -> None:
    lookup = HashEmbeddingLookup(2)
    lookup.eval()
    lookup(keys(1, 2))
    assert len(lookup.embedding_table) == 0


def test_max_norm_clips_the_result_and_not_the_rows() -> None:
    plain = HashEmbeddingLookup(3, param_init="ones")
    clipped = HashEmbeddingLookup(3, param_init="ones", max_norm=0.5)
    rows = clipped(keys(1, 2))
    assert torch.linalg.vector_norm(rows, dim=1).tolist() == pytest.approx([0.5, 0.5])
    assert clipped.embedding_table.get_values().tolist() == [[1.0] * 3] * 2
    assert HashEmbeddingLookup(3, max_norm=9.0, param_init="ones")(keys(1)).equal(plain(keys(1)))


def test_max_norm_has_the_gradient_of_plain_torch() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 3)
    lookup = HashEmbeddingLookup(3, max_norm=1.0)
    lookup.embedding_table.put(torch.arange(4), values)
    weight = torch.randn(4, 3)
    (lookup(torch.arange(4)) * weight).sum().backward()
    own = values.clone().requires_grad_()
    norms = own.norm(dim=1, keepdim=True)
    (torch.where(norms > 1, own / norms, own) * weight).sum().backward()
    (rows,) = lookup.embedding_table.embedding.rows
    assert own.grad is not None
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad.sum(0), own.grad.sum(0))


def test_a_cache_size_without_a_disk_is_accepted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hotbed")
    for _ in range(2):
        HashEmbeddingLookup(2, vocab_cache_size=100, sparse=False)
    assert caplog.text.count("vocab_cache_size has no effect, because a table without ssd_") == 1
    assert caplog.text.count("HashEmbeddingLookup.sparse has no effect") == 1


# --- rows on a disk -------------------------------------------------------------------------------


class OnDisk(nn.Module):
    """Lookups of keys whose rows lie on a disk, but for those in `cache`."""

    def __init__(self, folder: Any, cache: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        disk = {"vocab_cache_size": cache, "ssd_data_path": folder}
        self.deep = HashEmbeddingLookup(
            4, max_norm=0.5, permit_filter_value=2, evict_filter_value=9, **disk
        )
        self.wide = MapParameter(value_shape=(1, 1), default_value=0.1, **disk)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        deep = self.head(self.deep(batch.ids["key"])) + self.wide(batch.ids["key"]).flatten(1)
        return deep.squeeze(1)


def verbs_of(folder: Any, cache: int, states: Any) -> tuple[Any, ...]:
    """Learn, save and resume, score, and use each verb of the two tables; return all results."""
    random = np.random.default_rng(1)
    rows = {"y": random.integers(0, 2, 640), "key": random.integers(0, 150, 640)}
    schema = hb.Schema([hb.Label("y"), hb.Id("key")])
    clicks = hb.Dataset(hb.sources.Memory(rows), schema, 16)
    losses: list[float] = []

    class Losses(Callback):
        def step_end(self, run_context: Any) -> None:
            losses.append(float(run_context.original_args().net_outputs))

    for last in (17, 40):
        network = OnDisk(folder, cache)
        model = RecModel(network, "bce", hb.Adam(lr=0.1), {"auc"})
        saves = ModelCheckpoint("m", states, CheckpointConfig(4))
        model.online_train(clicks, [Losses(), saves], max_steps=last)
    results: list[Any] = [losses, model.eval(clicks), model.engine.predict(clicks).tolist()]
    for values in (network.deep.embedding_table, network.wide):
        results.append([array.tolist() for array in values.export_data()])
        values.put(np.arange(60), np.ones((60, *values.value_shape)))
        values.erase(np.arange(20))
        results.append([array.tolist() for array in values.export_data(incremental=True)])
        values.import_data(values.export_data())
        results.append([tensor.tolist() for tensor in values.get_data()])
        results.append(values.get(np.arange(99), insert_default_value=False).tolist())
    model.engine.save(states / "saved")
    reader = open_checkpoint(states / "saved")
    loaded = RecModel(OnDisk(None, 0), "bce", hb.Adam(lr=0.1)).engine
    loaded.restore(states / "saved")
    return *results, content_digest(reader), loaded.predict(clicks).tolist()


def test_rows_on_a_disk_are_those_in_memory(tmp_path: Any) -> None:
    (tmp_path / "disk").mkdir()
    on_disk = verbs_of(tmp_path / "disk", 24, tmp_path / "a")
    in_memory = verbs_of(None, 0, tmp_path / "b")
    for mine, theirs in zip(on_disk, in_memory, strict=True):
        assert mine == theirs
    network = OnDisk(tmp_path / "disk", 24)
    tables = RecModel(network, "bce", hb.Adam(lr=0.1)).engine.tables
    assert {type(table.tier) for table in tables.values()} == {hb.Ssd}
    copied = copy.deepcopy(network.wide)
    assert copied.table.tier == network.wide.table.tier == hb.Ssd(tmp_path / "disk", 24)


@pytest.mark.parametrize("kind", [MapParameter, HashEmbeddingLookup])
def test_wrong_arguments_of_a_disk_are_errors(kind: Any, tmp_path: Any) -> None:
    size = {} if kind is MapParameter else {"embedding_size": 2}
    with pytest.raises(ConfigError, match=r"\.ssd_data_path: vocab_cache_size says how many"):
        kind(**size, ssd_data_path=tmp_path)
    with pytest.raises(ConfigError, match=r"vocab_cache_size: must be an integer >= 0, got -1"):
        kind(**size, vocab_cache_size=-1)
    with pytest.raises(ConfigError, match=r"\.ssd_data_path: must be a local path, got 's3://x'"):
        kind(**size, vocab_cache_size=2, ssd_data_path="s3://x")
    with pytest.raises(ConfigError, match=r"does not exist, got .*/none"):
        kind(**size, vocab_cache_size=2, ssd_data_path=tmp_path / "none")


def test_values_put_before_the_model_is_made_are_kept() -> None:
    network = Net()
    network.map.put(keys(5), [[2.0]])
    model = RecModel(network, "mse", hb.Sgd(lr=0.5))
    assert list(model.engine.tables) == ["map"]
    assert network.map.get_data()[1].tolist() == [[2.0]]
    model.online_train(steps([5]))
    assert network.map.get_data()[1].tolist() == [[1.0]]


@pytest.mark.parametrize("again", [hb.Adagrad(lr=0.1), hb.Sgd(lr=0.1)])
def test_another_model_of_a_trained_network_keeps_rows_ages_and_counts(again: Any) -> None:
    network = Net(permit_filter_value=2, evict_filter_value=4)
    RecModel(network, "mse", hb.Adagrad(lr=0.5)).online_train(steps([1], [1], [1, 2], [1]))
    before = network.map.table
    rows = [row for batch in before.export() for row in batch.to_pylist()]
    model = RecModel(network, "mse", again)
    after = network.map.table
    assert after is not before
    for row, old in zip((r for b in after.export() for r in b.to_pylist()), rows, strict=True):
        assert {**row, "state": None} == {**old, "state": None}
        assert ("state" in row) == isinstance(again, hb.Adagrad)
        assert row.get("state") in (None, old["state"])
    model.online_train(steps([2]))
    assert sorted(network.map.get_keys().tolist()) == [1, 2], "2 has been counted once before"
    model.online_train(steps([2], [2], [2], [2]))
    assert network.map.export_data().keys.tolist() == [2]


def test_torch_s_embedding_with_sparse_adam_trains_the_same_rows() -> None:
    """The rows of a batch move as torch's SparseAdam moves them, others stay."""
    torch.manual_seed(0)
    start = torch.randn(10, 3)
    ours = nn.Sequential(HashEmbeddingLookup(3, name="rows"), nn.Flatten(), nn.Linear(6, 1))
    ours[0].embedding_table.put(torch.arange(10), start)
    theirs = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    theirs[0].weight.data = start.clone()
    theirs[2].load_state_dict(ours[2].state_dict())
    data = [(torch.randint(0, 10, (8, 2)), torch.randn(8)) for _ in range(12)]
    RecModel(ours, "mse", hb.Adam(lr=1e-2)).online_train(data)
    dense = torch.optim.Adam(theirs[2].parameters(), 1e-2)
    rows = torch.optim.SparseAdam(theirs[0].parameters(), 1e-2)
    for ids, label in data:
        nn.functional.mse_loss(theirs(ids).squeeze(1), label).backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()
    table = ours[0].embedding_table
    torch.testing.assert_close(
        table.get(torch.arange(10), insert_default_value=False).detach(), theirs[0].weight.detach()
    )


def test_a_network_that_looks_up_columns_as_they_are_is_served_alike(tmp_path: Any) -> None:
    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = HashEmbeddingLookup(4, max_norm=1.0)
            self.wide = HashEmbeddingLookup(1)
            self.head = nn.Linear(8, 1)

        def forward(self, batch: hb.Batch) -> torch.Tensor:
            columns = [batch.ids["user"], batch.ids["item"]]
            rows = torch.cat([self.deep(column) for column in columns], dim=1)
            wide = torch.cat([self.wide(column) for column in columns], dim=1)
            return self.head(rows).squeeze(1) + wide.sum(1)

    random = np.random.default_rng(0)
    rows = {name: random.integers(0, 30, 320) for name in ("user", "item")}
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
    labels = (rows["user"] % 2 == 0).astype(int)
    clicks = hb.Dataset(hb.sources.Memory({"y": labels, **rows}), schema, 32)
    model = RecModel(Served(), "bce", hb.Adam(lr=1e-2))
    model.train(2, clicks)
    model.engine.export(tmp_path)
    scores = hb.InferenceSession(tmp_path).predict(rows)
    np.testing.assert_allclose(scores, model.engine.predict(clicks), atol=1e-6)


def test_a_copy_of_a_network_reads_its_own_changes() -> None:
    values = MapParameter(value_shape=2, default_value="zeros")
    values.put([1], [[1.0, 1.0]])
    values.export_data()
    copied = copy.deepcopy(values)
    copied.put([2], [[2.0, 2.0]])
    assert len(values) == 1
    assert sorted(copied.export_data(incremental=True).keys) == [1, 2]  # its first export
    assert len(values.export_data(incremental=True).keys) == 0


def test_values_may_be_lists_or_have_gradients() -> None:
    values = MapParameter(key_tensor=[1], value_tensor=[[1.0, 2.0]])
    assert values.value_shape == (2,)
    values.put([4], torch.ones(1, 2, requires_grad=True))
    assert values.get([4]).tolist() == [[1.0, 1.0]]
