# SPDX-License-Identifier: Apache-2.0
"""The output of `hotbed prepare`: its files as a source, and its workflow as plain values."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa

from hotbed.config import parse_json
from hotbed.connectors.parquet import Parquet
from hotbed.connectors.position import SETTINGS, Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.errors import ConfigError, DataError
from hotbed.files import Where, digest_of, local_path, resolve

WORKFLOW_FILE = "workflow.json"
WORKFLOW_FORMAT = 2
_WITHOUT_DIGESTS = 1
"""The format before: without a digest of the workflow and of the source."""

_SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change of a file in which its time may not show another change."""


@dataclass(frozen=True)
class Prepared(Source):
    """The rows that `hotbed prepare` wrote.

    Args:
        path: the output folder of the preparation.
        part: "train", or "valid" for the rows that its split held back.

    Raises:
        DataError: the folder is not whole: a preparation was interrupted, or files were changed.
            The digest of each file is checked before its first row.
        ConfigError: the preparation has no such part.

    Example: `hb.sources.Prepared("prepared", part="valid")`
    """

    path: str
    part: Literal["train", "valid"] = "train"

    def schema(self) -> pa.Schema:
        return self._files.schema()

    @property
    def divisible(self) -> bool:
        return True

    def num_rows(self) -> int:
        num_rows: int = self._facts["rows"]
        return num_rows

    def locate(self, position: Position, back: int) -> RowPlace:
        return self._files.locate(position, back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return _checked(self, self._files, position, batch_rows, plan)

    def share(self, begin: Fraction, end: Fraction) -> Source:
        return _PreparedShare(self, begin, end)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The part and the digest of the preparation."""
        return {"part": self.part, "digest": read_workflow(self.path).get("digest", "")}

    @property
    def _entries(self) -> Mapping[str, Mapping[str, Any]]:
        """What the workflow says of each file of the part, by its path, in their order."""
        folder = local_path(self.path, "prepared.path")
        return {str(folder / entry["file"]): entry for entry in self._facts["files"]}

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
        check_maps(folder, read_workflow(folder))
        for file, entry in self._entries.items():
            _check_size(file, entry)
        if not self._entries:
            raise DataError(
                f"{folder}: the part {self.part!r} has no rows, got no files. Give the split a "
                "larger share."
            )
        return Parquet(list(self._entries))


@dataclass(frozen=True)
class _PreparedShare(Source):
    """The rows of a prepared part between two fractions of it."""

    source: Prepared
    begin: Fraction
    end: Fraction

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def num_rows(self) -> int | None:
        return self._files.num_rows()

    def locate(self, position: Position, back: int) -> RowPlace:
        return self._files.locate(position, back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return _checked(self.source, self._files, position, batch_rows, plan)

    @cached_property
    def _files(self) -> Source:
        return self.source._files.share(self.begin, self.end)


def _checked(
    source: Prepared, files: Source, position: Position | None, batch_rows: int, plan: ReadPlan
) -> Batches:
    """Yield the rows of prepared files, each file once its digest is checked."""
    if position is not None:
        position.require(position.writer, source)
        position = Position({key: position[key] for key in position.state if key != SETTINGS})
    with PartChecks(source._entries) as checks:
        for batch, after in files.read(position, batch_rows, replace(plan, opening=checks.wait)):
            yield batch, Position.of(source, after.state)


# --- checks ---------------------------------------------------------------------------------------


class PartChecks:
    """Checks the digests of a part's files on a thread, one file ahead of the reader.

    A file that was checked is not read again by later readers of this process, unless the system
    notes a change of it.

    Args:
        entries: bytes and digests of each file, in the order of reading.
    """

    _intact: ClassVar[dict[str, tuple[str | int, ...]]] = {}

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._entries = entries
        self._order = list(entries)
        self._pool = ThreadPoolExecutor(1, "hotbed-digest")
        self._running: dict[str, Future[None]] = {}
        self._is_open = True

    def wait(self, file: str) -> None:
        """Return once a file is checked, and begin with the next one.

        Raises:
            DataError: the file is missing or changed.
        """
        self._begin(file)
        following = self._order.index(file) + 1
        if following < len(self._order):
            self._begin(self._order[following])
        self._running.pop(file).result()

    def _begin(self, file: str) -> None:
        if file not in self._running:
            self._running[file] = self._pool.submit(self._check, file)

    def _check(self, file: str) -> None:
        entry = self._entries[file]
        _check_size(file, entry)
        before = _change_key(file)
        if self._intact.get(file) == (entry["sha256"], *before):
            return
        began = time.time_ns()
        kind = "xxh3" if "xxh3" in entry else "sha256"  # earlier preparations have no XXH3
        digest = digest_of(file, kind, lambda: self._is_open)
        if digest and digest != entry[kind]:
            raise _changed(file, f"{kind} {digest}", entry[kind])
        # the clock of a file system is coarse: a later change could have the time of an earlier one
        if digest and began - before[-1] > _SETTLED_NS:
            self._intact[file] = (entry["sha256"], *before)

    def __enter__(self) -> PartChecks:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._pool.shutdown(cancel_futures=True)


def _change_key(file: str) -> tuple[int, ...]:
    """Return numbers of which one differs after any change of a file; its last change in ns."""
    facts = os.stat(file)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _check_size(file: str | Path, entry: Mapping[str, Any]) -> None:
    num_bytes = os.path.getsize(file) if os.path.exists(file) else 0
    if num_bytes != entry["bytes"]:
        raise _changed(file, f"{num_bytes:,} bytes", f"{entry['bytes']:,}")


def _check_digest(file: Path, entry: Mapping[str, Any]) -> None:
    _check_size(file, entry)
    digest = digest_of(file)
    if digest != entry["sha256"]:
        raise _changed(file, f"sha256 {digest}", entry["sha256"])


def _changed(file: str | Path, got: str, expected: str) -> DataError:
    return DataError(
        f"{file}: not the file that was prepared, got {got} instead of {expected}. Run hotbed "
        "prepare again."
    )


def check_maps(folder: Path, workflow: Mapping[str, Any]) -> None:
    """Check the fitted maps of a prepared folder.

    Raises:
        DataError: a map is missing or changed.
    """
    for name, entry in workflow.get("files", {}).items():
        if name.startswith("maps/"):
            _check_digest(folder / name, entry)


def is_prepared(where: Where) -> bool:
    """Return whether a place is the output folder of a preparation."""
    folder = resolve(where)
    return isinstance(folder, Path) and (folder / WORKFLOW_FILE).is_file()


def verify_prepared(path: str | Path) -> dict[str, Any]:
    """Check the workflow, and digests and rows of all files, of the output of a preparation.

    Returns:
        `folder`, `digest` of the workflow ("" for a folder of an earlier version), the number of
        `files`, their `bytes`, and the `rows` of each part.

    Raises:
        DataError: something is wrong; the message names it.
    """
    folder = local_path(path, "prepared.path")
    workflow = read_workflow(folder)
    files = dict(workflow["files"])
    for part, facts in workflow["parts"].items():
        num_rows = 0
        for entry in facts["files"]:
            files[entry["file"]] = entry
            _check_digest(folder / entry["file"], entry)
            num_rows += Parquet(str(folder / entry["file"])).num_rows()
        if num_rows != facts["rows"]:
            raise _changed(folder / part, f"{num_rows:,} rows", f"{facts['rows']:,}")
    for name, entry in workflow["files"].items():
        _check_digest(folder / name, entry)
    return {
        "folder": str(folder),
        "digest": workflow.get("digest", ""),
        "files": 1 + len(files),
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "rows": {part: facts["rows"] for part, facts in workflow["parts"].items()},
    }


# --- the workflow ---------------------------------------------------------------------------------


def sealed(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workflow of this format, with the digest of its other values as its last member."""
    plain = json.loads(json.dumps({"format": WORKFLOW_FORMAT, **workflow}))  # as it is read again
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True)
    return {**plain, "digest": hashlib.sha256(text.encode()).hexdigest()}


def read_workflow(path: str | Path) -> dict[str, Any]:
    """Return the workflow in the output folder of a preparation, as plain values.

    Raises:
        DataError: the folder does not hold a whole preparation.
    """
    folder = local_path(path, "prepared.path")
    file = folder / WORKFLOW_FILE
    if folder.suffix == ".partial":
        raise DataError(
            f"{folder}: an interrupted preparation, got a folder whose name ends in .partial. Run "
            "hotbed prepare again."
        )
    try:
        workflow: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
        version = workflow.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{file}: not the workflow of a preparation, got {error}. Run hotbed prepare first, "
            "and give its output folder."
        ) from error
    if version == _WITHOUT_DIGESTS:
        return _of_earlier_version(workflow)
    if version != WORKFLOW_FORMAT:
        raise DataError(
            f"{file}: expected format {WORKFLOW_FORMAT}, got {version!r}. Use the version of "
            "Hotbed that wrote it, or run hotbed prepare again."
        )
    values = {name: value for name, value in workflow.items() if name != "digest"}
    digest = sealed(values)["digest"]
    if digest != workflow.get("digest"):
        raise _changed(file, f"SHA-256 {digest}", str(workflow.get("digest")))
    return workflow


def _of_earlier_version(workflow: dict[str, Any]) -> dict[str, Any]:
    """Return the workflow of format 1, whose negatives never were items that the user has."""
    preparation = dict(workflow.get("prepare", {}))
    if "negatives" in preparation:
        preparation["negatives"] = {"seen": "never", **preparation["negatives"]}
    return {**workflow, "prepare": preparation}
