# SPDX-License-Identifier: Apache-2.0
"""ChangeReader gives each change once, and never a gap without an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hotbed as hb
from hotbed.embedding.changed_rows import ChangeReader, Changes
from hotbed.errors import ConfigError, TableError
from hotbed.persist.container.format import open_checkpoint


def learn(table: hb.Table, *ids: int) -> None:
    slots = table.find_or_insert(np.array(ids))
    table.update(slots, np.ones((len(ids), table.dim), np.float32))


def apply(copy: dict[int, list[float]], news: Changes) -> None:
    """Bring a copy, a plain dict, up to date."""
    for gone in news.removed.tolist():
        copy.pop(gone, None)
    copy.update(zip(news.ids.tolist(), news.values.tolist(), strict=True))


def rows_of(table: hb.Table) -> dict[int, list[float]]:
    return {row["id"]: row["value"] for batch in table.export() for row in batch.to_pylist()}


def test_a_copy_that_takes_all_changes_equals_the_table() -> None:
    table = hb.Table("user", dim=2, evict=hb.Ttl(steps=4))
    reader = ChangeReader(table)
    learn(table, 1, 2, -1)
    copy: dict[int, list[float]] = {}
    apply(copy, reader.all())
    random = np.random.default_rng(3)
    for round in range(20):
        learn(table, *random.choice(40, 5, replace=False).tolist())
        table.remove(random.choice(40, 2, replace=False))
        if round % 5 == 4:
            table.evict()
        apply(copy, reader.changes())
        assert copy == rows_of(table)


def test_removed_ids_alone_are_a_change() -> None:
    table = hb.Table("user", dim=2)
    reader = ChangeReader(table)
    learn(table, 1, 2, 3)
    reader.all()
    table.remove(np.array([2, 3, 9]))
    news = reader.changes()
    assert news.ids.tolist() == []
    assert news.values.shape == (0, 2)
    assert news.removed.tolist() == [2, 3]
    assert reader.changes().removed.tolist() == []


def test_an_id_that_came_back_is_not_among_the_removed() -> None:
    table = hb.Table("user", dim=1)
    reader = ChangeReader(table)
    learn(table, 5)
    reader.all()
    table.remove(np.array([5]))
    learn(table, 5)
    news = reader.changes()
    assert (news.ids.tolist(), news.removed.tolist()) == ([5], [])


def test_changes_that_another_reader_took_are_an_error() -> None:
    table = hb.Table("user", dim=1)
    reader = ChangeReader(table)
    with pytest.raises(TableError, match="not known"):
        reader.changes()
    reader.all()
    learn(table, 1)
    with table.snapshot(takes=False) as snapshot:
        list(snapshot.rows())
    assert reader.changes().ids.tolist() == [1]
    ChangeReader(table).all()
    with pytest.raises(TableError, match="another reader"):
        reader.changes()
    reader.all()
    table.clear()
    with pytest.raises(TableError, match="restored"):
        reader.changes()


def test_a_rule_that_moves_idle_rows_has_full_reads_only() -> None:
    reader = ChangeReader(hb.Table("user", dim=1, rule=hb.Adam(lr=0.1, scope="all")))
    learn(reader.table, 1, 2)
    assert sorted(reader.all().ids.tolist()) == [1, 2]
    with pytest.raises(ConfigError, match="changes cannot be tracked"):
        reader.changes()


def clicks() -> hb.Dataset:
    user = np.arange(640)  # every id in one batch alone
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    return hb.Dataset(hb.sources.Memory({"y": user % 2, "user": user}), schema, 64)


class ReadsChanges:
    """Takes the changes of a table at every third step."""

    def __init__(self, table: hb.Table) -> None:
        self.reader = ChangeReader(table)
        self.copy: dict[int, list[float]] = {}

    def on_step_end(self, run: object) -> None:
        if run.step % 3 == 0:  # type: ignore[attr-defined]
            news = self.reader.changes() if self.reader.has_read else self.reader.all()
            apply(self.copy, news)


def network() -> hb.RecModel:
    data = clicks()
    tables = hb.make_tables(data.schema, dim=1, rule=hb.Adagrad(lr=0.1))
    return hb.RecModel(hb.models.LR(data.schema, tables), "bce", "sgd")


def only_table(model: hb.RecModel) -> hb.Table:
    (table,) = model.tables.values()
    return table


def test_full_checkpoints_leave_the_changes_to_their_reader(tmp_path: Path) -> None:
    model = network()
    reads = ReadsChanges(only_table(model))
    saves = hb.callbacks.Checkpoint(tmp_path, every_steps=1, full_every=1, wait=True)
    model.fit(clicks(), callbacks=[reads, saves], progress=False)
    apply(reads.copy, reads.reader.changes())
    assert reads.copy == rows_of(only_table(model))


def test_deltas_and_a_reader_of_changes_exclude_each_other(tmp_path: Path) -> None:
    model = network()
    saves = hb.callbacks.Checkpoint(tmp_path, every_steps=1, wait=True)
    with pytest.raises(TableError, match="full_every=1"):
        model.fit(clicks(), callbacks=[ReadsChanges(only_table(model)), saves], progress=False)


@pytest.mark.parametrize("taken_by", ["reader", "clear"])
def test_a_delta_is_a_full_where_the_changes_were_taken(taken_by: str, tmp_path: Path) -> None:
    class Takes:
        def on_step_end(self, run: object) -> None:
            if run.step == 5:  # type: ignore[attr-defined]
                ChangeReader(table).all() if taken_by == "reader" else table.clear()

    model = network()
    table = only_table(model)
    saves = hb.callbacks.Checkpoint(tmp_path, every_steps=1, full_every=100, keep=9, wait=True)
    model.fit(clicks(), callbacks=[Takes(), saves], progress=False)
    kinds = [open_checkpoint(path).manifest.kind for path in sorted(tmp_path.glob("checkpoint-*"))]
    assert (kinds.count("full"), kinds[5], kinds[-1]) == (2, "full", "delta")
    restored = network().restore(tmp_path)
    assert rows_of(only_table(restored)) == rows_of(table)
