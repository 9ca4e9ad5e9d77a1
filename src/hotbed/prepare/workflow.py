# SPDX-License-Identifier: Apache-2.0
"""Workflow: what a preparation fitted, and how it is made and applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hotbed.connectors.prepared import read_workflow, verify_prepared
from hotbed.connectors.source import Source
from hotbed.data.schema import Schema
from hotbed.prepare.engine import Engine, Local
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.run import apply, new_output, run, run_again
from hotbed.prepare.stages import Report, Stage


def ignore(_stage: Stage) -> None:
    """Ignore how far a preparation is."""


@dataclass(frozen=True)
class Workflow:
    """The fitted workflow in the output folder of a preparation.

    Args:
        path: the folder.

    Raises:
        DataError: the folder does not hold a whole preparation.

    Example: `hb.prepare.Workflow("prepared").sizes`
    """

    path: str | Path

    @property
    def schema(self) -> Schema:
        """The schema of the prepared files; its `raw` is that of raw rows."""
        return Schema.of_prepared(self.path)

    @property
    def raw(self) -> Schema:
        """The fitted schema over raw rows."""
        return Schema.of_prepared(self.path, "raw")

    @property
    def preparation(self) -> Preparation:
        """The preparation that was run; only if its source was not in memory."""
        return Preparation.from_json(self._values["prepare"])

    @property
    def sizes(self) -> Mapping[str, int]:
        """For each id feature whose ids are 0 .. size - 1, the size."""
        sizes: Mapping[str, int] = self._values["sizes"]
        return sizes

    @property
    def counts(self) -> Mapping[str, Any]:
        """Rows of each part, added negatives, and rows left out by reason (`skipped`)."""
        counts: Mapping[str, Any] = self._values["counts"]
        return counts

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return read_workflow(self.path)

    def apply(
        self,
        source: Source,
        output: str,
        *,
        training: bool = False,
        engine: Engine | None = None,
        restart: bool = False,
        report: Report = ignore,
    ) -> Workflow:
        """Write the rows of another source as this workflow encodes them.

        Derived columns are computed from the rows of `source`.

        Args:
            source: raw rows with the columns of the preparation's source.
            output: the folder to write.
            training: `source` holds the rows that the workflow was fitted on: split, add negatives
                and sample as the preparation did, and give training rows their own target
                encodings. Else all rows are in the part `valid`, and none is added or left out.
            engine: runs the tasks; None: threads of this process.
            restart: rename an output folder that exists, and begin anew.
            report: called when a task of a stage has ended.

        Raises:
            ConfigError: the output exists and `restart` is not set.
            DataError: `training` is set and the source is not that of the preparation, or a file
                changes while it is read. A workflow of an earlier version without a digest of its
                source is only compared by numbers of rows.
            DecodeError: a row cannot be read; the message names file, row and column.
            PersistError: another process writes the output.

        Example: `Workflow("prepared").apply(hb.sources.Csv("today.csv"), "prepared-today")`
        """
        plain = {**self._values["prepare"], "source": source, "output": output}
        job = Preparation.from_json(plain)
        runs_tasks = engine or Local()
        with new_output(output, restart=restart) as folder:
            if training:
                run_again(job, self.raw, self._values, runs_tasks, folder, report)
            else:
                apply(job, self.raw, runs_tasks, folder, report)
        return Workflow(output)

    def verify(self) -> dict[str, Any]:
        """Check the digests of all files in the folder, as `hotbed verify` does.

        Returns:
            `folder`, `digest` of the workflow, the number of `files`, their `bytes`, and the `rows`
            of each part.

        Raises:
            DataError: a file is missing or changed; the message names it.
        """
        return verify_prepared(self.path)


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
        DataError: an input file changes while it is read.
        DecodeError: a row cannot be read; the message names file, row and column.
        PersistError: another process writes the output.
    """
    with new_output(job.output, restart=restart) as folder:
        run(job, engine or Local(), folder, report)
    return Workflow(job.output)
