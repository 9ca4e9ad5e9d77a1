# SPDX-License-Identifier: Apache-2.0
"""StatusFile: what a run is doing, in a file that `hotbed watch` reads."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.config import described
from hotbed.files import check_folder, local_path, new_file
from hotbed.memory import resident_bytes
from hotbed.memory_limit import memory_limits
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.run import Run
from hotbed.training.watching.readings import statistics, stream_observations

log = logging.getLogger("hotbed")

STATUS_FILE = "status.json"
_MOMENTS = 300
_SERIES = ("time", "samples", "lag_rows", "freshness_seconds", "resident_bytes")


@described
class StatusFile:
    """Write what a run is doing into `status.json` of a folder, every `every_seconds` seconds.

    `hotbed watch` shows it. The file is replaced as a whole and is not forced to the disk, so that
    training never waits for it; if it cannot be written, that is logged once, and training
    continues. Of several ranks the first writes. Jobs write it into their output folder.

    Args:
        folder: a local folder.
        every_seconds: seconds between two writes.

    Example:
        >>> callbacks = [hb.callbacks.Checkpoint("runs/clicks"), StatusFile("runs/clicks")]
        >>> model.online_train(clicks, callbacks)
    """

    runs_last = True  # after the checkpoint, whose last save and publication it shows
    reads_features = False

    def __init__(self, folder: str | Path, every_seconds: float = 2.0) -> None:
        self._folder = local_path(folder, "StatusFile.folder")
        checks.at_least("StatusFile.every_seconds", every_seconds, 0)
        self._every = every_seconds
        self._moments: deque[tuple[float | None, ...]] = deque(maxlen=_MOMENTS)
        self._began = 0.0
        self._written = -math.inf
        self._state = "training"
        self._is_warned = False

    def check_ready(self) -> None:
        """Raise ConfigError if no file can be made in the folder."""
        check_folder(self._folder, "StatusFile.folder")

    def on_fit_begin(self, run: Run) -> None:
        self._began = time.time()
        self._moments.clear()

    def on_epoch_begin(self, run: Run) -> None:
        self._write(run, "training")

    def barrier(self, step: int, now: int | None) -> bool:
        return False  # it reads no table of which a later batch may change the counts

    def on_step_end(self, run: Run) -> None:
        if self._is_due() or self._state != "training":
            self._write(run, "training")

    def on_idle(self, run: Run) -> None:
        if self._is_due():
            self._write(run, "waiting")

    def on_fit_end(self, run: Run) -> None:
        self._write(run, "ended" if run.error is None else "failed")

    def _is_due(self) -> bool:
        return time.monotonic() - self._written >= self._every

    def _write(self, run: Run, state: str) -> None:
        """Replace the file; `state`: training, waiting (for events), ended or failed."""
        self._written = time.monotonic()
        self._state = state
        if not run.learner.shard.is_first:
            return
        text = json.dumps(self._status(run), separators=(",", ":"))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with new_file(self._folder / STATUS_FILE, durable=False) as file:
                file.write(text.encode())
        except OSError as error:
            if not self._is_warned:
                log.warning(
                    "%s: not written, so that `hotbed watch` shows no news: %s",
                    self._folder / STATUS_FILE,
                    error,
                )
            self._is_warned = True

    def _status(self, run: Run) -> dict[str, Any]:
        """Return the content of the file; times are Unix seconds."""
        observed = stream_observations(run)
        now = time.time()
        memory: dict[str, Any] = {"resident_bytes": resident_bytes()}
        for limit in memory_limits()[:1]:
            memory |= asdict(limit)
        newest = {"time": now, "samples": run.samples, **observed, **memory}
        self._moments.append(tuple(newest.get(name) for name in _SERIES))
        tables = statistics(run)
        return {
            "state": self._state,
            "part": "stream" if run.online else "train",
            "written": now,
            "every_seconds": self._every,
            "began": self._began,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "ranks": run.learner.shard.size,
            "error": "" if run.error is None else f"{type(run.error).__name__}: {run.error}",
            "reason": "" if run.ending is None else run.ending.reason,
            "step": run.step,
            "samples": run.samples,
            "epoch": run.epoch,
            "epoch_steps": run.goal.epoch_steps,
            "loss": None if run.loss is None else float(run.loss.detach()),
            "metrics": dict(run.metrics),
            "window": dict(run.window),
            "watermark": None if run.now is None else run.now / 1e6,
            "observed": observed,
            "memory": memory,
            "rows": {name: counters["rows"] for name, counters in tables.items()},
            **_writes(run),
            "moments": dict(zip(_SERIES, map(list, zip(*self._moments, strict=True)), strict=True)),
        }


def _writes(run: Run) -> Mapping[str, Any]:
    """Return what the checkpoint of a run says of its saves and publications."""
    writes: dict[str, Any] = {"saves": None, "publications": None}
    for checkpoint in run.callbacks.of(Checkpoint):
        writes["saves"] = asdict(checkpoint.saves)
        if checkpoint.publications is not None:
            writes["publications"] = asdict(checkpoint.publications)
    return writes
