# SPDX-License-Identifier: Apache-2.0
"""One clear error for each bad input; a failed batch leaves everything as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.errors import ConfigError, HotbedError, NonFiniteGradient, RowShapeError, TableFull

NAN, INF = float("nan"), float("inf")


def on_disk(path: str, dim: int = 4, ram_rows: int = 10, **keywords: Any) -> hb.Table:
    return hb.Table("user", dim, tier=hb.Ssd(path, ram_rows=ram_rows), **keywords)


BAD_VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: hb.Table("user", dim=0), "dim"),
    (lambda: hb.Table("user", dim=-3), "dim"),
    (lambda: hb.Table("user", dim=2**20 + 1), "dim"),  # no checkpoint would hold it
    (lambda: hb.Table("user", dim=2**33), "dim"),
    (lambda: hb.Table("user", dim=1.5), "dim"),
    (lambda: hb.Table("", dim=1), "name"),
    (lambda: hb.Table("user", dim=1, default=NAN), "default"),
    (lambda: hb.Table("user", dim=1, seed=2**64), "seed"),
    (lambda: hb.Table("user", dim=1, seed=0.5), "seed"),
    (lambda: hb.Table("user", dim=1, dtype="float64"), "dtype"),
    (lambda: hb.Table("user", dim=1, rule=hb.Adagrad), "rule"),
    (lambda: hb.Table("user", dim=1, rule=torch.optim.Adam), "rule"),
    (lambda: hb.Table("user", dim=1, admit=3), "admit"),
    (lambda: hb.Table("user", dim=1, admit=0), "admit"),
    (lambda: hb.Table("user", dim=1, admit=hb.Ttl(days=1)), "admit"),
    (lambda: hb.Table("user", dim=1, evict=hb.MinCount(1)), "evict"),
    (lambda: hb.Table("user", dim=1, evict=7), "evict"),
    (lambda: hb.Table("user", dim=1, evict=[hb.Ttl(days=1), hb.Ttl(days=2)]), "evict"),
    (lambda: hb.Table("user", dim=1, init=0.5), "init"),
    (lambda: hb.Table("user", dim=1, tier="ram"), "tier"),
    (lambda: hb.Ssd("s3://bucket/rows", 10), "Ssd.path"),
    (lambda: hb.Ssd(3, 10), "path"),  # type: ignore[arg-type]
    (lambda: hb.Ssd("/data", 0), "Ssd.ram_rows"),
    (lambda: hb.Ssd("/data", 1e6), "Ssd.ram_rows"),  # type: ignore[arg-type]
    (lambda: hb.Ssd("/data", 10, fetch=-1), "Ssd.fetch"),
    (lambda: hb.Ssd("/data", 10, engine="aio"), "Ssd.engine"),  # type: ignore[arg-type]
    (lambda: on_disk("/nowhere"), "tier.path: does not exist, got '/nowhere'"),
    (lambda: on_disk("/dev/null"), "tier.path: is not a folder"),
    (lambda: on_disk("/proc"), "tier.path: no file can be made"),
    (lambda: on_disk("/", rule=hb.Adam(scope="all")), "Use scope='catch_up'"),
    (lambda: on_disk("/", dim=15_359, rule=hb.Sgd()), "61,433 bytes .* got 61,436"),
    (lambda: on_disk("/", dim=10_300, dtype="float16"), "61,433 bytes .* got 61,808"),
    (lambda: on_disk("/", 15_000, 2**32 - 2, rule=hb.Sgd()), r"tier\.ram_rows: .* 257,698\.\d GB"),
    (lambda: hb.Uniform(-0.1), "Uniform.scale"),
    (lambda: hb.Normal(INF), "Normal.std"),
    (lambda: hb.Constant(NAN), "Constant.value"),
    (lambda: hb.MinCount(-2), "MinCount.count"),
    (lambda: hb.MinCount(1.5), "MinCount.count"),
    (lambda: hb.MinCount(3, coefficient=0), "MinCount.coefficient"),
    (lambda: hb.MinCount(3, sketch_bytes=100), "MinCount.sketch_bytes"),
    (lambda: hb.MinCount(3, max_candidates=0), "MinCount.max_candidates"),
    (lambda: hb.MinCount(3, expire_seconds=-2), "MinCount.expire_seconds"),
    (lambda: hb.MinCount(3, expire_seconds=5, sketch_bytes=1 << 20), "MinCount.expire_seconds"),
    (lambda: hb.MinCount(3, expire_steps=2.5), "MinCount.expire_steps"),  # type: ignore[arg-type]
    (lambda: hb.MinCount(3, expire_steps=-2), "MinCount.expire_steps"),
    (lambda: hb.MinCount(3, once_a_batch=2), "MinCount.once_a_batch"),  # type: ignore[arg-type]
    (lambda: hb.MinCount(3, expire_steps=5, expire_seconds=5), "MinCount.expire_steps"),
    (lambda: hb.MinCount(3, expire_steps=5, sketch_bytes=1 << 20), "MinCount.expire_steps"),
    (lambda: hb.Table("user", dim=1, capacity=0), "capacity"),
    (lambda: hb.Table("user", dim=1, capacity=1e6), "capacity"),  # type: ignore[arg-type]
    (lambda: hb.Probability(1.01), "Probability.p"),
    (lambda: hb.Probability(-2), "Probability.p"),
    (lambda: hb.Ttl(seconds=-2), "Ttl.seconds"),
    (lambda: hb.Ttl(days=NAN), "Ttl.days"),
    (lambda: hb.Ttl(days=1, hours=1), "Ttl.hours"),
    (lambda: hb.Ttl(steps=2.5), "Ttl.steps"),  # type: ignore[arg-type]
    (lambda: hb.Ttl(steps=-2), "Ttl.steps"),
    (lambda: hb.Ttl(days=1, steps=5), "Ttl.steps"),
    (lambda: hb.Lru(-2), "Lru.max_rows"),
    (lambda: hb.Lru(0), "Lru.max_rows"),
    (lambda: hb.Lru(1023), "Lru.max_rows"),
    (lambda: hb.Lfu(100), "Lfu.max_rows"),
    (lambda: hb.Lfu(1024, half_life_seconds=0), "Lfu.half_life_seconds"),
    (lambda: hb.set_num_threads(0), "num_threads"),
]

RULES = [
    hb.Sgd,
    hb.Momentum,
    hb.Nesterov,
    hb.Adagrad,
    hb.RowwiseAdagrad,
    hb.RmsProp,
    hb.Adam,
    hb.Ftrl,
]


@pytest.mark.parametrize(
    "build, parameter", BAD_VALUES, ids=[f"{i}-{name}" for i, (_, name) in enumerate(BAD_VALUES)]
)
def test_a_bad_value_is_an_error_that_names_the_parameter(
    build: Callable[[], Any], parameter: str
) -> None:
    with pytest.raises(ConfigError, match=parameter) as error:
        build()
    assert re.fullmatch(r".+: .+, got .+\. [A-Z].+\.", str(error.value)), "what, value, advice"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "field, value",
    [
        ("lr", -1),
        ("lr", NAN),
        ("lr", "fast"),
        ("l2", -0.1),
        ("l1", INF),
        ("clip", 0),
        ("scope", "some"),
    ],
)
def test_every_rule_names_its_bad_parameter(rule: Any, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{rule.__name__}\.{field}"):
        rule(**{field: value})


@pytest.mark.parametrize(
    "build, parameter",
    [
        (lambda: hb.Momentum(momentum=1.0), "Momentum.momentum"),
        (lambda: hb.Nesterov(momentum=-0.1), "Nesterov.momentum"),
        (lambda: hb.Adagrad(eps=0), "Adagrad.eps"),
        (lambda: hb.Adagrad(initial_accumulator=-1), "Adagrad.initial_accumulator"),
        (lambda: hb.RowwiseAdagrad(eps=-1), "RowwiseAdagrad.eps"),
        (lambda: hb.RmsProp(alpha=1), "RmsProp.alpha"),
        (lambda: hb.Adam(beta1=1.0), "Adam.beta1"),
        (lambda: hb.Adam(beta2=2), "Adam.beta2"),
        (lambda: hb.Adam(decay=-1), "Adam.decay"),
        (lambda: hb.Ftrl(power=-0.7), "Ftrl.power"),
        (lambda: hb.Ftrl(initial_accumulator=0.0), "Ftrl.initial_accumulator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rules_own_bad_parameter_is_named(build: Callable[[], Any], parameter: str) -> None:
    with pytest.raises(ConfigError, match=parameter):
        build()


def rows_of(table: hb.Table) -> list[pa.RecordBatch]:
    return list(table.export())


def everything(table: hb.Table) -> Any:
    """All that a table knows."""
    scalars = {k: v for k, v in table.scalars().items() if k != "timed"}
    return rows_of(table), list(table.candidates()), scalars, table.stats


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array(["a"]),
        np.array([True]),
        [1.5],
        [2**64],
        np.array(7),
    ],
    ids=["float", "2d", "text", "bool", "list of floats", "more than 64 bits", "0d"],
)
@pytest.mark.parametrize("verb", ["find", "find_or_insert", "lookup", "gather"])
def test_ids_of_a_wrong_dtype_or_shape_are_refused(verb: str, ids: np.ndarray) -> None:
    table = hb.Table("user", dim=2)
    with pytest.raises(RowShapeError):
        getattr(table, verb)(ids)
    assert len(table) == 0


def test_arrow_and_torch_and_unsigned_ids_are_taken() -> None:
    table = hb.Table("user", dim=2)
    slots = table.find_or_insert(np.array([5, -1]))
    assert (table.find(pa.array([5, -1])) == slots).all()
    assert (table.find(torch.tensor([5, -1])) == slots).all()
    assert (table.find(np.array([5, 2**64 - 1], np.uint64)) == slots).all()
    assert (table.find(np.array([5, 0, -1, 0])[::2]) == slots).all()
    assert (table.find([5, -1]) == slots).all()


def test_nulls_name_nothing() -> None:
    with pytest.raises(RowShapeError, match="null"):
        hb.Table("user", dim=2).find(pa.array([5, None]))


@pytest.mark.parametrize(
    "grads",
    [
        np.ones((2, 3), np.float32),
        np.ones((1, 2), np.float32),
        np.ones(4, np.float32),
        np.ones((2, 2)),
        np.ones((2, 2), np.int64),
    ],
    ids=["wide", "few", "flat", "float64", "int64"],
)
def test_gradients_of_a_wrong_dtype_or_shape_are_refused(grads: np.ndarray) -> None:
    table = hb.Table("user", dim=2)
    slots = table.find_or_insert(np.array([1, 2]))
    before = everything(table)
    with pytest.raises(RowShapeError, match="user"):
        table.update(slots, grads)
    assert everything(table) == before


@pytest.mark.parametrize("slot", [-2, 10**6, 2**40, -(2**63)])
def test_slots_that_no_row_can_have_are_refused(slot: int) -> None:
    table = hb.Table("user", dim=2)
    table.find_or_insert(np.array([1]))
    with pytest.raises(RowShapeError, match="slots"):
        table.gather(np.array([slot]))
    with pytest.raises(RowShapeError, match="slots"):
        table.update(np.array([slot]), np.ones((1, 2), np.float32))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_gradient_that_is_not_finite_changes_nothing(rule: Any, bad: float) -> None:
    table = hb.Table("user", dim=3, rule=rule(scope="all"))
    ids = np.arange(100)
    table.update(table.find_or_insert(ids), np.ones((100, 3), np.float32))
    before, grads = everything(table), np.ones((100, 3), np.float32)
    grads[77, 2] = bad
    with pytest.raises(NonFiniteGradient, match="user") as error:
        table.update(table.find(ids), grads)
    assert error.value.table == "user"
    assert everything(table) == before


@pytest.mark.parametrize("lr", [NAN, INF, -0.1, "fast"])
def test_a_learning_rate_that_is_no_rate_changes_nothing(lr: Any) -> None:
    table = hb.Table("user", dim=1)
    slots = table.find_or_insert(np.array([1]))
    before = everything(table)
    with pytest.raises(ConfigError, match="lr"):
        table.update(slots, np.ones((1, 1), np.float32), lr=lr)
    assert everything(table) == before


@pytest.mark.parametrize("now", ["today", None, 2**63, 1.5])
def test_evict_takes_a_time_in_microseconds(now: Any) -> None:
    table = hb.Table("user", dim=1, evict=hb.Ttl(days=1))
    with pytest.raises(HotbedError, match="now"):
        table.evict(now)


def test_a_sum_that_overflows_is_not_finite_either() -> None:
    table = hb.Table("user", dim=1, rule=hb.Sgd())
    slots = table.find_or_insert(np.array([1, 1]))
    before = everything(table)
    with pytest.raises(NonFiniteGradient):
        table.update(slots, np.full((2, 1), 3e38, np.float32))
    assert everything(table) == before


@pytest.mark.parametrize("n", [3_000, 200_000])
@pytest.mark.parametrize(
    "policies", [{}, {"admit": hb.MinCount(1)}, {"admit": hb.Probability(0.9)}], ids=str
)
def test_a_batch_that_does_not_fit_changes_nothing(policies: dict[str, Any], n: int) -> None:
    table = hb.Table("user", dim=2, evict=hb.Lru(1024), **policies)
    table.find_or_insert(np.arange(50))
    table.find_or_insert(np.arange(25))
    before = everything(table)
    with pytest.raises(TableFull, match="max_rows"):
        table.find_or_insert(np.arange(n))
    assert everything(table) == before
    table.find_or_insert(np.arange(50))


@pytest.mark.parametrize("policy", [hb.Lru, hb.Lfu], ids=lambda policy: policy.__name__)
def test_a_batch_may_exceed_the_quota_of_a_partition_until_the_next(policy: Any) -> None:
    table = hb.Table("user", dim=1, evict=policy(1024))
    many = np.random.default_rng(0).integers(0, 2**62, 512)
    # about one partition of ten gets more than its quota of four
    slots = table.find_or_insert(many)
    assert (slots >= 0).all()
    assert len(np.unique(slots)) == len(table) == len(many)
    again = hb.Table("user", dim=1, evict=policy(1024))
    again.load(table.export())  # what a checkpoint may hold
    for one in (table, again):
        one.find_or_insert([1])
        counts = np.bincount(
            [number for batch in one.export() for number in batch["partition"].to_pylist()]
        )
        assert counts.max() == 4


def test_a_full_table_leaves_the_other_tables_of_the_call_as_they_were() -> None:
    make: dict[str, Any] = {"dim": 2, "admit": hb.MinCount(2)}
    tables = {
        name: hb.Table(name, evict=evict, **make)
        for name, evict in {"a": None, "b": hb.Lru(1024), "c": None}.items()
    }
    collection = hb.EmbeddingCollection([Feature(name, name) for name in tables], tables)
    few = hb.Ids(torch.arange(20))
    for _ in range(2):
        collection(dict.fromkeys(tables, few))
    before = {name: everything(table) for name, table in tables.items()}
    many = hb.Ids(torch.arange(4_000).repeat(2))
    with pytest.raises(TableFull, match="b"):
        collection(dict.fromkeys(tables, many))
    for name, table in tables.items():
        assert everything(table) == before[name], name


def test_a_full_table_leaves_new_rows_in_the_modules_before_it() -> None:
    """Each module maps its own ids: those of one collection, as above, are mapped together."""
    tables = [hb.Table("a", 2), hb.Table("b", 2, evict=hb.Lru(1024)), hb.Table("c", 2)]
    modules = [hb.EmbeddingCollection([Feature("f", t.name)], [t]) for t in tables]

    def look_up(num_ids: int) -> None:
        for module in modules:
            module({"f": hb.Ids(torch.arange(num_ids))})

    look_up(20)
    before = [everything(table) for table in tables]
    for _ in range(2):  # the second time, its ids have their rows
        with pytest.raises(TableFull, match="'b'"):
            look_up(4_000)
        assert [everything(table) for table in tables[1:]] == before[1:]
        assert (len(tables[0]), tables[0].step) == (4_000, 0)
    ids = np.arange(4_000)
    assert (tables[0].lookup(ids) == hb.Table("a", 2).lookup(ids)).all()


def test_ttl_without_time_is_an_error() -> None:
    table = hb.Table("user", dim=1, evict=hb.Ttl(days=1))
    with pytest.raises(ConfigError, match="time"):
        table.find_or_insert(np.array([1]))
    with pytest.raises(ConfigError, match="time"):
        hb.EmbeddingBag(table)(torch.tensor([[1]]))
    assert len(table) == 0


def test_a_schema_without_a_time_column_cannot_have_a_ttl() -> None:
    schema = hb.Schema([hb.Label("click"), hb.Id("user")])
    with pytest.raises(ConfigError, match="Time"):
        hb.make_tables(schema, 4, evict=hb.Ttl(days=1))


@pytest.mark.parametrize(
    "time",
    [np.array([1, 2]), np.array([0.5]), "now", np.array([[1]])],
    ids=["two", "float", "text", "2d"],
)
def test_times_of_a_wrong_dtype_or_shape_are_refused(time: Any) -> None:
    table = hb.Table("user", dim=1, evict=hb.Ttl(days=1))
    with pytest.raises(RowShapeError, match="time"):
        table.find_or_insert(np.array([1]), time)
    table.find_or_insert(np.array([1]), 5)
    assert len(table) == 1


def test_batches_with_and_without_times_do_not_mix() -> None:
    table = hb.Table("user", dim=1, evict=hb.Lru(1024))
    table.find_or_insert(np.array([1]), 5)
    with pytest.raises(ConfigError, match="time"):
        table.find_or_insert(np.array([1]))


def test_unknown_overrides_are_named() -> None:
    schema = hb.Schema([hb.Label("click"), hb.Id("user")])
    with pytest.raises(ConfigError, match=r"overrides\.item"):
        hb.make_tables(schema, 4, overrides={"item": {"dim": 8}})
    with pytest.raises(ConfigError, match=r"overrides\.user\.dims"):
        hb.make_tables(schema, 4, overrides={"user": {"dims": 8}})


def test_rows_of_another_table_do_not_load() -> None:
    wide, narrow = hb.Table("user", dim=3), hb.Table("user", dim=2)
    wide.find_or_insert(np.array([1, 2]))
    with pytest.raises(RowShapeError, match="value"):
        narrow.load(wide.export())
    with pytest.raises(HotbedError):
        narrow.load([pa.RecordBatch.from_pydict({"id": pa.array([1], pa.int64())})])
    assert len(narrow) == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("column", ["value", "state"])
def test_rows_that_are_not_finite_do_not_load(column: str, wrong: float) -> None:
    table = hb.Table("user", dim=2, rule=hb.Adagrad(lr=0.1))
    table.find_or_insert(np.array([7, 8, 9]))
    (rows,) = pa.Table.from_batches(table.export()).combine_chunks().to_batches()
    numbers = rows.column(column).flatten().to_numpy().copy()
    numbers[3] = wrong  # of the second row
    place = rows.schema.names.index(column)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 2)
    other = hb.Table("user", dim=2, rule=hb.Adagrad(lr=0.1))
    id = rows.column("id")[1]
    with pytest.raises(RowShapeError, match=f"{column}.*{wrong} for id {id}"):
        other.load([rows.set_column(place, column, lists)])
    assert len(other) == 0


OFFSETS = {
    "short": [0, 1],
    "falls": [0, 2, 1, 3],
    "starts late": [1, 3],
    "too long": [0, 9],
    "negative": [0, -1, 3],
    "none": [],
}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_offsets_that_do_not_cut_the_ids_are_refused(offsets: list[int]) -> None:
    table = hb.Table("user", dim=1)
    with pytest.raises(RowShapeError, match="offsets"):
        hb.EmbeddingBag(table)(torch.tensor([1, 2, 3]), torch.tensor(offsets, dtype=torch.int64))
    assert len(table) == 0


def test_module_inputs_of_a_wrong_dtype_or_length_are_refused() -> None:
    bag = hb.EmbeddingBag(hb.Table("user", dim=1))
    with pytest.raises(RowShapeError, match="integers"):
        bag(torch.tensor([1.0]), torch.tensor([0, 1]))
    with pytest.raises(RowShapeError, match="weight"):
        bag(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(3))
    with pytest.raises(RowShapeError, match="weight"):
        bag(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(2, dtype=torch.float64))
    with pytest.raises((ConfigError, RowShapeError), match="weight"):
        hb.EmbeddingBag(bag.tables[0], pooling="max")(
            torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(2)
        )
    with pytest.raises(ConfigError, match="pooling"):
        hb.EmbeddingBag(bag.tables[0], pooling="median")
    with pytest.raises(ConfigError, match="none"):
        hb.EmbeddingBag(bag.tables[0], pooling="none")


def test_a_missing_feature_is_named() -> None:
    collection = hb.EmbeddingCollection(
        [Feature("user", "user")], {"user": hb.Table("user", dim=1)}
    )
    with pytest.raises(RowShapeError, match="user"):
        collection({"item": hb.Ids(torch.tensor([1]))})
    with pytest.raises(ConfigError, match="item"):
        hb.EmbeddingCollection([Feature("item", "item")], {"user": hb.Table("user", dim=1)})


def test_an_optimizer_needs_tables() -> None:
    with pytest.raises(ConfigError, match="tables"):
        hb.SparseOptimizer(torch.nn.Linear(1, 1))


def test_a_failed_step_leaves_dense_parameters_values_and_state_as_they_were() -> None:
    """The gradient of one id turns NaN in the backward pass; the check comes before the dense step."""
    tables = {name: hb.Table(name, dim=2, rule=hb.Adam(lr=0.1)) for name in ("user", "item")}
    collection = hb.EmbeddingCollection([Feature(name, name) for name in tables], tables)
    tower = torch.nn.Linear(4, 1)
    model = torch.nn.ModuleDict({"rows": collection, "tower": tower})
    dense, sparse = torch.optim.Adam(hb.dense_parameters(model), lr=0.1), hb.SparseOptimizer(model)
    batch = {name: hb.Ids(torch.tensor([3, -1, 4])) for name in tables}

    def backward(scale: torch.Tensor) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        flat = collection.flat(batch)
        (tower(flat) + (flat * scale).sum(dim=1, keepdim=True)).sum().backward()

    backward(torch.ones(3, 4))
    sparse.check_finite()
    dense.step()
    sparse.step()
    before = {name: rows_of(table) for name, table in tables.items()}
    weights = [parameter.detach().clone() for parameter in tower.parameters()]
    bad = torch.ones(3, 4)
    bad[1, 3] = NAN  # a lane of item -1
    backward(bad)
    for attempt in (sparse.check_finite, sparse.step):
        with pytest.raises(NonFiniteGradient, match="item") as error:
            attempt()
        assert (error.value.table, error.value.id) == ("item", -1)
    assert {name: rows_of(table) for name, table in tables.items()} == before
    assert all(torch.equal(a, b) for a, b in zip(weights, tower.parameters(), strict=True))
    backward(torch.ones(3, 4))
    sparse.step()
    assert {name: rows_of(table) for name, table in tables.items()} != before
