# SPDX-License-Identifier: Apache-2.0
"""The task that encodes and writes the rows of a partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.position import PLACE
from hotbed.connectors.read_plan import BadRow, Skips
from hotbed.data import numbers
from hotbed.data.arrow_types import Shape, Type, joined, joined_shape, shape_of, type_of
from hotbed.data.bad_rows import dead_letters
from hotbed.data.batch import Batch
from hotbed.data.columns import Columns
from hotbed.data.encode import Encoder
from hotbed.data.schema import Schema
from hotbed.errors import DecodeError
from hotbed.prepare.keyed.encodings import training_schema
from hotbed.prepare.output.files import LETTERS_FOLDER, PartWriter, WrittenFile
from hotbed.prepare.output.layout import Layout
from hotbed.prepare.partitions import PARTS, TRAIN, VALID, Chunk, Partition
from hotbed.prepare.places import Purpose
from hotbed.prepare.report import Profile
from hotbed.prepare.view import View


@dataclass
class Written:
    """What the task of a partition wrote.

    `files`: by part. `types`, `shapes`: of the raw columns. `skipped`: rows that were left out
    because they are bad, by reason. `profile`: of the rows.
    """

    profile: Profile
    files: dict[str, WrittenFile] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def note_types(self, schema: Schema, rows: pa.Schema) -> None:
        """Add the types and shapes of the raw columns that a schema reads."""
        for name in schema.raw_columns(labels=False):
            kind = type_of(rows.field(name).type)
            if kind is not None:
                self.types[name] = joined(self.types.get(name), kind)
            shape = shape_of(rows.field(name).type)
            if shape is not None:
                self.shapes[name] = joined_shape(self.shapes.get(name), shape)


@dataclass(frozen=True)
class Writing:
    """The task that encodes and writes the rows of a partition.

    Args:
        folder: of the output.
        view: the rows.
        layout: the columns to write.
    """

    folder: Path
    view: View
    layout: Layout

    def __call__(self, partition: Partition) -> Written:
        return _Writer(self, partition).write()


class _Writer:
    """Writes one partition."""

    def __init__(self, task: Writing, partition: Partition) -> None:
        self._task = task
        self._partition = partition
        self._written = Written(Profile(task.layout.raw))
        self._skips = Skips()
        letters = task.folder / LETTERS_FOLDER / f"part-{partition.number:05d}.jsonl"
        letters.unlink(missing_ok=True)  # a task may run again
        self._letters = DeadLetters(letters)
        raw = task.layout.raw
        self._encoders = {
            TRAIN: self._encoder(training_schema(raw, task.view.encoded)),
            VALID: self._encoder(raw),
        }
        self._files: dict[int, PartWriter] = {}

    def write(self) -> Written:
        """Write all rows; return what was written."""
        view = self._task.view
        if view.skip_bad:
            plan = replace(view.plan, skips=self._skips, aside=self._unreadable)
            view = replace(view, plan=plan)
        for chunk in view.chunks(self._partition, self._unusable):
            self._written.note_types(self._task.layout.raw, chunk.rows.schema)
            for part in np.unique(chunk.part).tolist():
                self._write_part(part, chunk.of_part(part))
        for part, file in self._files.items():
            self._written.files[PARTS[part]] = file.close()
        self._written.skipped.update(self._skips.counts)
        return self._written

    def _write_part(self, part: int, chunk: Chunk) -> None:
        layout = self._task.layout
        batch = self._encoded(self._encoders[part], chunk)
        if not len(batch):
            return
        if part not in self._files:
            name = f"{PARTS[part]}/part-{self._partition.number:05d}.parquet"
            self._files[part] = PartWriter(self._task.folder, name, layout.arrow())
        self._files[part].write(layout.table(batch))
        names = [name for name in chunk.rows.schema.names if not name.startswith("\0")]
        rows = chunk.rows.select(names)
        self._written.profile.add(PARTS[part], rows, batch)
        self._written.profile.sample.add(
            rows, self._labels(chunk), chunk.hashes(self._task.view.seed, Purpose.SAMPLE)
        )

    def _labels(self, chunk: Chunk) -> dict[str, np.ndarray]:
        context = Columns(chunk.rows)
        labels: dict[str, np.ndarray] = {}
        for label in self._task.layout.raw.labels:
            labels[label.name] = numbers.label(label, context.column(label.source))
        return labels

    def _encoder(self, schema: Schema) -> Encoder:
        encoder = Encoder(schema)
        if self._task.view.skip_bad:
            encoder = Encoder(schema, "skip", self._bad_value)
        encoder.stats.skips = self._skips
        return encoder

    def _encoded(self, encoder: Encoder, chunk: Chunk) -> Batch:
        if self._task.view.skip_bad:
            return encoder(self._with_places(chunk))
        try:
            return encoder(chunk.rows)
        except DecodeError as error:
            raise chunk.located((error.row or 1) - 1, str(error), error.column) from error

    # --- rows that are left out ---

    def _with_places(self, chunk: Chunk) -> pa.RecordBatch:
        """Return the rows with the place of each, as dead letters have it."""
        files = pa.array([self._partition.name] * len(chunk))
        rows = pa.array(chunk.places + 1)
        places = pa.StructArray.from_arrays([files, rows], names=["file", "row"])
        return chunk.with_columns({PLACE: places}).rows

    def _unusable(self, chunk: Chunk, message: str) -> None:
        """Keep rows whose label, weight or time cannot be used."""
        self._skips.add("value", message, len(chunk))
        self._bad_value(self._with_places(chunk), "value", message)

    def _bad_value(self, rows: pa.RecordBatch, reason: str, message: str) -> None:
        names = [name for name in rows.schema.names if name == PLACE or not name.startswith("\0")]
        self._letters.add_all(dead_letters(rows.select(names), reason))

    def _unreadable(self, rows: Sequence[BadRow]) -> None:
        """Keep lines that cannot be read."""
        letters = []
        for row in rows:
            where: dict[str, Any] = {"file": self._partition.name, "row": row.number}
            if row.line is not None:
                where = {"file": self._partition.name, "line": row.line}
            letters.append((where, "undecodable", row.content))
        self._letters.add_all(letters)
