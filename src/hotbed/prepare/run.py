# SPDX-License-Identifier: Apache-2.0
"""The stages of a preparation, one after another; the output appears whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.prepared import WORKFLOW_FILE, WORKFLOW_FORMAT
from hotbed.data.columns import require_columns
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, PersistError
from hotbed.files import HeldFolder, free_name, local_path, new_file, sync_folder, writing
from hotbed.prepare.engine import Engine, Local, Progress
from hotbed.prepare.fit import fit
from hotbed.prepare.partitions import Partition, partitions_of
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.view import PARTS, View
from hotbed.prepare.workflow import Workflow
from hotbed.prepare.write import Layout, Writing, Written


@dataclass(frozen=True)
class Stage:
    """A stage of a preparation has `done` of `total` tasks."""

    name: str
    done: int
    total: int


Report = Callable[[Stage], None]


def ignore(_stage: Stage) -> None:
    """Ignore how far a preparation is."""


def prepare(
    job: Preparation,
    engine: Engine | None = None,
    *,
    restart: bool = False,
    report: Report = ignore,
) -> Workflow:
    """Fit the schema of a preparation, and write the encoded rows.

    The output folder appears whole, or not at all.

    Args:
        job: the preparation.
        engine: runs the tasks; None: threads of this process.
        restart: rename an output folder that exists, and begin anew.
        report: called when a task of a stage has ended.

    Returns:
        The fitted workflow.

    Raises:
        ConfigError: the output exists and `restart` is not set.
        DecodeError: a row cannot be read; the message names file, row and column.
        PersistError: another process writes the output.
    """
    output = local_path(job.output, "prepare.output")
    _refuse_existing(output, restart)
    partial = output.with_name(output.name + ".partial")
    with writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
    with _held(partial):
        _empty(partial)
        _Preparing(job, engine or Local(), partial, report).run()
        if restart and output.exists():
            os.rename(output, free_name(output))
        os.rename(partial, output)
        sync_folder(output.parent)
    return Workflow(output)


def _refuse_existing(output: Path, restart: bool) -> None:
    if output.exists() and not restart:
        raise ConfigError(
            f"prepare.output: the folder exists and is not overwritten, got {output}. Give another "
            "one, or move it aside with `hotbed prepare --restart`."
        )


def _held(partial: Path) -> HeldFolder:
    try:
        return HeldFolder(partial)
    except BlockingIOError as error:
        raise PersistError(
            f"{partial}: another process prepares it, got {error}. Wait for it, or give this one "
            "another output."
        ) from error


def _empty(folder: Path) -> None:
    """Remove what an interrupted preparation left in the folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class _Preparing:
    """The state of one preparation."""

    def __init__(
        self,
        job: Preparation,
        engine: Engine,
        folder: Path,
        report: Report,
    ) -> None:
        self._job = job
        self._engine = engine
        self._folder = folder
        self._report = report

    def run(self) -> None:
        """Run all stages, and write the workflow last."""
        job = self._job
        partitions = partitions_of(job.source)
        view = View(self._plan())
        raw = fit(
            job.schema,
            view,
            partitions,
            self._engine,
            self._progress,
        )
        layout = Layout.of(raw, self._first_rows(partitions, view))
        writing_task = Writing(self._folder, view, layout)
        done = self._progress("write", len(partitions))
        written = list(self._engine.map(writing_task, partitions, done))
        for one in written:
            raw = raw.with_types(one.types, one.shapes)
        self._finish(raw, layout, written)

    def _progress(self, name: str, total: int) -> Progress:
        self._report(Stage(name, 0, total))
        return lambda done: self._report(Stage(name, done, total))

    def _plan(self) -> ReadPlan:
        schema = self._job.schema
        columns = schema.raw_columns()
        require_columns(columns, self._job.source.schema().names)
        return ReadPlan(tuple(columns), schema.number_types())

    def _first_rows(self, partitions: Sequence[Partition], view: View) -> pa.RecordBatch:
        for partition in partitions:
            for rows in view.rows(partition):
                return rows.columns.slice(0, 1000)
        raise AssertionError("a fitted source has rows")

    def _finish(self, raw: Schema, layout: Layout, written: Sequence[Written]) -> None:
        """Write the metadata of each part, and the workflow."""
        parts: dict[str, Any] = {}
        for part in PARTS:
            files = [asdict(one.files[part]) for one in written if part in one.files]
            if files:
                num_rows = sum(file["rows"] for file in files)
                parts[part] = {"rows": num_rows, "files": files}
        workflow = {
            "format": WORKFLOW_FORMAT,
            "prepare": self._job.to_json(),
            "schema": layout.schema().to_json(),
            "raw": raw.to_json(),
            "sizes": {},
            "parts": parts,
            "counts": {part: facts["rows"] for part, facts in parts.items()},
        }
        for part in parts:
            sync_folder(self._folder / part)
        with new_file(self._folder / WORKFLOW_FILE) as file:
            file.write(json.dumps(workflow, indent=1, ensure_ascii=False).encode())
