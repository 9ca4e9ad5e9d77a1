# SPDX-License-Identifier: Apache-2.0
"""What a run writes into its folder: its status, its newest state."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError, FormatError, HotbedError
from hotbed.files import local_path
from hotbed.job.file import names_a_job
from hotbed.persist.container.format import Reader, read_newest
from hotbed.persist.container.store import CURRENT_FILE, MANIFEST_FILE
from hotbed.training.watching.points import points_of
from hotbed.training.watching.report_charts import windows_of_points
from hotbed.training.watching.window_log import Window, WindowLog
from hotbed.watch.disks import DiskSpace, disk_spaces
from hotbed.watch.run_status import read_status
from hotbed.watch.saved import SavedState, VersionList, paired
from hotbed.yaml_files import read_mapping

JOB_FILE = "job.json"
STATES = "checkpoint"
SILENT_SECONDS = 10.0
"""A run that writes nothing for longer, and for five of its intervals, is called silent."""
RATE_SECONDS = 10.0
"""The events a second are those of about so many seconds."""
ENDED = ("ended", "failed")


@dataclass(frozen=True)
class Course:
    """What the newest state holds of the course of a run.

    Attributes:
        folder: of the state.
        windows: those of the callback `Windows`; of a run without it, the points at which its
            history has progressive metrics.
        compared: windows of baselines, by name.
        losses: events learned and mean loss since the point before, of each point of its history.
        rows: of each table.
    """

    folder: str
    windows: Sequence[Window]
    compared: Mapping[str, Sequence[Window]]
    losses: Sequence[tuple[int, float]]
    rows: Mapping[str, int]


@dataclass(frozen=True)
class SeenRun:
    """What a run wrote.

    Attributes:
        folder: of the run.
        state: training, waiting (for events), ended, failed, silent (nothing was written for some
            time, though it did not end), or unknown (it wrote no status).
        status: as `StatusFile` wrote it; empty where there is none.
        events_a_second: of the last seconds; None while it does not train.
        states: saved states and published versions, newest first.
        published: where versions are published; "" = they are not.
        course: what the newest state holds of it; None = there is none.
        disks: on which the run and its versions lie.
        problems: what could not be read, or went wrong.
    """

    folder: str
    state: str
    status: Mapping[str, Any]
    events_a_second: float | None = None
    states: Sequence[SavedState] = ()
    published: str = ""
    course: Course | None = None
    disks: Sequence[DiskSpace] = ()
    problems: Sequence[str] = field(default_factory=tuple)


class RunFolder:
    """Reads the folder of a run again and again; what did not change is read once.

    Args:
        run: the output folder of a job, its job file, or the folder of the states of a run.
        published: the folder in which its versions are published; None = as its job.json says.
        state_seconds: between two reads of the newest state, which may be large, while it trains.

    Raises:
        ConfigError: `run` is the URL of an object store, or a file that is not a job.
    """

    def __init__(self, run: str, published: str | None = None, state_seconds: float = 30.0) -> None:
        folder = local_path(run, "watch.run")
        if names_a_job(run) and folder.exists():
            folder = local_path(str(read_mapping(folder).get("output", "runs/job")), "watch.run")
        self.folder = folder
        self._published = None if published is None else Path(published)
        self._states = VersionList(folder)
        self._versions: VersionList | None = None
        self._course: Course | None = None
        self._newest: tuple[Path, bytes] | None = None  # the state of `_course`
        self._state_seconds = state_seconds
        self._course_read = -inf

    def read(self) -> SeenRun:
        """Return what is there now.

        Raises:
            ConfigError: there is no such folder, or nothing in it is of a run.
        """
        problems: list[str] = []
        status = self._status(problems)
        root = self.folder / STATES if (self.folder / STATES).is_dir() else self.folder
        if not status and not _is_run(self.folder, root):
            raise ConfigError(_no_run(self.folder))
        published = self._published_folder(problems)
        state = _state_of(status, time.time())
        return SeenRun(
            folder=str(self.folder),
            state=state,
            status=status,
            events_a_second=None if state in (*ENDED, "silent") else _rate(status),
            states=self._pairs(root, published, problems),
            published=str(published or ""),
            course=self._newest_state(root, problems, has_ended=state in ENDED),
            disks=disk_spaces(
                [self.folder, root, *([published] if isinstance(published, Path) else [])]
            ),
            problems=problems,
        )

    def _status(self, problems: list[str]) -> Mapping[str, Any]:
        """Return what the run wrote about itself; {} where it did not."""
        try:
            status = read_status(self.folder)
        except FormatError as error:
            problems.append(str(error))
            return {}
        if not status:
            return {}
        if status["error"]:
            problems.append(f"The run failed: {status['error']}")
        for kind, verb in (("saves", "saved"), ("publications", "published")):
            failures = (status[kind] or {}).get("failures", 0)
            if failures:
                problems.append(
                    f"{failures} states could not be {verb}: the log of the run says why."
                )
        return status

    def _published_folder(self, problems: list[str]) -> Path | str | None:
        """Return the folder of published versions, or the words for another place."""
        if self._published is not None:
            return self._published
        try:
            job = json.loads((self.folder / JOB_FILE).read_bytes())
            publish = job.get("checkpoint", {}).get("publish")
            if not isinstance(publish, dict):
                return None
            if "path" not in publish:
                return f"topic {publish.get('topic', '')!r}"
            return Path(publish["path"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            problems.append(f"{self.folder / JOB_FILE}: cannot be read, got {error}.")
            return None

    def _pairs(
        self, root: Path, published: Path | str | None, problems: list[str]
    ) -> list[SavedState]:
        if self._states.root != root:
            self._states = VersionList(root)
        versions = []
        if isinstance(published, Path):
            if self._versions is None or self._versions.root != published:
                self._versions = VersionList(published)
            if published.is_dir():
                versions = self._versions.versions()
            else:
                problems.append(
                    f"{published}: versions are published there, and this machine sees no such "
                    "folder. Give its place here with --published."
                )
        states = self._states.versions()
        problems += [version.problem for version in (*states, *versions) if version.problem]
        return paired(states, versions)

    def _newest_state(self, root: Path, problems: list[str], *, has_ended: bool) -> Course | None:
        """Return what the newest state holds, as it was at most `state_seconds` ago."""
        try:
            newest = (root, (root / CURRENT_FILE).read_bytes())
        except FileNotFoundError:
            return None
        is_due = has_ended or time.monotonic() - self._course_read >= self._state_seconds
        if newest != self._newest and is_due:
            try:
                self._course = read_newest(root, _course)
            except HotbedError as error:
                problems.append(str(error))
                return self._course
            self._newest = newest
            self._course_read = time.monotonic()
        return self._course


def _is_run(folder: Path, root: Path) -> bool:
    names = (CURRENT_FILE, MANIFEST_FILE)
    return (folder / JOB_FILE).exists() or any((root / name).exists() for name in names)


def _no_run(folder: Path) -> str:
    there = "a folder without a run" if folder.is_dir() else "no folder"
    return (
        f"{folder}: there is no run yet, got {there}. Give the output folder of a job, or the "
        "folder of a Checkpoint; the page shows the run once it has begun."
    )


def _state_of(status: Mapping[str, Any], now: float) -> str:
    if not status:
        return "unknown"
    state = str(status["state"])
    patience = max(SILENT_SECONDS, 5 * status["every_seconds"])
    if state not in ENDED and now - status["written"] > patience:
        return "silent"
    return state


def _rate(status: Mapping[str, Any]) -> float | None:
    """Return the events a second of the last seconds; None before there are two moments."""
    moments = status.get("moments")
    if not moments or len(moments["time"]) < 2:
        return None
    times = moments["time"]
    since = next(n for n, time_ in enumerate(times) if time_ >= times[-1] - RATE_SECONDS)
    since = min(since, len(times) - 2)
    samples = moments["samples"][-1] - moments["samples"][since]
    return float(samples / max(times[-1] - times[since], 1e-9))


def _course(reader: Reader) -> Course:
    """Return what a state holds of the course of its run."""
    callbacks: Mapping[str, Any] = {}
    if reader.manifest.contents == "state":
        callbacks = reader.progress.get("callbacks", {})
    losses: list[tuple[int, float]] = []
    windows: list[Window] = []
    compared: dict[str, list[Window]] = {}
    try:
        if "history.0" in callbacks:
            points = points_of(callbacks["history.0"])
            losses = [(point.samples, point.loss) for point in points if isfinite(point.loss)]
            windows = windows_of_points(points)
        if "windows.0" in callbacks:
            state = callbacks["windows.0"]
            windows = _windows(state["log"])
            for name, beside in state.get("wall_beside", {}).items():
                compared[name] = _windows(beside["log"])
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(
            f"{reader.folder}: its windows cannot be read, got {type(error).__name__}: {error}. "
            "Watch a run with the version of Hotbed that trains it."
        ) from error
    rows = {table.name: table.rows for table in reader.manifest.tables}
    return Course(reader.folder, windows, compared, losses, rows)


def _windows(state: Mapping[str, Any]) -> list[Window]:
    log = WindowLog()
    log.load_state(state)
    return log.windows
