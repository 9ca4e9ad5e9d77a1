# SPDX-License-Identifier: Apache-2.0
"""Rows of another job: they follow their words, or are refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.data.columns import ids_of
from hotbed.data.encode import Encoder
from hotbed.data.fitted import FittedMap
from hotbed.errors import PersistError, SchemaError
from hotbed.job import run
from hotbed.job.job import WarmStart
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.upkeep.warm_starts import warm_start

T = hb.transforms
WORDS = {"text": ["ada", "bo", "cy", "dee", "eve", "flo"], "integer": [7, 8, -3, 40, 2**62, 0]}


def item(*transforms: Any, name: str = "item", table: str | None = None) -> hb.Schema:
    return hb.Schema([hb.Id(name, transforms=transforms, table=table)])


def ids_in(schema: hb.Schema, words: Sequence[Any], column: str = "item") -> np.ndarray:
    others = {name: words for name in schema.raw_columns()}
    return Encoder(schema)(pa.record_batch({**others, column: words})).ids[column].values


def table_of(ids: np.ndarray, name: str = "item") -> hb.Table:
    """A table whose row of the n-th id is [n, n]."""
    table = hb.Table(name, 2)
    for number, own in enumerate(ids):
        values = pa.FixedSizeListArray.from_arrays(pa.array([number, number], pa.float32()), 2)
        table.load([pa.record_batch({"id": pa.array([own]), "value": values})])
    return table


@functools.cache
def fitted(folder: Path, words: tuple[Any, ...]) -> FittedMap:
    name = f"{len(list(folder.iterdir()))}.rows"
    return FittedMap.write(folder / name, ids_of(pa.array(words), "word"))


def numbering(kind: str, words: tuple[Any, ...], folder: Path) -> list[Any]:
    """The transforms that number words in one way."""
    return {
        "plain": [],
        "map": [T.Map(words)],
        "fitted": [T.Map(fitted=fitted(folder, words))],
        "shifted": [T.Map(words, min_count=3), T.Shift(10), T.Shift(-3)],
        "split": [T.Split("|"), T.Map(words)],
    }[kind]


ways = st.sampled_from(["plain", "map", "fitted", "shifted"])
kinds = st.sampled_from(["text", "integer"])


@settings(max_examples=20)
@given(kinds, ways, ways, st.permutations(range(6)), st.permutations(range(6)), st.data())
def test_rows_of_a_warm_start_follow_their_words(
    tmp_path_factory: Any, kind: str, way: str, new_way: str, old: Any, new: Any, data: Any
) -> None:
    """Compared with a dict of word -> row, for every pair of ways in which ids number words."""
    folder = tmp_path_factory.mktemp("words")
    size = data.draw(st.integers(1, 6))
    new_size = data.draw(st.integers(1, 6))
    old_words = tuple(WORDS[kind][n] for n in old[:size])
    new_words = tuple(WORDS[kind][n] for n in new[:new_size])
    there = item(*numbering(way, old_words, folder))
    here = item(*numbering(new_way, new_words, folder))
    rows = dict(zip(old_words, range(size), strict=True))
    table = table_of(ids_in(there, old_words))
    save(folder / "old", State(tables={"item": table}, schema=there.to_json()))
    own = hb.Table("item", 2)
    known = [word for word in new_words if word in rows or new_way == "plain"]
    if not [word for word in new_words if word in rows] and "plain" not in (way, new_way):
        with pytest.raises(PersistError, match=r"no word of .'item'. is known here"):
            warm_start({"item": own}, open_checkpoint(folder / "old"), schema=here)
        return
    if way == "plain" != new_way and not any(word in rows for word in new_words):
        with pytest.raises(PersistError, match=r"no word of .'item'. is known here"):
            warm_start({"item": own}, open_checkpoint(folder / "old"), schema=here)
        return
    warm_start({"item": own}, open_checkpoint(folder / "old"), schema=here)
    words = [word for word in (known if new_way != "plain" else old_words) if word in rows]
    found = own.lookup(ids_in(here, words))
    np.testing.assert_array_equal(found[:, 0], [rows[word] for word in words])
    assert len(own) == len(words)


def test_row_of_unknown_words_stays_theirs(tmp_path: Path) -> None:
    there, here = item(T.Map(["a", "b"])), item(T.Map(["b", "c"]))
    save(tmp_path, State(tables={"item": table_of(np.array([0, 1, 2]))}, schema=there.to_json()))
    table = hb.Table("item", 2)
    warm_start({"item": table}, open_checkpoint(tmp_path), schema=here)
    rows = table.lookup(ids_in(here, ["z", "b"]))
    assert rows[:, 0].tolist() == [0, 2]  # of the unknown, and of "b"
    assert table.find(ids_in(here, ["c"])).tolist() == [-1]  # new: it begins as every row


def test_words_of_lists_and_of_shared_tables_are_followed(tmp_path: Path) -> None:
    """Two features of one table with ranges of ids of their own, one of them in lists."""

    def schema(words: list[str], tags: list[str]) -> hb.Schema:
        return hb.Schema(
            [
                hb.Id("item", table="all", transforms=[T.Map(words)]),
                hb.Id("tag", table="all", transforms=[T.Split("|"), T.Map(tags), T.Shift(100)]),
            ]
        )

    there, here = schema(["a", "b"], ["x", "y"]), schema(["b", "c", "a"], ["y", "z"])
    save(
        tmp_path,
        State(tables={"all": table_of(np.array([1, 2, 101, 102]), "all")}, schema=there.to_json()),
    )
    table = hb.Table("all", 2)
    warm_start({"all": table}, open_checkpoint(tmp_path), schema=here)
    batch = Encoder(here)(pa.record_batch({"item": ["a", "b"], "tag": ["y", "z|y"]}))
    assert table.lookup(batch.ids["item"].values)[:, 0].tolist() == [0, 1]
    assert table.lookup(batch.ids["tag"].values)[[0, 2], 0].tolist() == [3, 3]
    assert len(table) == 3


def test_id_that_stood_for_two_values_is_refused(tmp_path: Path) -> None:
    """A plain feature and a mapped one share a table: which of them a row belongs to is open."""

    def schema(words: list[str]) -> hb.Schema:
        mapped = hb.Id("item", table="all", transforms=[T.Map(words)])
        return hb.Schema([mapped, hb.Id("number", table="all")])

    table = table_of(np.arange(3), "all")
    save(tmp_path, State(tables={"all": table}, schema=schema(["a", "b"]).to_json()))
    own = hb.Table("all", 2)
    with pytest.raises(PersistError, match=r"stands for a value of 'number' and .*\['item'\]"):
        warm_start({"all": own}, open_checkpoint(tmp_path), schema=schema(["b", "a"]))
    warm_start({"all": own}, open_checkpoint(tmp_path), schema=schema(["a", "b"]))
    assert len(own) == 3


@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        ([], [T.Hash(100)], "hash(bins=100)"),
        ([T.Hash(100)], [T.Hash(100, seed=1)], "hash(bins=100) there"),
        ([T.Hash(100)], [T.Hash(101)], "hash(bins=101)"),
        ([T.Cross(["b"])], [T.Cross(["c"])], "cross"),
        ([T.Map(["1", "2"]), T.Cross(["b"])], [T.Map(["2"]), T.Cross(["b"])], "map(vocabulary="),
        ([T.Bucketize([1.0, 2.0])], [T.Bucketize([1.0, 3.0])], "bucketize(boundaries=[1.0, 3.0])"),
        ([T.Split("|"), T.Hash(5)], [T.Split(","), T.Hash(5)], "split"),
        ([T.Map(["1"]), T.Hash(5)], [T.Map(["2"]), T.Hash(5)], "map(vocabulary="),
        ([T.Extract("(.)")], [], "extract"),
    ],
)
def test_changed_transform_that_hides_its_values_is_refused_by_name(
    tmp_path: Path, there: list[Any], here: list[Any], named: str
) -> None:
    table = table_of(np.arange(3))
    save(tmp_path, State(tables={"item": table}, schema=item(*there).to_json()))
    own = hb.Table("item", 2)
    with pytest.raises(PersistError, match=r"the transforms of 'item'") as refused:
        warm_start({"item": own}, open_checkpoint(tmp_path), schema=item(*here))
    assert named in str(refused.value)
    assert len(own) == 0
    # both pieces of advice work
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.schema is not None
    transforms = checkpoint.schema["item"].transforms
    warm_start({"item": own}, open_checkpoint(tmp_path), schema=item(*transforms))
    assert len(own) == 3
    rename = eval(re.search(r"rename=(\{.*?\})", str(refused.value))[1])
    other = hb.Id("other")
    state = State(
        tables={"item": table, "other": table_of(np.arange(2), "other")},
        schema=hb.Schema([*item(*there).columns, other]).to_json(),
    )
    save(tmp_path / "both", state)
    got = warm_start(
        {name: hb.Table(name, 2) for name in ("item", "other")},
        open_checkpoint(tmp_path / "both"),
        rename,
        schema=hb.Schema([*item(*here).columns, other]),
    )
    assert got == {"other": "other"}


def test_warm_start_needs_the_schema_of_rows_that_have_one(tmp_path: Path) -> None:
    save(
        tmp_path, State(tables={"item": table_of(np.arange(3))}, schema=item(T.Map([1])).to_json())
    )
    with pytest.raises(PersistError, match=r"got no schema here .* Give schema="):
        warm_start({"item": hb.Table("item", 2)}, open_checkpoint(tmp_path))


# --- models and jobs ------------------------------------------------------------------------------


def months(month: int) -> hb.sources.Memory:
    """Twenty items; the odd ones are clicked. Another month has other frequent items."""
    random = np.random.default_rng(month)
    weights = np.arange(1, 21)[:: 1 if month == 1 else -1]
    items = random.choice(20, 600, p=weights / weights.sum())
    return hb.sources.Memory({"click": items % 2, "item": [f"i{number:02d}" for number in items]})


def model_of(source: Any, network: Any = hb.models.LR, dim: int = 4, **more: Any) -> hb.RecModel:
    schema = hb.Schema([hb.Label("click"), hb.Id("item", transforms=[T.Map()])]).fit(source)
    tables = hb.make_tables(schema, dim=dim, rule=hb.Adagrad(lr=0.5))
    return hb.RecModel(network(schema, tables, **more), "bce", "adam", ["auc"])


def data_of(model: hb.RecModel, source: Any) -> hb.Dataset:
    return hb.Dataset(source, model.schema, 64)


def test_model_and_job_score_another_month_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = model_of(months(1))
    old.fit(data_of(old, months(1)), epochs=3, progress=False)
    old.save("old")
    new = model_of(months(2))
    words = [list(model.schema["item"].transforms[0].vocabulary) for model in (old, new)]
    assert words[0] != words[1]
    assert new.warm_start("old") == {"item.linear": "item.linear"}
    assert new.evaluate(data_of(new, months(2)))["auc"] > 0.99

    job = hb.Job(
        schema=hb.Schema([hb.Label("click"), hb.Id("item", transforms=[T.Map()])]),
        model="lr",
        train=months(2),
        warm_start=WarmStart("old"),
        output="new",
    )
    learning = run._Learning(job, lambda event: None, progress=False)
    model = learning.new_model()
    assert model.evaluate(data_of(model, months(2)))["auc"] > 0.99


def test_table_of_another_dim_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    path = tmp_path / "old"
    old = model_of(months(1), hb.models.DeepFM, hidden=[4])
    old.fit(data_of(old, months(1)), progress=False)
    old.save(path)
    wide = model_of(months(1), hb.models.DeepFM, dim=8, hidden=[4])
    with pytest.raises(PersistError, match="has dim 8, got dim 4") as refused:
        wide.warm_start(path)
    rename = eval(re.search(r"rename=(\{.*?\})", str(refused.value))[1])
    assert wide.warm_start(path, rename) == {"item.linear": "item.linear"}
    with pytest.raises(PersistError, match=r"dim is 4 in the checkpoint") as refused:
        wide.restore(path)
    assert "allow" not in str(refused.value)
    assert "table 'item' has dim 4 there, and 8 here" in str(refused.value)
    for allow in (["*"], ["tables.item.dim"]):
        before = {name: len(table) for name, table in wide.tables.items()}
        with pytest.raises(PersistError, match="the model has other shapes"):
            wide.restore(path, allow=allow)
        assert {name: len(table) for name, table in wide.tables.items()} == before
    lr = model_of(months(1))
    lr.fit(data_of(lr, months(1)), progress=False)
    lr.save(tmp_path / "lr")
    with pytest.raises(
        PersistError, match=r"no table has a counterpart .*'item\.linear'.*same dim"
    ):
        model_of(months(1), hb.models.DNN, hidden=[4]).warm_start(tmp_path / "lr")


def test_change_that_may_be_accepted_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    old = model_of(months(1))
    old.fit(data_of(old, months(1)), progress=False)
    old.save(tmp_path)
    other = model_of(months(2))
    with pytest.raises(PersistError, match=r"schema\.item\.transforms is") as refused:
        other.restore(tmp_path)
    allow = eval(re.search(r"allow=(\[.*?\])", str(refused.value))[1])
    other.restore(tmp_path, allow=allow)


class Ranker(nn.Module):
    """A plain model; the name of its lookup is that of the feature."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(30, 1)

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        return self.item((item + 1) % 30).squeeze(1)


def test_model_of_auto_refuses_another_vocabulary_by_name(tmp_path: Path) -> None:
    """Its code makes ids of the words, so that rows cannot follow them."""

    def auto_model() -> hb.RecModel:
        network = Ranker()
        network, optimizer, _ = hb.auto(network, torch.optim.SGD(network.parameters(), lr=0.1))
        return hb.RecModel(network, "bce", optimizer)

    schemas = [model_of(months(month)).schema for month in (1, 2)]
    old = auto_model()
    old.fit(hb.Dataset(months(1), schemas[0], 64), progress=False)
    old.save(tmp_path)
    new = auto_model()
    with pytest.raises(PersistError, match="got no schema here"):
        new.warm_start(tmp_path)
    with pytest.raises(PersistError, match=r"features \['item'\] have other vocabularies here"):
        new.warm_start(tmp_path, schema=schemas[1])
    assert new.warm_start(tmp_path, schema=schemas[0]) == {"item": "item"}


# --- types of columns -----------------------------------------------------------------------------

INTEGERS = {"click": [0, 1] * 32, "item": list(range(64))}
TEXTS = {**INTEGERS, "item": [str(number) for number in range(64)]}
PLAIN = hb.Schema([hb.Label("click"), hb.Id("item")])


def dataset(columns: Any, schema: hb.Schema = PLAIN) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(columns), schema, 16)


def plain_model() -> hb.RecModel:
    tables = hb.make_tables(PLAIN, dim=1)
    return hb.RecModel(hb.models.LR(PLAIN, tables), "bce", "adam", ["auc"])


@pytest.mark.parametrize(("learned", "other"), [(INTEGERS, TEXTS), (TEXTS, INTEGERS)])
def test_ids_of_another_type_than_in_training_are_refused_everywhere(
    tmp_path: Path, learned: Any, other: Any
) -> None:
    model = plain_model()
    with pytest.raises(SchemaError, match="column 'item': it held"):
        model.fit(dataset(learned), dataset(other), progress=False)
    assert model.counters["steps"] == 0  # validation data are looked at before
    model.fit(dataset(learned), progress=False)
    uses: list[Any] = [
        lambda own: own.evaluate(dataset(other)),
        lambda own: own.predict(dataset(other)),
        lambda own: own.predict(list(dataset(other))),
        lambda own: own.predict(next(iter(dataset(other)))),
        lambda own: own.fit(dataset(other), progress=False),
        lambda own: own.fit(hb.Ahead(dataset(other)), progress=False),
        lambda own: own.online_train(dataset(other), progress=False),
        lambda own: own.step(next(iter(dataset(other)))),
        lambda own: hb.Evaluation(own).add(next(iter(dataset(other)))),
    ]
    model.save(tmp_path / "model")
    warm = plain_model()
    warm.warm_start(tmp_path / "model")
    restored = plain_model().restore(tmp_path / "model")
    for own in (model, hb.load(tmp_path / "model"), warm, restored):
        num_rows = [len(table) for table in own.tables.values()]
        for use in uses:
            with pytest.raises(SchemaError, match=r"column 'item': it held .* in training, got"):
                use(own)
        assert [len(table) for table in own.tables.values()] == num_rows
        own.evaluate(dataset(learned))
        own.fit(dataset(learned), progress=False)


def test_types_are_compared_by_feature_and_not_across_other_transforms() -> None:
    model = plain_model()
    model.fit(dataset(INTEGERS), progress=False)
    renamed = hb.Schema([hb.Label("click"), hb.Id("item", column="number")])
    with pytest.raises(SchemaError, match="column 'number': it held integer values"):
        model.evaluate(dataset({"click": [0, 1], "number": ["1", "2"]}, renamed))
    # text of another form, which a transform makes the same integers of
    parsed = hb.Schema(
        [hb.Label("click"), hb.Id("item", transforms=[T.Extract("i(.*)"), T.Map(["1"])])]
    )
    model.evaluate(dataset({"click": [0, 1], "item": ["i1", "i2"]}, parsed))
    with pytest.raises(SchemaError, match=r"id 'item': expected integers or strings"):
        model.evaluate(dataset({"click": [0, 1], "item": [1.0, 2.0]}))
    with pytest.raises(SchemaError, match="held single values in training, got lists"):
        model.evaluate(dataset({"click": [0, 1], "item": [[1], [2, 3]]}))
