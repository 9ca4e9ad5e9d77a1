# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model by grains have the bits of one process; what they cannot
do, or must not, is refused on each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.parallel import Placement, Ranks
from hotbed.training.watching.report import write_report

Results = dict[str, Any]


def run_ranks(task: str, ranks: int, *arguments: str) -> list[Results]:
    """Run a task of this file on so many processes; return what each of them found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, task, *arguments]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=500) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(found.splitlines()[-1]) for found, _ in outputs]


# --- equal bits -----------------------------------------------------------------------------------


def digest(value: Any) -> str:
    return hashlib.sha256(value).hexdigest()[:16]


def learned(steps: str) -> Results:
    """Learn as the tests of grains do, with all policies; return digests of what this rank has."""
    sys.path.insert(0, str(Path(__file__).parent))
    grains: Any = __import__("test_grains")
    torch.manual_seed(5)
    network = grains.Network()
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=grains.GRAINS)
    callbacks = [hb.callbacks.Evict(step_interval=3), hb.callbacks.ClipGradients(0.05)]
    batches = list(grains.batches(int(steps)))
    history = model.fit(batches, callbacks=callbacks, progress=False)
    rank = int(os.environ["RANK"])
    placement = Placement(int(os.environ["WORLD_SIZE"]), grains.GRAINS)
    rows = {}
    for name, table in model.tables.items():
        owners = placement.owners(name)
        assert set(np.flatnonzero(owners != rank)).isdisjoint(_filled(table))
        for partition in np.flatnonzero(owners == rank).tolist():
            parts = [batch.sort_by("id") for batch in table.export([partition])]
            rows[f"{name} {partition}"] = digest(
                repr([part.to_pydict() for part in parts]).encode()
            )
    state = optimizer.state_dict()["state"]
    dense = [*network.head.state_dict().values(), torch.get_rng_state()]
    dense += [value for number in state for value in state[number].values()]
    return {
        "rows": rows,
        "stats": {
            name: {count: table.stats[count] for count in ("admitted", "refused", "evicted")}
            for name, table in model.tables.items()
        },
        "dense": [digest(np.ascontiguousarray(tensor).tobytes()) for tensor in dense],
        "loss": history.epochs[0]["loss"],
        "metrics": model.evaluate(batches[:2]),
        "predictions": digest(np.asarray(model.predict(batches[:2])).tobytes()),
    }


def _filled(table: hb.Table) -> set[int]:
    """The partitions that hold rows."""
    return {p for p in range(256) if sum(batch.num_rows for batch in table.export([p]))}


@functools.cache
def one_process(steps: int) -> Results:
    return run_ranks("learned", 1, str(steps))[0]


def check_equal_bits(ranks: int, steps: int) -> None:
    expected = dict(one_process(steps))
    every = run_ranks("learned", ranks, str(steps))
    for found in every:
        for name in ("dense", "loss", "metrics", "predictions"):
            assert found[name] == expected[name], name
    rows: dict[str, str] = {}
    for found in every:
        rows |= found["rows"]
    assert rows == expected["rows"]
    for table, counts in expected["stats"].items():
        sums = {name: sum(found["stats"][table][name] for found in every) for name in counts}
        assert sums == counts, table


def test_three_processes_have_the_bits_of_one() -> None:
    check_equal_bits(3, 10)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_any_number_of_processes_has_the_bits_of_one(ranks: int) -> None:
    check_equal_bits(ranks, 300)


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
    return hb.RecModel(hb.models.DCNv2(schema, tables, hidden=(4,)), "bce", "adam", grains=2)


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


def refusals() -> Results:
    rank = int(os.environ["RANK"])
    model = small()
    model.fit([batch()], progress=False)
    capped = small(evict=hb.Lru(1024))
    capped.step(batch(1000))
    size = [len(table) for table in capped.tables.values()]
    found = {
        "save": error_of(lambda: model.save("never")),
        "online_train": error_of(lambda: model.online_train([batch()], progress=False)),
        "own loop": error_of(lambda: own_loop(model)),
        "not finite": error_of(lambda: model.step(batch(label=float("nan")))),
        "other data": error_of(lambda: model.step(batch(16 + rank))),
        "wall clock": error_of(
            lambda: model.fit(
                [batch()],
                callbacks=[hb.callbacks.Evict(seconds_interval=1, clock="wall")],
                progress=False,
            )
        ),
        "too many rows": error_of(lambda: capped.step(batch(1100))),
    }
    assert [len(table) for table in capped.tables.values()] == size
    model.step(batch())  # goes on
    found["weights"] = error_of(lambda: small(seed=rank).step(batch()))
    found["random numbers"] = error_of(lambda: model.step(batch()))
    return found


def test_what_several_processes_cannot_do_is_refused_on_each() -> None:
    first, second = run_ranks("refusals", 2)
    assert first == second
    starts = {
        "save": "ConfigError: state: one process writes and reads states",
        "online_train": "ConfigError: online_train: one process learns a stream",
        "own loop": "ConfigError: ranks: tables that several ranks share learn in the steps",
        "not finite": "NonFiniteGradient: table 'user': the gradient of id 0 is not finite",
        "weights": "ConfigError: ranks: all ranks must train the same model with the same",
        "other data": "ConfigError: ranks: all ranks must get the same batches",
        "random numbers": "ConfigError: ranks: all ranks must get the same batches",
        "wall clock": "ConfigError: Evict.clock: the clocks of several ranks differ",
        "too many rows": "TableFull: table 'user'",
    }
    for name, start in starts.items():
        assert first[name].startswith(start), first[name]


def watched() -> Results:
    """Fit with a progress bar and log lines on every rank; return what each showed and counted."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # the short way
    logging.getLogger().addHandler(handler)
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
        "lines": lines,
        "printed": printed.getvalue(),
        "ranks": [dataclasses.asdict(work) for work in history.ranks],
        "page": Path(f"{rank}.html").read_text(),
        "sent": sent,
        "more is sent": ranks.traffic.sent_bytes > sent,
    }


def test_ranks_show_one_progress_bar_name_themselves_in_logs_and_count_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_ranks("watched", 2)
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
        run_ranks("killed", 2)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    tasks: dict[str, Callable[..., Results]] = {
        "learned": learned,
        "refusals": refusals,
        "killed": killed,
        "watched": watched,
    }
    print(json.dumps(tasks[name](*arguments)))
