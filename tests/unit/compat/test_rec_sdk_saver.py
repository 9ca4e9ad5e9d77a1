# SPDX-License-Identifier: Apache-2.0
"""Saving, restoring, warm start and eviction of Rec SDK's door."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.saver.sparse import export
from hotbed.embedding.changed_rows import ChangeReader
from hotbed.errors import ConfigError, HotbedError, PersistError
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

pytestmark = pytest.mark.usefixtures("rec_sdk")

STEPS = 12
BATCH = 8
SETTINGS: dict[str, Any] = {
    "batch_size": BATCH,
    "columns": {},
    "label": {},
    "dense": {"lr": 0.01},
    "others": lambda optimizer: [],
    "table": {},
    "default": None,
}


class Program:
    """The eight steps over a small stream, up to step 8; `run` is its loop.

    Args:
        thresholds: of its one feature.
        hook: keywords of the EvictHook; None = no hook.
        dim: of the table.
        table: the name of the table.
        future: number of an event whose time lies ahead; None = none does.
        changed: other settings: `batch_size`, raw columns by name, keywords of the label, the dense
            optimizer, the scheduler, keywords of the table, and the value of absent ids.
        options: of `init`.
    """

    def __init__(
        self,
        thresholds: dict[str, int] | None = None,
        hook: dict[str, Any] | None = None,
        dim: int = 2,
        table: str = "user",
        future: int | None = None,
        changed: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        settings = {**SETTINGS, **(changed or {})}
        mx.init(**options)
        self.owner = framework.current()
        self.sparse = mx.optimizers.lazy_adam.create_hash_optimizer(0.05)
        self.spec = mx.FeatureSpec("user", table_name=table, **thresholds or {})
        clock = mx.FeatureSpec("t", is_timestamp=True)
        columns = settings["columns"]
        label = hb.Label("y", **settings["label"])
        ids = [hb.Id("user", column=columns.get("user")), hb.Id("item")]
        schema = hb.Schema([label, hb.Time("t", unit="s"), *ids])
        rows = hb.sources.Memory(events(future))
        self.dataset = hb.Dataset(rows, schema, settings["batch_size"])
        self.batches = self.dataset.map(mx.get_asc_insert_func([clock, self.spec]))
        self.table = mx.create_table(
            torch.int64, dim, table, hb.Normal(std=0.1), 1000, **settings["table"]
        )
        self.default = settings["default"]
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Dropout(0.3), nn.Linear(dim, 1))
        mx.get_dense_and_sparse_variable(self.net)
        self.dense = torch.optim.Adam(self.net.parameters(), **settings["dense"])
        self.hook = None if hook is None else mx.EvictHook(True, **hook)
        self.saver = mx.Saver([self.net, self.dense, *settings["others"](self.dense)])
        self.step = 0
        mx.start_asc_pipeline()
        self.rows = self.owner.started("test").tables[table]

    def forward(self, batch: Any, *, is_train: bool = True) -> torch.Tensor:
        rows = mx.sparse_lookup(
            self.table,
            self.spec,
            batch=batch,
            is_train=is_train,
            serving_default_value=self.default,
        )
        scores: torch.Tensor = self.net(rows).squeeze(1)
        return scores

    def run(self, to: int = STEPS) -> Iterator[int]:
        """Learn, and yield the number of each step that is done."""
        for step, batch in zip(range(self.step + 1, to + 1), self.batches, strict=False):
            self.learn(batch)
            if self.hook is not None:
                self.hook.after_run(global_step=step)
            self.step = step
            yield step

    def learn(self, batch: Any) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.forward(batch), batch.labels["y"]
        )
        self.dense.zero_grad()
        loss.backward()
        self.sparse.step()
        self.dense.step()

    def restore(self, path: Any) -> int:
        self.step = self.saver.restore(path)
        return self.step

    def bits(self) -> tuple[str, list[list[float]]]:
        """All that was learned."""
        own = [parameter.detach().flatten().tolist() for parameter in self.net.parameters()]
        return hb.checkpoints.content_digest({"t": self.rows}), own


def events(future: int | None) -> pa.Table:
    rng = np.random.default_rng(3)
    count = STEPS * BATCH
    return pa.table(
        {
            "user": rng.integers(0, 12, count) + np.arange(count) // 10,
            "item": np.arange(count) % 7,
            "y": rng.integers(0, 2, count),
            "t": np.where(np.arange(count) == future, count, np.arange(count)),
        }
    )


def whole(**keywords: Any) -> tuple[str, list[list[float]]]:
    """What a program learns that is neither saved nor stopped; the one before is ended."""
    mx.terminate_config_initializer()
    program = Program(**keywords)
    list(program.run())
    return program.bits()


INCREMENTAL = {
    "is_incremental_checkpoint": True,
    "save_checkpoint_due_time": 60,
    "save_delta_checkpoints_secs": 20,
}
AGING: dict[str, Any] = {
    "thresholds": {"access_threshold": 2, "eviction_threshold": 30},
    "hook": {"evict_step_interval": 3},
}


# --- save and restore -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [4, 8])
def test_a_program_resumes_from_any_step_that_was_saved(step: int, tmp_path: Path) -> None:
    saving = Program(**AGING, save_steps=4)
    for number in saving.run():
        if number % 4 == 0:
            assert saving.saver.save(tmp_path, global_step=number) == f"{tmp_path}-{number}"
    mx.terminate_config_initializer()
    assert mx.latest_checkpoint(tmp_path) == f"{tmp_path}-12"
    resumed = Program(**AGING)
    assert resumed.restore(f"{tmp_path}-{step}") == step
    assert list(resumed.run()) == list(range(step + 1, STEPS + 1))
    assert resumed.bits() == saving.bits() == whole(**AGING)


def test_a_state_holds_the_newest_time(tmp_path: Path) -> None:
    """An event of the future makes older ones stale, also after a restoration."""
    keywords: dict[str, Any] = {**AGING, "hook": {"evict_step_interval": 5}, "future": 20}
    program = Program(**keywords, save_steps=4)
    for number in program.run():
        if number == 4:
            program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    resumed = Program(**keywords)
    resumed.restore(tmp_path)
    list(resumed.run())
    assert resumed.bits() == program.bits()


def test_restore_takes_the_newest_state_or_the_version_of_init(tmp_path: Path) -> None:
    program = Program(save_steps=3)
    for number in program.run():
        if number % 3 == 0:
            program.saver.save(tmp_path, global_step=number)
    mx.terminate_config_initializer()
    # max_to_keep is 3
    for options, version in (({}, 12), ({"restore_model_version": 6}, 6)):
        other = Program(**options)
        assert other.restore(tmp_path) == version
        mx.terminate_config_initializer()
    other = Program(restore_model_version=3)
    with pytest.raises(ValueError, match=r"got 3\. Choose one of: 6, 9, 12"):
        other.restore(tmp_path)
    with pytest.raises(ValueError, match=r"Choose one of"):
        other.restore(f"{tmp_path}-7")
    with pytest.raises(ValueError, match="other-7: no checkpoint lies at this path"):
        other.restore(tmp_path / "other-7")
    assert mx.latest_checkpoint(tmp_path / "other") is None


def test_without_save_steps_each_step_may_be_saved(tmp_path: Path, caplog: Any) -> None:
    program = Program()
    with caplog.at_level(logging.INFO, logger="hotbed.compat.mx_rec"):
        for number in program.run():
            if number in (1, 2, 7):
                program.saver.save(tmp_path)
    assert caplog.text.count("no ids are mapped ahead; give init(save_steps=N)") == 1
    mx.terminate_config_initializer()
    resumed = Program()
    assert resumed.restore(tmp_path) == 7
    list(resumed.run())
    assert resumed.bits() == program.bits() == whole()


def test_a_step_that_is_not_done_is_not_saved(tmp_path: Path) -> None:
    program = Program(**AGING, save_steps=5)
    save = program.saver.save
    batches = iter(program.batches)
    batch = next(batches)
    loss = program.forward(batch).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="1 lookups that wait for their update"):
        save(tmp_path)
    program.sparse.step()
    with pytest.raises(RuntimeError, match=r"did not run after step 1\. Call its after_run"):
        save(tmp_path)
    assert program.hook is not None
    program.hook.after_run(global_step=1)
    deadline = 50
    while not program.owner.started("test").progress.is_ahead and deadline:
        program.learn(next(batches))
        program.hook.after_run()
        deadline -= 1
    with pytest.raises(RuntimeError, match=r"ids of later batches are mapped .*save_steps=N"):
        save(tmp_path)
    assert mx.latest_checkpoint(tmp_path) is None


def test_calls_at_a_wrong_time_are_errors(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Call mx_rec\.init"):
        mx.Saver()
    mx.init()
    with pytest.raises(RuntimeError, match="step 8"):
        mx.Saver().save(tmp_path)
    with pytest.raises(RuntimeError, match="step 8"):
        mx.Saver().restore(tmp_path)
    mx.terminate_config_initializer()
    program = Program(if_load=True)
    with pytest.raises(RuntimeError, match=r"init\(if_load=True\) .* Call Saver.restore"):
        next(program.run())
    mx.terminate_config_initializer()
    program = Program(save_steps=1)
    next(program.run())
    program.saver.save(tmp_path)
    with pytest.raises(RuntimeError, match="before the first batch, got step 1"):
        program.restore(tmp_path)
    with pytest.raises(RuntimeError, match="before the first batch, got step 1"):
        mx.warm_start(str(tmp_path))
    with pytest.raises(ValueError, match="save_delta needs incremental checkpoints"):
        program.saver.save(tmp_path, save_delta=True)
    with pytest.raises(ValueError, match=r"var_list holds .* got int"):
        mx.Saver([3])
    with pytest.raises(ValueError, match="the first argument is the path, got NoneType"):
        program.saver.save(None)


def test_bases_and_deltas_follow_the_seconds_of_init(tmp_path: Path) -> None:
    program = Program(**AGING, **INCREMENTAL, save_steps=2)
    seconds = 0.0
    program.owner.clock.read = lambda: seconds
    kinds = []
    digests = {}
    for number in program.run():
        if number % 2 == 0:
            seconds += 25
            program.saver.save(tmp_path, global_step=number)
            kinds.append(hb.checkpoints.open_checkpoint(tmp_path).manifest.kind)
            digests[number] = program.bits()
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]
    program.saver.save(tmp_path, save_delta=False)
    assert hb.checkpoints.open_checkpoint(tmp_path).manifest.kind == "full"
    mx.terminate_config_initializer()
    for number in digests:  # each delta holds what its step needs, evicted rows too
        resumed = Program(**AGING, **INCREMENTAL)
        assert resumed.restore(f"{tmp_path}-{number}") == number
        assert resumed.bits() == digests[number]
        mx.terminate_config_initializer()


@pytest.mark.parametrize("killed", [(2,), (3, 8), (1, 2, 5, 9, 11)])
def test_a_program_that_starts_again_saves_what_changed_since_its_state(
    killed: tuple[int, ...], tmp_path: Path
) -> None:
    """States, bases and deltas are those of a program without a stop; a kill leaves no more."""
    saved: dict[str, list[Any]] = {"whole": [], "parts": []}
    for name, stops in (("whole", ()), ("parts", killed)):
        for stop in (*stops, STEPS):
            program = Program(**AGING, **INCREMENTAL, save_steps=1)
            if mx.latest_checkpoint(tmp_path / name) is not None:
                program.restore(tmp_path / name)
            for number in program.run(stop):
                program.owner.clock.read = lambda now=number: 1e6 + 11.0 * now
                if number != stop or stop == STEPS:  # else it is killed before this save
                    program.saver.save(tmp_path / name, global_step=number)
                    reader = hb.checkpoints.open_checkpoint(tmp_path / name)
                    changed = sum(part.num_rows for part in reader.newest_link.parts("user"))
                    digest = hb.checkpoints.content_digest(reader)
                    saved[name].append((number, reader.manifest.kind, changed, digest))
            mx.terminate_config_initializer()
    assert saved["parts"] == saved["whole"]
    assert [kind for _, kind, *_ in saved["whole"]].count("full") == 2


@pytest.mark.parametrize(
    "reason", ["an older state", "other settings", "a save elsewhere", "a reader of changes"]
)
def test_a_base_comes_first_after_a_restart_where_changes_are_not_known(
    reason: str, tmp_path: Path
) -> None:
    program = Program(**AGING, **INCREMENTAL, save_steps=1)
    for number in program.run(5):
        program.saver.save(tmp_path, global_step=number)
    mx.terminate_config_initializer()
    settings = dict(AGING)
    if reason == "other settings":
        settings["thresholds"] = {"access_threshold": 2, "eviction_threshold": 20}
    program = Program(**settings, **INCREMENTAL, save_steps=1)
    program.restore(f"{tmp_path}-3" if reason == "an older state" else tmp_path)
    for number in program.run(7):
        if reason == "a save elsewhere" and number == 6:
            mx.Saver([program.net, program.dense]).save(f"{tmp_path}/elsewhere")
        elif reason == "a reader of changes" and number == 6:
            ChangeReader(program.rows).all()
        elif number == 7:
            program.saver.save(tmp_path)
    assert hb.checkpoints.open_checkpoint(tmp_path).manifest.kind == "full"
    mx.terminate_config_initializer()
    resumed = Program(**settings)
    resumed.restore(tmp_path)
    assert resumed.bits() == program.bits()


def test_saves_in_two_places_each_hold_everything(tmp_path: Path) -> None:
    """What one place saved is no change any more: a delta of the other would lack it."""
    program = Program(save_steps=1, **INCREMENTAL)
    other = mx.Saver([program.net, program.dense])
    digests = {}
    for number in program.run():
        name, saver = [("a", program.saver), ("b", other), ("c", program.saver)][number % 3]
        saver.save(tmp_path / name, global_step=number)
        digests[f"{tmp_path / name}-{number}"] = program.bits()
    mx.terminate_config_initializer()
    for name in "abc":
        resumed = Program()
        path = mx.latest_checkpoint(tmp_path / name)
        assert path is not None
        resumed.restore(path)
        assert resumed.bits() == digests[path]
        mx.terminate_config_initializer()


def test_a_failed_save_keeps_the_state_before(tmp_path: Path, monkeypatch: Any) -> None:
    program = Program(save_steps=1, **INCREMENTAL)
    for number in program.run(5):
        if number == 3:
            with monkeypatch.context() as patch:
                patch.setattr("os.rename", _refuse)
                with pytest.raises(PersistError):
                    program.saver.save(tmp_path)
            assert mx.latest_checkpoint(tmp_path) == f"{tmp_path}-2"
        elif number != 4:
            program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    resumed = Program()
    resumed.restore(tmp_path)
    assert resumed.bits() == program.bits()


def _refuse(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_schedulers_and_rates_come_back(tmp_path: Path) -> None:
    program = Program(save_steps=1)
    scheduler = torch.optim.lr_scheduler.StepLR(program.dense, 2, 0.5)
    saver = mx.Saver([program.net, program.dense, scheduler])
    for _ in program.run(5):
        scheduler.step()
        program.sparse.learning_rate *= 0.9
    saver.save(tmp_path)
    mx.terminate_config_initializer()
    resumed = Program()
    scheduler = torch.optim.lr_scheduler.StepLR(resumed.dense, 2, 0.5)
    mx.Saver([resumed.net, resumed.dense, scheduler]).restore(tmp_path)
    assert resumed.dense.param_groups[0]["lr"] == program.dense.param_groups[0]["lr"] == 0.0025
    assert scheduler.last_epoch == 5
    assert resumed.sparse.learning_rate == program.sparse.learning_rate


def test_a_program_may_get_a_hook_and_no_optimizer(tmp_path: Path, caplog: Any) -> None:
    """Without `var_list`, the models of step 7 are saved, and no dense optimizer."""
    program = Program(save_steps=1)
    saver = mx.Saver()
    list(program.run(3))
    saver.save(tmp_path)
    mx.terminate_config_initializer()
    resumed = Program(hook={"evict_step_interval": 1})
    with caplog.at_level(logging.INFO, logger="hotbed.compat.mx_rec"):
        assert mx.Saver().restore(tmp_path) == 3
    assert "begins anew after a restoration" in caplog.text
    assert resumed.bits() == program.bits()
    with pytest.raises(PersistError, match=r"0 objects .* got var_list with 1"):
        mx.Saver([resumed.net, torch.optim.lr_scheduler.StepLR(resumed.dense, 1)]).restore(tmp_path)


def test_data_without_a_position_begin_anew_and_it_is_said(tmp_path: Path, caplog: Any) -> None:
    for steps in (2, STEPS):
        program = Program(save_steps=2)
        if steps == STEPS:
            assert program.restore(tmp_path) == 2
        loader = [
            {"user": torch.from_numpy(batch.ids["user"].values), "t": torch.arange(BATCH)}
            for batch in program.dataset
        ]
        batches = program.batches.insert.over(loader[:steps])
        for batch in batches:
            program.forward(batch).sum().backward()
            program.sparse.step()
        program.saver.save(tmp_path)
        mx.terminate_config_initializer()
    assert mx.latest_checkpoint(tmp_path) == f"{tmp_path}-{2 + STEPS}"
    assert "begin anew after step 2" in caplog.text


def test_another_program_is_refused(tmp_path: Path) -> None:
    program = Program(save_steps=1)
    next(program.run())
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    for keywords, text in (({"dim": 3}, "dim"), ({"table": "member"}, "has tables")):
        other = Program(**keywords)
        with pytest.raises(PersistError, match=text):
            other.restore(tmp_path)
        mx.terminate_config_initializer()


def scheduled(kind: Any, *arguments: Any) -> dict[str, Any]:
    return {"others": lambda optimizer: [kind(optimizer, *arguments)]}


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        ({}, {"thresholds": {"index_key": "item"}}, "features is"),
        ({}, {"changed": {"columns": {"user": "item"}}}, "schema.user.column is"),
        ({}, {"changed": {"label": {"threshold": 1}}}, "schema.y.threshold is"),
        (
            {"changed": scheduled(torch.optim.lr_scheduler.StepLR, 2)},
            {"changed": scheduled(torch.optim.lr_scheduler.ExponentialLR, 0.5)},
            "objects is",
        ),
        (
            {"thresholds": {"access_threshold": 2}, "changed": {"default": 0.5}},
            {"thresholds": {"access_threshold": 2}, "changed": {"default": 0.7}},
            "got 0.7 and 0.5",
        ),
    ],
    ids=["feature", "column", "label", "scheduler", "default"],
)
def test_a_program_that_gives_a_state_another_meaning_is_refused(
    before: Any, after: Any, refusal: str, tmp_path: Path
) -> None:
    program = Program(save_steps=2, **before)
    list(zip(range(2), program.run(), strict=False))
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    other = Program(save_steps=2, **after)

    def resume() -> None:
        other.restore(tmp_path)
        next(other.run())

    with pytest.raises(HotbedError, match=refusal):
        resume()


def test_other_features_may_be_allowed(tmp_path: Path) -> None:
    program = Program(save_steps=2)
    list(zip(range(2), program.run(), strict=False))
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    other = Program(thresholds={"index_key": "item"})
    other.step = other.saver.restore(tmp_path, allow=["features"])
    next(other.run())


def test_data_of_another_kind_may_be_allowed_and_begin_anew(tmp_path: Path, caplog: Any) -> None:
    program = Program(save_steps=2)
    list(zip(range(2), program.run(), strict=False))
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    other = Program()
    batches = list(other.dataset)
    other.batches = framework.current().inserts[0].over(batches)
    other.step = other.saver.restore(tmp_path, allow=["schema.*", "order.*"])
    next(other.run())
    assert "the training data have no position: they begin anew after step 2" in caplog.text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"changed": {"batch_size": 4}}, "run.batch_size was 8, resumed with 4"),
        ({"hook": {"evict_step_interval": 3}}, "run.evict_hooks was []"),
        ({"changed": {"dense": {"lr": 0.5}}}, "dense_0.lr was 0.01, resumed with 0.5"),
        ({"changed": {"dense": {"lr": 0.01, "eps": 0.5}}}, "dense_0.eps stays 1e-08"),
        (
            {
                "changed": {
                    "table": {"padding_keys": [3], "padding_keys_mask": True, "padding_keys_len": 1}
                }
            },
            "run.user.padding_keys was []",
        ),
    ],
    ids=["batch", "hook", "rate", "eps", "padding"],
)
def test_a_program_that_learns_otherwise_says_so(
    changes: Any, line: str, tmp_path: Path, caplog: Any
) -> None:
    program = Program(save_steps=2)
    list(zip(range(2), program.run(), strict=False))
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()
    caplog.set_level(logging.INFO)
    other = Program(save_steps=2, **changes)
    other.restore(tmp_path)
    next(other.run())
    assert line in caplog.text
    if "dense" in changes.get("changed", {}):
        assert other.dense.param_groups[0]["lr"] == changes["changed"]["dense"]["lr"]


def test_one_program_at_a_time_writes_a_place(tmp_path: Path) -> None:
    program = Program(save_steps=1)
    next(program.run())
    lock = hb.sources.Journal(tmp_path / "journal")
    with pytest.raises(PersistError, match="another run"):
        program.saver.save(tmp_path)
    lock.close()
    program.saver.save(tmp_path)
    mx.terminate_config_initializer()

    lock = hb.sources.Journal(tmp_path / "journal")
    reading = Program(hook={"evict_time_interval": 60})
    assert reading.restore(tmp_path) == 1
    evaluation = reading.dataset.map(mx.get_asc_insert_func([reading.spec], is_training=False))
    assert len([reading.forward(batch, is_train=False) for batch in evaluation]) == STEPS
    with pytest.raises(PersistError, match="another run"):  # its clock would decide otherwise
        next(reading.run())
    lock.close()


def test_an_object_store_is_a_place() -> None:
    pytest.importorskip("fsspec", reason="fsspec absent")
    program = Program(save_steps=4)
    for number in program.run():
        if number == 4:
            program.saver.save("memory://rec_sdk/run", global_step=4)
    mx.terminate_config_initializer()
    resumed = Program()
    assert resumed.restore("memory://rec_sdk/run-4") == 4
    list(resumed.run())
    assert resumed.bits() == program.bits()


# --- the hook that saves --------------------------------------------------------------------------


def test_the_hook_saves_at_steps_and_at_the_end(tmp_path: Path) -> None:
    program = Program()
    hook = mx.CheckpointSaverHook(tmp_path, save_steps=5, saver=program.saver)
    for number in program.run():
        hook.after_run(global_step=number)
        program.saver.wait()  # a save that falls due during another is made after it
    hook.end(STEPS)
    mx.terminate_config_initializer()
    for version in (5, 10, 12):
        resumed = Program()
        assert resumed.restore(f"{tmp_path}-{version}") == version
        list(resumed.run())
        assert resumed.bits() == program.bits() == whole()
        mx.terminate_config_initializer()


@pytest.mark.parametrize(
    ("options", "seconds", "expected"),
    [
        ({}, 30, "3 full, 6 full, 9 full, 12 full"),
        (INCREMENTAL, None, "2 full, 4 delta, 6 delta, 8 full, 10 delta, 12 delta"),
        (INCREMENTAL, 1, "2 full, 4 delta, 6 delta, 8 full, 10 delta, 12 delta"),
    ],
)
def test_the_hook_saves_by_its_seconds_or_by_those_of_init(
    options: Any, seconds: float | None, expected: str, tmp_path: Path
) -> None:
    program = Program(**options, save_steps=1)
    moment = 1000.0
    program.owner.clock.read = lambda: moment
    saver = mx.Saver([program.net, program.dense], max_to_keep=None)
    hook = mx.CheckpointSaverHook(tmp_path, save_secs=seconds, saver=saver)
    saved = []
    for number in program.run():
        before = mx.latest_checkpoint(tmp_path)
        moment += 10.0
        hook.after_run(global_step=number)
        saver.wait()
        if mx.latest_checkpoint(tmp_path) != before:
            manifest = hb.checkpoints.open_checkpoint(tmp_path).manifest
            saved.append(f"{manifest.version} {manifest.kind}")
    assert ", ".join(saved) == expected


def test_the_hook_takes_one_interval() -> None:
    mx.init()
    for keywords in ({}, {"save_secs": 1.0, "save_steps": 1}):
        with pytest.raises(ValueError, match="one of save_secs and save_steps"):
            mx.CheckpointSaverHook("runs", **keywords)


# --- warm start -----------------------------------------------------------------------------------


def saved_program(path: Path, steps: int, **keywords: Any) -> Program:
    program = Program(save_steps=steps, **keywords)
    list(program.run(steps))
    program.saver.save(path)
    mx.terminate_config_initializer()
    return program


def test_rows_of_the_newest_save_are_exported_as_numpy_files(tmp_path: Path) -> None:
    """As they were saved: the program has learned since."""
    program = Program(save_steps=3)
    with pytest.raises(RuntimeError, match="export: it writes rows that were saved"):
        export()
    list(program.run(3))
    saved = program.saver.save(tmp_path / "films")
    expected = {}
    for batch in program.table.export():
        expected |= dict(zip(batch["id"].to_pylist(), batch["value"].to_pylist(), strict=True))
    list(program.run(6))
    export(["user"])
    file = tmp_path / "sparse-films-3" / "user" / "key-emb.npy"
    rows = np.load(file, allow_pickle=True).item()
    assert {key: row.tolist() for key, row in rows.items()} == expected
    with pytest.raises(ConfigError, match=r"no such table, got 'usr'. Did you mean 'user'"):
        export(table_list=["usr"])
    mx.terminate_config_initializer()
    again = Program(save_steps=3)
    again.restore(saved)
    file.unlink()
    export()
    assert file.exists()


@pytest.mark.parametrize("names", [".*", "user", "us", ["user"], ["x", "user|0.*"]])
def test_rows_start_with_those_of_another_program(names: Any, tmp_path: Path) -> None:
    old = saved_program(tmp_path / "old", 6)
    program = Program()
    before = program.net[1].weight.clone()
    settings = mx.WarmStartSettings(str(tmp_path / "old"), names)
    assert mx.warm_start(settings, program.net)[0] == "user"
    ids = np.arange(5, 12)
    np.testing.assert_array_equal(program.rows.lookup(ids), old.rows.lookup(ids))
    is_dense_too = names == ".*"
    assert torch.equal(program.net[1].weight, old.net[1].weight) is is_dense_too
    assert torch.equal(program.net[1].weight, before) is not is_dense_too
    next(program.run())


def test_later_settings_replace_what_earlier_ones_brought(tmp_path: Path) -> None:
    first, second = (
        saved_program(tmp_path / name, steps) for name, steps in (("first", 3), ("second", 9))
    )
    program = Program()
    paths = [str(tmp_path / "first"), str(tmp_path / "second")]
    settings = mx.WarmStartSettings(paths, [".*", ["user"]], None, [{}, {}])
    taken = mx.warm_start(settings, program.net)
    assert taken == ["user", "1.weight", "1.bias"]
    ids = np.arange(5, 12)
    np.testing.assert_array_equal(program.rows.lookup(ids), second.rows.lookup(ids))
    assert torch.equal(program.net[1].weight, first.net[1].weight)
    mx.terminate_config_initializer()
    program = Program()
    mx.warm_start([paths[1], mx.WarmStartSettings(paths[0], "user")], program.net)
    assert torch.equal(program.net[1].weight, second.net[1].weight)


def test_tables_and_parameters_may_have_other_names(tmp_path: Path) -> None:
    old = saved_program(tmp_path, 6, table="member")
    program = Program()
    settings = mx.WarmStartSettings(
        str(tmp_path), ["user", "1.bias"], None, {"user": "member", "1.bias": "1.bias"}
    )
    assert mx.warm_start(settings, program.net) == ["user", "1.bias"]
    ids = np.arange(5, 12)
    np.testing.assert_array_equal(program.rows.lookup(ids), old.rows.lookup(ids))


def test_settings_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    saved_program(tmp_path, 2)
    for arguments in (
        (["a", "b"], ".*"),
        (["a", "b"], ["user"]),
        (["a", "b"], ["user", "x"], None, [{}]),
    ):
        with pytest.raises(ValueError, match="lists have one entry for each of the 2 paths"):
            mx.WarmStartSettings(*arguments)
    with pytest.raises(ValueError, match="var_name_to_vocab_info is not needed"):
        mx.WarmStartSettings("a", ".*", {"user": "vocabulary"})
    program = Program(dim=3)
    with pytest.raises(ValueError, match=r"nothing of these names, got 'item'"):
        mx.warm_start(mx.WarmStartSettings(str(tmp_path), "item"), program.net)
    with pytest.raises(PersistError, match="has dim 3, got dim 2"):
        mx.warm_start(str(tmp_path))
    with pytest.raises(ValueError, match="no checkpoint"):
        mx.warm_start(str(tmp_path / "other"))


# --- the hook that evicts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "steps", "by_seconds"),
    [
        ({"evict_time_interval": None}, [], False),
        ({"evict_time_interval": None, "evict_step_interval": 5}, [5, 10], False),
        ({"evict_time_interval": 100}, [], True),
        ({"evict_time_interval": 100, "evict_step_interval": 10}, [10], True),
    ],
)
def test_either_both_or_no_interval_evicts(
    hook: Any, steps: list[int], by_seconds: bool, monkeypatch: Any
) -> None:
    program = Program(AGING["thresholds"])
    moment = 0.0
    program.owner.clock.read = lambda: moment
    program.hook = mx.EvictHook(True, **hook)
    evicted = spied(monkeypatch)
    for _ in program.run():
        moment += 25.0
    if by_seconds:  # 4 steps take 100 s; ids that are mapped already delay it by two steps
        assert evicted[0] in (4, 5, 6, 7)
        assert set(steps) <= set(evicted)
    else:
        assert evicted == steps


def spied(monkeypatch: Any) -> list[int]:
    """The steps after which evictions begin."""
    evicted: list[int] = []
    begin = EvictionSchedule._begin

    def note(self: Any, step: int, now: int | None) -> None:
        evicted.append(step)
        begin(self, step, now)

    monkeypatch.setattr(EvictionSchedule, "_begin", note)
    return evicted


def test_hooks_act_after_a_step_that_evaluation_followed(tmp_path: Path) -> None:
    program = Program(**AGING, train_steps=1)
    evaluation = program.dataset.map(mx.get_asc_insert_func([program.spec], is_training=False))
    hook = mx.CheckpointSaverHook(tmp_path, save_steps=6, saver=program.saver)
    for step, batch in enumerate(program.batches, 1):
        program.learn(batch)
        program.net.eval()
        for other in evaluation:
            program.forward(other, is_train=False)
        program.net.train()
        assert program.hook is not None
        program.hook.after_run(global_step=step)
        hook.after_run(global_step=step)
        program.saver.wait()
    mx.terminate_config_initializer()
    assert mx.latest_checkpoint(tmp_path) == f"{tmp_path}-12"
    assert program.bits() == whole(**AGING)


def test_evaluation_evicts_nothing_and_says_so_once(caplog: Any, monkeypatch: Any) -> None:
    program = Program(AGING["thresholds"], {"evict_step_interval": 1})
    evicted = spied(monkeypatch)
    assert list(program.run(2)) == [1, 2]
    assert evicted == [1, 2]
    evaluation = program.dataset.map(mx.get_asc_insert_func([program.spec], is_training=False))
    digest = program.bits()
    assert program.hook is not None
    with caplog.at_level(logging.INFO, logger="hotbed.compat.mx_rec"):
        for number, batch in enumerate(evaluation, 1):
            program.forward(batch, is_train=False)
            program.hook.after_run(global_step=number)
    assert evicted == [1, 2]
    assert program.bits() == digest
    assert [record.message for record in caplog.records] == [
        "EvictHook: rows are removed in training only, not in evaluation"
    ]


def test_steps_are_counted_as_the_pipeline_does() -> None:
    program = Program(AGING["thresholds"], {"evict_step_interval": 3})
    for step, batch in enumerate(program.batches):
        program.learn(batch)
        assert program.hook is not None
        with pytest.raises(ConfigError, match=r"training step 1, got global_step=0\. Count"):
            program.hook.after_run(global_step=step)
        break
    for value in (0, 2**31, 1.5):
        with pytest.raises(ValueError, match="evict_time_interval"):
            mx.EvictHook(True, evict_time_interval=value)
        with pytest.raises(ValueError, match="evict_step_interval"):
            mx.EvictHook(True, evict_step_interval=value)


def test_a_resumed_program_evicts_when_the_one_before_did(tmp_path: Path, monkeypatch: Any) -> None:
    """The clock of the life after the kill is another one; decisions before the kill stand."""
    evicted = spied(monkeypatch)
    hook = {"evict_time_interval": 100}
    thresholds = AGING["thresholds"]
    killed = Program(thresholds, save_steps=4)
    moment = 0.0
    killed.owner.clock.read = lambda: moment
    killed.hook = mx.EvictHook(True, **hook)
    for number in killed.run():
        moment += 35.0
        if number == 4:
            killed.saver.save(tmp_path)
    decided = list(evicted)
    assert decided[-1] > 4
    mx.terminate_config_initializer()  # gives the lock back, as a kill does

    resumed = Program(thresholds)
    resumed.owner.clock.read = lambda: 5000.0
    resumed.hook = mx.EvictHook(True, **hook)
    assert resumed.restore(tmp_path) == 4
    assert list(resumed.run())[-1] == STEPS
    assert evicted == decided + [step for step in decided if step > 4]
    assert resumed.bits() == killed.bits()


def test_a_part_may_stand_alone_and_steps_are_integers(tmp_path: Path) -> None:
    program = Program(save_steps=1)
    saver = mx.Saver(program.net)
    assert saver.save(tmp_path, global_step=np.int64(3)) == f"{tmp_path}-3"
    for wrong in (1.5, "3", True):
        with pytest.raises(ConfigError, match="global_step: must be an integer"):
            saver.save(tmp_path, global_step=wrong)


def test_wrong_patterns_of_a_warm_start_are_errors() -> None:
    for wrong in ("(", ["user", "("], 3):
        with pytest.raises(ConfigError, match="vars_to_warm_start holds regular expressions"):
            mx.WarmStartSettings("anywhere", wrong)
