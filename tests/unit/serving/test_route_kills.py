# SPDX-License-Identifier: Apache-2.0
"""A server that is killed while it changes the rule of its models."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from forked import SERVER

import hotbed as hb
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.routes.changing import RouteWatcher
from hotbed.serving.routes.leases import Leases
from hotbed.serving.server.options import NO_LOGS
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.scoring.routed import LocalRules
from hotbed.serving.stores.held import HeldVersions

if TYPE_CHECKING:
    from .conftest import Trainer


@pytest.fixture(scope="module")
def published(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, int, int]:
    """A trainer, and two versions that it published."""
    from .conftest import Trainer  # processes that import this file have no package

    trainer = Trainer(tmp_path_factory.mktemp("published"), exported)
    return trainer, trainer.publish(0, full=True), trainer.publish(1)


# What is being changed -> the function that a process is killed in, and whether before its work.
STATES = {
    "no version is written": (ParameterServer, "obtain", True),
    "a version is being written": (ParameterServer, "_write", False),
    "the versions are held": (ParameterServer, "obtain", False),
    "the versions are warm": (LocalRules, "prepare", False),
    "the rule is not written": (HeldVersions, "put_in_force", True),
    "the rule is written": (HeldVersions, "put_in_force", False),
}


def open_models(folder: Path, rows: Path) -> tuple[Models, RouteWatcher]:
    models = Models(hb.ParameterServer(rows))
    models.add("m", folder / "export")
    sources = {"m": [folder / "published", folder / "export"]}
    leases = Leases("rows", {})
    return models, RouteWatcher(
        rows / "routes.yaml", sources, models.rules, leases, NO_LOGS.check_rule
    )


def write_rule(rows: Path, revision: int, rule: Any) -> None:
    rows.mkdir(exist_ok=True)
    text = yaml.safe_dump({"revision": revision, "models": {"m": rule}})
    (rows / "routes.yaml").write_text(text)


def change(folder: Path, rows: Path) -> None:
    """Put the rule of the file in force."""
    models, watcher = open_models(folder, rows)
    watcher.start()
    models.close()


def change_and_die(folder: Path, rows: Path, state: str) -> None:
    """Put the rule of the file in force, and be killed in the midst of it."""
    _, watcher = open_models(folder, rows)
    place, name, is_before = STATES[state]
    work = getattr(place, name)

    def die(*arguments: Any, **keywords: Any) -> None:
        if not is_before:
            work(*arguments, **keywords)
        (rows / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, die)
    watcher.start()


@pytest.mark.parametrize("state", STATES)
def test_a_change_that_is_killed_leaves_one_of_both_rules_in_force(
    published: tuple[Trainer, int, int], tmp_path: Path, state: str
) -> None:
    trainer, first, second = published
    folder, rows = trainer.folder, tmp_path / "rows"
    write_rule(rows, 1, {"stable": {"pin": first}})
    SERVER.call(change, folder, rows)
    write_rule(rows, 2, {"stable": {"pin": second}, "shadow": {"version": first}})
    with pytest.raises(AssertionError):
        SERVER.call(change_and_die, folder, rows, state)
    assert (rows / "died").exists()
    models, watcher = open_models(folder, rows)
    model = models.named("m")
    is_new = state == "the rule is written"
    assert model.versions[0] == str(second if is_new else first)
    assert model.reason == ""
    watcher.start()
    assert model.versions[:2] == [str(second), str(first)]
    for version in (first, second):
        scores = model.loaded(str(version)).session.predict(trainer.asked)
        assert np.abs(scores - trainer.scores[version]).max() < 1e-6
    models.close()
