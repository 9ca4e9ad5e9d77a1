# SPDX-License-Identifier: Apache-2.0
"""Batches of Rec SDK's door: ids of any shape, and evaluations between the steps of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.errors import DataError, RowShapeError

pytestmark = pytest.mark.usefixtures("rec_sdk")

USER = "user"
DIM = 3


class Program:
    """Steps 1 to 8 over batches that are dicts, with one table."""

    def __init__(
        self,
        batches: Iterable[Any],
        evaluation: Iterable[Any] = (),
        hook: dict[str, Any] | None = None,
        thresholds: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        mx.init(use_dynamic_expansion=True, **options)
        factory = mx.optimizers.adagrad_by_addr.create_hash_optimizer_by_address
        self.optimizer = factory(0.05)
        self.spec = mx.FeatureSpec(USER, **thresholds or {})
        clock = mx.FeatureSpec("seconds", is_timestamp=True)
        specs = [self.spec] if thresholds is None else [clock, self.spec]
        self.train = mx.get_asc_insert_func(specs).over(batches)
        insert = mx.get_asc_insert_func([self.spec], is_training=False)
        self.evaluation = insert.over(evaluation)
        self.table = mx.create_table(torch.int64, DIM, USER, hb.Normal(std=0.1), 100)
        self.hook = None if hook is None else mx.EvictHook(True, **hook)
        mx.start_asc_pipeline()

    def look_up(self, batch: Any, *, is_train: bool = True) -> Tensor:
        return mx.sparse_lookup(self.table, self.spec, batch=batch, is_train=is_train)

    def learn(self, batch: Any) -> Tensor:
        rows = self.look_up(batch)
        emb = mx.get_collection("ASCEND_SPARSE_LOOKUP_LOCAL_EMB")
        addr = mx.get_collection("ASCEND_SPARSE_LOOKUP_ID_OFFSET")
        grads = torch.autograd.grad(rows.square().sum() + rows.sum(), emb)
        self.optimizer.apply_gradients([grads, addr])
        return rows

    def evaluate(self) -> None:
        with torch.no_grad():
            for batch in self.evaluation:
                self.look_up(batch, is_train=False)
                if self.hook is not None:
                    self.hook.after_run()

    def state(self) -> tuple[Any, Any, Any]:
        """Return every row with its count and time, and the statistics."""
        own = framework.current().started("test").tables[USER]
        return bits_of(own.export()), own.stats, own.scalars()


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2), (0, 2), (2, 0), (2, 1, 3)])
def test_rows_have_the_shape_of_the_ids(shape: tuple[int, ...]) -> None:
    program = Program([{USER: torch.ones(shape, dtype=torch.int64)}])
    for batch in program.train:
        assert program.learn(batch).shape == (*shape, DIM)


def test_texts_of_a_batch_stay_as_they_are() -> None:
    program = Program([{USER: [1, 2], "title": ["Alien", "Brazil"]}])
    for batch in program.train:
        assert program.learn(batch).shape == (2, DIM)
        assert batch["title"] == ["Alien", "Brazil"]


@pytest.mark.parametrize("ids", [["a", "b"], [None, 1], [0.5, 1.0]])
def test_ids_that_are_no_integers_are_errors(ids: list[Any]) -> None:
    program = Program([{USER: ids}])
    with pytest.raises(RowShapeError, match=r"feature 'user/user': .*integers"):
        next(iter(program.train))


# --- evaluation between the steps -----------------------------------------------------------------


def steps() -> list[dict[str, Tensor]]:
    ids = torch.tensor([[1, 1, 2], [2, 3, 3], [4, 4, 4], [1, 5, 5], [4, 5, 6], [6, 6, 7]])
    return [{USER: row, "seconds": torch.tensor(10.0 * at)} for at, row in enumerate(ids)]


def test_an_evaluation_within_a_step_changes_nothing() -> None:
    """An EvictHook removes the same rows, whether or not an evaluation comes before it."""
    ended = []
    for evaluates in (False, True):
        program = Program(
            steps(),
            steps()[::-1],
            hook={"evict_step_interval": 2},
            thresholds={"access_threshold": 2, "eviction_threshold": 15},
            train_steps=1,
        )
        for step, batch in enumerate(program.train, start=1):
            program.learn(batch)
            before = program.state()
            if evaluates:
                program.evaluate()
            assert program.state() == before
            assert program.hook is not None
            program.hook.after_run(global_step=step)
        ended.append(program.state())
        framework.end()
    assert ended[0] == ended[1]
    assert ended[0][1]["evicted"] > 0


def test_an_evaluation_while_later_ids_are_mapped_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(steps(), steps())
    batches = iter(program.train)
    program.learn(next(batches))
    program.learn(next(batches))
    progress = framework.current().started("test").progress
    progress._cleared = 2  # as if ids of step 3 were mapped, which the mapping thread decides
    program.evaluate()
    assert caplog.text.count("evaluation after training step 2") == 1
    assert "init(train_steps=N)" in caplog.text


# --- times ----------------------------------------------------------------------------------------


def learned_until(seconds: Any) -> int | None:
    """Learn one batch of two ids; return its newest time in microseconds."""
    program = Program(
        [{USER: torch.tensor([1, 2]), "seconds": seconds}],
        thresholds={"access_threshold": 0, "eviction_threshold": 15},
    )
    for batch in program.train:
        program.learn(batch)
    return framework.current().started("test").progress.now


@pytest.mark.parametrize(
    "seconds",
    [
        1_700_000_000,
        torch.tensor(1_700_000_000),
        torch.tensor([1_700_000_000, 1_600_000_000]),
        torch.tensor([[1_700_000_000.0], [1_600_000_000.0]], dtype=torch.float64),
    ],
)
def test_times_are_seconds(seconds: Any) -> None:
    assert learned_until(seconds) == 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (torch.tensor(1_700_000_000_000), "seconds since 1970 are needed, got 1700000000000"),
        (torch.tensor(1_700_000_000_000_000), "Divide milliseconds by 1e3 and microseconds"),
        (torch.tensor(float("nan")), "fill what is missing"),
        (torch.tensor([1.0, float("inf")]), "seconds since 1970 are needed, got inf"),
        ("2026-01-01", "seconds since 1970 are needed, got '2026-01-01'"),
        (torch.tensor(1_700_000_000.0), "float32 holds no exact seconds"),
    ],
)
def test_times_that_are_no_seconds_are_errors(seconds: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        learned_until(seconds)


# --- after the end --------------------------------------------------------------------------------


def test_parts_of_a_terminated_program_are_refused() -> None:
    """An optimizer of a program before would update nothing in the next one."""
    before = Program(steps(), hook={"evict_step_interval": 1})
    saver = mx.Saver()
    mx.terminate_config_initializer()
    Program(steps())
    hook = before.hook
    assert hook is not None
    for call in (before.optimizer.step, hook.after_run, lambda: saver.save("never")):
        with pytest.raises(OSError, match="its framework is terminated"):
            call()
