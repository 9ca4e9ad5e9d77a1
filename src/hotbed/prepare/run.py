# SPDX-License-Identifier: Apache-2.0
"""The stages of a preparation, one after another; the output appears whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.prepared import WORKFLOW_FILE, WORKFLOW_FORMAT
from hotbed.data.columns import require_columns
from hotbed.data.schema import Dense, Id, Schema, Weight
from hotbed.errors import ConfigError, PersistError
from hotbed.files import HeldFolder, free_name, local_path, new_file, sync_folder, writing
from hotbed.prepare.engine import Engine, Local
from hotbed.prepare.fit import fit
from hotbed.prepare.partitions import PARTS, Partition, partitions_of
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.report import Profile, write_report
from hotbed.prepare.stages import (
    Report,
    Stage,
    Work,
    add_negatives,
    derive,
    num_buckets,
    split,
)
from hotbed.prepare.view import View
from hotbed.prepare.workflow import Workflow
from hotbed.prepare.write import Layout, Writing, Written

REPORT_FILE = "report.html"


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
        ConfigError: the output exists and `restart` is not set, or a machine of the engine does not
            see it.
        DecodeError: a row cannot be read; the message names file, row and column.
        PersistError: another process writes the output.
    """
    output = local_path(job.output, "prepare.output")
    _refuse_existing(output, restart)
    partial = output.absolute().with_name(output.name + ".partial")
    with writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
    engine = engine or Local()
    with _held(partial):
        _empty(partial)
        engine.check_folder(partial)
        _Preparing(job, engine, partial, report).run()
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


def _keys_and_groups(job: Preparation) -> list[str]:
    """Return the raw columns that are read as they are: keys, times and items."""
    names: list[str] = []
    for derivation in job.derive:
        names += derivation.inputs()
    if job.split is not None:
        names += job.split.inputs()
    if job.negatives is not None:
        names += job.negatives.inputs()
    return names


def _with_weight(schema: Schema, job: Preparation) -> Schema:
    """Return the schema with the weight that down-sampling computes, in the place of its own."""
    sample = job.down_sample
    if sample is None or sample.weight is None:
        return schema
    weight = Weight(sample.weight, column=sample.weight_column)
    if schema.weight is None:
        return replace(schema, columns=[*schema.columns, weight])
    columns = [weight if column is schema.weight else column for column in schema.columns]
    return replace(schema, columns=columns)


def _only_learned_from(schema: Schema) -> list[str]:
    names: list[str] = []
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        for transform in column.transforms:
            names += transform.learns_from()
    return names


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
        self._counts: dict[str, int] = {}

    def run(self) -> None:
        """Run all stages, and write the workflow last."""
        job = self._job
        work = Work(
            self._engine,
            partitions_of(job.source),
            self._folder / "work",
            num_buckets(job, self._engine.num_workers),
            self._report,
            self._counts,
        )
        view = View(
            self._plan(),
            job.schema,
            job.seed,
            job.on_error == "skip",
        )
        view = derive(job, work, view)
        view = split(job, work, view)
        view = add_negatives(job, work, view)
        view = replace(view, down_sample=job.down_sample)
        fitted = fit(job.schema, work, view, self._folder)
        raw = fitted.schema
        view = fitted.view
        layout = Layout.of(_with_weight(raw, job), self._first_rows(work.partitions, view))
        writing_task = Writing(self._folder, view, layout)
        written: list[Written] = []
        profile = Profile(raw)
        for one, seen in work.map("write", writing_task, work.partitions):
            written.append(one)
            profile.merge(seen)
            raw = raw.with_types(one.types, one.shapes)
        of_requests = raw.raw_columns(labels=False)
        derived = {one.name: one.description for one in job.derive if one.name in of_requests}
        raw = replace(raw, derived=derived)
        shutil.rmtree(work.folder, ignore_errors=True)
        write_report(
            self._folder / REPORT_FILE,
            profile,
            raw,
            about=self._about(),
        )
        self._finish(raw, layout, written)

    def _plan(self) -> ReadPlan:
        """Return the raw columns to read, and their types."""
        job = self._job
        present = job.source.schema().names
        others = _keys_and_groups(job)
        of_schema = [*job.schema.raw_columns(), *_only_learned_from(job.schema)]
        derived = {derivation.name for derivation in job.derive}
        added = set(derived)
        if job.negatives is not None:
            added |= {label.source for label in job.schema.labels} - set(present)
        names = [name for name in dict.fromkeys([*of_schema, *others]) if name not in added]
        require_columns(names, present)
        types = {}
        for name, kind in job.schema.number_types().items():
            if name not in others:
                types[name] = kind
        return ReadPlan(tuple(names), types)

    def _about(self) -> dict[str, str]:
        """Return the job's keys and values, for the report."""
        plain = self._job.to_json()
        keys = [name for name in plain if name not in ("schema", "output", "memory")]
        return {name: json.dumps(plain[name], ensure_ascii=False) for name in keys}

    def _first_rows(self, partitions: Sequence[Partition], view: View) -> pa.RecordBatch:
        for partition in partitions:
            for chunk in view.chunks(partition):
                return chunk.rows.slice(0, 1000)
        raise AssertionError("a fitted source has rows")

    def _finish(self, raw: Schema, layout: Layout, written: Sequence[Written]) -> None:
        """Write the metadata of each part, and the workflow."""
        parts: dict[str, Any] = {}
        for part in PARTS:
            files = [asdict(one.files[part]) for one in written if part in one.files]
            if files:
                num_rows = sum(file["rows"] for file in files)
                parts[part] = {"rows": num_rows, "files": files}
        map_names = {}
        for fitted in raw.maps:  # the folder is renamed at the end
            map_names[fitted.digest] = fitted.path.relative_to(self._folder)
        workflow = {
            "format": WORKFLOW_FORMAT,
            "prepare": self._job.to_json(),
            "schema": layout.schema().to_json(),
            "raw": raw.with_maps(map_names).to_json(),
            "sizes": {},
            "parts": parts,
            "counts": {part: facts["rows"] for part, facts in parts.items()} | self._counts,
        }
        for part in parts:
            sync_folder(self._folder / part)
        with new_file(self._folder / WORKFLOW_FILE) as file:
            file.write(json.dumps(workflow, indent=1, ensure_ascii=False).encode())
