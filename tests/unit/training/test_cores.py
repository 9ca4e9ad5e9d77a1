# SPDX-License-Identifier: Apache-2.0
"""With `hb.Ahead` the threads of torch and of the core are chosen by measurement, and journalled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.embedding.native import num_threads
from hotbed.persist.container.format import open_checkpoint
from hotbed.training.ahead import cores
from hotbed.training.ahead.cores import TOPIC, Cores, Threads, candidates
from hotbed.training.callbacks import Checkpoint
from hotbed.training.run import Run


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = Threads.now()
    Threads(2, 2).use()
    yield
    before.use()


class Machine:
    """A clock on which a step takes `seconds` of the setting in use, and whatever `steps` adds."""

    def __init__(self, seconds: dict[Threads, float]) -> None:
        self.seconds = seconds
        self.setting = Threads.now()
        self.now = 0.0
        self.used: list[Threads] = []

    def step(self) -> None:
        assert replace(self.setting, ahead=True) == Threads.now()
        self.used.append(self.setting)
        self.now += self.seconds[self.setting]


IN_TURN = Threads(2, 2, ahead=False)
SECONDS = {
    Threads(1, 1): 3.0,
    Threads(2, 1): 2.0,
    Threads(1, 2): 9.0,
    Threads(2, 2): 2.5,
    IN_TURN: 2.4,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(SECONDS)
    use = Threads.use

    def watched(threads: Threads) -> None:
        use(threads)
        machine.setting = threads

    monkeypatch.setattr(Threads, "use", watched)
    monkeypatch.setattr(cores.time, "perf_counter", lambda: machine.now)
    return machine


def drive(chosen: Cores, machine: Machine, steps: range, journal: Journal | None = None) -> None:
    chosen.begin(steps.start, journal)
    for step in steps:
        machine.step()
        chosen.step(step + 1, journal)


def test_settings_are_at_most_the_threads_in_use() -> None:
    assert candidates(Threads(1, 1)) == [Threads(1, 1)]
    assert candidates(Threads(1, 8)) == [Threads(1, 1), Threads(1, 8)]
    assert [c.torch for c in candidates(Threads(6, 1))] == [1, 2, 4, 6, 6]
    assert [c.torch for c in candidates(Threads(8, 1))] == [1, 2, 4, 8, 8]
    assert candidates(Threads(8, 4))[-1] == Threads(8, 4, ahead=False)


def test_every_setting_is_tried_and_the_fastest_stays_to_the_end(machine: Machine) -> None:
    chosen = Cores()
    drive(chosen, machine, range(200))
    assert set(machine.used[:45]) == set(SECONDS)
    assert Threads(1, 2) not in machine.used[45:], "too slow for a second round"
    assert Threads(1, 1) not in machine.used[90:], "too slow for a third round"
    assert machine.used[-30:] == [Threads(2, 1)] * 30
    chosen.close()
    assert Threads.now() == Threads(2, 2)


def test_of_settings_about_as_fast_the_one_with_fewest_threads_stays(machine: Machine) -> None:
    for frugal in (Threads(1, 1), IN_TURN):  # at most two threads are busy, of the fastest three
        machine.seconds = {**SECONDS, frugal: 2.08}
        machine.used.clear()
        Threads(2, 2).use()
        chosen = Cores()
        drive(chosen, machine, range(200))
        assert machine.used[-30:] == [frugal] * 30
        chosen.close()


def test_ids_are_mapped_in_their_turn_where_the_measured_setting_does_so(machine: Machine) -> None:
    chosen = Cores()
    assert not chosen.barrier(0, None)
    machine.seconds = {**SECONDS, IN_TURN: 1.0}
    chosen.begin(0)
    for step in range(200):
        machine.step()
        assert chosen.barrier(step, None) == (machine.setting == IN_TURN)
        chosen.step(step + 1)
    assert machine.setting == IN_TURN
    chosen.close()


def test_a_first_step_that_loads_code_does_not_decide(machine: Machine) -> None:
    machine.now = -1e6
    chosen = Cores()
    chosen.begin(0)
    machine.now = 0.0
    for step in range(200):
        machine.step()
        machine.now += 50.0 * (step % 9 == 0)  # the first step under each setting
        chosen.step(step + 1)
    assert machine.used[-1] == Threads(2, 1)


def test_a_step_that_waited_for_data_is_not_timed(machine: Machine) -> None:
    chosen = Cores()
    chosen.begin(0)
    for step in range(200):
        if machine.setting == Threads(2, 1):
            machine.now += 1000.0
            chosen.on_idle(cast(Any, None))
        machine.step()
        chosen.step(step + 1)
    assert machine.used[-1] == IN_TURN, "nothing was measured under the fastest setting"


def test_given_threads_are_used_from_the_first_step_on(machine: Machine, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(TOPIC, 5, {"torch": 2, "core": 1, "decided": True})
    chosen = Cores(1)
    drive(chosen, machine, range(20), journal)
    assert set(machine.used) == {Threads(1, 2)}
    assert chosen.state() == {}
    journal.close()


def test_one_core_leaves_nothing_to_choose(machine: Machine) -> None:
    Threads(1, 1).use()
    chosen = Cores()
    drive(chosen, machine, range(20))
    assert chosen.state()["wall_decided"]
    assert set(machine.used) == {Threads(1, 1)}


@pytest.mark.parametrize(
    ("saved", "killed"), [(0, 0), (0, 3), (0, 9), (8, 22), (9, 9), (9, 51), (37, 57), (80, 99)]
)
def test_a_resumed_run_repeats_the_threads_of_each_step(
    machine: Machine, tmp_path: Path, saved: int, killed: int
) -> None:
    journal = Journal(tmp_path / "journal")
    first = Cores()
    drive(first, machine, range(saved), journal)
    state = first.state() if saved else {}
    for step in range(saved, killed):
        machine.step()
        first.step(step + 1, journal)
    first.close()
    journal.close()
    decided = max(saved, min(killed, journal.last(TOPIC) + 1))
    used = list(machine.used)

    machine.used.clear()
    machine.seconds = {threads: 1 / seconds for threads, seconds in SECONDS.items()}
    again = Journal(tmp_path / "journal")
    resumed = Cores()
    resumed.load_state(state)
    drive(resumed, machine, range(saved, 160), again)
    assert machine.used[: decided - saved] == used[saved:decided]
    assert len(set(machine.used[-30:])) == 1, "the trials end after a resumption, too"
    again.close()


def test_a_state_and_a_journal_without_the_place_of_maps_are_read(
    machine: Machine, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(TOPIC, 8, {"torch": 2, "core": 1, "decided": True})
    chosen = Cores()
    state = {
        "wall_threads": [1, 2],
        "wall_decided": False,
        "wall_left": [[2, 1], [2, 2]],
        "wall_round": 1,
        "wall_began": 4,
        "wall_seconds": [[1, 1, 3.0, 3.0]],
    }
    chosen.load_state(state)
    drive(chosen, machine, range(5, 20), journal)
    assert machine.used == [Threads(1, 2)] * 3 + [Threads(2, 1)] * 12
    chosen.close()
    journal.close()


def test_a_run_that_measures_nothing_repeats_the_journal(machine: Machine, tmp_path: Path) -> None:
    with_journal = Journal(tmp_path / "journal")
    drive(Cores(), machine, range(100), with_journal)
    used = list(machine.used)
    machine.used.clear()
    machine.seconds = dict.fromkeys(SECONDS, 1.0)
    Threads(2, 2).use()
    drive(Cores(measures=False), machine, range(100), with_journal)
    assert machine.used == used
    with_journal.close()


# --- in a run -------------------------------------------------------------------------------------


class Watches:
    """Records the threads of each step."""

    def __init__(self) -> None:
        self.used: dict[int, Threads] = {}

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_gradients(self, run: Run) -> None:
        self.used[run.step] = Threads.now()


class Dies(Watches):
    def on_step_end(self, run: Run) -> None:
        if run.step == 23:
            raise KeyboardInterrupt

    def on_gradients(self, run: Run) -> None:
        super().on_gradients(run)


def test_a_killed_run_resumes_with_the_threads_it_had(
    dataset: Any,
    network: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a slow step would end a trial early in one of the runs, after the last entry of the journal
    monkeypatch.setattr(cores, "FAR_WORSE", math.inf)

    def run(watch: Watches) -> None:
        model = hb.RecModel(network(), "bce", "adam")
        callbacks = [watch, Checkpoint(tmp_path / "run", every_steps=9, wait=True)]
        data = hb.Ahead(dataset(64 * 200))
        model.online_train(data, callbacks, progressive=False, progress=False)

    killed = Dies()
    with pytest.raises(KeyboardInterrupt):
        run(killed)
    assert Threads.now() == Threads(2, 2), "the threads of the caller are back"
    saved = open_checkpoint(tmp_path / "run").progress["run"]["step"]
    assert saved < 23
    resumed = Watches()
    with caplog.at_level("INFO", "hotbed"):
        run(resumed)
    assert "torch_threads" not in caplog.text, "they were measured in both runs"
    both = [step for step in killed.used if step in resumed.used]
    assert both
    assert [resumed.used[step] for step in both] == [killed.used[step] for step in both]
    assert len({resumed.used[step] for step in range(190, 200)}) == 1
    assert resumed.used[20] in candidates(Threads(2, 2))
    assert num_threads() == 2
    assert torch.get_num_threads() == 2


def test_threads_stay_as_they_are_without_mapping_ahead(dataset: Any, network: Any) -> None:
    for data in (dataset(640), hb.Ahead(dataset(640), depth=0)):
        watch = Watches()
        model = hb.RecModel(network(), "bce", "adam")
        model.online_train(data, [watch], progressive=False, progress=False)
        assert set(watch.used.values()) == {Threads(2, 2)}


def test_a_plain_loop_chooses_too_and_gives_the_threads_back(dataset: Any, network: Any) -> None:
    net = network()
    used = [Threads.now() for _ in hb.Ahead(dataset(64 * 200), net)]
    threads = {replace(setting, ahead=True) for setting in candidates(Threads(2, 2))}
    assert set(used[:45]) == threads
    assert len(set(used[-10:])) == 1
    assert Threads.now() == Threads(2, 2)
    given = [torch.get_num_threads() for _ in hb.Ahead(dataset(640), net, torch_threads=1)]
    assert set(given) == {1}
    for _ in hb.Ahead(dataset(640), net, torch_threads=1):
        break
    assert torch.get_num_threads() == 2
