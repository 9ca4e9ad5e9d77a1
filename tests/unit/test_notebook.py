# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows: reprs, tab completion, progress and errors."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

from rich.console import Console

import hotbed as hb
from hotbed.errors import SchemaError
from hotbed.training.callbacks import ProgressBar

SCHEMA = hb.Schema([hb.Label("y"), hb.Id("user")])
COLUMNS: dict[str, Any] = {"y": [0, 1] * 8, "user": list(range(16))}
MODULES = (
    "callbacks",
    "config",
    "errors",
    "losses",
    "metrics",
    "models",
    "report",
    "schedules",
    "sources",
    "testing",
    "transforms",
)


def data(columns: dict[str, Any] = COLUMNS) -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, 8, shuffle=4)


@pytest.fixture(scope="module")
def trained() -> tuple[hb.RecModel, Any, str]:
    """A model, its history and the lines of its progress."""
    model = hb.RecModel(hb.models.LR(SCHEMA, hb.make_tables(SCHEMA, 1)), "bce", "adam", {"auc"})
    shown = Console(file=io.StringIO(), width=200)
    history = model.fit(data(), data(), epochs=2, callbacks=ProgressBar(shown), progress=False)
    return model, history, shown.file.getvalue()


def test_repr_says_what_is_in_a_model_a_history_a_dataset_and_a_client(trained: Any) -> None:
    model, history, _ = trained
    assert "LR, " in repr(model)
    assert "1 tables with 16 rows" in repr(model)
    assert "4 steps, 2 epochs" in repr(model)
    assert "History(2 epochs, 4 steps: loss 0." in repr(history)
    assert "valid.auc" in repr(history)
    for part in ("Dataset(", "'y', 'user'", "batch_size=8", "shuffle=4", "rows=16"):
        assert part in repr(data())
    assert (
        repr(hb.Client("http://me:secret@localhost:8000", token="t"))
        == "Client('http://localhost:8000')"
    )


def test_epoch_line_shows_training_and_validation_loss(trained: Any) -> None:
    _, history, lines = trained
    for row, line in zip(history.epochs, lines.splitlines(), strict=True):
        assert f"  loss {row['loss']:.4f}" in line
        assert f"valid.loss {row['valid.loss']:.4f}" in line


@pytest.mark.parametrize("name", MODULES)
def test_tab_completion_shows_public_names_only(name: str) -> None:
    module = getattr(hb, name)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, public) is not None for public in dir(module))
    assert set(dir(hb)) == {*hb.__all__, "__version__"}


def test_folders_are_attributes_before_they_are_imported() -> None:
    code = (
        "import hotbed as hb; print(hb.training.__name__, hb.optim.__name__, hb.persist.__name__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["hotbed.training", "hotbed.optim", "hotbed.persist"]


def test_error_in_a_notebook_shows_the_users_lines_and_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hb.RecModel(hb.models.LR(SCHEMA, hb.make_tables(SCHEMA, 1)), "bce", "adam", {"auc"})
    with pytest.raises(SchemaError) as caught:
        model.fit(data({"y": [0, 1], "usr": [1, 2]}), progress=False)
    lines = "\n".join(caught.value._render_traceback_()).splitlines()
    assert "model.fit(data(" in lines[1]
    assert lines[-1].startswith("SchemaError: columns ['user'] are missing")
    assert len(lines) <= 4
    monkeypatch.setenv("HOTBED_TRACEBACK", "1")
    assert "in require_columns" in "".join(caught.value._render_traceback_())


def test_what_was_printed_is_not_displayed_again(
    trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = trained[0].summary()
    assert capsys.readouterr().out == f"{text}\n"
    assert text._ipython_display_() is None
    assert "dense parameters" in text
