# SPDX-License-Identifier: Apache-2.0
"""Histories and counts on several ranks are those of a dict, and have the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import polars as pl
import torch
from forked import ranks_of
from kept_ratings import (
    SCHEMA,
    Replay,
    check_seen,
    dataset_of,
    make_model,
    make_network,
    read_ratings,
)
from on_disk import on_disk

import hotbed as hb
from hotbed.embedding.hashing import partition
from hotbed.embedding.histories import history_tables
from hotbed.embedding.modules import histories_of
from hotbed.errors import ConfigError
from hotbed.job.sampled_tables import SampledHistories, table_facts
from hotbed.parallel import Placement
from hotbed.parallel.forecast.messages import sent_for_histories
from hotbed.parallel.hosts import Hosts
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest, part_digests
from hotbed.persist.upkeep.kept import kept_entries

ROOT = Path(__file__).resolve().parents[2]
BATCH = 64
NUM_ROWS = 18 * BATCH


def crowded_ratings(num_rows: int) -> pl.DataFrame:
    """Return ratings whose users lie in four partitions, several long histories in each."""
    ratings = read_ratings(ROOT, num_rows)
    ids = np.arange(100_000)
    ids = ids[partition(ids) % 64 == 0]
    numbers = ratings["userId"].rank("dense").to_numpy()
    return ratings.with_columns(userId=pl.Series(ids[numbers]))


class Judge:
    """Compares what each row sees with what a dict says."""

    def __init__(self, ratings: pl.DataFrame, num_learned: int) -> None:
        self._replay = Replay()
        self._rows = ratings.to_dicts()
        self.num_seen = num_learned
        for row in self._rows[:num_learned]:
            self._replay.leave(row)

    def on_step_begin(self, run: Any) -> None:
        self.check(run.example.batch, leaves=True)

    def check(self, batch: hb.Batch, *, leaves: bool) -> None:
        expected = []
        for row in self._rows[self.num_seen : self.num_seen + len(batch)]:
            expected.append(self._replay.see(row))
            if leaves:
                self._replay.leave(row)
        self.num_seen += len(batch)
        check_seen(batch.ids["before"], batch.dense["likes"], expected)


def learn(folder: str, first: int, last: int, tier: Any, kind: str) -> dict[str, Any]:
    """Learn the batches from `first` to `last`, from the state in the folder, and compare them.

    `kind`: "fit"; "stream" publishes versions, too.
    """
    torch.manual_seed(3)
    model = make_model(grains=4, tier=tier)
    every = crowded_ratings(NUM_ROWS + 2 * BATCH)
    ratings = every.head(NUM_ROWS)
    publish = None if kind == "fit" else hb.PublishDirectory(f"{folder}/versions")
    save = hb.callbacks.Checkpoint(
        f"{folder}/run", every_steps=7, full_every=9, wait=True, publish=publish
    )
    judge = Judge(ratings, first * BATCH)
    callbacks = [save, hb.callbacks.Evict(step_interval=3), judge]
    data = dataset_of(ratings, model)
    if kind == "fit":
        model.fit(data, callbacks=callbacks, max_steps=last, progress=False)
    else:
        model.online_train(hb.Ahead(data), callbacks, max_steps=last, progress=False)
    assert judge.num_seen == last * BATCH
    later = dataset_of(every.tail(2 * BATCH), model)
    judge = Judge(every, last * BATCH)
    judge.num_seen = NUM_ROWS
    judge_of_scores = SimpleNamespace(
        on_predicted=lambda run: judge.check(run.example.batch, leaves=False)
    )
    metrics = model.evaluate(later, callbacks=[judge_of_scores])
    assert judge.num_seen == NUM_ROWS + 2 * BATCH
    scores = np.asarray(model.predict(later)).tobytes()
    if model.learner.shard.size > 1:
        shown = hb.callbacks.Windows(samples=BATCH, scored="shown")
        arriving = hb.Dataset(hb.sources.Follow(folder, pattern="*.csv"), SCHEMA)
        with pytest.raises(ConfigError, match="'shown' scores impressions in one process"):
            model.online_train(arriving, shown, progress=False)
    return {"metrics": metrics, "scores": scores}


def states_of(folder: Path) -> list[Any]:
    names = ["run", "versions"] if (folder / "versions").exists() else ["run"]
    states = [open_checkpoint(folder / name) for name in names]
    assert all(len(state.links) > 1 for state in states)
    return [(content_digest(state), part_digests(state)) for state in states]


@pytest.mark.parametrize(
    ("kind", "tier", "lives"),
    [
        ("fit", hb.Ram(), [(3, 7), (2, 18)]),
        pytest.param("stream", hb.Ram(), [(2, 7), (1, 9), (3, 18)], marks=pytest.mark.soak),
        pytest.param("fit", on_disk(100, fetch=4), [(2, 5), (3, 18)], marks=pytest.mark.soak),
    ],
    ids=["fit", "stream", "disk"],
)
def test_ranks_keep_what_one_process_keeps(
    kind: str, tier: Any, lives: list[tuple[int, int]], tmp_path: Path
) -> None:
    """`lives`: the ranks of each process group, and the step at which it ends."""
    (expected,) = ranks_of(learn, 1, str(tmp_path / "one"), 0, 18, hb.Ram(), kind)
    first = 0
    for num_ranks, last in lives:
        scores = ranks_of(learn, num_ranks, str(tmp_path / "several"), first, last, tier, kind)
        first = last
    assert scores == [expected] * num_ranks
    assert states_of(tmp_path / "several") == states_of(tmp_path / "one")
    user = crowded_ratings(NUM_ROWS + 2 * BATCH)["userId"][0]
    shown = []
    for folder in ("several", "one"):
        (history,) = kept_entries(tmp_path / folder / "run", "user", str(user))
        shown.append(history.values.tolist())
    assert shown[0] == shown[1] != []


NUM_BATCHES = 12


def learn_by_loop(folder: str, last: int) -> tuple[str, int, int]:
    """Learn in a plain loop, from the state in the folder up to the batch `last`.

    Each rank reads its part of a batch. Returns what `fill` says to a part alone, and the bytes and
    messages that this rank sends to fill the last batch.
    """
    torch.manual_seed(3)
    tables = hb.make_tables(SCHEMA, dim=4)
    network = make_network(tables)
    dense = torch.optim.Adam(hb.dense_parameters(network), lr=1e-3)
    sparse = hb.SparseOptimizer(network)
    loop = hb.shard(network, dense, sparse, grains=4)
    state = hb.checkpoints.State(
        network, tables, {"dense": dense, "sparse": sparse}, shard=loop.shard
    )
    first = 0
    if Path(folder).exists():
        reader = hb.checkpoints.open_checkpoint(folder)
        hb.checkpoints.restore(reader, state)
        first = reader.manifest.counters["steps"]
    ratings = crowded_ratings(NUM_BATCHES * BATCH)
    every_batch = list(hb.Dataset(hb.sources.Memory(ratings), SCHEMA, BATCH))
    size = BATCH // loop.shard.size
    own_rows = slice(loop.shard.rank * size, (loop.shard.rank + 1) * size)
    judge = Judge(ratings, first * BATCH)
    histories = histories_of(network)
    assert histories is not None
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for batch in loop.joined(batch[own_rows] for batch in every_batch[first:last]):
        batch = histories.fill(batch, leaves=True)
        judge.check(batch, leaves=True)
        loop.backward(batch, lambda part: loss_fn(network(part), part.labels["liked"]))
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
    assert judge.num_seen == last * BATCH
    hb.checkpoints.save(folder, replace(state, counters={"steps": last}))
    if loop.shard.size == 1:
        return "", 0, 0
    shard: Any = loop.shard
    traffic = shard._ranks.traffic
    num_bytes, messages = traffic.sent_bytes, traffic.messages
    histories.fill(every_batch[-1], leaves=False)
    num_bytes, messages = traffic.sent_bytes - num_bytes, traffic.messages - messages
    with pytest.raises(ConfigError) as error:
        histories.fill(every_batch[-1][own_rows], leaves=True)
    return str(error.value), num_bytes, messages


def sent_as_planned() -> list[tuple[float, float]]:
    """Return the bytes and messages that a plan says of the last batch, by rank."""
    batches = list(
        hb.Dataset(hb.sources.Memory(crowded_ratings(NUM_BATCHES * BATCH)), SCHEMA, BATCH)
    )
    sampled = SampledHistories(SCHEMA, BATCH, 1)
    for batch in batches:
        list(sampled.fill(batch))
    tables = history_tables(SCHEMA)
    zeros = np.zeros(256)
    facts = [table_facts(table, zeros, zeros) for table in tables.values()]
    owners = Placement(2, 4).owners
    rows = [
        np.bincount(owners(name)[partition(ids)], minlength=2)
        for name, ids in sampled.rows_of(batches[-1]).items()
    ]
    assert rows[1].any(), "no user has older rows"
    sent = sent_for_histories(facts, Hosts.of([0, 1]), np.stack(rows))
    return list(zip(sent.num_bytes.sum((0, 1)), sent.messages.sum((0, 1)), strict=True))


def test_loops_of_ranks_keep_what_a_loop_of_one_process_keeps(tmp_path: Path) -> None:
    ranks_of(learn_by_loop, 1, str(tmp_path / "one"), NUM_BATCHES)
    ranks_of(learn_by_loop, 2, str(tmp_path / "several"), 5)
    of_ranks = ranks_of(learn_by_loop, 2, str(tmp_path / "several"), NUM_BATCHES)
    digests = [content_digest(open_checkpoint(tmp_path / name)) for name in ("several", "one")]
    assert digests[0] == digests[1]
    assert [sent for _, *sent in of_ranks] == [list(sent) for sent in sent_as_planned()]
    assert all("rows of a batch with histories" in error for error, _, _ in of_ranks)
