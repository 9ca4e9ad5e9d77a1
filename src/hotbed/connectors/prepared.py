# SPDX-License-Identifier: Apache-2.0
"""The output of `hotbed prepare`: its files as a source, and its workflow as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from hotbed.connectors.parquet import Parquet
from hotbed.connectors.plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.position import Batches, Place, Position
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, DataError
from hotbed.files import local_path

WORKFLOW_FILE = "workflow.json"
WORKFLOW_FORMAT = 1


@dataclass(frozen=True)
class Prepared(Source):
    """The rows that `hotbed prepare` wrote.

    Args:
        path: The output folder of the preparation.
        part: "train", or "valid" for the rows that its split held back.

    Raises:
        DataError: The folder is not whole: a preparation was interrupted, or files were changed.
        ConfigError: The preparation has no such part.

    Example: `hb.sources.Prepared("prepared", part="valid")`
    """

    path: str
    part: Literal["train", "valid"] = "train"

    def schema(self) -> pa.Schema:
        return self._files.schema()

    def num_rows(self) -> int:
        num_rows: int = self._facts["rows"]
        return num_rows

    def locate(self, position: Position, back: int) -> Place:
        return self._files.locate(position, back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return self._files.read(position, batch_rows, plan)

    @cached_property
    def _facts(self) -> Mapping[str, Any]:
        """What the workflow says of the part."""
        workflow = read_workflow(self.path)
        parts = workflow["parts"]
        if self.part not in parts:
            raise ConfigError(
                f"prepared.part: {self.path} has no such part, got {self.part!r}. Prepare it with "
                f"a split, or read one of {', '.join(parts)}."
            )
        facts: Mapping[str, Any] = parts[self.part]
        return facts

    @cached_property
    def _files(self) -> Parquet:
        folder = local_path(self.path, "prepared.path")
        files: list[str] = []
        for entry in self._facts["files"]:
            file = folder / entry["file"]
            num_bytes = file.stat().st_size if file.exists() else 0
            if num_bytes != entry["bytes"]:
                raise DataError(
                    f"{file}: not the file that was prepared, got {num_bytes:,} bytes instead of "
                    f"{entry['bytes']:,}. Run hotbed prepare again."
                )
            files.append(str(file))
        if not files:
            raise DataError(
                f"{folder}: the part {self.part!r} has no rows, got no files. Give the split a "
                "larger share."
            )
        return Parquet(files)


def read_workflow(path: str | Path) -> dict[str, Any]:
    """Return the workflow in the output folder of a preparation, as plain values.

    Raises:
        DataError: The folder does not hold a whole preparation.
    """
    folder = local_path(path, "prepared.path")
    file = folder / WORKFLOW_FILE
    if folder.suffix == ".partial":
        raise DataError(
            f"{folder}: an interrupted preparation, got a folder whose name ends in .partial. Run "
            "hotbed prepare again."
        )
    try:
        workflow: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: not the workflow of a preparation, got {error}. Run hotbed prepare first, "
            "and give its output folder."
        ) from error
    version = workflow.get("format")
    if version != WORKFLOW_FORMAT:
        raise DataError(
            f"{file}: expected format {WORKFLOW_FORMAT}, got {version!r}. Use the version of "
            "Hotbed that wrote it, or run hotbed prepare again."
        )
    return workflow
