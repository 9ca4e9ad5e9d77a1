# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different calls are refused at once, on each of them, by the names of the calls;
a rank that makes none is lost by name after the timeout.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from departures import TIMEOUT, End, check_ends, ends_of
from forked import ranks_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.persist import content_digest

SCHEMA = hb.Schema([hb.Label("y"), hb.Id("user")])


def batch() -> hb.Batch:
    ids = {"user": hb.Ids(np.arange(16))}
    return hb.Batch(ids, {}, {"y": np.arange(16, dtype=np.float32) % 2})


def dataset() -> hb.Dataset:
    rows = {"user": [*range(128)], "y": [0, 1] * 64}
    return hb.Dataset(hb.sources.Memory(rows), SCHEMA, batch_size=16)


def model_of() -> hb.RecModel:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, 2, evict=hb.Lru(1024))
    network = hb.models.DCNv2(SCHEMA, tables, hidden=(4,))
    return hb.RecModel(network, "bce", "adam", {"auc"}, grains=4)


def backward() -> None:
    network = hb.models.DCNv2(SCHEMA, hb.make_tables(SCHEMA, 2), hidden=(4,))
    dense = torch.optim.Adam(hb.dense_parameters(network))
    hb.shard(network, dense, hb.SparseOptimizer(network), grains=4)


def calls_of(model: hb.RecModel, folder: str) -> dict[str, Callable[[], Any]]:
    """Every public call that ranks make together, by the name that an error gives it."""
    states = f"{folder}/saved"
    return {
        "fit": lambda: model.fit([batch()], progress=False),
        "online_train": lambda: model.online_train([batch()], progress=False),
        "step": lambda: model.step(batch()),
        "evaluate": lambda: model.evaluate([batch()]),
        "predict": lambda: model.predict(batch()),
        "save": lambda: model.save(f"{folder}/{os.environ['RANK']}"),
        "restore": lambda: model.restore(states),
        "warm_start": lambda: model.warm_start(states),
        "export": lambda: model.export(f"{folder}/exported"),
        "load": lambda: hb.load(states),
        "RecModel": model_of,
        "shard": backward,
    }


PLACES = {"step": r"(step \d+, map|step)"}
"""Where an error says that a call is, unless it is the name of the call."""


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def pairs(folder: str) -> dict[tuple[str, str], str]:
    """What each pair of calls of two ranks ends with; then a step, which works."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    rank = int(os.environ["RANK"])
    model = model_of()
    model.fit([batch()], progress=False)
    model.save(f"{folder}/saved")
    calls = calls_of(model, folder)
    found = {}
    for pair in itertools.permutations(calls, 2):
        found[pair] = error_of(calls[pair[rank]])
    torch.manual_seed(0)  # a step had drawn a number before it was refused
    model.step(batch())
    return found


def test_two_ranks_that_make_different_calls_are_told_both_at_once(tmp_path: Path) -> None:
    first, second = ranks_of(pairs, 2, str(tmp_path))
    assert first == second
    assert len(first) == 12 * 11
    start = "ConfigError: ranks: all ranks must make the same calls in the same order, got "
    for pair, error in first.items():
        one, other = [PLACES.get(name, rf"(step \d+, )?{name}") for name in pair]
        assert error.startswith(start), error
        assert re.search(rf"got rank 0 in {one} and rank 1 in {other}\. ", error), (pair, error)


# --- inside a training ----------------------------------------------------------------------------


class Once:
    """Does something at a step, on the first rank alone."""

    def __init__(self, action: Callable[[Any], Any], step: int = 3) -> None:
        self.action = action
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step and os.environ["RANK"] == "0":
            self.action(run)


def within(folder: str, depth: int) -> dict[str, str]:
    """What a fit of 8 steps ends with, where the first rank alone does something in it.

    `depth`: of mapping ahead; 0 = none.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    rank = int(os.environ["RANK"])
    arguments: Mapping[str, Any] = {
        "save": {"callbacks": Once(lambda run: run.model.save(f"{folder}/saved"))},
        "evaluate": {"callbacks": Once(lambda run: run.model.evaluate([batch()]))},
        "predict": {"callbacks": Once(lambda run: run.model.predict(batch()))},
        "export": {"callbacks": Once(lambda run: run.model.export(f"{folder}/exported"))},
        "callback": {"callbacks": [Once(lambda run: run.model.save(f"{folder}/s"))][rank:]},
    }
    found = {}
    for name, settings in arguments.items():
        data = hb.Ahead(dataset(), depth=depth) if depth else dataset()
        call = functools.partial(model_of().fit, data, progress=False, **settings)
        found[name] = error_of(call)
    return found


WITHIN = {
    "save": "step 3, save",
    "evaluate": "step 3, evaluate",
    "predict": "step 3, predict",
    "export": "step 3, export",
    "callback": "step 3, save",
}


@pytest.mark.parametrize("depth", [0, 2])
def test_a_call_of_one_rank_in_a_fit_is_told_with_the_step_of_the_other(
    depth: int, tmp_path: Path
) -> None:
    first, second = ranks_of(within, 2, str(tmp_path), depth)
    for name, place in WITHIN.items():
        told = rf"got rank 0 in {place} and rank 1 in step \d, [A-Za-z._]+\. Call fit, save"
        for error in (first[name], second[name]):
            assert re.search(told, error), f"{name}: {error}"


def stopped(folder: str) -> list[tuple[int, int, str]]:
    """Fit two epochs of 8 steps; stop in each after other steps, on the first rank or on all.

    Return the steps, the epochs, and the digest of the newest state.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    ends = []
    for step in (3, 8, 11):
        stop = Once(lambda run: run.stop("enough"), step)
        states = f"{folder}/{step}"
        keep = hb.callbacks.Checkpoint(states)
        callbacks = [stop, keep] if os.environ["RANK"] == "0" else [keep]
        model = model_of()
        model.fit(dataset(), epochs=2, callbacks=callbacks, progress=False)
        reader = hb.checkpoints.open_checkpoint(states)
        assert reader.manifest.counters == model.counters
        counters = model.counters
        ends.append((counters["steps"], counters["epochs"], content_digest(reader)))
    return ends


def test_a_stop_on_one_rank_ends_a_fit_on_all_after_the_same_step(tmp_path: Path) -> None:
    (one,) = ranks_of(stopped, 1, str(tmp_path / "one"))
    assert [end[:2] for end in one] == [(3, 0), (8, 1), (11, 1)]
    assert ranks_of(stopped, 2, str(tmp_path / "two")) == [one, one]


# --- a rank that makes no call --------------------------------------------------------------------


def absent(rank: int, how: str) -> str:
    """Learn two steps; `rank` then stands still, or is gone. Return the error of the others."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = "3"
    if how == "still beside a group of the program":
        torch.distributed.init_process_group("gloo")  # which waits for 30 minutes
    model = model_of()
    model.step(batch())
    if os.environ["RANK"] == str(rank):
        if how.startswith("still"):
            time.sleep(8)
        return ""
    return error_of(lambda: model.step(batch()))


@pytest.mark.parametrize(
    ("ranks", "rank", "how"),
    [
        (2, 1, "still beside a group of the program"),
        pytest.param(4, 2, "still on two hosts", marks=pytest.mark.soak),
        pytest.param(4, 1, "gone from two hosts", marks=pytest.mark.soak),
        pytest.param(2, 1, "still", marks=pytest.mark.soak),
        *[
            pytest.param(3, rank, how, marks=pytest.mark.soak)
            for rank in range(3)
            for how in ("still", "gone")
        ],
    ],
)
def test_a_rank_that_is_lost_is_named_with_the_last_call_of_all(
    ranks: int, rank: int, how: str
) -> None:
    found = ranks_of(absent, ranks, rank, how, host_ranks=2 if "two hosts" in how else 1)
    for number, error in enumerate(found):
        if number != rank:
            lost = rf"step 2, map: the connection to rank {rank} was lost, got .*"
            assert re.match(rf"RankLost: ranks: rank {number} in {lost}", error), error
            assert "All ranks were last seen in step 1, map. " in error


def left(folder: str) -> list[str]:
    """Leave a step by an error of the network: on all ranks, and then on the first alone."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = "3"
    model = model_of()
    model.step(batch())
    found = []
    for is_here in (True, os.environ["RANK"] == "0"):
        with (
            patch.object(model.network, "forward", fail) if is_here else nullcontext(),
            suppress(OSError),
        ):
            found.append(error_of(lambda: model.step(batch())))
        found.append(error_of(lambda: model.save(f"{folder}/saved")))
    return found


def fail(batch: Any) -> Any:
    raise OSError("of the network")


def test_an_error_of_the_network_leaves_a_call_that_others_do_not_take_for_theirs(
    tmp_path: Path,
) -> None:
    """Its messages have sizes of their own: one that is too long would end a process."""
    first, second = ranks_of(left, 2, str(tmp_path))
    assert first[0] == second[0] == "no error"
    assert first[1].startswith("RankLost: ")
    assert second[1].startswith("RankLost: ranks: rank 1 in step 2, exchange: ")


# --- a rank that leaves a call by an error, and lives on -------------------------------------------


def interrupt(run: Any) -> None:
    if run.step == 3:
        raise KeyboardInterrupt("by hand")


def divide(run: Any) -> None:
    print(1 // (3 - run.step))


def bad_rows() -> Iterator[hb.Batch]:
    yield from [batch(), batch()]
    raise hb.errors.DataError("row 33: bad")


def failing(model: hb.RecModel, call: Callable[[], Any]) -> None:
    with patch.object(model.network, "forward", fail):
        call()


FAILURES: dict[str, tuple[str, Callable[[hb.RecModel], Any], Callable[[hb.RecModel], Any]]] = {
    "step": (
        "OSError: of the network",
        lambda model: failing(model, lambda: model.step(batch())),
        lambda model: model.step(batch()),
    ),
    "evaluate": (
        "OSError: of the network",
        lambda model: failing(model, lambda: model.evaluate([batch()])),
        lambda model: model.evaluate([batch()]),
    ),
    "bad row": (
        "DataError: row 33: bad",
        lambda model: model.fit(bad_rows(), progress=False),
        lambda model: model.fit(iter([batch()] * 8), progress=False),
    ),
    "callback": (
        "ZeroDivisionError: integer division or modulo by zero",
        lambda model: model.fit(
            dataset(), callbacks=SimpleNamespace(on_step_end=divide), progress=False
        ),
        lambda model: model.fit(
            dataset(), callbacks=SimpleNamespace(on_step_end=id), progress=False
        ),
    ),
    "interrupt": (
        "KeyboardInterrupt: by hand",
        lambda model: model.fit(
            hb.Ahead(dataset(), depth=2), callbacks=SimpleNamespace(on_step_end=interrupt),
            progress=False,
        ),
        lambda model: model.fit(
            hb.Ahead(dataset(), depth=2), callbacks=SimpleNamespace(on_step_end=id), progress=False
        ),
    ),
}  # fmt: skip
"""The error of a rank, the call in which it meets it, and the same call on the others."""


def alone(name: str, rank: int, folder: str) -> tuple[str, float]:
    """Let one rank leave a call by an error; all live on until the others have ended theirs.

    Return the error, and the seconds until it was raised.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    model = model_of()
    began = time.monotonic()
    _, fails, goes_on = FAILURES[name]
    is_here = os.environ["RANK"] == str(rank)
    error = ""
    try:
        (fails if is_here else goes_on)(model)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - began
    (Path(folder) / os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    return error, seconds


@pytest.mark.parametrize(
    ("name", "rank", "ranks"),
    [
        ("step", 0, 2),
        ("evaluate", 1, 2),
        ("bad row", 0, 2),
        ("callback", 1, 2),
        ("interrupt", 0, 2),
        ("step", 1, 3),
        *[pytest.param(name, 0, 3, marks=pytest.mark.soak) for name in FAILURES],
    ],
)
def test_an_error_of_one_rank_that_lives_on_ends_the_others_at_once_by_its_name(
    name: str, rank: int, ranks: int, tmp_path: Path
) -> None:
    own = FAILURES[name][0]
    for number, (error, seconds) in enumerate(ranks_of(alone, ranks, name, rank, str(tmp_path))):
        if number == rank:
            assert error == own
        else:
            lost = rf"RankLost: ranks: rank {number} in [^:]*: rank {rank} has left \w+ by an error"
            assert re.match(f"{lost}, got {own}. All ", error), error
            assert seconds < TIMEOUT / 2


# --- a rank that fails before the first message of a call -----------------------------------------


NUM_CALLS = 16


def calls_and_mistakes(folder: str) -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """Each call by its name, and the same call with a value that is wrong."""
    model = model_of()
    model.save(f"{folder}/saved")
    network = hb.models.DCNv2(SCHEMA, hb.make_tables(SCHEMA, 2), hidden=(4,))
    sparse = hb.SparseOptimizer(network)
    loop = hb.shard(network, torch.optim.SGD(hb.dense_parameters(network), 0.1), sparse)
    backward = functools.partial(loop.backward, batch(), lambda part: network(part).mean())
    backward()
    wrong: dict[str, Callable[[], Any]] = {
        "fit": lambda: model.fit([batch()], epochs="two"),
        "online_train": lambda: model.online_train(3),
        "step": lambda: model.step(None),
        "evaluate": lambda: model.evaluate(3),
        "predict": lambda: model.predict(3),
        "save": lambda: model.save(3),
        "restore": lambda: model.restore(3),
        "warm_start": lambda: model.warm_start(3),
        "export": lambda: model.export(state=3),  # type: ignore[call-arg]  # without a path
        "load": lambda: hb.load(3),
        "RecModel": lambda: hb.RecModel(network, "no loss", grains=4),
        "shard": lambda: hb.shard(network, grains=3),
        "Evaluation": lambda: hb.Evaluation(None),
        "backward": lambda: loop.backward(3, id),
        "clip_gradients": lambda: loop.clip_gradients(-1.0),
        "remove": lambda: model.tables["user"].remove("one"),
    }
    calls: dict[str, Callable[..., Any]] = {
        **calls_of(model, folder),
        "Evaluation": functools.partial(hb.Evaluation, model),
        "backward": backward,
        "clip_gradients": functools.partial(loop.clip_gradients, 1.0),
        "remove": functools.partial(model.tables["user"].remove, [1, 2]),
    }
    return {name: (call, wrong[name]) for name, call in calls.items()}


def fails_first(folder: str, rank: int, way: str, step: int) -> dict[str, End]:
    numbers = range(0, NUM_CALLS, step)
    return ends_of(lambda: calls_and_mistakes(folder), numbers, folder, rank, way)


@pytest.mark.parametrize(
    ("rank", "way", "step"),
    [
        (0, "value", 1),
        (1, "other", 5),
        pytest.param(0, "other", 1, marks=pytest.mark.soak),
        pytest.param(1, "interrupt", 1, marks=pytest.mark.soak),
    ],
)
def test_an_error_before_the_first_message_of_a_call_ends_the_others_at_once(
    rank: int, way: str, step: int, tmp_path: Path
) -> None:
    """Also where these wait in another call; `step`: every how manyth call is made."""
    ends = ranks_of(fails_first, 2, str(tmp_path), rank, way, step)
    assert len(ends[rank]) == len(range(0, NUM_CALLS, step))
    check_ends(ends, rank)


def fails_and_returns(folder: str) -> list[str]:
    """Fail in a call before its first message, and make it again: all ranks, or the first alone.

    The first rank is late, either before the call that works or in it.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    is_first = os.environ["RANK"] == "0"
    model = model_of()
    found = []
    for is_here, late in ((True, "before"), (is_first, "within"), (True, "within")):
        found.append(error_of(lambda: model.step(None)) if is_here else "")
        if is_first and late == "before":
            time.sleep(2)
        slow = late == "within" and is_first
        with patch.object(model.network, "forward", slowly(model)) if slow else nullcontext():
            found.append(error_of(lambda: model.step(batch())))
    return found


def slowly(model: hb.RecModel) -> Callable[[Any], Any]:
    forward = model.network.forward

    def wait_and_compute(batch: Any) -> Any:
        time.sleep(0.5)  # in each of two grains
        return forward(batch)

    return wait_and_compute


def test_ranks_wait_for_one_that_makes_the_call_again(tmp_path: Path) -> None:
    first, second = ranks_of(fails_and_returns, 2, str(tmp_path))
    refused = first[0]
    assert refused.startswith("ConfigError: step: not a batch")
    assert first == [refused, "no error"] * 3
    assert second == [refused, "no error", "", "no error", refused, "no error"]


def fails_at_the_end(folder: str, how: str) -> str:
    """Let the first rank have an error at the end of a call, and return how the next one ends.

    `how`: what becomes of the error: "caught", and the first rank comes late; "uncaught", and its
    process lives on; or the first rank is "away" until the others have waited for too long.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = "2" if how == "away" else str(TIMEOUT)
    model = model_of()
    is_first = os.environ["RANK"] == "0"
    end = model.learner.end

    def end_and_fail() -> Any:
        end()
        print(1 // 0)

    try:
        with patch.object(model.learner, "end", end_and_fail) if is_first else nullcontext():
            model.fit([batch()], progress=False)
    except ZeroDivisionError as error:
        if how == "uncaught":
            sys.excepthook(type(error), error, error.__traceback__)
        time.sleep(2 if how == "caught" else 4)
        if how != "caught":
            return ""
    return error_of(lambda: model.save(f"{folder}/saved"))


REASON = "has left {} by an error, got ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("caught", "no error"),
        ("uncaught", f"rank 0 {REASON.format('the program')}. All"),
        ("away", f"rank 0 was lost, got .*; rank 0 {REASON.format('fit')}, in the call before. "),
    ],
)
def test_ranks_wait_for_one_that_has_left_the_call_before_unless_it_left_the_program(
    how: str, expected: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    _, error = ranks_of(fails_at_the_end, 2, str(tmp_path), how)
    assert re.search(expected, error), error
    assert time.monotonic() - began < TIMEOUT / 2
