# SPDX-License-Identifier: Apache-2.0
"""`hotbed train` runs files of other systems whose packages register a dialect."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotbed.cli.commands import app
from hotbed.errors import ConfigError
from hotbed.job import run
from hotbed.job.dialect import GROUP, dialect_of

READER = """
from hotbed.job.dialect import Dialect

trained = []
dialect = Dialect("OtherSystem", lambda spec: "their_layers" in spec, trained.append)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: one registers a dialect, one cannot be imported."""
    (tmp_path / "other_system_jobs.py").write_text(READER)
    _install(tmp_path, "other", "other_system_jobs:dialect")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _install(folder: Path, name: str, value: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")


def _written(folder: Path, spec: Mapping[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(spec))
    return path


def test_dialect_trains_its_file_with_the_values_that_were_set(installed: Path) -> None:
    path = _written(installed, {"their_layers": [], "solver": {"steps": 10}})
    job = run.read(path, {"solver.steps": 2})

    assert isinstance(job, run.ForeignJob)
    job.train(restart=False)
    import other_system_jobs

    assert other_system_jobs.trained == [{"their_layers": [], "solver": {"steps": 2}}]


def test_dialect_rejects_restart(installed: Path) -> None:
    job = run.read(_written(installed, {"their_layers": []}), {})
    assert isinstance(job, run.ForeignJob)
    with pytest.raises(ConfigError, match=r"--restart: .* of OtherSystem"):
        job.train(restart=True)


def test_job_is_not_shown_to_dialects(installed: Path) -> None:
    assert dialect_of({"their_layers": [], "model": "dnn"}) is None


def test_broken_dialect_is_logged_and_leaves_the_others(
    installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _install(installed, "broken", "no_such_module:dialect")
    with caplog.at_level(logging.WARNING, "hotbed"):
        found = dialect_of({"their_layers": []})
    assert found is not None
    assert found.name == "OtherSystem"
    assert "broken = no_such_module:dialect cannot be loaded" in caplog.text


def test_command_line_trains_a_file_of_a_dialect_and_evaluates_none(installed: Path) -> None:
    path = _written(installed, {"their_layers": [1]})
    trained = CliRunner().invoke(app, ["train", str(path)])
    evaluated = CliRunner().invoke(app, ["evaluate", str(path)])
    import other_system_jobs

    assert trained.exit_code == 0
    assert other_system_jobs.trained[-1] == {"their_layers": [1]}
    assert "not a job, got a training file of OtherSystem" in str(evaluated.exception)
