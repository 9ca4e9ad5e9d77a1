# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model by grains have the bits of one process; what they cannot
do, or must not, is refused on each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import io
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import LogLines, ranks_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError
from hotbed.parallel import Placement, Ranks, connections
from hotbed.parallel.probe import probe
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.container.sink import LocalFile
from hotbed.persist.state.digest import part_digests
from hotbed.training.watching.report import write_report

Results = dict[str, Any]


# --- equal bits -----------------------------------------------------------------------------------


def learned(folder: str, ends: list[int], begun: str = "") -> Results:
    """Learn as the tests of grains do, with all policies, and save at each of these steps.

    `begun`: the state to begin from, whose step is the first of `ends`.
    """
    grains: Any = importlib.import_module("test_grains")
    torch.manual_seed(5)
    network = grains.Network()
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=grains.GRAINS)
    if begun:
        model.restore(begun)
        torch.set_rng_state(torch.load(f"{begun}/random"))
    batches = list(grains.batches(ends[-1]))
    losses = []
    for first, last in itertools.pairwise(ends):
        callbacks = [hb.callbacks.Evict(step_interval=3), hb.callbacks.ClipGradients(0.05)]
        history = model.fit(batches[first:last], callbacks=callbacks, progress=False)
        losses.append(history.epochs[0]["loss"])
        saved = f"{folder}/{last}"
        model.save(saved)
        if os.environ["RANK"] == "0":
            torch.save(torch.get_rng_state(), f"{saved}/random")
    rank = int(os.environ["RANK"])
    placement = Placement(int(os.environ["WORLD_SIZE"]), grains.GRAINS)
    for name, table in model.tables.items():
        assert set(np.flatnonzero(placement.owners(name) != rank)).isdisjoint(_filled(table))
    return {
        "losses": losses,
        "metrics": model.evaluate(batches[:2]),
        "predictions": np.asarray(model.predict(batches[:2])).tobytes(),
        "random": torch.get_rng_state().tolist(),
    }


def _filled(table: hb.Table) -> set[int]:
    """The partitions that hold rows."""
    batches = table.export(range(256))  # an empty one yields none
    return {int(batch.column("partition")[0].as_py()) for batch in batches}


def check_equal_bits(
    folder: Path, ends: list[int], ranks: list[int], host_ranks: Sequence[int] = ()
) -> None:
    """Compare one process with `ranks[0]` up to the second of `ends`, and so on, each by resuming.

    `host_ranks`: ranks of a host, for each of `ranks`; (): there is one host.
    """
    (expected,) = ranks_of(learned, 1, f"{folder}/one", ends)
    begun = ""
    on_hosts = host_ranks or [1] * len(ranks)
    for number, of_host, span in zip(ranks, on_hosts, itertools.pairwise(ends), strict=True):
        where = f"{folder}/several"
        last = ranks_of(learned, number, where, list(span), begun, host_ranks=of_host)
        begun = f"{folder}/several/{span[1]}"
        several = open_checkpoint(begun)
        one = open_checkpoint(f"{folder}/one/{span[1]}")
        assert part_digests(several) == part_digests(one)
        assert content_digest(several) == content_digest(one)
    for found in last:
        assert found == {**expected, "losses": expected["losses"][-1:]}


def test_three_processes_then_two_hosts_have_the_bits_of_one(tmp_path: Path) -> None:
    check_equal_bits(tmp_path, [0, 4, 7], [3, 4], [1, 2])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_any_number_of_processes_has_the_bits_of_one(ranks: int, tmp_path: Path) -> None:
    check_equal_bits(tmp_path, [0, 300], [ranks])


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "host_ranks"), [(4, 2), (6, 2), (6, 3), (8, 4), (8, 2)])
def test_any_number_of_hosts_has_the_bits_of_one(
    ranks: int, host_ranks: int, tmp_path: Path
) -> None:
    check_equal_bits(tmp_path, [0, 60], [ranks], [host_ranks])


@pytest.mark.soak
def test_a_state_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    check_equal_bits(tmp_path, [0, 75, 150, 225, 300], [8, 3, 1, 4])


class KilledAt:
    """The process is gone after a step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step and int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        return {}


class Plain(nn.Module):
    """A model of torch alone, for `hb.auto`."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(100, 2)
        self.item = nn.Embedding(100, 2)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([self.user(user), self.item(item % 100)], 1))
        return scores.squeeze(1)


class Users(Plain):
    """The same, for batches without items."""

    def forward(self, user: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(user % 100, user)


def checkpointed(
    folder: str,
    epochs: int,
    killed: tuple[int, int] = (0, 0),
    seconds: float | None = None,
    *,
    by_auto: bool = False,
) -> Any:
    """Fit a Dataset with a checkpoint every 3 steps; `killed`: the step and the rank to kill."""
    draw = np.random.default_rng(0)
    columns = {
        "user": (draw.zipf(1.2, 2000) % 700).tolist(),
        "item": draw.integers(0, 4000, 2000).tolist(),
        "y": draw.integers(0, 2, 2000).tolist(),
    }
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item")])
    policies: dict[str, Any] = {
        "admit": hb.MinCount(2, sketch_bytes=1 << 16),
        "evict": hb.Lru(1024),
    }
    tables = hb.make_tables(schema, 2, **policies)
    torch.manual_seed(1)
    network: nn.Module = hb.models.DCNv2(schema, tables, hidden=(4,), dropout=0.2)
    optimizer: Any = "adam"
    if by_auto:
        network = Plain()
        optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
        network, optimizer, _ = hb.auto(network, optimizer, {"user": policies, "item": policies})
    model = hb.RecModel(network, "bce", optimizer, {"auc"}, grains=8)
    data = hb.Dataset(hb.sources.Memory(columns), schema, batch_size=100, shuffle=500, seed=3)
    callbacks = [
        hb.callbacks.Evict(step_interval=7),
        hb.callbacks.Checkpoint(folder, every_steps=3, every_seconds=seconds, full_every=3),
        KilledAt(*killed),
    ]
    return model.fit(data, epochs=epochs, callbacks=callbacks, progress=False).epochs[-1]["loss"]


def exported(folder: str, kind: str) -> None:
    """Train a few steps, and export the model for servers."""
    model = small(evict=hb.Lru(1024))
    if kind == "auto":
        torch.manual_seed(1)
        network: nn.Module = Users()
        optimizer: Any = torch.optim.Adagrad(network.parameters(), lr=0.05)
        network, optimizer, _ = hb.auto(network, optimizer, {"user": {"evict": hb.Lru(1024)}})
        model = hb.RecModel(network, "bce", optimizer, grains=8)
    for number in range(3):
        model.step(batch(200 + number))
    model.export(folder)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["hb.models", "auto"])
def test_two_processes_export_what_one_does(kind: str, tmp_path: Path) -> None:
    for ranks in (1, 2):
        ranks_of(exported, ranks, f"{tmp_path}/{ranks}", kind)
    one, two = (open_checkpoint(tmp_path / name) for name in ("1", "2"))
    assert content_digest(one) == content_digest(two)
    assert one.manifest.graph == two.manifest.graph


def beside_baselines() -> Any:
    """Fit and stream beside baselines, and return their figures, also by segment."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30, 400)
    rows = {"y": (user + rng.integers(0, 20, 400)) % 2, "user": user, "x": rng.random(400)}
    rows["country"] = rng.choice(["DE", "FR", "CN"], 400)
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Dense("x")])
    torch.manual_seed(0)
    network = hb.models.DNN(schema, hb.make_tables(schema, 4), hidden=[8])
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), ["auc", "log_loss"], grains=2)
    source = hb.sources.Memory(rows)
    train, valid = (hb.Dataset(source.slice(*part), schema, 32) for part in ((0, 300), (300, 400)))
    callbacks = [hb.callbacks.Baselines(), hb.callbacks.BySegment("country")]
    fitted = model.fit(train, valid, 2, callbacks, progress=False)
    streamed = model.online_train(train, callbacks, progress=False)
    segments = hb.callbacks.BySegment("country")
    unread = model.fit(train, valid, 1, segments, progress=False)  # ranks read some features each
    tables = (fitted.segments, streamed.segments, unread.segments)
    return fitted.baselines, fitted.new_ids, streamed.baselines, tables


def test_baselines_of_several_processes_are_those_of_one() -> None:
    (alone,) = ranks_of(beside_baselines, 1)
    assert set(alone[0]) == {"constant", "linear", "popularity of user"}
    assert [sum(row.rows for table in each.values() for row in table) for each in alone[3]] == [
        100,
        300,
        100,
    ]
    assert ranks_of(beside_baselines, 2) == [alone, alone]


class Received(hb.checkpoints.Publisher):
    """Takes versions, and does nothing with them."""

    def publish(self, saved: Any, *, forced: str | None = None) -> None: ...


def gated(folder: str) -> Any:
    """Learn a stream with labels flipped in its last third; return what a gate decided of it."""
    draw = np.random.default_rng(0)
    user = draw.integers(0, 40, 3000)
    clicked = (user % 4 == 0) ^ (np.arange(3000) > 2000)
    rows = {"y": clicked.astype(np.int64), "user": user, "t": np.arange(3000)}
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Time("t")])
    torch.manual_seed(0)
    tables = hb.make_tables(schema, 4, rule=hb.Adagrad(lr=0.2))
    network = hb.models.DNN(schema, tables, hidden=[8])
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-2), grains=2)
    gate = hb.checkpoints.PublishGate(held_back=0.2, min_samples=100, warm_up=4)
    states = hb.callbacks.Checkpoint(folder, 2, publish=Received(), gate=gate, wait=True)
    data = hb.Dataset(hb.sources.Memory(rows), schema, 100)
    no_graph = ConfigError("export: a graph takes seconds")
    with patch.object(hb.RecModel, "graph", side_effect=no_graph):
        model.online_train(data, [states], progress=False)
    assert states.gatekeeper is not None
    return states.gatekeeper.log, states.gatekeeper.facts


def test_gate_of_several_processes_decides_as_that_of_one(tmp_path: Path) -> None:
    (alone,) = ranks_of(gated, 1, f"{tmp_path}/1")
    assert alone[0]
    for of_rank in ranks_of(gated, 2, f"{tmp_path}/2"):
        np.testing.assert_equal(dataclasses.asdict(of_rank[1]), dataclasses.asdict(alone[1]))
        assert of_rank[0] == alone[0]


def by_auto(
    folder: str, epochs: int, killed: tuple[int, int] = (0, 0), seconds: float | None = None
) -> Any:
    """Fit a model of `hb.auto` as `checkpointed` does."""
    return checkpointed(folder, epochs, killed, seconds, by_auto=True)


def check_kills(
    folder: Path,
    kills: list[tuple[int, int, int]],
    ranks: int,
    epochs: int,
    fit: Callable[..., Any] = checkpointed,
) -> None:
    """Compare a run of one process with runs of `ranks` of which one is killed, until one is not.

    `kills`: the number of processes, the step, and the rank that is killed after it.
    """
    (loss,) = ranks_of(fit, 1, f"{folder}/one", epochs)
    for number, step, rank in kills:
        with pytest.raises(AssertionError, match=r"Connection (closed|reset) by peer"):
            ranks_of(fit, number, f"{folder}/several", epochs, (step, rank))
    last = ranks_of(fit, ranks, f"{folder}/several", epochs, (0, 0), 0.01)
    assert last == [loss] * ranks
    one, several = (open_checkpoint(folder / name) for name in ("one", "several"))
    assert part_digests(several) == part_digests(one)
    assert content_digest(several) == content_digest(one)


def test_a_fit_that_was_killed_goes_on_with_other_processes_to_the_bits_of_one(
    tmp_path: Path,
) -> None:
    check_kills(tmp_path, [(2, 8, 1)], 3, 1)


@pytest.mark.soak
def test_a_fit_by_auto_that_was_killed_goes_on_with_other_processes_to_the_bits_of_one(
    tmp_path: Path,
) -> None:
    check_kills(tmp_path, [(2, 8, 1), (4, 13, 0)], 3, 1, by_auto)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1, 7))
def test_a_fit_that_is_killed_again_and_again_has_the_bits_of_one(
    first: int, tmp_path: Path
) -> None:
    kills = [(3, first, 0), (2, first + 9, 1), (4, first + 17, 3), (8, first + 25, 0)]
    check_kills(tmp_path, kills, 2, 2)


@pytest.mark.parametrize("grains", [2, 8, 64, 256])
def test_blocks_are_parts_of_the_tree_of_grains_in_order(grains: int) -> None:
    for ranks in range(1, min(grains, 20) + 1):
        placement = Placement(ranks, grains)
        every = [block for of_rank in placement.blocks for block in of_rank]
        assert [block.first for block in every] == [0, *np.cumsum([b.size for b in every])[:-1]]
        assert sum(block.size for block in every) == grains
        for rank, blocks in enumerate(placement.blocks):
            assert sum(block.size for block in blocks) == len(placement.grains_of(rank))
            assert len(placement.grains_of(rank)) in (grains // ranks, -(-grains // ranks))
        for block in every:
            assert block.size.bit_count() == 1
            assert block.first % block.size == 0
            assert block.size % placement.leaf == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 200])
def test_each_rank_owns_its_share_of_partitions_in_a_run(ranks: int) -> None:
    begins = set()
    for number in range(20):
        owners = Placement(ranks, 256).owners(f"table {number}")
        counts = np.bincount(owners, minlength=ranks)
        assert set(counts) <= {256 // ranks, -(-256 // ranks)}
        assert np.count_nonzero(np.diff(owners.astype(int))) <= ranks  # runs, one may wrap around
        begins.add(int(owners[0]))
    assert len(begins) > min(ranks, 8) // 2  # small tables do not all lie on one rank


# --- errors on every rank -------------------------------------------------------------------------


def small(seed: int = 0, **policies: Any) -> hb.RecModel:
    torch.manual_seed(seed)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, **policies)
    return hb.RecModel(hb.models.DCNv2(schema, tables, hidden=(4,)), "bce", "adam", grains=4)


def batch(ids: int = 16, label: float = 1.0) -> hb.Batch:
    labels = np.full(ids, label, np.float32)
    return hb.Batch({"user": hb.Ids(np.arange(ids))}, {}, {"y": labels})


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def own_loop(model: hb.RecModel) -> None:
    model.network.train()
    model.network(batch()).sum().backward()


def refusals(folder: str) -> Results:
    rank = int(os.environ["RANK"])
    model = small()
    model.fit([batch()], progress=False)
    capped = small(evict=hb.Lru(1024))
    capped.step(batch(1000))
    size = [len(table) for table in capped.tables.values()]
    found = {
        "save": error_of(lambda: model.save(f"/dev/null/{rank}")),
        "other folder": error_of(lambda: model.save(f"{folder}/{rank}")),
        "restore": error_of(lambda: model.restore(f"{folder}/none")),
        "own loop": error_of(lambda: own_loop(model)),
        "not finite": error_of(lambda: model.step(batch(label=float("nan")))),
        "other data": error_of(lambda: model.step(batch(16 + rank))),
        "too many rows": error_of(lambda: capped.step(batch(1100))),
    }
    ahead = hb.Ahead([batch(1000), batch(1000), batch(1100), batch(1020)])
    found["too many rows ahead"] = error_of(lambda: capped.fit(ahead, progress=False))
    assert [len(table) for table in capped.tables.values()] == size
    by_clock = hb.callbacks.Evict(seconds_interval=1e-9, clock="wall")
    model.fit([batch()] * 3, callbacks=[by_clock], progress=False)  # goes on
    found["evictions"] = by_clock.state()["begun"]
    model.save(f"{folder}/full")
    full = patch.object(LocalFile, "write", side_effect=OSError(errno.ENOSPC, "No space left"))
    with full if rank else contextlib.nullcontext():
        found["full disk"] = error_of(lambda: model.save(f"{folder}/full"))
    found["left"] = sorted(os.listdir(f"{folder}/full"))
    model.save(f"{folder}/full")
    warm = small()
    warm.warm_start(f"{folder}/full", optimizer_state=True)
    warm.save(f"{folder}/warm")
    found["weights"] = error_of(lambda: small(seed=rank).step(batch()))
    found["random numbers"] = error_of(lambda: model.step(batch()))
    found["unreached"] = unreached(Ranks.of_job())
    return found


def unreached(ranks: Ranks) -> Results:
    """Connect ranks whose first check of messages fails on one rank or on all."""
    from_each = connections._from_each
    second: Results = {
        "no interface": from_each,
        "no message": lambda group, number: [0, 1],
        "another message": lambda group, number: from_each(group, 7),
    }
    found = {}
    for name, call in second.items():
        broken = patch.object(connections, "_from_each", call if ranks.rank else from_each)
        absent = {connections.INTERFACE: "absent"} if name == "no interface" else {}
        limit = patch.object(connections, "CHECK_TIMEOUT", timedelta(seconds=1))
        with broken, limit, patch.dict(os.environ, absent):
            found[name] = error_of(ranks.another)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_what_several_processes_cannot_do_is_refused_on_each(ranks: int, tmp_path: Path) -> None:
    found = ranks_of(refusals, ranks, str(tmp_path))
    first = found[0]
    full, warm = (open_checkpoint(tmp_path / name) for name in ("full", "warm"))
    for name in full.table_names:
        assert list(full.rows(name)) == list(warm.rows(name))
    for rank, of_rank in enumerate(found):
        unreached = of_rank.pop("unreached")
        assert len(unreached) == 3
        for error in unreached.values():
            assert error.startswith(f"ConfigError: ranks: rank {rank} of {ranks} cannot reach")
            assert "GLOO_SOCKET_IFNAME" in error
            assert f"hotbed doctor --ranks {ranks}" in error
    # another rank may list the folder before the first one has removed its draft
    left = [of_rank.pop("left") for of_rank in found]
    assert left[0] == ["CURRENT", "checkpoint-00000001"]
    assert found == [first] * ranks
    starts = {
        "save": "NotWritten: rank 0: /dev/null/0",
        "other folder": "PersistError: ",
        "full disk": "NotWritten: ",
        "restore": "FormatError: ",
        "own loop": "ConfigError: ranks: tables that several ranks share learn in the steps",
        "not finite": "NonFiniteGradient: table 'user': the gradient of id 0 is not finite",
        "weights": "ConfigError: ranks: all ranks must train the same model with the same",
        "other data": "ConfigError: ranks: all ranks must get the same batches",
        "random numbers": "ConfigError: ranks: all ranks must get the same batches",
        "too many rows": "TableFull: table 'user'",
        "too many rows ahead": "TableFull: table 'user'",
    }
    assert first.pop("evictions") == 3
    for name, start in starts.items():
        assert first[name].startswith(start), first[name]


def watched() -> Results:
    """Fit with a progress bar and log lines on every rank; return what each showed and counted."""
    logged = LogLines()
    logging.getLogger().addHandler(logged)
    model = small()
    for name in ("hotbed", "hotbed.persist", "hotbeds"):
        logging.getLogger(name).warning("%d rows", 7)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        history = model.fit([batch(), batch(10)], [batch(12)], epochs=2)
    rank = os.environ["RANK"]
    write_report(f"{rank}.html", {"train": history})
    ranks = Ranks.of_job()
    first = ranks.rank == 0
    parts = [torch.zeros(3), torch.zeros(5)] if first else [torch.zeros(7), torch.zeros(1)]
    ranks.exchange([parts], [3, 7] if first else [5, 1])
    ranks.gather(torch.zeros(4, dtype=torch.int64))
    sent = ranks.traffic.sent_bytes
    assert ranks.gather_objects({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
    return {
        "lines": logged.lines,
        "printed": printed.getvalue(),
        "ranks": [dataclasses.asdict(work) for work in history.ranks],
        "page": Path(f"{rank}.html").read_text(),
        "sent": sent,
        "more is sent": ranks.traffic.sent_bytes > sent,
        "connection": dataclasses.asdict(probe()),
    }


def test_ranks_show_one_progress_bar_name_themselves_in_logs_and_count_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = ranks_of(watched, 2)
    for rank, of_rank in enumerate(found):
        assert of_rank["lines"][:3] == [f"rank {rank}: 7 rows", f"rank {rank}: 7 rows", "7 rows"]
        assert of_rank["sent"] == (5 * 4 if rank == 0 else 7 * 4) + 4 * 8
        assert of_rank["more is sent"]
        assert of_rank["ranks"] == found[0]["ranks"]
        assert "Ranks, train" in of_rank["page"]
    first, second = (of_rank["printed"] for of_rank in found)
    assert first.count("epoch") == 2
    assert not second
    works = found[0]["ranks"]
    assert [work["rank"] for work in works] == [0, 1]
    assert [work["steps"] for work in works] == [4, 4]
    assert [work["samples"] for work in works] == [26, 26]  # half of two epochs of 16 and 10
    assert sum(work["rows"] for work in works) == 16
    assert all(work["sent_bytes"] > 0 and work["wait_seconds"] > 0 for work in works)
    connection = found[0]["connection"]
    assert connection == found[1]["connection"]
    assert connection["hosts"] == [socket.gethostname()] * 2
    assert list(connection["seconds"]) == [8, 65536, 4194304]
    assert min(connection["seconds"].values()) > 0


def killed() -> Results:
    """The second of the ranks is gone in its third step."""
    model = small()
    for step in range(5):
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        model.step(batch())
    return {}


@pytest.mark.soak
def test_a_rank_that_is_killed_ends_the_others_with_an_error() -> None:
    with pytest.raises(AssertionError, match=r"Connection (closed|reset) by peer"):
        ranks_of(killed, 2)
