# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model by grains have the bits of one process; what they cannot
do, or must not, is refused on each of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.parallel import Placement

Results = dict[str, Any]


# --- equal bits -----------------------------------------------------------------------------------


def digest(value: Any) -> str:
    return hashlib.sha256(value).hexdigest()[:16]


def learned(steps: int) -> Results:
    """Learn as the tests of grains do, with all policies; return digests of what this rank has."""
    grains: Any = importlib.import_module("test_grains")
    torch.manual_seed(5)
    network = grains.Network()
    optimizer = torch.optim.Adam(hb.dense_parameters(network), lr=0.01)
    model = hb.RecModel(network, "bce", optimizer, {"auc", "log_loss"}, grains=grains.GRAINS)
    callbacks = [hb.callbacks.Evict(step_interval=3), hb.callbacks.ClipGradients(0.05)]
    batches = list(grains.batches(steps))
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
    return ranks_of(learned, 1, steps)[0]


def check_equal_bits(ranks: int, steps: int) -> None:
    expected = dict(one_process(steps))
    every = ranks_of(learned, ranks, steps)
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
    first, second = ranks_of(refusals, 2)
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
