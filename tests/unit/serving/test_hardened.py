# SPDX-License-Identifier: Apache-2.0
"""What breaks around a server, and values that make no sense: it answers on, or says why it does not."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.errors import ServingError
from hotbed.serving.process import JsonLines
from hotbed.serving.stores.following import Following

from .conftest import Running, draw, wait_for


class _Broken(io.StringIO):
    """A stderr that takes nothing more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


FAILURES = [OSError(28, "No space left on device"), BrokenPipeError(), ValueError("I/O on closed file")]


def lose_stderr(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Log lines cannot be written from here on."""
    monkeypatch.setattr(logging.getLogger("hotbed.serving"), "handlers", [JsonLines()])
    monkeypatch.setattr(sys, "stderr", _Broken(error))


@pytest.mark.parametrize("error", FAILURES)
def test_a_log_line_that_cannot_be_written_ends_no_thread_that_follows(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_stderr(monkeypatch, error)
    steps = list[int]()

    def step() -> None:
        steps.append(len(steps))
        raise OSError("the disk is full")

    following = Following(lambda name, error: logging.getLogger("hotbed.serving").warning("%s: %s", name, error))
    following.repeat("m", step, 0.01)
    wait_for(lambda: len(steps) > 2, "the thread ended")
    following.close()


@pytest.mark.parametrize("error", FAILURES)
def test_a_log_line_that_cannot_be_written_leaves_the_scoring_thread_alive(
    error: Exception, running: Running, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, columns = running.models.named("m").batcher, draw(5, 1)
    monkeypatch.setattr(batcher, "_alone", False)
    with hb.Client(f"http://{running.http}", timeout_seconds=5) as client:
        with monkeypatch.context() as broken:
            lose_stderr(broken, error)
            broken.setattr(batcher, "_session", lambda: 1 / 0)
            for _ in range(2):
                with pytest.raises(ServingError, match="an error of the server"):
                    client.predict("m", columns)
        assert np.abs(client.predict("m", columns) - session.predict(columns)).max() < 1e-6


def test_a_log_line_that_cannot_be_made_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines().handle(logging.LogRecord("hotbed", logging.INFO, __file__, 1, "%d", ("no number",), None))
    assert "Logging error" in capsys.readouterr().err
