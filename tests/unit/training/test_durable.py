# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: when it saves, what it goes on from, what failures leave. Kills are in
tests/journey/test_kill.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.errors import ConfigError, NonFiniteGradient, PersistError
from hotbed.files import Lock
from hotbed.optim.schedule import Warmup
from hotbed.persist.container.format import Reader, open_checkpoint
from hotbed.persist.state import checkpoint, restoring, saver
from hotbed.persist.state.digest import content_digest
from hotbed.testing import FakeStream
from hotbed.training.callbacks import (
    Checkpoint,
    EarlyStopping,
    Evict,
    LearningRate,
    ReducePlateau,
    Validate,
)


@pytest.fixture
def learn(dataset: Any, network: Any, tmp_path: Path) -> Any:
    """learn(*callbacks, data=…, **keywords): a new model follows 640 events in 10 steps, with a
    Checkpoint last.
    """

    def run(
        *callbacks: Any,
        data: Any = None,
        path: Any = tmp_path / "state",
        save: Any = None,
        **keywords: Any,
    ) -> Any:
        model = hb.RecModel(network(evict=hb.Ttl(seconds=200)), "bce", "adam", {"auc"})
        given = [*callbacks, Checkpoint(path, **(save or {}))]
        torch.manual_seed(1)
        model.online_train(
            dataset(640) if data is None else data, given, progress=False, **keywords
        )
        return model

    return run


def digest(path: Path) -> str:
    return content_digest(open_checkpoint(path))


def kinds(path: Path) -> list[tuple[str, int]]:
    """(kind, step) of the checkpoints in a folder, oldest first."""
    manifests = [state.manifest for state in states(path)]
    return [(manifest.kind, manifest.version) for manifest in manifests]


def states(path: Path) -> list[Reader]:
    """The checkpoints in a folder, oldest first."""
    return [open_checkpoint(folder) for folder in sorted(path.glob("checkpoint-*"))]


def test_a_stream_left_at_any_step_goes_on_to_the_bits_of_one_that_was_not(
    learn: Any, tmp_path: Path
) -> None:
    learn(Evict(step_interval=4), path=tmp_path / "whole")
    for steps in (3, 3, 8, None):
        model = learn(Evict(step_interval=4), path=tmp_path / "parts", max_steps=steps)
    assert model.counters["steps"] == 10
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_callbacks_remember_what_they_saw(learn: Any, dataset: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            Validate(3, dataset(64)),
            ReducePlateau("auc", factor=0.5, min_delta=1.0),
            EarlyStopping("auc", 9),
            LearningRate(Warmup(8)),
        ]

    whole = learn(*callbacks(), path=tmp_path / "whole")
    for steps in (4, 7, None):
        parts = learn(*callbacks(), path=tmp_path / "parts", max_steps=steps)
    rates = [
        [group["lr"] for group in model.learner.sparse.param_groups] for model in (whole, parts)
    ]
    assert rates[0] == rates[1]
    states = [open_checkpoint(tmp_path / name).progress["callbacks"] for name in ("whole", "parts")]
    assert {"validate.0", "reduce_plateau.0", "early_stopping.0", "learning_rate.0"} <= states[
        0
    ].keys()
    assert states[0]["reduce_plateau.0"] == states[1]["reduce_plateau.0"]
    assert states[0]["learning_rate.0"] == states[1]["learning_rate.0"]
    assert states[0]["early_stopping.0"]["best"] == states[1]["early_stopping.0"]["best"]


def test_it_saves_at_the_start_when_due_and_at_the_end_a_full_first_then_changes(
    learn: Any, tmp_path: Path
) -> None:
    learn(save={"every_steps": 2, "full_every": 4, "keep": 9, "wait": True})
    assert kinds(tmp_path / "state") == [
        ("full", 0),
        ("delta", 2),
        ("delta", 4),
        ("delta", 6),
        ("full", 8),
        ("delta", 10),
    ]


def test_a_resumed_stream_goes_on_with_changes_of_the_state_that_it_resumes_from(
    learn: Any, tmp_path: Path
) -> None:
    save = {"every_steps": 2, "full_every": 4, "keep": 9, "wait": True}
    learn(Evict(step_interval=4), path=tmp_path / "whole", save=save)
    for steps in (3, 5, 8, None):
        learn(Evict(step_interval=4), path=tmp_path / "parts", save=save, max_steps=steps)
    assert kinds(tmp_path / "parts") == [
        ("full", 0),
        ("delta", 2),
        ("delta", 3),
        ("delta", 4),
        ("full", 5),  # deltas before a start count
        ("delta", 6),
        ("delta", 8),
        ("delta", 10),
    ]
    parts, whole = (
        {folder.manifest.version: folder for folder in states(tmp_path / name)}
        for name in ("parts", "whole")
    )
    for step, state in whole.items():
        assert content_digest(parts[step]) == content_digest(state)
    for step in (4, 6, 10):  # of two batches at most
        assert parts[step].newest_link.entry("user").parts[0].rows <= 2 * 50
    manifests = [parts[step].manifest for step in sorted(parts)]
    for before, after in itertools.pairwise(manifests):
        assert after.parent == before.digest


def test_a_stream_resumed_by_the_same_model_saves_deltas_again(
    learn: Any, dataset: Any, tmp_path: Path
) -> None:
    model = learn(max_steps=4)
    saves = Checkpoint(tmp_path / "state", every_steps=2, keep=9, wait=True)
    model.online_train(dataset(640), [saves], progress=False, max_steps=8)
    assert kinds(tmp_path / "state")[-2:] == [("delta", 6), ("delta", 8)]


@pytest.mark.parametrize("change", ["policy", "build", "rule"])
def test_a_full_comes_first_where_a_resume_may_change_rows(
    learn: Any, dataset: Any, network: Any, change: str, tmp_path: Path, monkeypatch: Any
) -> None:
    learn(max_steps=4)
    table = {"evict": hb.Ttl(seconds=300 if change == "policy" else 200)}
    table["rule"] = hb.Adagrad(lr=0.2 if change == "rule" else 0.1)
    if change == "build":
        for module in (checkpoint, restoring):
            monkeypatch.setattr(module, "package_version", lambda: "9.9.9")
    model = hb.RecModel(network(**table), "bce", "adam", {"auc"})
    saves = Checkpoint(tmp_path / "state", every_steps=2, keep=9, wait=True)
    model.online_train(dataset(640), [saves], progress=False, max_steps=8)
    assert kinds(tmp_path / "state")[-2:] == [("full", 6), ("delta", 8)]


def test_seconds_are_told_by_the_clock_of_the_run_also_while_idle(
    learn: Any, dataset: Any, tmp_path: Path
) -> None:
    class Clock:
        now = 1000.0

        def on_fit_begin(self, run: Any) -> None:
            run.clock.read = lambda: self.now

        def on_step_end(self, run: Any) -> None:
            self.now += 10.0 if run.step != 5 else -5000.0  # someone sets the clock back

    learn(Clock(), save={"every_seconds": 20.0, "keep": 9, "wait": True})
    assert [step for _, step in kinds(tmp_path / "state")] == [0, 2, 4, 7, 9, 10]


def test_a_save_that_is_due_while_one_is_written_waits_for_it_not_for_training(
    learn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written, write = threading.Event(), saver.write

    def slow(*arguments: Any) -> Any:
        if arguments[1].manifest.version == 2:
            assert written.wait(60)
        return write(*arguments)

    class Release:
        def on_step_end(self, run: Any) -> None:
            if run.step == 7:
                written.set()
                while any(
                    thread.name.startswith("hotbed-saver") for thread in threading.enumerate()
                ):
                    pass

    monkeypatch.setattr(saver, "write", slow)
    learn(Release(), save={"every_steps": 2, "keep": 9})
    steps = [step for _, step in kinds(tmp_path / "state")]
    assert steps[:3] == [0, 2, 7]
    assert steps[-1] == 10


def test_an_eviction_under_way_puts_a_due_save_off(
    learn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "hotbed.training.decisions.checkpoint.sweeping",
        lambda run: run if 2 <= run.step < 5 else None,
    )
    learn(save={"every_steps": 2, "keep": 9, "wait": True})
    assert [step for _, step in kinds(tmp_path / "state")] == [0, 5, 6, 8, 10]
    monkeypatch.setattr("hotbed.training.decisions.checkpoint.PATIENCE", 2)
    learn(path=tmp_path / "impatient", save={"every_steps": 2, "keep": 9, "wait": True})
    assert [step for _, step in kinds(tmp_path / "impatient")][:3] == [0, 3, 5]


@pytest.mark.parametrize(
    "evict",
    [
        Evict(seconds_interval=5.0, clock="wall"),  # begins while the stream is idle
        # begins at the last step, and is not through when the stream falls idle
        Evict(step_interval=10),
    ],
)
def test_idle_stream_saves_when_due_also_while_an_eviction_is_under_way(
    evict: Evict, learn: Any, world: Any, tmp_path: Path
) -> None:
    ticks: list[bool] = []

    class Idle:
        now = 1000.0

        def on_fit_begin(self, run: Any) -> None:
            run.clock.read = lambda: self.now

        def on_idle(self, run: Any) -> None:
            self.now += 4.0
            ticks.append(evict.schedule.sweeping)
            if len(ticks) == 8:
                run.stop("idle for 32 seconds")

    class Looks:
        runs_last = True
        saved: tuple[int, ...] = ()

        def on_fit_begin(self, run: Any) -> None:
            evict.schedule.slice_rows = 1

        def on_idle(self, run: Any) -> None:
            for thread in threading.enumerate():
                if thread.name.startswith("hotbed-saver"):
                    thread.join()
            self.saved = tuple(step for _, step in kinds(tmp_path / "state"))

    looks = Looks()
    data = hb.Dataset(FakeStream(world.columns(640), takes=[640], then=0), world.schema, 64)
    learn(Idle(), evict, looks, data=data, save={"every_seconds": 10.0, "keep": 9, "wait": True})
    assert any(ticks)
    assert 10 in looks.saved


def test_a_stream_that_is_left_is_safe_before_anything_looks_back(
    learn: Any, tmp_path: Path
) -> None:
    """An orchestrator that asks a run to end does not wait for its last evaluation."""
    seen: list[int] = []

    class LooksBack:
        def on_epoch_end(self, run: Any) -> None:
            seen.append(open_checkpoint(tmp_path / "state").manifest.counters["steps"])

    learn(LooksBack(), max_steps=3)
    assert seen == [3]


def test_an_error_while_reading_leaves_the_last_step(
    learn: Any, dataset: Any, tmp_path: Path
) -> None:
    class Torn:
        position, schema = hb.Position({}), None

        def __iter__(self) -> Any:
            yield from list(dataset(640))[:7]
            raise OSError("the disk is gone")

        def resume(self, position: Any) -> None: ...

    with pytest.raises(OSError, match="the disk is gone"):
        learn(data=Torn())
    assert open_checkpoint(tmp_path / "state").manifest.counters["steps"] == 7
    learn(path=tmp_path / "other", max_steps=7)
    learn()
    learn(path=tmp_path / "other")
    assert digest(tmp_path / "state") == digest(tmp_path / "other")


def test_a_batch_that_fails_half_learned_is_not_in_any_state(
    learn: Any, dataset: Any, tmp_path: Path, caplog: Any
) -> None:
    batches = list(dataset(640))
    dense = {name: values.copy() for name, values in batches[6].dense.items()}
    dense["x"][5] = np.nan

    class Poisoned:
        position, schema = hb.Position({}), None

        def __iter__(self) -> Any:
            return iter([*batches[:6], dataclasses.replace(batches[6], dense=dense)])

        def resume(self, position: Any) -> None: ...

    with pytest.raises(NonFiniteGradient):
        learn(data=Poisoned(), save={"every_steps": 4, "wait": True})
    assert "step 7 failed half learned" in caplog.text
    assert open_checkpoint(tmp_path / "state").manifest.counters["steps"] == 4
    learn(path=tmp_path / "whole")
    learn()
    assert digest(tmp_path / "state") == digest(tmp_path / "whole")


def test_mapping_ahead_with_given_threads_changes_no_content_digest(
    learn: Any, dataset: Any, tmp_path: Path
) -> None:
    """What `hb.Ahead` keeps of its threads is no content, whether it measured them or not."""
    learn(path=tmp_path / "alone")
    for number, keywords in enumerate(({"torch_threads": torch.get_num_threads()}, {"depth": 0})):
        learn(data=hb.Ahead(dataset(640), **keywords), path=tmp_path / f"{number}")
        assert digest(tmp_path / f"{number}") == digest(tmp_path / "alone")


def test_a_resumption_that_fails_leaves_the_state_as_it_was(learn: Any, tmp_path: Path) -> None:
    learn(max_steps=4)
    before = digest(tmp_path / "state")

    class Refuses:
        def state(self) -> dict[str, Any]:
            return {}

        def load_state(self, state: Any) -> None:
            raise ValueError("not mine")

        def on_epoch_begin(self, run: Any) -> None: ...

    learn(Refuses(), max_steps=4, path=tmp_path / "other")
    with pytest.raises(ValueError, match="not mine"):
        learn(Refuses(), path=tmp_path / "other")
    assert digest(tmp_path / "state") == before
    assert open_checkpoint(tmp_path / "other").manifest.counters["steps"] == 4


@pytest.mark.parametrize("fails", [2, 10])
def test_a_save_that_fails_is_made_up_for_and_only_the_last_one_is_an_error(
    fails: int, learn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    write = saver.write

    def refuse(where: Any, captured: Any, *rest: Any) -> Any:
        if captured.manifest.version == fails:
            captured.close(saved=False)
            raise PersistError("no space left")
        return write(where, captured, *rest)

    monkeypatch.setattr(saver, "write", refuse)
    save = {"every_steps": 2, "keep": 9, "wait": True}
    if fails == 10:
        with pytest.raises(PersistError, match="no space left"):
            learn(save=save)
    else:
        learn(save=save)
        assert kinds(tmp_path / "state") == [
            ("full", 0),
            ("full", 4),
            ("delta", 6),
            ("delta", 8),
            ("delta", 10),
        ]
    assert "no space left" in caplog.text
    monkeypatch.setattr(saver, "write", write)
    learn(save=save)
    learn(path=tmp_path / "whole")
    assert digest(tmp_path / "state") == digest(tmp_path / "whole")


def test_tables_whose_rule_moves_idle_rows_are_saved_in_full_and_the_log_says_so(
    dataset: Any, network: Any, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    model = hb.RecModel(network(rule=hb.Adam(lr=0.01, scope="catch_up")), "bce", "adam")
    model.online_train(
        dataset(256), Checkpoint(tmp_path, every_steps=2, keep=9, wait=True), progress=False
    )
    assert kinds(tmp_path) == [("full", 0), ("full", 2), ("full", 4)]
    assert caplog.text.count("every checkpoint is a full") == 1


# --- the journal, the source, other hands ---------------------------------------------------------


def stream(columns: Any, schema: Any, takes: list[int]) -> hb.Dataset:
    """An endless dataset whose blocks come as a script says; it stops after its last row."""
    return hb.Dataset(
        FakeStream(columns(640), takes=takes, then=50, ends=True),
        schema,
        64,
        prefetch=0,
        flush_seconds=0.0,
    )


def test_what_the_clock_decided_is_decided_again(
    learn: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed, against one that was not and finds the same decisions on record."""
    monkeypatch.setattr(Journal, "forget", lambda self, before: None)

    def script(*takes: int) -> hb.Dataset:
        return stream(world.columns, world.schema, list(takes))

    evict = Evict(seconds_interval=1e-4, clock="wall")
    with pytest.raises(RuntimeError, match="killed"):
        learn(
            evict,
            _Fails(6),
            data=script(40, 0, 0, 70, 0, 0, 10, 0, 0),
            save={"every_steps": 2, "wait": True},
        )
    learn(evict, data=script(500))
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "journal").write_bytes((tmp_path / "state" / "journal").read_bytes())
    learn(evict, path=tmp_path / "whole", data=script(7))
    # idle times ended batches early
    assert open_checkpoint(tmp_path / "state").manifest.counters["steps"] > 10
    assert digest(tmp_path / "state") == digest(tmp_path / "whole")


class _Fails:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise RuntimeError("killed")


def test_the_source_hears_of_durable_positions_only_and_the_journal_forgets_them(
    learn: Any, world: Any, tmp_path: Path
) -> None:
    data = stream(world.columns, world.schema, [])
    learn(data=data, max_steps=5)
    source: Any = data.source
    saved = open_checkpoint(tmp_path / "state").manifest.positions["stream"]["source"]
    assert source.commits[-1].to_json() == saved
    journal = Journal(tmp_path / "state" / "journal")
    assert journal.get("block", saved["block"] - 1) is None
    assert journal.last("block") >= saved["block"]
    journal.close()


def test_two_runs_in_one_folder_are_refused(learn: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal")
    with pytest.raises(PersistError, match="another run writes this journal"):
        learn()
    journal.close()
    learn(max_steps=1)
    learn(max_steps=2)


@pytest.mark.parametrize("scheme", ["file://", "local://", "file:"])
def test_local_url_is_the_same_place_for_states_journal_and_lock(
    scheme: str, learn: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    columns = world.columns(640)
    columns["t"][7] = 10**12
    data = hb.Dataset(FakeStream(columns, ends=True), world.schema, 64, max_ahead_seconds=3600.0)
    learn(path=f"{scheme}{tmp_path}/state", data=data)
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {"CURRENT", "journal", "journal.lock", "dead_letters.jsonl"} <= names
    assert list(elsewhere.iterdir()) == []
    with Lock(tmp_path / "state" / "journal"), pytest.raises(PersistError, match="another run"):
        learn(path=f"{scheme}{tmp_path}/state")


def test_states_have_one_writer_also_where_the_journal_lies_elsewhere(
    learn: Any, dataset: Any, tmp_path: Path
) -> None:
    data = dataset(640)
    data.live = replace(data.live, journal=Journal(tmp_path / "own" / "journal"))
    with Lock(tmp_path / "state" / "journal"), pytest.raises(PersistError, match="another run"):
        learn(data=data)
    learn(data=data, max_steps=2)
    learn(data=data, max_steps=4)
    data.live.journal.close()
    # the folder's own, opened by the caller
    data.live = replace(data.live, journal=Journal(tmp_path / "state" / "journal"))
    learn(data=data)
    data.live.journal.close()


def test_dead_letters_lie_beside_the_states(learn: Any, world: Any, tmp_path: Path) -> None:
    columns = world.columns(640)
    columns["t"][7] = 10**12
    data = hb.Dataset(FakeStream(columns, ends=True), world.schema, 64, max_ahead_seconds=3600.0)
    learn(data=data)
    assert "future" in (tmp_path / "state" / "dead_letters.jsonl").read_text()


def test_other_batch_sizes_and_thread_counts_go_on_without_loss_or_repeat(
    learn: Any, dataset: Any
) -> None:
    learn(max_steps=3)
    hb.set_num_threads(2)
    model = learn(data=dataset(640, batch_size=50))
    assert model.counters["samples"] == 640
    assert model.counters["steps"] == 3 + 9


def test_what_it_cannot_follow_is_refused(
    learn: Any, dataset: Any, network: Any, tmp_path: Path
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    with pytest.raises(
        ConfigError, match="Checkpoint: the data have no position to resume from, got list"
    ):
        model.online_train(list(dataset(64)), Checkpoint(tmp_path), progress=False)
    with pytest.raises(ConfigError, match="Checkpoint: a run takes one, got several"):
        learn(Checkpoint(tmp_path / "other"))
    model.save(tmp_path)
    with pytest.raises(PersistError, match="no position in a stream"):
        model.online_train(dataset(64), Checkpoint(tmp_path), progress=False)
    for wrong in ({"every_steps": 0}, {"every_seconds": 0.0}, {"full_every": 0}, {"keep": 0}):
        with pytest.raises(ConfigError, match=rf"Checkpoint\.{next(iter(wrong))}"):
            Checkpoint(tmp_path, **wrong)


def test_a_url_takes_states_too_without_a_journal(learn: Any, caplog: Any) -> None:
    learn(path="memory://durable", max_steps=4)
    assert "a journal needs a local disk" in caplog.text
    assert learn(path="memory://durable").counters["samples"] == 640


def test_versions_are_published_in_order_and_a_failure_does_not_end_training(
    learn: Any, tmp_path: Path, caplog: Any
) -> None:
    class Publisher:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def publish(self, saved: Any) -> None:
            self.seen.append(saved.version)
            if saved.version == 4:
                raise PersistError("the broker is gone")

    publisher = Publisher()
    learn(save={"every_steps": 4, "publish": publisher, "wait": True})
    assert publisher.seen == [0, 4, 8, 10]
    assert "not published: the broker is gone" in caplog.text


def test_saves_and_publications_are_counted_and_no_value_is_shown_before_a_state_is_loaded(
    learn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saver.write

    def refuse(where: Any, captured: Any, *rest: Any) -> Any:
        if captured.manifest.version == 4:
            captured.close(saved=False)
            raise PersistError("no space left")
        return write(where, captured, *rest)

    class Publisher(hb.PublishDirectory):
        def publish(self, saved: Any) -> Any:
            if saved.version == 2:
                raise PersistError("the store is gone")
            return super().publish(saved)

    def without_graph(*_: Any) -> None:
        raise ConfigError("export: a graph takes seconds, and none is counted")

    class Look:
        """Sees what is served before and after each step."""

        def __init__(self, served: hb.callbacks.Prometheus) -> None:
            self.served = served
            self.pages: list[dict[str, float]] = []

        def look(self, run: Any) -> None:
            endpoint = self.served._endpoint
            assert endpoint is not None
            self.pages.append({value.name: value.value for value in endpoint._readings})

        on_fit_begin = on_stream_begin = on_epoch_begin = on_step_end = look

    monkeypatch.setattr(saver, "write", refuse)
    monkeypatch.setattr(hb.RecModel, "graph", without_graph)
    save = {"every_steps": 2, "publish": Publisher(tmp_path / "out"), "wait": True}
    served = hb.callbacks.Prometheus(port=0, every_seconds=0)
    look = Look(served)
    learn(served, look, save=save, max_steps=10)
    last = look.pages[-1]
    assert last["saves"] in (3, 4)  # of 0, 2 and 6; that of 8 may be under way
    assert last["publications"] in (1, 2, 3)
    assert last["save_failures"] == last["publication_failures"] == 1
    assert last["last_save_bytes"] > 0 < last["last_publication_bytes"]
    assert last["last_save_duration_seconds"] > 0
    assert abs(last["last_save_timestamp_seconds"] - time.time()) < 60
    assert last["steps_since_save"] in (2, 4)  # 10 steps are learned
    assert last["steps_since_publication"] in (2, 4, 10)
    written = (tmp_path / "out").stat().st_mtime
    served = hb.callbacks.Prometheus(port=0, every_seconds=60)
    look = Look(served)
    learn(served, look, save=save)
    begun, opened, first, *_ = look.pages
    assert begun == opened == {}
    assert (first["steps"], first["samples"]) == (10, 640)
    assert first["table_rows"] > 0 < first["bytes"]
    # of the state that the run resumed: a job that cannot save is found after a restart, too
    assert first["saves"] == first["steps_since_save"] == 0
    assert 0 <= written - first["last_save_timestamp_seconds"] < 60


def test_a_network_that_cannot_become_a_graph_is_published_without_one(
    learn: Any, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("export: it depends on values")

    monkeypatch.setattr(hb.RecModel, "graph", refuse)
    learn(save={"every_steps": 4, "publish": hb.PublishDirectory(tmp_path / "out"), "wait": True})
    assert (
        "published versions contain no graph, servers need an export: export: it depends on values"
        in caplog.text
    )
    manifest = open_checkpoint(tmp_path / "out").manifest
    assert manifest.version == 10
    assert manifest.graph is None


def test_batches_without_a_position_are_an_error_that_names_them(tmp_path: Path) -> None:
    class Pairs:
        position = hb.Position({"at": 0})

        def resume(self, position: hb.Position) -> None: ...

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield torch.ones(2, 3), torch.ones(2)

    model = hb.RecModel(torch.nn.Linear(3, 1), "mse", "sgd")
    with pytest.raises(ConfigError, match="the newest batch has no position"):
        model.online_train(Pairs(), hb.callbacks.Checkpoint(tmp_path), progress=False)
